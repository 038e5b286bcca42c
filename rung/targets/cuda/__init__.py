"""NVIDIA GPUs from Hopper on: header-free CUDA C++, compiled by nvcc to a cubin."""
