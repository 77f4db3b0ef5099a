"""TideKV: long-document inference on constrained devices. Importing this package imports nothing heavy."""

__version__ = "0.1.0"
