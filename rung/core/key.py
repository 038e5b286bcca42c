"""Structural keys: equal for functions that differ in names only.

A key is the hash of the canonical text: values, axes, loop variables and sizes named by their order
of appearance, without origins and the function's own name. It is the key of the passes' memo, of
dedup, tuning and the disk cache.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from rung.core.expr import Expr, is_size, may_be_negative, sym
from rung.core.op import Block, Func, Op, Value, attributes, walk
from rung.core.text import LANE, Printer, field_kinds, print_func
from rung.core.types import INDEX, AxesType, TensorType, Type, VecType, shape_of
from rung.core.verify import ops_in_line

_texts: WeakKeyDictionary[Func, str] = WeakKeyDictionary()


def structural_key(func: Func, *extra: str) -> str:
    """sha256 of the canonical text and of what else the result depends on, in hexadecimal."""
    if func not in _texts:
        _texts[func] = print_func(canonical(func))
    return sha256("\0".join([_texts[func], *extra]).encode()).hexdigest()


def magnitude(func: Func, lanes: int) -> str:
    """The text of a function without its name, in which a number stands for all of as many bits
    that `lanes` divides or does not: what is decided by prices is the same for all of them."""
    def about(found: re.Match[str]) -> str:
        number = int(found[0])
        return found[0] if number <= lanes else f"{number.bit_length()}{'.' * (number % lanes > 0)}"

    return re.sub(r"\b\d+\b", about, str(func).partition("(")[2])


def canonical(func: Func) -> Func:
    """`func` called f, with all names by order of appearance: p0 y0 v0 a0 s0 ...

    Inlined values are numbered too: their text does not show how many ops they are.
    """
    printer = Printer(func)
    return _Renamer(_symbol_names(func, printer), printer.inlined).func(func)


def _local_axes(op: Op) -> dict[str, None]:
    """Axes local to the op: a whole-tensor op's names of dimensions, in order."""
    kinds = field_kinds(type(op))
    return dict.fromkeys(
        a for name, x in attributes(op) if kinds[name] == "tuple[Axis, ...]" for a in x)


def _expressions(func: Func, printer: Printer) -> Iterator[Expr]:
    """Every expression and every name of an axis, in an order that depends on no name."""
    for value in (*func.params, *func.outs):
        yield from shape_of(value.type)
    for op in (op for _, row in printer.rows if row for op in ops_in_line(row, printer)):
        for name, x in attributes(op):
            if field_kinds(type(op))[name] == "Axis":
                yield sym(x)
            else:
                yield from _leaves(x)
    for _, value in func.attrs:  # a mapping's own names come last and bring nothing new
        yield from (Expr.of(name) for name, _ in getattr(value, "counts", ()))


def _leaves(x: Any) -> Iterator[Expr]:
    if isinstance(x, Expr):
        yield x
    elif isinstance(x, TensorType):
        yield from x.shape + (x.strides or ())
    elif isinstance(x, tuple):
        for y in x:
            yield from _leaves(y)


def _symbol_names(func: Func, printer: Printer) -> dict[str, str]:
    """New names of axes and sizes; symbols that appear together are ordered by their later uses."""
    exprs = list(_expressions(func, printer))
    local = {a for op in walk(func.body) for a in _local_axes(op)}
    order = dict.fromkeys(p.name for p in func.params if is_size(p.name) and p.type == INDEX)
    for expr in exprs:
        new = expr.symbols() - order.keys() - {LANE}
        order.update(dict.fromkeys(
            new if len(new) < 2 else sorted(new, key=lambda s: (_signature(s, exprs), s))))
    count = Counter[str]()
    names = {}
    for old in (s for s in order if is_size(s) or s not in local):
        letter = ("z" if may_be_negative(sym(old)) else "s") if is_size(old) else "a"
        names[old] = f"{letter}{count[letter]}"
        count[letter] += 1
    return names


def _signature(symbol: str, exprs: list[Expr]) -> tuple[str, ...]:
    """The uses of `symbol`, independent of all names."""
    return tuple(str(e.subs({s: sym("this" if s == symbol else "other") for s in e.symbols()}))
                 for e in exprs)


class _Renamer:
    """Rebuilds a function under new names."""

    def __init__(self, names: Mapping[str, str], hidden: Collection[Value]):
        self.names, self.hidden = dict(names), hidden
        self.count: Counter[str] = Counter()
        self.symbols = {old: sym(new) for old, new in names.items()}
        self.values: dict[Value, Value] = {}

    def func(self, func: Func) -> Func:
        params = tuple(self.define(p, self.type(p.type), "p") for p in func.params)
        outs = tuple(self.define(o, self.type(o.type), "y") for o in func.outs)
        body = self.block(func.body)
        names = self.names | {old.name: new.name for old, new in self.values.items()}
        names[func.name] = "f"
        attrs = tuple((name, value.renamed(names)) for name, value in func.attrs)
        return Func(func.kind, "f", params, outs, body, attrs)

    def define(self, value: Value, new: Type, letter: str = "v") -> Value:
        letter = "h" if value in self.hidden else letter
        name = f"{letter}{self.count[letter]}"
        self.count[letter] += 1
        if new == INDEX:
            name = self.names.get(value.name, name)
        self.values[value] = Value(name, new, value.role)
        return self.values[value]

    def block(self, block: Block) -> Block:
        args = tuple(self.define(a, self.type(a.type)) for a in block.args)
        return Block(args, tuple(self.op(op) for op in block.ops))

    def op(self, op: Op) -> Op:
        outer = self.names, self.symbols
        if local := {old: f"a{n}" for n, old in enumerate(_local_axes(op))}:
            self.names = self.names | local
            self.symbols = self.symbols | {old: sym(new) for old, new in local.items()}
        kinds = field_kinds(type(op))
        changes = {name: self.field(x, kinds[name]) for name, x in attributes(op)}
        made = op.with_fields(**changes, results=())
        self.names, self.symbols = outer
        return made.with_fields(results=tuple(
            self.define(old, t) for old, t in zip(op.results, made.infer(), strict=True)))

    def field(self, x: Any, kind: str) -> Any:
        match x:
            case Value():
                return self.values[x]
            case Expr():
                return x.subs(self.symbols)
            case Block():
                return self.block(x)
            case str():
                return self.names.get(x, x) if "Axis" in kind or kind == "Unroll" else x
            case tuple():
                return tuple(self.field(y, kind) for y in x)
            case TensorType() | VecType() | AxesType():
                return self.type(x)
        return x

    def type(self, t: Type) -> Type:
        match t:
            case TensorType(dtype, shape, strides):
                return TensorType(dtype, self.field(shape, ""), self.field(strides, ""))
            case VecType(dtype, lanes, unroll):
                return VecType(dtype, lanes, self.field(unroll, "Unroll"))
            case AxesType(dtype, axes):
                return AxesType(dtype, self.field(axes, "Axis"))
        return t
