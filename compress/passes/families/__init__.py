"""Shared code of the kinds of passes: quantizing, pruning, allocation, training, reconstruction, reshaping."""
