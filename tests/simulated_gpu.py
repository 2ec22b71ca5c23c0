"""A simulated GPU: tensors that stay on the CPU, but count as those of `cuda`, with the errors of a real device.

Inside of `simulated(monkeypatch)`, `torch.device("cuda")` exists. A tensor that is moved to it, made on it or computed
from its tensors is marked by its storage. An operation on a marked and an unmarked tensor raises as on a GPU, and so do
`numpy()`, `data_ptr()`, operations with CPU kernels only, and random numbers of a generator on the CPU. Results equal
those of the CPU, but tensors are multiplied by the rounded reciprocal of a Python number instead of divided, as CUDA
does. Not simulated: memory, streams, and CUDA's other numerics.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
TRANSFERS = {"copy_", "_to_copy", "set_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
OF_SEQUENCES = {"cat", "stack"}  # there, a number on the CPU is no exception
DEVICE, IS_CUDA, IS_CPU = Tensor.device.__get__, Tensor.is_cuda.__get__, Tensor.is_cpu.__get__
DIVISIONS = {torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor}
HOST_ONLY = {Tensor.numpy, Tensor.data_ptr, Tensor.__array__}


class Generator(torch.Generator):
    """A generator of the CPU that counts as one of the given device."""

    def __new__(cls, device="cpu"):
        found = super().__new__(cls, "cpu")
        found.simulated = torch.device(device).type == "cuda"
        return found


class Marks:
    """The storages on the simulated device."""

    def __init__(self):
        self.held: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor):
        if tensor.is_meta or tensor.layout != torch.strided:
            return False
        return StorageWeakRef(tensor.untyped_storage()).cdata in self.held

    def put(self, tensor, on):
        if tensor.is_meta or tensor.layout != torch.strided:
            return
        reference = StorageWeakRef(tensor.untyped_storage())
        key = reference.cdata
        if on:
            self.held[key] = reference
        else:
            self.held.pop(key, None)
        if len(self.held) > 50_000:
            self.held = {key: ref for key, ref in self.held.items() if not ref.expired()}


class Calls(TorchFunctionMode):
    """Devices as Python sees them: attributes, moves and new tensors."""

    def __init__(self, marks):
        super().__init__()
        self.marks = marks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == DEVICE:
            return GPU if args[0] in self.marks else func(*args)
        if func in (IS_CUDA, IS_CPU):
            return func(*args) if args[0] not in self.marks else func == IS_CUDA
        if func in HOST_ONLY and args[0] in self.marks:
            raise TypeError(f"{func.__name__} of a tensor on {GPU}")
        if func is Tensor.cpu:
            return self._moved(args[0], args[0], torch.device("cpu"))
        if func is Tensor.cuda:
            return self._moved(args[0], args[0], GPU)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.backward:  # Python code of a backward pass sees the device, too
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
            with self:
                return torch.autograd.backward(*args, **kwargs)
        return self._called(func, args, kwargs)

    def _called(self, func, args, kwargs):
        asked, generator = kwargs.get("device"), kwargs.get("generator")
        if asked is None and generator is None:
            return func(*args, **kwargs)
        known = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on = any(leaf in self.marks for leaf in known) if asked is None else torch.device(asked).type == "cuda"
        if generator is not None and on != getattr(generator, "simulated", False):
            raise RuntimeError(f"{func.__name__}: a generator of another device than that of the numbers")
        if asked is None:
            return func(*args, **kwargs)
        found = func(*args, **kwargs | {"device": "cpu" if on else asked})
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and all(leaf is not each for each in known):
                self.marks.put(leaf, on)
        return found

    def _to(self, tensor, *args, **kwargs):
        target = None
        args = list(args)
        for i, value in enumerate(args):
            if isinstance(value, (str, torch.device)):
                target, args[i] = torch.device(value), _on_cpu(value)
            elif isinstance(value, Tensor):
                target = GPU if value in self.marks else value.device
        if kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            kwargs["device"] = _on_cpu(target)
        return self._moved(tensor, tensor.to(*args, **kwargs), target)

    def _moved(self, tensor, found, target):
        """`found`, computed from a tensor, on the device `target`; None: on the tensor's own."""
        on = tensor in self.marks
        wanted = on if target is None else target.type == "cuda"
        if found.is_meta or wanted == on:
            return found
        if not tensor.is_meta and found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            found = found.clone()
        self.marks.put(found, wanted)
        return found


class Operations(TorchDispatchMode):
    """Operations as kernels see them: those of two devices raise, and results are where the inputs are."""

    def __init__(self, marks):
        super().__init__()
        self.marks = marks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_meta]
            on = [tensor in self.marks for tensor in tensors]
            if any(on):
                self._check(func, tensors, on)
            if func in DIVISIONS and args[0] in self.marks and self._is_number(args[1]):
                found = _times_reciprocal(args[0], float(args[1]))
                found = args[0].copy_(found) if func is torch.ops.aten.div_.Tensor else found
            else:
                found = func(*args, **kwargs)
            if any(on) and not (func.overloadpacket.__name__ in TRANSFERS and not on[0]):
                for leaf in tree_leaves(found):
                    if isinstance(leaf, Tensor):
                        self.marks.put(leaf, True)
        return found

    def _is_number(self, divisor):
        """Whether a divisor is a Python number, or a number on the CPU."""
        return not isinstance(divisor, Tensor) or (divisor.dim() == 0 and divisor not in self.marks)

    def _check(self, func, tensors, on):
        packet = func.overloadpacket.__name__
        if func.namespace not in ("aten", "prims"):
            raise NotImplementedError(f"{func} has no kernel for {GPU}")
        if packet in TRANSFERS:
            return
        if packet in INDEXING and on[0]:
            tensors = [t for t in tensors if t.dtype.is_floating_point]  # the values; indices may be on the CPU
        plain = [t for t in tensors if t not in self.marks and (t.dim() or packet in OF_SEQUENCES)]
        if plain:
            raise RuntimeError(f"{func}: tensors on {GPU} and on cpu, {[list(t.shape) for t in plain]}")


def _times_reciprocal(values, number):
    """The quotient as CUDA's kernel for numbers computes it (ATen/native/cuda/BinaryDivTrueKernel.cu)."""
    kind = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    wide = torch.promote_types(kind, torch.float32)
    return (values.to(wide) * torch.tensor(number, dtype=wide).reciprocal()).to(kind)


def _on_cpu(device):
    return torch.device("cpu") if torch.device(device).type == "cuda" else device


@contextmanager
def simulated(monkeypatch):
    """A simulated GPU inside of the context."""
    values = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "mem_get_info": lambda device=None: (1 << 36, 1 << 36),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a simulated GPU",
        "synchronize": lambda device=None: None,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", Generator)
    marks = Marks()
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    with ExitStack() as stack:
        stack.enter_context(Calls(marks))
        stack.enter_context(Operations(marks))
        yield marks
