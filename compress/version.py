"""The version of the package, kept here alone."""

__version__ = "0.1.0"
