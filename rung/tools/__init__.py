"""What the command line is made of: each command's work is one file, `cli.py` only dispatches."""
