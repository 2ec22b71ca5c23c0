"""Passes that quantize the keys and values of attention."""
