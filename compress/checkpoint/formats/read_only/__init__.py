"""Formats of other programs that are read and not written: sources that are quantized already."""
