"""The components of a compressed layer: parts of its weight and transforms of its input, one file per kind."""
