"""Compiled programs on disk: host code as JSON, found by what the program is, without lowering."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from rung.core import store, trace
from rung.core.key import structural_key
from rung.core.op import Func
from rung.runtime.checks import Site
from rung.runtime.code import Bound, Code
from rung.targets.device import Signature

KIND = "programs"  # the cache's folder


@dataclass(frozen=True)
class Saved:
    """What an `Executable` is made of: `library` is the file with the stretches, `kernels` the
    texts of those that other libraries run, `nodes` the op of the program that each check is for.
    """

    code: Code
    library: str
    kernels: dict[str, str]
    nodes: dict[str, int]


def key_of(func: Func, *rest: str) -> str:
    """The key of a program: its structure, what else decides how it is compiled, the versions."""
    return structural_key(func, sys.version, own_version(), *rest)


@cache
def own_version() -> str:
    """The hash of Rung's own source."""
    root = Path(__file__).parents[1]
    files = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".c"))
    return sha256(b"\0".join(p.read_bytes() for p in files)).hexdigest()


def save(key: str, func: Func, code: Code, library: str, kernels: Mapping[str, str]) -> None:
    """Keep what was compiled for a program; where there is no room, nothing is kept."""
    asked = {site.node for bound in code.stretches.values() for site in bound.sites}
    nodes = {r.name: n for n, op in enumerate(func.body.ops) for r in op.results
             if r.name in asked}
    text = json.dumps(asdict(Saved(code, library, dict(kernels), nodes)), indent=1)
    try:
        store.write(KIND, f"{key}.json", text.encode())
    except OSError as error:
        trace.emit("declined", "saved", key, str(error))


def load(key: str) -> Saved | None:
    """What was compiled for the program of this key; None if there is nothing, or not all."""
    entry = store.find(KIND, f"{key}.json")
    trace.emit("fired" if entry else "declined", "saved", key)
    if entry is None:
        return None
    found: dict[str, Any] = json.loads(entry.content)
    code = found.pop("code")
    stretches = {name: _bound(x) for name, x in code.pop("stretches").items()}
    names = {name: (kind, what) for name, (kind, what) in code.pop("names").items()}
    return Saved(Code(**code, names=names, stretches=stretches), **found)


def _bound(found: Mapping[str, Any]) -> Bound:
    s = found["signature"]
    signature = Signature(tuple(s["kinds"]), tuple(s["made"]), tuple(s["results"]), s["boxed"])
    return Bound(signature, tuple(Site(**site) for site in found["sites"]))


def lines_for(nodes: Mapping[str, int], func: Func, lines: Mapping[str, str]) -> dict[str, str]:
    """The user's lines by the names that a program of the same structure had."""
    ops: Sequence[Any] = func.body.ops
    return {name: lines.get(ops[n].results[0].name, "") for name, n in nodes.items()}
