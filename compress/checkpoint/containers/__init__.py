"""Containers: files that hold the tensors of a checkpoint."""
