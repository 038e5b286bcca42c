"""The backend that `torch.compile(backend="rung")` calls.

Each graph of AOTAutograd (inference, forward or backward) is imported and compiled. A graph that
Rung cannot take runs as it is, with one warning in the log `rung`; `strict` makes that an error.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.registry import register_backend

from rung.core import trace
from rung.core.errors import LoweringError, RungError, Unsupported
from rung.core.expr import Expr
from rung.core.op import Value
from rung.core.options import MODES, Options
from rung.core.types import INDEX
from rung.frontends.torch import compat
from rung.frontends.torch.double_backward import differentiable
from rung.frontends.torch.faults import apart, fault
from rung.frontends.torch.importer import Imported, import_graph
from rung.frontends.torch.masks import without_known_masks
from rung.frontends.torch.partition import partition
from rung.frontends.torch.telling import told
from rung.frontends.torch.tracing import compile_graphs
from rung.frontends.torch.types import hints_of

log = logging.getLogger("rung")
DEFAULTS = Options()
Run = Callable[[list[Any]], Sequence[Any]]
Compiled = Callable[[Imported, Options, Mapping[str, int]], Run]
"""What makes a callable of an imported graph and the sizes to expect."""


@dataclass(eq=False)  # torch gives it attributes of its own
class Backend:
    """What `torch.compile` calls. `targets` are the names that options may give; `verified` gives a
    callable that compares a share of its calls with the graph."""

    compiled: Compiled
    verified: Callable[[Run, fx.GraphModule, Imported, Options], Run]
    targets: tuple[str, ...]

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], *,
                 mode: str | None = None, options: Mapping[str, object] | None = None
                 ) -> Callable[..., Any]:
        """Compile one graph of Dynamo, its backward included."""
        given: dict[str, object] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
        given |= {"mode": mode} if mode else {}
        chosen = Options.of(given | dict(options or {}), self.targets)
        if why := MODES[chosen.mode]:
            _warn_once(f"mode {chosen.mode!r} does what 'default' does: {why}")
        compiler = partial(self.compile_graph, options=chosen)
        return traced(gm, example_inputs, compiler, compiler, compiler,
                      partial(declined, options=chosen), chosen.precision == "eager")

    def register(self, name: str) -> None:
        """Make it known to `torch.compile(backend=name)`."""
        register_backend(self, name=name)

    def reset(self) -> None:
        """What `torch.compiler.reset()` calls: warnings are given anew."""
        _warned.clear()

    def compile_graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any],
                      options: Options = DEFAULTS) -> compat.Boxed:
        """A boxed callable for one ATen graph; the graph itself where Rung declines it."""
        try:
            with compat.unset_fake_temporarily(), told(), _own_errors(), _without_collector():
                imported = import_graph(gm, static=compat.static_inputs(gm))
                if imported.tokens and options.verify:
                    raise Unsupported("a graph with tokens cannot be run twice, as verify does")
                inputs = list(example_inputs)
                drop(inputs, imported.tokens)
                run = self.compiled(imported, options, hints_of(imported.func, inputs))
            run = without_tokens(with_results(run, imported), imported.tokens)
            if options.verify:
                run = compat.boxed(self.verified(run, gm, imported, options))
            return run
        except RungError as error:
            declined(error, options)
            return as_it_is(gm)


def traced(gm: fx.GraphModule, example_inputs: Sequence[Any], forward: compat.Compiler,
           backward: compat.Compiler, inference: compat.Compiler,
           refuse: Callable[[RungError], None], exact: bool = False) -> Callable[..., Any]:
    """AOTAutograd around compilers; Dynamo's graph itself where that cannot be, and `refuse` is
    told why. `exact`: operators stay those whose bits are eager's."""
    kinds = {"tangents of forward-mode differentiation": compat.in_forward_mode(),
             "an argument without memory": any(map(compat.has_no_memory, example_inputs))}
    if why := next((what for what, holds in kinds.items() if holds), "") or fault(gm):
        refuse(Unsupported(why))
        return gm
    without_known_masks(gm)
    graphs = list[fx.GraphModule]()

    def noted(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return forward(graph, inputs)

    depth = compat.function_depth()
    try:
        with differentiable(graphs):
            return apart(compile_graphs(gm, example_inputs, noted, backward, inference,
                                        partition=partial(partition, exact=exact)), gm)
    except Exception as error:
        if isinstance(error, RungError) or compat.is_dynamos(error):
            raise
        compat.leave_functions(depth)  # which tracing entered
        why = str(error).partition("\n")[0]
        refuse(Unsupported(f"AOTAutograd refuses it: {why}"))
        return gm  # which raises what eager raises, where it does


_warned: set[str] = set()


@contextmanager
def _without_collector() -> Iterator[None]:
    """No search for cyclic garbage: compiling makes little, and each full search walks all that
    Dynamo holds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _own_errors() -> Iterator[None]:
    """A bug of ours must not stop the user's model: it is a RungError like any other."""
    try:
        yield
    except RungError:
        raise
    except Exception as error:
        raise LoweringError(f"internal error: {type(error).__name__}: {error}") from error


def declined(error: RungError, options: Options) -> None:
    """Tell that torch runs a graph; `strict` makes that an error."""
    if options.strict:
        raise error
    reason = f"{type(error).__name__}: {error}"
    trace.emit("declined", "backend", "graph", reason)
    _warn_once(f"a graph runs without rung: {reason}")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning("rung: %s", message)


def as_it_is(gm: fx.GraphModule) -> compat.Boxed:
    """The graph, run by torch."""
    def run(args: list[Any]) -> Sequence[Any]:
        values = tuple(args)
        args.clear()
        out: Sequence[Any] = gm(*values)
        return out
    return compat.boxed(run)


def without_tokens(run: compat.Boxed, tokens: Sequence[int]) -> compat.Boxed:
    """`run` for arguments among which tokens stand at these places."""
    def call(args: list[Any]) -> Sequence[Any]:
        drop(args, tokens)
        return run(args)
    return compat.boxed(call) if tokens else run


def drop(items: list[Any], places: Sequence[int]) -> None:
    """Remove what is at the `places`, which go up."""
    for n in reversed(places):
        del items[n]


def with_results(run: compat.Boxed, imported: Imported) -> compat.Boxed:
    """`run`, which gives the tensors, with the sizes and Nones among the graph's results."""
    if all(isinstance(r, Value) for r in imported.results):
        return compat.boxed(run)
    sizes = [(n, p.name) for n, p in enumerate(imported.func.params) if p.type == INDEX]

    def complete(args: list[Any]) -> Sequence[Any]:
        known = {name: args[n] for n, name in sizes}
        tensors = iter(run(args))
        return [next(tensors) if isinstance(r, Value)
                else int(r.evaluate(known)) if isinstance(r, Expr) else r
                for r in imported.results]
    return compat.boxed(complete)
