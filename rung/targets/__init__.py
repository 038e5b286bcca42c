"""Targets: what is known about one kind of machine, and how code for it is written and run."""

TARGETS = {  # name: folder
    "cpu": "rung.targets.cpu",
    "cpu.avx512": "rung.targets.cpu",
    "cpu.avx2": "rung.targets.cpu",
    "cpu.base": "rung.targets.cpu",
    "toy": "rung.targets.toy",
    "cuda": "rung.targets.cuda",
    "cuda.sm90": "rung.targets.cuda",
    "cuda-emulated": "rung.targets.cuda_emulated",
}
