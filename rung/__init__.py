"""Rung: a machine-learning compiler that lowers PyTorch programs one readable rung at a time."""

__version__ = "0.1.0"


def check() -> None:
    """Wait for the devices that run kernels, and raise what their checks found: IndexError for an
    index out of range, with the user's line. Without this it is raised by a later call."""
    from rung.targets.device import settle

    settle()
