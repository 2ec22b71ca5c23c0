"""Passes that train a model."""
