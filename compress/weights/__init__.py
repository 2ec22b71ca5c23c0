"""What a compressed layer is made of: parts of its weight and transforms of its input, one file per kind."""
