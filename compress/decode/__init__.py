"""Decoding by traced steps: a step of a model is traced once, and then run by the C++ library without Python.

`accelerate_generation` is the public contract of this folder; everything else is internal.
"""

from compress.decode.acceleration import accelerate_generation

__all__ = ["accelerate_generation"]
