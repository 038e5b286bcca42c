"""x86-64 CPUs: header-free GNU C, vectors in registers, threads through torch's OpenMP."""
