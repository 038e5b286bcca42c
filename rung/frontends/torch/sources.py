"""Where the nodes of a graph come from: the user's line, the module and the function called there.

The line is the innermost one that is neither torch's nor a helper's of another package: of einops
inside a user's module it is the user's, and of a model that a package brings it is the package's.
"""

from __future__ import annotations

import os
import re
import sysconfig
from functools import cache

import torch
from torch import fx

from rung.core.origins import Origin
from rung.frontends.torch import compat

FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n\s+([^\n]*))?')
PACKAGE = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")
TORCH = os.path.dirname(torch.__file__) + os.sep
PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
ROOT = re.compile(r"^(?:.*\bcell_contents|[LG]\['(\w+)'\])\.?")
CHILD = re.compile(r"\._modules\['(\w+)'\]")
COMPILED = ("self", "fn")  # what Dynamo calls a module that is compiled itself
NUMBER = re.compile(r"_\d+$")


def origin_of(node: fx.Node, place: int = 0) -> Origin:
    """The node, at its place in the graph, and what the user wrote that made it or, in a backward
    graph, what it is the gradient of."""
    source = compat.source_of(node)
    frames = FRAME.findall(source.stack)
    outer = [c.__module__.partition(".")[0] for _, c in source.modules if isinstance(c, type)]
    home = next((p for p in reversed(outer) if p != "torch"), "")
    ours = [f for f in frames if _package(f[0]) in ("", home)]
    others = [f for f in frames if _package(f[0]) != "torch"]
    path, line, code = (ours or others or frames or [("", "", "")])[-1]
    module = _module_path(source.modules[-1][0]) if source.modules else ""
    return Origin(node.name, str(node.target), f"{path}:{line}" if path else "", code, module,
                  NUMBER.sub("", source.function), source.backward, place)


@cache
def _package(path: str) -> str:
    """The package that a file is of; "" for the user's own."""
    if path.startswith(TORCH):
        return "torch"
    found = PACKAGE.match(path)
    return found[1] if found else "python" if path.startswith(PYTHON) else ""


@cache
def _module_path(path: str) -> str:
    """`stages.0` for L['self']._modules['stages']._modules['0'], what Dynamo calls a module."""
    root = ROOT.match(path)
    rest = CHILD.sub(r".\1", "." + path[root.end():] if root else path).strip(".")
    name = root[1] if root and root[1] not in COMPILED else ""
    return ".".join(x for x in (name, rest) if x)
