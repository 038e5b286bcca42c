"""`make replay`: does a change of the compiler change the source of any kernel?

    PYTHONPATH=tests python -m replay [--base REV] [--only REGEX] [--workers N]

The functions of `rung bench` (forward and training, fp32 and bf16, for one core and two) and fifty
small architectures of transformers are compiled to source, without building it, by the revision
`--base` (HEAD) in a worktree of its own and by the working tree. What differs is printed as a diff
of the first lines, and ends in exit code 1. Sources of a revision are kept in `build/replay`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RUNG_CALIBRATE", "0")  # the same prices in all processes

import shards
import torch

PLACE = shards.ROOT / "build" / "replay"
ZOO = 50  # architectures, of which every so many-th is trained, and compiled for CUDA
TRAINED, ON_CUDA = 5, 10
CPU, CUDA = "cpu.avx512", "cuda.sm90"
SHOWN = 12  # lines of a diff


def units() -> list[str]:
    """`kind name way` of all that is compiled, in an order that mixes them."""
    from zoo import models as zoo

    from rung.tools import benchmarks

    named = sorted(zoo.names(), key=lambda name: zlib.crc32(name.encode()))[:ZOO]
    rows = [(f"bench {b.name}", b.train) for b in benchmarks.BENCHMARKS]
    rows += [(f"zoo {name}", False) for name in named]
    rows += [(f"zoo {name}", True) for name in named[::TRAINED]]
    rows += [(f"cuda {name}", False) for name in named[::ON_CUDA]]
    rows += [(f"cuda-bench {b.name}", False) for b in benchmarks.BENCHMARKS if not b.group]
    return sorted((f"{row} {'training' if train else 'forward'}" for row, train in rows),
                  key=lambda unit: zlib.crc32(unit.encode()))


def given(kind: str, name: str, train: bool) -> Any:
    """The function of a unit, with its arguments."""
    from rung.tools import benchmarks
    from rung.tools.given import Given

    if kind.endswith("bench"):
        (row,) = (b for b in benchmarks.BENCHMARKS if b.name == name)
        torch.manual_seed(0)
        return Given(name, *row.build(False))
    from zoo import models as zoo
    from zoo.trial import tried

    model = zoo.build(name).train(train)
    return Given(name, model, (), kwargs=tried(model, train)[0])


def write(unit: str, folder: Path) -> shards.Record:
    """The sources of a unit, each in a file, and the program around them."""
    from rung.compilation import Compilation
    from rung.core.errors import RungError
    from rung.frontends.torch.externs import TORCH
    from rung.targets.base import target
    from rung.tools.capture import capture

    kind, name, way = unit.split()
    train = way == "training"
    try:
        function = given(kind, name, train)
    except Exception as error:  # not in the zoo
        return {"skipped": f"{type(error).__name__}: {error}"[:200], "failed": []}
    with torch.set_grad_enabled(train):
        graphs = [g for g in capture(function, train).graphs if g.imported]
    for n, graph in enumerate(graphs):
        for cores in (1, 2):
            found: Any = target(CUDA if kind.startswith("cuda") else CPU)
            found = replace(found, machine=replace(found.machine, cores=cores))
            try:
                compilation = Compilation(found, externs=TORCH, hints=graph.hints)
                stages = compilation.lower(graph.imported.func)
                text = f"{stages.source}\n{stages.modules['kernel'].main}\n"
            except RungError as error:
                text = f"{type(error).__name__}: {error}\n"
            path = folder / f"{kind}-{name}-{way}-{n}-{cores}.txt"
            path.write_text(text, encoding="utf-8")
            if kind.startswith("cuda"):
                break
    return {"graphs": len(graphs), "failed": []}


def work(folder: Path, unit: str, have: frozenset[str]
         ) -> Iterator[tuple[str, Callable[[], shards.Record]]]:
    if unit not in have:
        yield unit, partial(write, unit, folder)


def record(folder: Path, only: str, workers: int) -> None:
    """The sources of all units whose name `only` finds, by the package that Python imports."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    (folder / "units").mkdir(parents=True, exist_ok=True)
    wanted = [u for u in units() if re.search(only, u)]
    found = shards.run(wanted, partial(work, folder), folder / "units", workers)
    for why in (why for rs in found.values() for r in rs for why in r["failed"]):
        print(f"replay: not compiled: {why}", file=sys.stderr)


def by_tree(tree: Path, folder: Path, only: str, workers: int) -> None:
    """`record` by the package in `tree`, in a process of its own."""
    script = tree / "tests" / "replay.py"
    path = os.pathsep.join([str(tree), str(tree / "tests")])
    subprocess.run([sys.executable, str(script if script.exists() else __file__), "--record",
                    str(folder), "--only", only, "--workers", str(workers)],
                   cwd=tree, env=os.environ | {"PYTHONPATH": path}, check=True)


def of_revision(name: str, only: str, workers: int) -> Path:
    """The folder with the sources of a revision, which are made where they are not there yet."""
    revision = subprocess.run(["git", "rev-parse", "--verify", f"{name}^{{commit}}"], check=True,
                              cwd=shards.ROOT, capture_output=True, text=True).stdout.strip()
    tree = PLACE / "tree"
    subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=shards.ROOT,
                   capture_output=True, check=False)
    subprocess.run(["git", "worktree", "add", "--detach", tree, revision], cwd=shards.ROOT,
                   capture_output=True, check=True)
    try:
        by_tree(tree, PLACE / revision[:12], only, workers)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=shards.ROOT, check=True)
    return PLACE / revision[:12]


def differences(before: Path, after: Path, only: str) -> Iterator[str]:
    """A diff's first lines for each source that is not the same."""
    names = sorted({p.name for folder in (before, after) for p in folder.glob("*.txt")})
    for name in names:
        if not re.search(only, name.replace("-", " ")):
            continue
        one, two = (path.read_text().splitlines() if (path := folder / name).exists() else []
                    for folder in (before, after))
        if one != two:
            lines = difflib.unified_diff(one, two, f"before/{name}", f"after/{name}", "", "", 1, "")
            yield "\n".join(islice(lines, SHOWN))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="the revision to compare with")
    parser.add_argument("--only", default="", help="the units to compile, as a regular expression")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.record:
        record(asked.record, asked.only, asked.workers)
        return 0
    after = PLACE / "now"
    shutil.rmtree(after, ignore_errors=True)
    before = of_revision(asked.base, asked.only, asked.workers)
    by_tree(shards.ROOT, after, asked.only, asked.workers)
    found = list(differences(before, after, asked.only))
    print("\n".join(found))
    total = len(list(after.glob("*.txt")))
    print(f"{total} sources, {len(found)} differ from {asked.base}")
    return 1 if found or not total else 0


if __name__ == "__main__":
    sys.exit(main())
