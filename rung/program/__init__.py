"""Program: the frame around the kernels, where memory and effects live."""
