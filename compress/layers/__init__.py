"""The compressed layer: parts of its weight, transforms of its input, and the modules that compute it."""
