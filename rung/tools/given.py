"""What a user gives on the command line, as a function and its example arguments.

`-c "torch.relu(torch.randn(4, 8) @ torch.randn(8, 2))"` becomes `relu(x0 @ x1)` of two tensors: the
results of torch's factory calls are the inputs, in the order in which they are evaluated; modules
that the expression builds are built once. `FILE.py:BUILD` imports the file as a neighbour of it
would, and calls BUILD(), which returns `(function or module, example arguments)`, or keyword
arguments too: `(model, (), {"input_ids": ids})`.
"""

from __future__ import annotations

import ast
import copy
import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
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
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent),
             str(Path(__file__).parents[1]), "<")  # whose files are not the user's
SEED = 0
Function = Callable[..., Any]
Args = tuple[Any, ...]


class UserError(RungError):
    """What the user gave cannot be read or run; the message says what and where."""


class UsageError(UserError):
    """The command line itself is wrong: it names what does not exist, or is no expression."""


@dataclass(frozen=True)
class Given:
    """A function or module to compile, the arguments of one call, and those of later calls, which
    have the same keyword arguments."""

    label: str
    function: Function
    args: Args
    again: tuple[Args, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


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
    class Filler(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if not node.id.startswith(SITE):
                return node
            return ast.copy_location(make(node.id.removeprefix(SITE)), node)

    filled: ast.expr = Filler().visit(copy.deepcopy(body))
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
    build = _defined(path, name)
    torch.manual_seed(SEED)
    try:
        made = build(**sizes)
    except (Exception, SystemExit) as error:
        raise failure(text, error, path) from error
    match made:
        case (function, args, *rest) if callable(function) and isinstance(
                args, tuple | list | torch.Tensor):
            kwargs = rest[0] if rest else {}
            if len(rest) < 2 and isinstance(kwargs, Mapping):
                args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
                return Given(text, function, args, kwargs=dict(kwargs))
    kinds = [type(x).__name__ for x in made] if isinstance(made, tuple) else [type(made).__name__]
    raise UserError(f"{text} must return (function or module, example arguments) or (function or "
                    f"module, example arguments, keyword arguments), not {', '.join(kinds)}")


def _defined(path: str, name: str) -> Function:
    try:
        module = imported(Path(path).resolve())
    except (Exception, SystemExit) as error:
        raise failure(path, error, path) from error
    scope = vars(module)
    if not callable(scope.get(name)):
        known = sorted(n for n, x in scope.items() if callable(x) and not n.startswith("_")
                       and getattr(x, "__module__", "") == module.__name__)
        raise UsageError(f"{path} has no function {name!r}; it has {', '.join(known) or 'none'}")
    build: Function = scope[name]
    return build


def imported(path: Path) -> ModuleType:
    """The module of a file, as its neighbours import it: from its folder, or as a member of its
    package. Where another module has its name already, it gets one that is free."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        root, parts = root.parent, [root.name, *parts]
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))
    if str(path.parent) not in sys.path:  # last: a package's `types` is no module of its own
        sys.path.append(str(path.parent))
    parts = parts[:-1] if parts[1:] and parts[-1] == "__init__" else parts
    if parts[1:] and str(root / parts[0]) in getattr(import_module(parts[0]), "__path__", ()):
        return import_module(".".join(parts))
    name = re.sub(r"\W", "_", path.stem)
    while name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == str(path):
            return sys.modules[name]
        name += "_"
    spec = spec_from_loader(name, SourceFileLoader(name, str(path)))
    assert spec and spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def failure(label: str, error: BaseException, path: str = "") -> UserError:
    """What to tell of an error in the user's program: the innermost line of theirs, and it."""
    rows = [(x.filename, x.lineno, x.line) for x in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        rows.append((error.filename or "", error.lineno, error.text))
    own = [row for row in rows if row[0] == str(Path(path).resolve()) or not (
        row[0].startswith(LIBRARIES) or re.search("(site|dist)-packages", row[0]))]
    where = [f"\n  {file}:{line}: {(code or '').strip()}" for file, line, code in own[-1:]]
    said = f": {error}" if str(error) else ""
    return UserError(f"{label}: {type(error).__name__}{said}{''.join(where)}")


def inputs_of(args: Args) -> Iterator[torch.Tensor]:
    """The tensors among arguments, nested ones too."""
    yield from (x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
