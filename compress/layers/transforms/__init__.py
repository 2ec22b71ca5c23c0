"""Transforms of a layer's input, one file per kind."""
