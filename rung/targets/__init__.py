"""Targets: what is known about one kind of machine, and how code for it is written and run."""
