"""Products with 4-bit and 8-bit weights by ONNX Runtime and ggml, for kernels.py; where these are installed.

`products(weight, bits, batch, threads)` maps a name to a call without arguments. ONNX Runtime (packages onnx and
onnxruntime) computes MatMulNBits in groups of 64 with int8 inputs (accuracy level 4); ggml (package llama-cpp-python)
Q4_0 and Q8_0, in groups of 32, as it stands in a file and in the order that it repacks weights to.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GROUP = 64
Q4_0, Q8_0, F32 = 2, 8, 0  # of ggml_type
MEMORY = 1 << 20  # for the descriptions of tensors and graph
Calls = dict[str, Callable[[], object]]


def products(weight: Tensor, bits: int, batch: int, threads: int) -> Calls:
    """Calls that multiply [batch, in] by a weight [out, in], by name; empty for other widths and without peers."""
    if bits not in (4, 8):
        return {}
    return _onnx(weight, bits, batch, threads) | _ggml(weight, bits, batch, threads)


def _onnx(weight: Tensor, bits: int, batch: int, threads: int) -> Calls:
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return {}
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rows, width = weight.shape
    grouped = weight.view(rows, -1, GROUP)
    half = 2 ** (bits - 1)
    scale = grouped.abs().amax(-1) / half
    codes = (grouped / scale[..., None]).round().clamp(-half, half - 1).add(half).to(torch.uint8)
    packed = codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scale"],
        ["y"],
        domain="com.microsoft",
        K=width,
        N=rows,
        bits=bits,
        block_size=GROUP,
        accuracy_level=4,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, rows])],
        [numpy_helper.from_array(packed.numpy(), "codes"), numpy_helper.from_array(scale.flatten().numpy(), "scale")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # not into the next call of another
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    x = {"x": torch.randn(batch, width).numpy()}
    return {"onnxruntime": lambda: session.run(None, x)}


class _Parameters(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = [("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool)]


@cache
def _libraries() -> tuple[Any, Any] | None:
    """(base, CPU) of ggml, or None."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "lib"
    base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
    pointer, number = c_void_p, c_int64
    for library, name, result, arguments in (
        (base, "ggml_init", pointer, [_Parameters]),
        (base, "ggml_new_tensor_2d", pointer, [pointer, c_int, number, number]),
        (base, "ggml_mul_mat", pointer, [pointer, pointer, pointer]),
        (base, "ggml_new_graph", pointer, [pointer]),
        (base, "ggml_build_forward_expand", None, [pointer, pointer]),
        (base, "ggml_quantize_chunk", c_size_t, [c_int, pointer, pointer, number, number, number, pointer]),
        (base, "ggml_backend_alloc_ctx_tensors_from_buft", pointer, [pointer, pointer]),
        (base, "ggml_backend_tensor_set", None, [pointer, pointer, c_size_t, c_size_t]),
        (base, "ggml_backend_graph_compute", c_int, [pointer, pointer]),
        (base, "ggml_backend_cpu_buffer_type", pointer, []),
        (cpu, "ggml_backend_cpu_init", pointer, []),
        (cpu, "ggml_backend_cpu_set_n_threads", None, [pointer, c_int]),
        (cpu, REPACK, pointer, []),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return base, cpu


REPACK = "_Z35ggml_backend_cpu_repack_buffer_typev"


def _ggml(weight: Tensor, bits: int, batch: int, threads: int) -> Calls:
    found = _libraries()
    if found is None:
        return {}
    base, cpu = found
    backend = cpu.ggml_backend_cpu_init()
    cpu.ggml_backend_cpu_set_n_threads(backend, threads)
    kind, (rows, width) = Q4_0 if bits == 4 else Q8_0, weight.shape
    packed = torch.empty(weight.numel() * 2, dtype=torch.uint8)
    size = base.ggml_quantize_chunk(kind, weight.data_ptr(), packed.data_ptr(), 0, rows, width, None)
    x, calls = torch.randn(batch, width), {}
    plain = base.ggml_backend_cpu_buffer_type()
    for name, buffer in (("ggml", plain), ("ggml_repacked", getattr(cpu, REPACK)())):
        weights = base.ggml_init(_Parameters(MEMORY, None, True))
        w = base.ggml_new_tensor_2d(weights, kind, width, rows)
        if not base.ggml_backend_alloc_ctx_tensors_from_buft(weights, buffer):
            continue
        base.ggml_backend_tensor_set(w, packed.data_ptr(), 0, size)
        others = base.ggml_init(_Parameters(MEMORY, None, True))
        inputs = base.ggml_new_tensor_2d(others, F32, width, batch)
        graph = base.ggml_new_graph(others)
        base.ggml_build_forward_expand(graph, base.ggml_mul_mat(others, w, inputs))
        base.ggml_backend_alloc_ctx_tensors_from_buft(others, plain)
        base.ggml_backend_tensor_set(inputs, x.data_ptr(), 0, x.nbytes)
        calls[name] = lambda graph=graph: base.ggml_backend_graph_compute(backend, graph)
    return calls
