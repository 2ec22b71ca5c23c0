"""Kinds of models: their inputs, their loss, and how two of them agree."""
