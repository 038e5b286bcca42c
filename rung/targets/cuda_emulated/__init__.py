"""CUDA on the host: the source of `cuda.sm90` on fibers, with its memory watched."""
