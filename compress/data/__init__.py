"""Texts and calibration ids: sources, windows of token ids, text sampled from the model."""
