"""Kernel IR: what one thread, core or engine executes."""
