"""How far apart sums of floats may be that are equal on paper.

Kernels of another processor, other threads and weights that are mapped at another address add in another order. So
weights, codes and masks are compared bit for bit, logits and other sums by these; a wrong scale, zero point or order of
columns is far above them. Quantized activations are near in another sense: a sum in another order can move an input across
the border between two codes, and then the outputs of its token differ by a step of the grid.
"""

import torch

from compress.layers.linear import CompressedLinear

LOGITS = 1e-4  # of the tiny models, whose largest logits are about 10, in float32
CROSSED = 0.05  # of the largest logit; inputs of the pico model that differ in the last bit change 0.008 to 0.018 of it
CROSSED_LOGITS = 0.5  # the same of a verification, whose differences are absolute; digests compare the codes
STEPS = {"int8": 1 / 127, "fp8_e4m3": 32 / 448}  # between two codes, at most, relative to the largest number
UNITS = 32  # units in the last place of the largest number, for a few layers one after the other


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The same dtype and shape, and the same numbers but for the order of sums."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    found, wanted = found.detach(), wanted.detach()
    largest = max(float(wanted.abs().max()), 1.0)
    return float((found.float() - wanted.float()).abs().max()) <= UNITS * torch.finfo(wanted.dtype).eps * largest


def same_logits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The same dtype and shape, and logits of tiny models whose weights are equal, at other addresses or in a reader's."""
    if wanted.dtype != torch.float32:
        return near_rounded(found, wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    return float((found - wanted).abs().max()) <= LOGITS


def near_rounded(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The same dtype and shape, and logits that differ as those of inputs of layers that got the code beside theirs."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    return float((found - wanted).abs().max()) <= CROSSED * max(float(wanted.abs().max()), 1.0)


def layers_near(theirs: torch.nn.Module, ours: torch.nn.Module, ids: torch.Tensor) -> bool:
    """Whether the layers with quantized inputs compute the same from equal inputs, but for one code of a token.

    theirs: modules of the same names, which get the ids.
    """
    layers = {n: m for n, m in ours.named_modules() if isinstance(m, CompressedLinear) and m.rounding is not None}
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def hear(name: str):
        return lambda module, args, output: seen.update({name: (args[0], output)})

    hooks = [theirs.get_submodule(name).register_forward_hook(hear(name)) for name in layers]
    with torch.no_grad():
        theirs(input_ids=ids)
        for hook in hooks:
            hook.remove()
        assert layers and seen.keys() == layers.keys()
        return all(_one_code(layers[name], *pair) for name, pair in seen.items())


def _one_code(layer: CompressedLinear, x: torch.Tensor, wanted: torch.Tensor) -> bool:
    rounding = layer.rounding
    assert rounding is not None
    top = float(x.abs().max()) if rounding.scale is None else float(rounding.scale.max()) * rounding.grid.span
    step = STEPS[rounding.grid.name] * top * float(layer.weight.abs().max())
    sums = UNITS * torch.finfo(wanted.dtype).eps * max(float(wanted.abs().max()), 1.0)
    return float((layer(x) - wanted).abs().max()) <= step + sums
