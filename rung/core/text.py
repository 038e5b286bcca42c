"""One printer for every rung: `Func` to text that `core.parse` reads back.

An op prints by its `form`: literal words, `{field}`, an optional group `< word {field}>` that is
left out where its fields have their defaults, `{carry}` for a loop's `name = start` pairs, and
`{:}` where the result types go (default: last). Scalar maps print infix, loads as `x[i,k]`, and an
op of one use prints inside its user, so `y[i] = floor(x[i]) + 1.0` is one line for four ops.

`KINDS` says how the fields of each annotation are written and read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rung.core.expr import Expr
from rung.core.lexer import NAME
from rung.core.op import Block, Func, Op, Value, uses
from rung.core.ops import Cast, Const, IndexValue, LoadBase, Map, StoreBase, Sub
from rung.core.scalar import SCALARS
from rung.core.types import DTYPES, DType, read_type

if TYPE_CHECKING:
    from rung.core.parse import Parser

LANE = "lane"  # the index symbol that runs over the lanes of one vector


def print_func(func: Func, notes: Callable[[Op], str] | None = None) -> str:
    """The text of `func`; `notes` may give a trailing comment for an op."""
    return "\n".join(text for text, _ in Printer(func, notes).rows)


# --- forms and fields -----------------------------------------------------------------------------

@dataclass(frozen=True)
class Kind:
    """How fields of one annotation are written and read; `sep` stands between a tuple's items."""

    show: Callable[[Printer, Any], str]
    read: Callable[[Parser], Any]
    sep: str = ","


def field_kinds(cls: type) -> dict[str, str]:
    """Field name to its annotation."""
    return {f.name: str(f.type) for f in fields(cls) if f.name != "results"}


@cache
def kind(annotation: str) -> Kind:
    """How to write and read a field; that of a tuple follows from its items."""
    found = re.fullmatch(r"tuple\[(.*), \.\.\.\]", annotation)
    if not found:
        return KINDS[annotation.removesuffix(" | None")]
    item = KINDS[found[1]]
    return Kind(lambda p, xs: item.sep.join(item.show(p, x) for x in xs),
                lambda p: p.listed(lambda: item.read(p)))


@cache
def form_parts(form: str) -> tuple[tuple[bool, list[str]], ...]:
    """Parts of a form: whether optional, and [text, field, text, ..., field, text]."""
    parts = re.split(r"<( [^>]*)>", form.replace(" {:}", "{:}") + "{:}" * ("{:}" not in form))
    return tuple((n % 2 > 0, re.split(r"\{(.*?)\}", part)) for n, part in enumerate(parts))


NESTED = 40  # ops in one another in one line, at most

# --- functions ------------------------------------------------------------------------------------

class Printer:
    """Prints one function into `rows`: lines, each with its op or None."""

    def __init__(self, func: Func, notes: Callable[[Op], str] | None = None):
        self.notes = notes
        self.rows: list[tuple[str, Op | None]] = []
        self.inlined: dict[Value, Op] = {}
        self._level: dict[Value, int] = {}
        mapping = func.attr("mapping")
        self._keep = mapping.names() if mapping is not None else frozenset()
        self._plan(func.body, uses(func.body))
        self._header(func)
        self._block(func.body, 1)
        if mapping is not None:
            self.rows += [(line, None) for line in str(mapping).splitlines()]

    def _header(self, func: Func) -> None:
        params, outs = (", ".join(f"{v.name}: {v.type} {v.role}".rstrip() for v in values)
                        for values in (func.params, func.outs))
        head = f"{func.kind} {func.name}({params})" + (f" -> {outs}" if outs else "")
        attrs = [f"  {name} {value}" for name, value in func.attrs
                 if name != "mapping" and not value.implied(func)]
        self.rows += [(line, None) for line in (head, *attrs)]

    def _plan(self, block: Block, users: dict[Value, list[Op]]) -> None:
        """Choose the ops that print inside their user."""
        borders = (op.effect.value != "pure" or bool(op.blocks()) for op in block.ops)
        part = dict(zip(block.ops, accumulate(borders, initial=0), strict=False))
        for op in block.ops:
            for inner in op.blocks():
                self._plan(inner, users)
            readers = users.get(op.result, []) if op.inline == "single" else []
            alone = len(readers) == 1 and part.get(readers[0]) == part[op]
            level = 1 + max((self._level.get(x, 0) for x in op.operands()), default=0)
            if op.inline == "always" or (
                    alone and level <= NESTED and self._fits(op, readers[0])):
                self.inlined[op.result] = op
                self._level[op.result] = level

    def _fits(self, op: Op, reader: Op) -> bool:
        if op.result.name in self._keep:
            return False
        if isinstance(reader, LoadBase | StoreBase) and op.result in reader.subs:
            return isinstance(op, LoadBase | Cast)
        return isinstance(op, LoadBase) or (
            isinstance(reader, Map | Cast | StoreBase) or reader.keyword == "yield")

    def _block(self, block: Block, depth: int) -> None:
        for op in block.ops:
            if len(op.results) == 1 and op.result in self.inlined:
                continue
            note = self.notes(op) if self.notes else ""
            line = "  " * depth + self.statement(op)
            self.rows.append((f"{line}  # {note}" if note else line, op))
            for n, inner in enumerate(op.blocks()):
                if n and inner.ops:
                    self.rows.append(("  " * depth + "else", None))
                self._block(inner, depth + 1)

    def statement(self, op: Op) -> str:
        """One op as a line, without indentation and nested blocks."""
        if isinstance(op, StoreBase):
            by = getattr(op, "combine", "")
            return f"{self._element(op)} {by}= {self.expression(op.value)}"
        types = " : " + ", ".join(str(r.type) for r in op.results) if op.results else ""
        body = self._form(op, types) if op.form else self.inline(op) + types
        names = ", ".join(r.name for r in op.results)
        return f"{names} = {body}" if names else body.rstrip()

    def _form(self, op: Op, types: str) -> str:
        out = ""
        for optional, parts in form_parts(op.written()):
            names = ["inits" if n == "carry" else n for n in parts[1::2]]
            if not optional or any(repr(getattr(op, n)) != repr(getattr(type(op), n, None))
                                   for n in names):
                out += "".join(self._field(op, part, types) if n % 2 else part
                               for n, part in enumerate(parts))
        return out

    def _field(self, op: Op, name: str, types: str) -> str:
        if name == ":":
            return types
        if name == "carry":
            pairs = zip(op.blocks()[0].args, op.operands(), strict=False)
            return ", ".join(f"{a.name} = {self.expression(v)}" for a, v in pairs)
        return kind(field_kinds(type(op))[name]).show(self, getattr(op, name))

    # --- expressions
    def expression(self, value: Value, level: int = 0) -> str:
        """`value` by name, or its op inline, inside operators of precedence `level`."""
        op = self.inlined.get(value)
        return value.name if op is None else self.inline(op, level)

    def inline(self, op: Op, level: int = 0) -> str:
        """The right side of an op without form."""
        match op:
            case Const():
                text = print_number(op.value)
                return text if PLAIN.get(type(op.value)) == op.dtype.name else f"{op.dtype}({text})"
            case LoadBase():
                return self._element(op)
            case IndexValue():
                lanes = getattr(op, "lanes", 1)
                return f"index({op.expr} : {LANE} {lanes})" if lanes > 1 else f"index({op.expr})"
            case Cast():  # `f16(0.1)` is a constant, `f16((0.1))` the cast of one
                inner = self.expression(op.x)
                inner = f"({inner})" if isinstance(self.inlined.get(op.x), Const) else inner
                return f"{'round_' if op.implicit else ''}{op.dtype}({inner})"
            case Map():
                return self._map(op, level)
        return f"{op.keyword} ?"

    def _map(self, op: Map, level: int) -> str:
        infix = SCALARS[op.fn].infix if op.fn in SCALARS else None
        if infix is None or len(op.args) != 2:
            return f"{op.fn}({', '.join(map(self.expression, op.args))})"
        symbol, strength = infix
        left, right = (self.expression(a, strength + n) for n, a in enumerate(op.args))
        return f"({left} {symbol} {right})" if level > strength else f"{left} {symbol} {right}"

    def _element(self, op: LoadBase | StoreBase) -> str:
        lanes = getattr(op, "lanes", 1)
        text = ",".join(self.subscript(s, lanes) for s in op.subs)
        if lanes > 1 and " : " not in text:
            text += f" : {LANE} {lanes}"
        if op.mask:
            text += " | " + ", ".join(map(str, op.mask))
            if isinstance(op, LoadBase) and print_number(op.fill) not in ("0", "0.0"):
                text += " else " + print_number(op.fill)
        return f"{op.buf.name}[{text}]"

    def subscript(self, sub: Sub, lanes: int = 1) -> str:
        """A subscript; `j : 16` is a run of 16 lanes from j."""
        if isinstance(sub, Value):
            return self.expression(sub)
        run = sub.coefficient(LANE)
        if lanes > 1 and run is not None and run.is_const(1):
            return f"{sub.without(LANE)} : {lanes}"
        return str(sub)

    def argument(self, x: Any) -> str:
        """One argument of a library call: a value, number, string, dtype, size or list of these."""
        match x:
            case Value():  # a constant in parentheses is a value, and a number without
                return f"({self.expression(x)})" if x in self.inlined else x.name
            case tuple():
                return "[" + ", ".join(map(self.argument, x)) + "]"
            case Expr():
                return f"size({x})"
            case DType():
                return str(x)
            case str():
                return json.dumps(x)
        return "None" if x is None else print_number(x)


PLAIN = {float: "f32", int: "i64", bool: "bool"}  # constants that need no type


def print_number(value: float | int | bool) -> str:
    """A literal, such that 1, 1.0, true, 0.0 and -0.0 differ."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


KINDS = {
    "Value": Kind(lambda p, x: p.expression(x), lambda p: p.expression(), ", "),
    "Expr": Kind(lambda p, x: str(x), lambda p: p.expr()),
    "Sub": Kind(lambda p, x: p.subscript(x), lambda p: p.subscript()[0]),
    "Axis": Kind(lambda p, x: str(x), lambda p: p.name()),
    "Type": Kind(lambda p, x: str(x), read_type, ", "),
    "str": Kind(lambda p, x: x if re.fullmatch(NAME, x, re.A) else json.dumps(x),
                lambda p: p.word()),
    "int": Kind(lambda p, x: str(x), lambda p: p.integer()),
    "DType": Kind(lambda p, x: str(x), lambda p: p.known(DTYPES, "dtype")),
    "float | int | bool": Kind(lambda p, x: print_number(x), lambda p: p.number()),
    "Args": Kind(lambda p, xs: ", ".join((f"{name}=" if name else "") + p.argument(x)
                                         for name, x in xs),
                 lambda p: p.listed(p.keyword_argument)),
}
