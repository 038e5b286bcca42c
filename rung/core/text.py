"""One printer for every rung: `Func` to text that `core.parse` reads back.

An op prints by its `form`: literal words, `{field}`, an optional `<group>` that is left out when its
fields have their defaults, `{carry}` for a loop's `name = start` pairs, and `{:}` where the result
types go (default: last). Scalar maps print infix, loads as `x[i,k]`, and an op of one use prints
inside its user, so `y[i] = floor(x[i]) + 1.0` is one line for four ops.

`KINDS` says how the fields of each annotation are written and read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from rung.core.expr import Expr
from rung.core.lexer import NAME
from rung.core.op import Block, Func, Op, Value, uses
from rung.core.ops import Cast, Const, IndexValue, LoadBase, Map, StoreBase, Sub
from rung.core.scalar import SCALARS
from rung.core.types import DType

if TYPE_CHECKING:
    from rung.core.parse import Parser

LANE = "lane"  # the index symbol that runs over the lanes of one vector


def print_func(func: Func, notes: Callable[[Op], str] | None = None) -> str:
    """The text of `func`; `notes` may give a trailing comment for an op."""
    return "\n".join(Printer(func, notes).lines)


# --- forms and fields -----------------------------------------------------------------------------

@dataclass(frozen=True)
class Kind:
    """How fields of one annotation are written and read; `sep` stands between a tuple's items."""

    show: Callable[[Printer, Any], str]
    read: Callable[[Parser], Any]
    sep: str = ","


@cache
def field_kinds(cls: type) -> dict[str, str]:
    """Field name to its annotation."""
    return {f.name: str(f.type) for f in fields(cls) if f.name != "results"}


@cache
def kind(annotation: str) -> Kind:
    """How to write and read a field; that of a tuple follows from its items."""
    if annotation in KINDS:
        return KINDS[annotation]
    found = re.fullmatch(r"tuple\[(.*), \.\.\.\]", annotation)
    if not found:
        raise TypeError(f"a form cannot name a field of type {annotation}")
    item = KINDS[found[1]]
    return Kind(lambda p, xs: item.sep.join(item.show(p, x) for x in xs),
                lambda p: p.listed(lambda: item.read(p)))


@cache
def form_parts(form: str) -> tuple[Any, ...]:
    """A form as a tuple of literal text, ('field', name) and nested tuples for optional groups."""
    stack: list[list[Any]] = [[]]
    for token in re.findall(r"\{[^}]*\}|[<>]|(?:<-|->|[^{<>])+", form):
        if token == "<":
            stack.append([])
        elif token == ">":
            group = tuple(stack.pop())
            stack[-1].append(group)
        else:
            stack[-1].append(("field", token[1:-1]) if token[0] == "{" else token)
    return (*stack[0], *([] if "{:}" in form else [("field", ":")]))


@cache
def defaults(cls: type) -> dict[str, Any]:
    """Fields with a default, and `carry` for no carried values."""
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING} | {"carry": ""}


# --- functions ------------------------------------------------------------------------------------

class Printer:
    """Prints one function into `lines`; `rows` has the op of each line (None for other lines)."""

    def __init__(self, func: Func, notes: Callable[[Op], str] | None = None):
        self.notes = notes
        self.lines: list[str] = []
        self.rows: list[Op | None] = []
        self.inlined: dict[Value, Op] = {}
        mapping = func.attr("mapping")
        self._keep = mapping.names() if mapping is not None else frozenset()
        self._plan(func.body, uses(func.body))
        self._header(func)
        self._block(func.body, 1)
        for line in str(mapping).splitlines() if mapping is not None else ():
            self._line(line)

    def _line(self, text: str, op: Op | None = None) -> None:
        self.lines.append(text)
        self.rows.append(op)

    def _header(self, func: Func) -> None:
        params, outs = (", ".join(f"{v.name}: {v.type} {v.role}".rstrip() for v in values)
                        for values in (func.params, func.outs))
        self._line(f"{func.kind} {func.name}({params})" + (f" -> {outs}" if outs else ""))
        for name, value in func.attrs:
            if name != "mapping" and not value.implied(func):
                self._line(f"  {name} {value}")

    def _plan(self, block: Block, users: dict[Value, list[Op]]) -> None:
        """Choose the ops that print inside their user."""
        here = {id(op): n for n, op in enumerate(block.ops)}
        borders = [n for n, op in enumerate(block.ops)
                   if op.effect.value != "pure" or op.blocks()]
        for n, op in enumerate(block.ops):
            for inner in op.blocks():
                self._plan(inner, users)
            if op.inline == "never" or len(op.results) != 1:
                continue
            readers = users.get(op.result, [])
            at = here.get(id(readers[0]), -1) if len(readers) == 1 else -1
            alone = at > n and not any(n < e < at for e in borders)
            if op.inline == "always" or (alone and self._fits(op, readers[0])):
                self.inlined[op.result] = op

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
            self._line("  " * depth + self.statement(op) + (f"  # {note}" if note else ""), op)
            for n, inner in enumerate(op.blocks()):
                if n and inner.ops:
                    self._line("  " * depth + "else")
                self._block(inner, depth + 1)

    def statement(self, op: Op) -> str:
        """One op as a line, without indentation and nested blocks."""
        if isinstance(op, StoreBase):
            return f"{self._element(op)} = {self.expression(op.value)}"
        types = " : " + ", ".join(str(r.type) for r in op.results) if op.results else ""
        body = self._parts(op, form_parts(op.form), types) if op.form else self.inline(op) + types
        names = ", ".join(r.name for r in op.results)
        return f"{names} = {body}" if names else body.rstrip()

    def _parts(self, op: Op, parts: tuple[Any, ...], types: str) -> str:
        return "".join(p if isinstance(p, str) else self._part(op, p, types) for p in parts)

    def _part(self, op: Op, part: tuple[Any, ...], types: str) -> str:
        match part:
            case ("field", ":"):
                return types
            case ("field", "carry"):
                pairs = zip(op.blocks()[0].args, op.operands(), strict=True)
                return ", ".join(f"{a.name} = {self.expression(v)}" for a, v in pairs)
            case ("field", name):
                return kind(field_kinds(type(op))[name]).show(self, getattr(op, name))
        standard = defaults(type(op))
        inside = {p[1]: self._part(op, p, "") if p[1] == "carry" else getattr(op, p[1])
                  for p in part if p[0] == "field"}
        full = any(repr(x) != repr(standard.get(n)) for n, x in inside.items())
        return self._parts(op, part, types) if full else ""

    # --- expressions
    def expression(self, value: Value, level: int = 0) -> str:
        """`value` by name, or the op printed in its place, amid operators of strength `level`."""
        op = self.inlined.get(value)
        return value.name if op is None else self.inline(op, level)

    def inline(self, op: Op, level: int = 0) -> str:
        """The right side of an op without form."""
        match op:
            case Const():
                text = print_number(op.value)
                return text if PLAIN[type(op.value)] == op.dtype.name else f"{op.dtype}({text})"
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
        text = ",".join(self._sub(s, lanes) for s in op.subs)
        if lanes > 1 and " : " not in text:
            text += f" : {LANE} {lanes}"
        if op.mask:
            text += " | " + ", ".join(map(str, op.mask))
            if isinstance(op, LoadBase) and print_number(op.fill) not in ("0", "0.0"):
                text += " else " + print_number(op.fill)
        return f"{op.buf.name}[{text}]"

    def _sub(self, sub: Sub, lanes: int) -> str:
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


def print_word(x: str) -> str:
    return x if re.fullmatch(NAME, x, re.A) else json.dumps(x)


KINDS = {
    "Value": Kind(lambda p, x: p.expression(x), lambda p: p.expression(), ", "),
    "Expr": Kind(lambda p, x: str(x), lambda p: p.index()),
    "Axis": Kind(lambda p, x: str(x), lambda p: p.name()),
    "str": Kind(lambda p, x: print_word(x), lambda p: p.word()),
    "int": Kind(lambda p, x: str(x), lambda p: p.integer()),
    "DType": Kind(lambda p, x: str(x), lambda p: p.dtype()),
    "float | int | bool": Kind(lambda p, x: print_number(x), lambda p: p.number()),
    "Args": Kind(lambda p, xs: ", ".join((f"{name}=" if name else "") + p.argument(x)
                                         for name, x in xs),
                 lambda p: p.listed(p.keyword_argument)),
}
