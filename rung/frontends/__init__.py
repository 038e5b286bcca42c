"""Where programs come from."""
