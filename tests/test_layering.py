"""The package's import rules, read from the source with `ast`.

In: the files under `rung/`. Out: one line `file:line: message` for each import that a rule forbids.
An import is looked at as a dotted name, members included: `from rung.loop import ir` names
`rung.loop.ir`, so what a folder may see is a tuple of dotted prefixes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rung"

RUNGS = ("program", "tensor", "loop", "tile", "kernel")
"""In the order in which data passes through them."""

VISIBLE = {
    "core": ("rung.core",),
    # the program frames the kernels: its passes look into them, and theirs work on whole modules
    "program": ("rung.core", "rung.program", "rung.tensor.ir", "rung.loop.ir"),
    "tensor": ("rung.core", "rung.tensor", "rung.loop.ir", "rung.program.ir",
               "rung.program.storage"),
    "loop": ("rung.core", "rung.loop", "rung.tile.ir", "rung.program.ir"),
    # Tile IR is a Loop IR kernel as it stands, with a mapping beside it
    "tile": ("rung.core", "rung.tile", "rung.kernel.ir", "rung.loop.ir"),
    "kernel": ("rung.core", "rung.kernel", "rung.tile.mapping"),
    "targets": ("rung.core", "rung.loop.ir", "rung.tile", "rung.kernel", "rung.targets"),
    "frontends": ("rung.core", "rung.program", "rung.tensor", "rung.frontends"),
    "runtime": ("rung.core", "rung.program", "rung.kernel", "rung.runtime", "rung.targets.base",
                "rung.targets.device"),
    # the files beside the folders, but for those of SEES_ALL
    "__init__": ("rung.core",),
    "__main__": ("rung.cli",),
}
SEES_ALL = ("pipeline", "compilation", "entry", "cli", "tools")

SHARED_BY_TARGETS = ("TARGETS", "base", "device", "c_family", "libraries", "stretch")
"""Modules of `targets/` that are no machine; every other one is a concrete target."""

ENVIRONMENT_READER = "rung.core.config"
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb")

TORCH_IS_KNOWN_TO = ("frontends", "entry", "cli", "tools")

ALLOWED: dict[tuple[str, str], str] = {
    ("rung", "rung.targets.device"):
        "rung.check() is what a user calls",
    ("rung.targets.libraries", "torch"):
        "calls ATen and oneDNN, for a front end whose tensors are torch's",
}
"""(importing module, imported prefix) -> the reason why this one exception stands."""


CIRCLES: dict[tuple[str, ...], str] = {
    ("rung.core.expr", "rung.core.ranges"):
        "an expression is simplified by what is known of its parts' ranges",
    ("rung.core.interp", "rung.core.op", "rung.core.ops", "rung.core.parse", "rung.core.text"):
        "an op says what it means and how it reads, to what runs, prints and parses all ops",
}
"""Files that import each other -> why."""


@dataclass(frozen=True)
class Import:
    """One dotted name that a statement or an `import_module` call brings in."""

    name: str
    line: int


@dataclass(frozen=True)
class Module:
    """A source file: `name` is dotted, `part` the folder (or file) of `rung/` it belongs to."""

    path: Path
    name: str
    part: str
    tree: ast.Module

    def at(self, line: int, message: str) -> str:
        return f"{self.path}:{line}: {message}"


def modules(package: Path) -> list[Module]:
    """The modules below `package`, a folder named `rung`."""
    return [read_module(package, path) for path in sorted(package.rglob("*.py"))]


def read_module(package: Path, path: Path) -> Module:
    parts = path.relative_to(package).with_suffix("").parts
    dotted = parts[:-1] if parts[-1] == "__init__" else parts
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return Module(path.relative_to(package.parent), ".".join(("rung", *dotted)), parts[0], tree)


def imports(module: Module) -> Iterator[Import]:
    """What `module` imports, at any depth, under TYPE_CHECKING too, in absolute names."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(names=names):
                base = source_of(module, node)
                yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in names)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if is_dynamic(node.func):
                yield Import(name, node.lineno)


def source_of(module: Module, node: ast.ImportFrom) -> str:
    """The absolute module that a `from` statement names."""
    if not node.level:
        return node.module or ""
    up = node.level - (module.path.name == "__init__.py")
    base = module.name.split(".")
    return ".".join([*base[: len(base) - up], *([node.module] if node.module else [])])


def is_dynamic(function: ast.expr) -> bool:
    """Whether a call of `function` is `import_module(...)` or `__import__(...)`."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in ("import_module", "__import__")
    return False


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def excused(module: Module, name: str) -> bool:
    return any(module.name == importer and within(name, (to,)) for importer, to in ALLOWED)


# The rules: modules -> messages.


def check_visible(tree: list[Module], parts: tuple[str, ...]) -> list[str]:
    """Each of `parts` imports nothing of Rung but what VISIBLE grants it."""
    return [
        module.at(found.line, f"{module.part} must not import {found.name}")
        for module in tree
        if module.part in parts
        for found in imports(module)
        if within(found.name, ("rung",)) and not within(found.name, VISIBLE[module.part])
        if not excused(module, found.name)
    ]


def check_core(tree: list[Module]) -> list[str]:
    return check_visible(tree, ("core",))


def check_rungs(tree: list[Module]) -> list[str]:
    return check_visible(tree, RUNGS)


def check_targets(tree: list[Module]) -> list[str]:
    return check_visible(tree, ("targets",))


def check_frontends(tree: list[Module]) -> list[str]:
    return check_visible(tree, ("frontends",))


def check_runtime(tree: list[Module]) -> list[str]:
    return check_visible(tree, ("runtime",))


def check_top_level(tree: list[Module]) -> list[str]:
    return check_visible(tree, ("__init__", "__main__"))


def check_known_parts(tree: list[Module]) -> list[str]:
    """Every folder and top-level file has a rule, so that none sees everything by accident."""
    return [
        module.at(1, f"{module.part} has no entry in VISIBLE; say what it may import")
        for module in tree
        if module.part not in VISIBLE and module.part not in SEES_ALL
    ]


def check_target_names(tree: list[Module]) -> list[str]:
    """Generic code names no machine."""
    return [
        module.at(found.line, f"names a concrete target: {found.name}")
        for module in tree
        if module.part != "targets" and module.part not in SEES_ALL
        for found in imports(module)
        if is_concrete_target(found.name) and not excused(module, found.name)
    ]


def is_concrete_target(name: str) -> bool:
    match name.split("."):
        case ["rung", "targets", target, *_]:
            return target not in SHARED_BY_TARGETS
    return False


def check_torch(tree: list[Module]) -> list[str]:
    """Torch is the library of one front end: nothing below imports it, or that front end."""
    return [
        module.at(found.line, f"{module.part} must not import {found.name}")
        for module in tree
        if module.part not in TORCH_IS_KNOWN_TO
        for found in imports(module)
        if within(found.name, ("torch", "rung.frontends")) and not excused(module, found.name)
    ]


def check_devices(tree: list[Module]) -> list[str]:
    """Code is generated without a device: no target, and nothing above, imports one."""
    return [
        module.at(found.line, f"needs a device: {found.name}")
        for module in tree
        if not within(module.name, ("rung.tools",)) and not is_device(module.name)
        for found in imports(module)
        if is_device(found.name)
    ]


def is_device(name: str) -> bool:
    """Whether a name is of one target's device, or in it."""
    return re.match(r"rung\.targets\.\w+\.device\b", name) is not None


def check_circles(tree: list[Module]) -> list[str]:
    """No files import each other, directly or through others, but those of CIRCLES."""
    files = {module.name: module for module in tree}
    return [files[group[0]].at(1, f"a circle of imports: {', '.join(group)}")
            for group in sorted(circles(tree)) if group not in CIRCLES]


def circles(tree: list[Module]) -> set[tuple[str, ...]]:
    """The sets of files that reach each other by imports."""
    names = {module.name for module in tree}
    reached = {module.name: {to for found in imports(module)
                             if (to := file_of(found.name, names)) and to != module.name}
               for module in tree}
    for found in reached.values():
        todo = list(found)
        for to in todo:
            todo += reached[to] - found
            found |= reached[to]
    return {tuple(sorted(x for x in reached[name] if name in reached[x]))
            for name in names if name in reached[name]}


def file_of(name: str, files: set[str]) -> str:
    """The file that a dotted name is of, or is; empty for what is not of the package."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name


def check_environment(tree: list[Module]) -> list[str]:
    """One module reads the environment; no exception can be granted."""
    return [
        module.at(line, f"reads the environment; only {ENVIRONMENT_READER} does")
        for module in tree
        if module.name != ENVIRONMENT_READER
        for line in environment_reads(module)
    ]


def environment_reads(module: Module) -> Iterator[int]:
    """Lines that touch `os.environ` and its like, through `os`, an alias of it or `from os`."""
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os"
    }
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=base), attr=attr):
                if base in aliases and attr in ENVIRONMENT:
                    yield node.lineno
            case ast.ImportFrom(module="os", names=names):
                if any(alias.name in (*ENVIRONMENT, "*") for alias in names):
                    yield node.lineno


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return modules(PACKAGE)


def test_core_imports_only_core(package: list[Module]) -> None:
    report(check_core(package))


def test_rung_imports_core_itself_and_the_next_ir(package: list[Module]) -> None:
    report(check_rungs(package))


def test_targets_see_no_earlier_rung(package: list[Module]) -> None:
    report(check_targets(package))


def test_frontends_see_only_the_first_rungs(package: list[Module]) -> None:
    report(check_frontends(package))


def test_runtime_sees_no_compiler(package: list[Module]) -> None:
    report(check_runtime(package))


def test_only_pipeline_cli_and_tools_see_everything(package: list[Module]) -> None:
    report(check_top_level(package) + check_known_parts(package))


def test_no_target_is_named_outside_targets(package: list[Module]) -> None:
    report(check_target_names(package))


def test_torch_is_imported_by_its_front_end_alone(package: list[Module]) -> None:
    report(check_torch(package))


def test_code_is_generated_without_a_device(package: list[Module]) -> None:
    report(check_devices(package))


def test_no_files_import_each_other(package: list[Module]) -> None:
    report(check_circles(package))
    assert not CIRCLES.keys() - circles(package), "drop what is no circle any more"


def test_one_reader_of_the_environment(package: list[Module]) -> None:
    report(check_environment(package))


def test_exceptions_are_needed_and_explained(package: list[Module]) -> None:
    used = {(module.name, found.name) for module in package for found in imports(module)}
    for (importer, to), reason in ALLOWED.items():
        assert reason.strip(), f"{importer} -> {to} gives no reason"
        needed = any(name == importer and within(found, (to,)) for name, found in used)
        assert needed, f"{importer} no longer imports {to}; drop it from ALLOWED"


# The checker itself: every rule must catch something.

Rule = Callable[[list[Module]], list[str]]

VIOLATIONS: list[tuple[Rule, str, str, str]] = [
    (check_core, "core/a.py", "from rung.loop.ir import Kernel", "rung.loop.ir.Kernel"),
    (check_core, "core/b.py", "def f():\n    from ..kernel import ir", "rung.kernel.ir"),
    (check_rungs, "program/a.py", "import rung.tensor.simplify", "rung.tensor.simplify"),
    (check_rungs, "tensor/a.py", "from rung.kernel import ir", "rung.kernel.ir"),
    (check_rungs, "loop/a.py", "from rung.tensor.ir import Map", "rung.tensor.ir.Map"),
    (check_rungs, "tile/a.py", "from rung.loop import fuse", "rung.loop.fuse"),
    (check_rungs, "tile/b.py", "from rung import pipeline", "rung.pipeline"),
    (check_rungs, "kernel/a.py", "from rung.tile.price import p", "rung.tile.price.p"),
    (check_targets, "targets/cpu/a.py", "from rung.program import ir", "rung.program.ir"),
    (check_targets, "targets/toy/a.py", "from rung.loop.fuse import f", "rung.loop.fuse.f"),
    (check_frontends, "frontends/torch/a.py", "from rung.loop import ir", "rung.loop.ir"),
    (check_runtime, "runtime/a.py", "from rung.tile import mapping", "rung.tile.mapping"),
    (check_runtime, "runtime/b.py", "from rung.targets import c_family", "rung.targets.c_family"),
    (check_top_level, "__init__.py", "from .pipeline import compile", "rung.pipeline.compile"),
    (check_known_parts, "extra/a.py", "", "extra has no entry"),
    (check_target_names, "core/a.py", "from rung.targets.cpu import emit", "rung.targets.cpu.emit"),
    (check_target_names, "runtime/a.py", "from ..targets import toy", "rung.targets.toy"),
    (
        check_target_names,
        "frontends/a.py",
        "from importlib import import_module\nm = import_module('rung.targets.cuda')",
        "rung.targets.cuda",
    ),
    (check_torch, "runtime/a.py", "def f():\n    import torch", "must not import torch"),
    (check_torch, "compilation.py", "from rung.frontends.torch.externs import TORCH", "TORCH"),
    (check_devices, "targets/toy/target.py", "from rung.targets.toy.device import Toy", "a device"),
    (check_devices, "pipeline.py", "def f():\n    import rung.targets.cpu.device", "a device"),
    (check_environment, "core/a.py", "import os\nx = os.environ['X']", "reads the environment"),
    (check_environment, "tools/a.py", "import os as o\nx = o.getenv('X')", "reads the environment"),
    (check_environment, "cli.py", "from os import environ", "reads the environment"),
]


def write_tree(root: Path, sources: dict[str, str]) -> list[Module]:
    for name, text in sources.items():
        path = root / "rung" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return modules(root / "rung")


@pytest.mark.parametrize(
    ("rule", "name", "text", "message"),
    VIOLATIONS,
    ids=[f"{v[0].__name__}-{v[1]}" for v in VIOLATIONS],
)
def test_rule_catches(rule: Rule, name: str, text: str, message: str, tmp_path: Path) -> None:
    (problem,) = rule(write_tree(tmp_path, {name: text}))
    line = max(1, text.count("\n") + 1)
    assert problem.startswith(f"rung/{name}:{line}: ")
    assert message in problem


def test_circle_is_caught_through_a_third_file(tmp_path: Path) -> None:
    tree = write_tree(tmp_path, {
        "tile/a.py": "from rung.tile.b import f", "tile/b.py": "def f():\n    from . import c",
        "tile/c.py": "import rung.tile.a", "tile/d.py": "from rung.tile import a"})
    (problem,) = check_circles(tree)
    assert problem == "rung/tile/a.py:1: a circle of imports: rung.tile.a, rung.tile.b, rung.tile.c"


def test_lawful_tree_passes(tmp_path: Path) -> None:
    lawful = {
        "__init__.py": "from rung.core import errors",
        "__main__.py": "from rung.cli import main",
        "cli.py": "from rung.targets import cpu, toy",
        "pipeline.py": "import rung.targets.cpu, rung.loop.fuse",
        "tools/show.py": "from rung import pipeline",
        "core/config.py": "import os\nx = os.environ",
        "core/expr.py": "import os\nfrom . import dim\nhere = os.getcwd()",
        "program/lower.py": "from rung.core import dim\nfrom rung.tensor import ir",
        "tensor/to_loop.py": "from ..loop.ir import Kernel\nfrom .ir import Map",
        "loop/to_tile.py": "from rung.tile.ir import Tile",
        "tile/to_kernel.py": "from rung.kernel.ir import For",
        "kernel/vectorize.py": "from rung.tile.mapping import Mapping",
        "targets/cpu/emit.py": "from rung.loop import ir\nfrom ..c_family import f\nimport numpy",
        "frontends/torch/lower.py": "import torch\nfrom rung.tensor import ir",
        "runtime/launch.py": "from rung.targets.base import Target",
    }
    tree = write_tree(tmp_path, lawful)
    rules = {rule for rule, *_ in VIOLATIONS}
    assert [problem for rule in rules for problem in rule(tree)] == []
