"""Passes that set weights to zero."""
