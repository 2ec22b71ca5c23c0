"""Passes that remove channels, heads or blocks."""
