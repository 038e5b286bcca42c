"""What a user gives on the command line, as a function and its example arguments.

`-c "torch.relu(torch.randn(4, 8) @ torch.randn(8, 2))"` becomes `relu(x0 @ x1)` of two tensors: the
results of torch's factory calls are the inputs, in the order in which they are evaluated; modules
that the expression builds are built once. `FILE.py:BUILD` calls BUILD(), which returns
`(function or module, example arguments)`.
"""

from __future__ import annotations

import ast
import linecache
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rung.core.errors import RungError

FACTORIES = frozenset({
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros"})
EXPRESSION = "<rung -c>"  # the file in the lines of an expression's ops
SCOPE = {"torch": torch, "nn": nn, "F": F}
SEED = 0


class UserError(RungError):
    """What the user gave cannot be read or run; the message says what and where."""


class UsageError(UserError):
    """The command line itself is wrong: it names what does not exist, or is no expression."""


@dataclass(frozen=True)
class Given:
    """A function or module to compile, and the arguments of one call."""

    label: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def from_expression(text: str) -> Given:
    """The function that `text` is of its factory calls' results; UserError if it does not run."""
    source = text.strip()
    try:
        tree = ast.parse(source, EXPRESSION, mode="eval")
    except SyntaxError as error:
        raise UsageError(f"not a Python expression: {error.msg}\n  {source}") from None
    linecache.cache[EXPRESSION] = (len(source), None, source.splitlines(True), EXPRESSION)
    calls = _Calls()
    function = _function(calls.visit(tree))
    inputs: list[torch.Tensor] = []
    modules: list[nn.Module] = []
    torch.manual_seed(SEED)
    try:
        with torch.no_grad():
            function(_keep(inputs), _keep(modules))
    except Exception as error:
        raise UserError(f"the expression fails in eager: {type(error).__name__}: {error}") from None
    built = tuple(modules)

    def run(*given: torch.Tensor) -> Any:
        values, parts = iter(given), iter(built)
        return function(lambda _: next(values), lambda _: next(parts))

    return Given(source, run, tuple(inputs))


def _keep(into: list[Any]) -> Callable[[Callable[[], Any]], Any]:
    """What evaluates a call and remembers the result; calls inside it are part of it."""
    depth = 0

    def evaluate(call: Callable[[], Any]) -> Any:
        nonlocal depth
        depth += 1
        try:
            made = call()
        finally:
            depth -= 1
        if not depth:
            into.append(made)
        return made

    return evaluate


class _Calls(ast.NodeTransformer):
    """`torch.randn(4)` to `_input(lambda: torch.randn(4))`, and modules to `_module(lambda: ..)`.

    What is inside such a call is not looked at: it is evaluated with it, once.
    """

    def visit_Call(self, node: ast.Call) -> ast.AST:
        made = _resolve(node.func)
        kind = "_input" if _is_factory(made) else "_module" if _is_module(made) else ""
        if not kind:
            return self.generic_visit(node)
        none = ast.arguments([], [], None, [], [], None, [])
        call = ast.Call(ast.Name(kind, ast.Load()), [ast.Lambda(none, node)], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def _resolve(node: ast.expr) -> Any:
    """The object that a dotted name under torch, nn or F means; None for anything else."""
    match node:
        case ast.Name(id=name):
            return SCOPE.get(name)
        case ast.Attribute(value=owner, attr=name):
            found = _resolve(owner)
            return None if found is None else getattr(found, name, None)
    return None


_MADE = {getattr(torch, name) for name in FACTORIES}


def _is_factory(made: Any) -> bool:
    return made is nn.Parameter or (callable(made) and getattr(made, "__hash__", None) is not None
                                    and not isinstance(made, type) and made in _MADE)


def _is_module(made: Any) -> bool:
    return isinstance(made, type) and issubclass(made, nn.Module)


def _function(tree: ast.Expression) -> Callable[..., Any]:
    """`lambda _input, _module: EXPR`, with the expression's own line numbers."""
    names = [ast.arg(name) for name in ("_input", "_module")]
    body = ast.Lambda(ast.arguments([], names, None, [], [], None, []), tree.body)
    code = compile(ast.fix_missing_locations(ast.Expression(body)), EXPRESSION, "eval")
    made: Callable[..., Any] = eval(code, dict(SCOPE))
    return made


def from_file(text: str) -> Given:
    """What `FILE.py:BUILD` builds; UserError names what is missing or of the wrong kind."""
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise UsageError(f"expected FILE.py:BUILD or -c EXPR, not {text!r}")
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path}")
    with _importing_from(Path(path).resolve().parent):
        build = _defined(path, name)
        torch.manual_seed(SEED)
        try:
            made = build()
        except Exception as error:
            raise UserError(f"{text}: {type(error).__name__}: {error}") from error
    match made:
        case (function, (tuple() | list()) as args) if callable(function):
            return Given(text, function, tuple(args))
        case (function, torch.Tensor() as arg) if callable(function):
            return Given(text, function, (arg,))
    raise UserError(f"{text} must return (function or module, example arguments), "
                    f"not {type(made).__name__}")


def _defined(path: str, name: str) -> Callable[[], Any]:
    try:
        scope = runpy.run_path(path, run_name=Path(path).stem)
    except Exception as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    if not callable(scope.get(name)):
        known = sorted(n for n, x in scope.items() if callable(x) and not n.startswith("_")
                       and getattr(x, "__module__", "") == Path(path).stem)
        raise UsageError(f"{path} has no function {name!r}; it has {', '.join(known) or 'none'}")
    build: Callable[[], Any] = scope[name]
    return build


class _importing_from:
    """Lets the file import its neighbours, as when Python runs it."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __enter__(self) -> None:
        sys.path.insert(0, self.folder)

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self.folder)


def inputs_of(args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, nested ones too."""
    yield from (x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
