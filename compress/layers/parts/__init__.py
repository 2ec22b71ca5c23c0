"""The parts of a compressed layer: summands of its weight, one file per kind."""
