"""Tensor IR: what is computed, on whole tensors."""
