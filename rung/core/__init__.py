"""What every rung shares: the container, its text, types, expressions, errors and machines."""
