"""Targets: what is known about one kind of machine, and how code for it is written and run."""

TARGETS = {  # name: module whose `target(name)` makes it
    "cpu": "rung.targets.cpu.target",
    "cpu.avx512": "rung.targets.cpu.target",
    "cpu.avx2": "rung.targets.cpu.target",
    "cpu.base": "rung.targets.cpu.target",
    "toy": "rung.targets.toy.target",
    "cuda.sm90": "rung.targets.cuda.target",
}
