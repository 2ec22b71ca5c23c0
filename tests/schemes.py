"""Descriptions of layers of codes in one call, shared by the tests."""

from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.permutation import PermutationScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.layers.transforms.scale import ScaleScheme
from compress.numerics.quant.grids import GRIDS

PERMUTED, SCALED = PermutationScheme(), ScaleScheme()


def rounding(grid="int8", **fields):
    """How inputs are rounded."""
    return RoundingScheme(GRIDS[grid], **fields)


def coded(grid="int4", group_size=32, symmetric=True, *transforms, shape=(6, 64), **fields):
    """A layer of codes; inputs as of the transforms; fields: of the scheme of the codes."""
    return LayerScheme(shape, (CodesScheme(GRIDS[grid], group_size, symmetric, **fields),), transforms)


def layer_of(part, inputs=None):
    """The scheme of a layer that is one part; inputs: the grid that its inputs are rounded to."""
    return LayerScheme(part.shape, (part.scheme,), () if inputs is None else (RoundingScheme(inputs),))


def encoded(format_, part, inputs=None):
    """The tensors of a layer that is one part."""
    transforms = () if inputs is None else (InputRounding.of(inputs, shape=part.shape),)
    return format_.encode(layer_of(part, inputs), [part], transforms)


def decoded(format_, tensors, scheme):
    """The inverse of `encoded`."""
    (part,), _ = format_.read(tensors, scheme)
    return part
