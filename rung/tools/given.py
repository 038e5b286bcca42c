"""What a user gives on the command line, as a function and its example arguments.

`-c "torch.relu(torch.randn(4, 8) @ torch.randn(8, 2))"` becomes `relu(x0 @ x1)` of two tensors: the
results of torch's factory calls are the inputs, in the order in which they are evaluated; modules
that the expression builds are built once. `FILE.py:BUILD` calls BUILD(), which returns
`(function or module, example arguments)`.
"""

from __future__ import annotations

import ast
import copy
import linecache
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
SCOPE: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
SITE = "<call>"  # starts the names that stand where such a call stood; no Python name does
SEED = 0
Function = Callable[..., Any]
Args = tuple[Any, ...]


class UserError(RungError):
    """What the user gave cannot be read or run; the message says what and where."""


class UsageError(UserError):
    """The command line itself is wrong: it names what does not exist, or is no expression."""


@dataclass(frozen=True)
class Given:
    """A function or module to compile, the arguments of one call, and those of later calls."""

    label: str
    function: Function
    args: Args
    again: tuple[Args, ...] = ()


def from_expression(text: str) -> Given:
    """The function that `text` is of its factory calls' results; UserError if it does not run."""
    source = text.strip()
    try:
        calls = _Calls(ast.parse(source, EXPRESSION, mode="eval").body)
    except SyntaxError as error:
        raise UsageError(f"not a Python expression: {error.msg}\n  {source}") from None
    linecache.cache[EXPRESSION] = (len(source), None, source.splitlines(True), EXPRESSION)
    made: dict[str, list[Any]] = {}
    torch.manual_seed(SEED)
    try:
        with torch.no_grad():
            _function(["_made"], calls.recorded(), SCOPE)(_keep(made))
    except Exception as error:
        raise UserError(f"the expression fails in eager: {type(error).__name__}: {error}") from None
    inputs = [name for name in calls.sites if name in made and name.startswith("x")]
    values = {name: x[0] if len(x) == 1 else tuple(x) for name, x in made.items()}
    function = _function(inputs, calls.replaced(made), SCOPE | values)
    return Given(source, function, tuple(values[name] for name in inputs))


def arguments(text: str) -> Args:
    """The arguments of one more call, from an expression: a tuple of them, or the only one."""
    try:
        made = eval(text, dict(SCOPE))
    except Exception as error:
        raise UsageError(f"{text!r}: {type(error).__name__}: {error}") from None
    return made if isinstance(made, tuple) else (made,)


def _keep(into: dict[str, list[Any]]) -> Callable[[str, Callable[[], Any]], Any]:
    """What evaluates a call and remembers the result; calls inside it are part of it."""
    def evaluate(site: str, call: Callable[[], Any]) -> Any:
        made = call()
        into.setdefault(site, []).append(made)
        return made

    return evaluate


class _Calls(ast.NodeTransformer):
    """The calls of an expression that are evaluated once: `x0`, .. make inputs, `m0`, .. modules.

    What is inside such a call is not looked at: it is evaluated with it.
    """

    def __init__(self, body: ast.expr):
        self.sites: dict[str, ast.Call] = {}
        self.body: ast.expr = self.visit(body)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        made = _resolve(node.func)
        kind = "x" if _is_factory(made) else "m" if _is_module(made) else ""
        if not kind:
            return self.generic_visit(node)
        name = f"{kind}{len(self.sites)}"
        self.sites[name] = node
        return ast.copy_location(ast.Name(SITE + name, ast.Load()), node)

    def recorded(self) -> ast.expr:
        """`torch.randn(4)` as `_made("x0", lambda: torch.randn(4))`."""
        def record(name: str) -> ast.expr:
            call = ast.Lambda(_parameters([]), self.sites[name])
            return ast.Call(ast.Name("_made", ast.Load()), [ast.Constant(name), call], [])
        return _with_sites(self.body, record)

    def replaced(self, made: dict[str, list[Any]]) -> ast.expr:
        """`torch.randn(4)` as `x0`; in a loop, whose results are a tuple, as the next of `x0`."""
        several = [name for name, results in made.items() if len(results) > 1]

        def read(name: str) -> ast.expr:
            if name not in several:
                return ast.Name(name, ast.Load())
            return ast.Call(ast.Name("next", ast.Load()), [ast.Name(f"{name}_", ast.Load())], [])
        body = _with_sites(self.body, read)
        if not several:
            return body
        starts = [ast.Call(ast.Name("iter", ast.Load()), [ast.Name(name, ast.Load())], [])
                  for name in several]
        return ast.Call(ast.Lambda(_parameters([f"{n}_" for n in several]), body), [*starts], [])


def _with_sites(body: ast.expr, make: Callable[[str], ast.expr]) -> ast.expr:
    """A copy of `body` with what `make` gives for each site."""
    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if not node.id.startswith(SITE):
                return node
            return ast.copy_location(make(node.id.removeprefix(SITE)), node)

    filled: ast.expr = Fill().visit(copy.deepcopy(body))
    return filled


def _parameters(names: Sequence[str]) -> ast.arguments:
    return ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, [])


def _function(names: Sequence[str], body: ast.expr, scope: dict[str, Any]) -> Function:
    """`lambda NAMES: BODY`, with the expression's own line numbers."""
    made = ast.Lambda(_parameters(names), body)
    code = compile(ast.fix_missing_locations(ast.Expression(made)), EXPRESSION, "eval")
    function: Function = eval(code, dict(scope))
    return function


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


def from_file(text: str) -> Given:
    """What `FILE.py:BUILD` builds; UserError names what is missing or of the wrong kind."""
    return built(text, {})


def built(text: str, sizes: Mapping[str, int]) -> Given:
    """What `FILE.py:BUILD` builds, called with `sizes` by name."""
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise UsageError(f"expected FILE.py:BUILD or -c EXPR, not {text!r}")
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path}")
    with _importing_from(Path(path).resolve().parent):
        build = _defined(path, name)
        torch.manual_seed(SEED)
        try:
            made = build(**sizes)
        except Exception as error:
            raise UserError(f"{text}: {type(error).__name__}: {error}") from error
    match made:
        case (function, (tuple() | list()) as args) if callable(function):
            return Given(text, function, tuple(args))
        case (function, torch.Tensor() as arg) if callable(function):
            return Given(text, function, (arg,))
    raise UserError(f"{text} must return (function or module, example arguments), "
                    f"not {type(made).__name__}")


def _defined(path: str, name: str) -> Function:
    try:
        scope = runpy.run_path(path, run_name=Path(path).stem)
    except Exception as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    if not callable(scope.get(name)):
        known = sorted(n for n, x in scope.items() if callable(x) and not n.startswith("_")
                       and getattr(x, "__module__", "") == Path(path).stem)
        raise UsageError(f"{path} has no function {name!r}; it has {', '.join(known) or 'none'}")
    build: Function = scope[name]
    return build


class _importing_from:
    """Lets the file import its neighbours, as when Python runs it."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __enter__(self) -> None:
        sys.path.insert(0, self.folder)

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self.folder)


def inputs_of(args: Args) -> Iterator[torch.Tensor]:
    """The tensors among arguments, nested ones too."""
    yield from (x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
