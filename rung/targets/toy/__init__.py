"""The simplest target: a scratchpad, DMA with waits, a 16x16x16 matrix unit, run on NumPy."""
