"""The files of a temporary folder by which an export for another program, and its processes, communicate."""

SOURCE = "model"
"""The folder of the model that a converter reads."""
CODES = "codes.safetensors"
"""Codes, scales and zero points by layer; the metadata state the dtype of dense tensors."""
