"""Checkpoints: the formats and containers on disk, the sources that are opened, reading and writing."""
