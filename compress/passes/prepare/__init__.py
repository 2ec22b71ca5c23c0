"""Passes that change a model so that later passes lose less, without changing what it computes."""
