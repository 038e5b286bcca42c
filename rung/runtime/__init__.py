"""Running a compiled program: the host's code, its memory, and what it calls in libraries."""
