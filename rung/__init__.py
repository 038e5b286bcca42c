"""Rung: a machine-learning compiler that lowers PyTorch programs one readable rung at a time."""

__version__ = "0.1.0"
