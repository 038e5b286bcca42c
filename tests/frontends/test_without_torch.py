"""A front end of another library, in processes in which torch cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not for this process")

sys.meta_path.insert(0, Refusal())
import numpy as np
from array_language import compiled, interpret

def check(text, target, shapes=None, **args):
    copies = {name: x.copy() for name, x in args.items()}
    want = interpret(text, copies)
    run = compiled(text, shapes or {name: x.shape for name, x in args.items()}, target)
    given = list(args.values())
    got = run(given)
    assert given == [] and len(got) == len(want)
    for a, b in zip([*got, *args.values()], [*want, *copies.values()], strict=True):
        assert type(a) is np.ndarray
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    return run

def draw(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
"""

PROGRAMS = {
    "all five words": """
text = "y = square x\\nt = flip y\\nu = dot t w\\nz = sort u\\ns = total z\\nz s u"
check(text, TARGET, x=draw(6, 9), w=draw(6, 5))
""",
    "nothing but calls": 'check("y = sort x\\ny", TARGET, x=draw(3, 4))',
    "another layout": 'check("y = square x\\ny", TARGET, x=draw(5, 3).T)',
    "a write": 'check("y = square x\\nx <- y\\ns = total y\\ns", TARGET, x=draw(4, 7))',
    "a write of a view": 'check("y = square x\\nx <- y\\ns = total y\\ns", TARGET, x=draw(7, 4).T)',
    "temporaries between calls": """
text = "a = dot x x\\nb = sort a\\nc = dot b x\\nd = dot c c\\ne = sort d\\nf = total e\\nf"
check(text, TARGET, x=draw(8, 8))
""",
    "sizes": """
text = "t = flip x\\nu = dot t w\\ns = total u\\ns"
run = check(text, TARGET, {"x": ("s0", 8), "w": ("s0", 3)}, x=draw(5, 8), w=draw(5, 3))
x, w = draw(11, 8), draw(11, 3)
np.testing.assert_allclose(run([x, w])[0], (x.T @ w).sum(1), rtol=2e-5, atol=1e-5)
""",
}


def run(text: str, **environment: str) -> str:
    """The errors of a process in which torch cannot be imported."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", f"{START}\n{text}"], capture_output=True,
                          text=True, check=False, env=os.environ | path | environment)
    assert bool(done.returncode) == bool(done.stderr)
    return done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("target", ["cpu", "toy"])
def test_an_array_language_compiles_and_runs(target: str, name: str) -> None:
    assert not run(f"TARGET = {target!r}\n{PROGRAMS[name]}\nassert 'torch' not in sys.modules")


def test_torch_is_refused_there() -> None:
    assert "torch is not for this process" in run("import rung.frontends.torch.aten")


def test_what_was_compiled_is_found_again(tmp_path: Path) -> None:
    text = """
from rung import compilation
check("y = square x\\nz = sort y\\nz", "cpu", x=draw(5, 3))
compilation.Compilation.lower = None  # nothing is lowered again
check("y = square x\\nz = sort y\\nz", "cpu", x=draw(5, 3))
"""
    assert not run(text, RUNG_FRESH="0", RUNG_CACHE_DIR=str(tmp_path))


def test_errors_of_other_layouts() -> None:
    text = """
run = compiled("y = square x\\ny", {"x": (2, 3)}, "cpu")
run([draw(3, 2)])
"""
    assert "x is (3, 2)" in run(text)
