"""Layouts of the compressed-tensors family: how the tensors of a layer are named and shaped."""
