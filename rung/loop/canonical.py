"""Canonical names of kernels, parameters, axes and values; equal kernels are merged.

    kernel k7(t1, t4) -> v2 ...          ->    kernel mm_relu(x0, x1) -> y ...

A kernel is named after the user's functions that its first call computes or, if unknown, after its
ops; all other names depend on structure only. So equal layers call one kernel, and a user's line
that moves changes no text. Parameters are in order of first use, axes are i, j, .. in order of the
stores, then of use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import count

from rung.core import origins
from rung.core.expr import Expr, sym
from rung.core.op import RESERVED, Func, Op, Value
from rung.core.ops import Map, Sub
from rung.core.origins import Origin
from rung.core.rewrite import renamed
from rung.core.scalar import SCALARS
from rung.loop.emit import Copier, Emitter, hint
from rung.loop.ir import Fold, Load, Store, extents_of
from rung.program.ir import KernelCall, Module

LETTERS = "ijklmnop"
PARTS = 4  # words in a kernel's name


def canonical(module: Module, title: Callable[[Sequence[Origin]], str] = lambda _: "") -> Module:
    """The module with kernels renamed, those of equal text merged, and unused ones dropped.

    `title` gives a kernel's name from the origins of a call, or "".
    """
    kernels = {k.name: k for k in module.kernels}
    known: dict[str, Func] = {}  # text under the plain name -> kernel under its final name
    made: dict[str, tuple[Func, tuple[int, ...]]] = {}
    taken: set[str] = set()

    def final(call: KernelCall) -> tuple[Func, tuple[int, ...]]:
        name = call.callee
        if name not in made:
            plain, order = canonical_kernel(kernels[name])
            text = str(plain)
            if text not in known:
                new = title(origins.of_all(call.results)) or plain.name
                if new in taken:
                    new += "_" + sha256(text.encode()).hexdigest()[:6]
                taken.add(new)
                known[text] = replace(plain, name=new)
            for kept, gone in zip(known[text].body.ops, plain.body.ops, strict=True):
                for one, other in zip(kept.results, gone.results, strict=True):
                    origins.follow([one], [other])
            made[name] = known[text], order
        return made[name]

    def renew(op: Op) -> Op:
        if not isinstance(op, KernelCall):
            return op
        func, order = final(op)
        return replace(op, callee=func.name, args=tuple(op.args[n] for n in order))

    programs = tuple(p.with_ops([renew(op) for op in p.body.ops]) for p in module.programs)
    return Module(programs, tuple(known.values()))


def canonical_kernel(func: Func) -> tuple[Func, tuple[int, ...]]:
    """The kernel under its structural names, and for each parameter its old position."""
    used = [op.buf for op in func.body.ops if isinstance(op, Load | Store)]
    order = [v for v in dict.fromkeys(used) if v in func.params]
    order += [v for v in func.params if v not in order]
    axes = _axis_names(func)
    extents = extents_of(func)
    outs = [f"y{n}" if len(func.outs) > 1 else "y" for n in range(len(func.outs))]
    names = dict(zip((*order, *func.outs), (*(f"x{n}" for n in range(len(order))), *outs),
                     strict=True))
    buffers = {v: renamed(v, name) for v, name in names.items()}
    out = Emitter({axes[a]: extents[a] for a in axes}, names.values())
    to: dict[str, Sub] = {a: sym(b) for a, b in axes.items()}
    copier = _Naming(out, to, dict(buffers))
    copier.ops(func.body.ops)
    new = out.kernel(_title(func.body.ops), [buffers[v] for v in order],
                     [buffers[v] for v in func.outs])
    return new, tuple(func.params.index(v) for v in order)


class _Naming(Copier):
    """A copier that names results by their ops."""

    def op(self, op: Op) -> tuple[Value, ...]:
        new = self.out.add(self._moved(op))
        self.values.update(zip(op.results, new, strict=True))
        return new


def _axis_names(func: Func) -> dict[str, str]:
    """Old axis to new, the axes of stores first."""
    stores = [op for op in func.body.ops if isinstance(op, Store)]
    axes = dict.fromkeys(a for op in stores for a in _ordered(op))
    axes |= dict.fromkeys(extents_of(func))
    names = (f"{c}{n or ''}" for n in count() for c in LETTERS)
    return dict(zip(axes, (name for name in names if name not in RESERVED), strict=False))


def _ordered(store: Store) -> Iterable[str]:
    """Axes of a store, outermost dimension first."""
    seen = store.nest
    for sub in store.subs:
        if isinstance(sub, Expr):
            yield from (a for a in seen if a in sub.symbols())
    yield from seen


def _title(ops: Iterable[Op]) -> str:
    """`max_exp_sum`: folds, contractions and costly functions; else all ops."""
    main, rest = [], []
    moves = "copy"
    for op in ops:
        if isinstance(op, Fold) or (isinstance(op, Map) and _is_telling(op.fn)):
            main.append(hint(op))
        elif isinstance(op, Map):
            rest.append(op.fn)
        elif isinstance(op, Store) and any(isinstance(s, Value) for s in op.subs):
            moves = "scatter"
        elif isinstance(op, Load) and any(isinstance(s, Value) for s in op.subs):
            moves = "gather"
    parts = list(dict.fromkeys(main or rest)) or [moves]
    return "_".join(parts[:PARTS] + (["scatter"] if moves == "scatter" and main + rest else []))


def _is_telling(fn: str) -> bool:
    return fn == "relu" or SCALARS[fn].cost >= 10
