"""Passes that store weights or activations in fewer bits."""
