"""The one container of all rungs: `Func`, `Block`, `Op`, `Value`, in A-normal form.

A rung is a vocabulary of `Op` subclasses, not a data structure. An op is a frozen dataclass whose
fields are its operands (`Value`), nested `Block`s and attributes; `infer` gives the types of its
results, `check` its own rules, `run` its meaning on NumPy, `form` its text (see `core/text.py`); an
op with several forms has the others in `forms`. Ops and values compare by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rung.core.expr import Expr, is_size
from rung.core.types import DTYPES, Type, axes_of

if TYPE_CHECKING:
    from rung.core.interp import Interp
    from rung.core.parse import Parser


class Effect(Enum):
    """What an op does besides computing its results. Only pure ops are merged, moved or deleted."""

    PURE = "pure"
    RNG = "rng"
    MUTATES = "mutates"
    RAISES = "raises"
    ORDERED = "ordered"


@dataclass(frozen=True, eq=False)
class Value:
    """One SSA value. `role` says where a program's parameter lives (see `program.ir`)."""

    name: str
    type: Type
    role: str = ""

    def __repr__(self) -> str:
        return f"<{self.name}: {self.type}>"


@dataclass(frozen=True, eq=False)
class Block:
    """A straight line of ops; `args` are the values that its owner binds on entry."""

    args: tuple[Value, ...]
    ops: tuple[Op, ...]

    @property
    def last(self) -> Op:
        return self.ops[-1]


AnyOp = TypeVar("AnyOp", bound="Op")


@dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    """Base of all ops; subclasses are `@dataclass(frozen=True, eq=False)` too."""

    results: tuple[Value, ...] = field(default=())

    keyword: ClassVar[str] = ""
    form: ClassVar[str] = ""
    forms: ClassVar[tuple[tuple[str, Mapping[str, Any]], ...]] = ()  # and fields that each implies
    inline: ClassVar[str] = "never"  # printed inside its user: never | single (use) | always
    effect: ClassVar[Effect] = Effect.PURE

    @property
    def result(self) -> Value:
        (value,) = self.results
        return value

    def written(self) -> str:
        """The form that this op prints in."""
        return self.form

    @cached_property
    def nest(self) -> tuple[str, ...]:
        """The named axes of the op's loop nest: on Loop IR, those that its results vary over."""
        return tuple(dict.fromkeys(a for r in self.results for a in axes_of(r.type)))

    def infer(self) -> tuple[Type, ...]:
        """Types of the results, from the fields alone."""
        return ()

    def check(self) -> None:
        """Raise `VerifyError` when a rule of this op is broken; types are checked before."""

    def run(self, interp: Interp, *operands: Any) -> Any:
        """The op's meaning: operands as NumPy arrays to result(s)."""
        raise NotImplementedError(type(self).__name__)

    def operands(self) -> tuple[Value, ...]:
        """Values that the op itself reads, in field order; nested blocks not included."""
        known = self.__dict__.get("_operands")
        if known is None:
            found: list[Value] = []
            for _, x in attributes(self):
                _collect(x, found)
            known = self.__dict__["_operands"] = tuple(found)
        return known

    def blocks(self) -> tuple[Block, ...]:
        kind = type(self)
        if kind not in _BLOCKS:
            _BLOCKS[kind] = tuple(f.name for f in fields(kind) if "Block" in str(f.type))
        names = _BLOCKS[kind]
        return tuple(x for n in names if isinstance(x := getattr(self, n), Block)) if names else ()

    def key(self) -> Hashable:
        """Equal for ops of one class whose fields, results apart, are equal."""
        known = self.__dict__.get("_key")
        if known is None:
            fields = tuple(hashable(x) for _, x in attributes(self))
            known = self.__dict__["_key"] = (type(self), fields)
        return known

    def with_fields(self: AnyOp, **changes: object) -> AnyOp:
        """A copy with other fields; `dataclasses.replace` takes several times as long."""
        new = object.__new__(type(self))
        known = {**self.__dict__, **changes}
        stale = ("nest",) if changes.keys() == {"results"} else ("nest", "_operands", "_key")
        for name in stale:
            known.pop(name, None)
        new.__dict__.update(known)
        return new

    def map(self: AnyOp, values: Mapping[Value, Value],
            block: Callable[[Block], Block] | None = None) -> AnyOp:
        """This op with operands (and blocks) replaced; the same object when nothing changes."""
        if values.keys().isdisjoint(self.operands()) and not (block and self.blocks()):
            return self
        changes = {}
        for name, old in attributes(self):
            new = block(old) if isinstance(old, Block) and block else _substitute(old, values)
            if new is not old:
                changes[name] = new
        return self.with_fields(**changes) if changes else self


@dataclass(frozen=True, eq=False)
class Func:
    """A program or kernel: `kind name(params) -> outs` and a body. `outs` are result buffers.

    `attrs` holds what a rung adds to its functions (axes, a mapping), as text-able frozen values.
    """

    kind: str
    name: str
    params: tuple[Value, ...]
    outs: tuple[Value, ...]
    body: Block
    attrs: tuple[tuple[str, Any], ...] = ()

    def attr(self, name: str, default: Any = None) -> Any:
        return dict(self.attrs).get(name, default)

    def with_attr(self, name: str, value: Any) -> Func:
        rest = tuple((n, v) for n, v in self.attrs if n != name)
        return replace(self, attrs=rest if value is None else (*rest, (name, value)))

    def with_ops(self, ops: Sequence[Op]) -> Func:
        return replace(self, body=Block(self.body.args, tuple(ops)))

    def __str__(self) -> str:
        from rung.core.text import print_func

        return print_func(self)


@dataclass(frozen=True)
class Vocabulary:
    """The ops that one kind of function may contain.

    `attrs` holds the reader of each attribute line; `finish` adds what text omits.
    """

    kind: str
    ops: tuple[type[Op], ...]
    attrs: tuple[tuple[str, Callable[[Parser], Any]], ...] = ()
    finish: Callable[[Func], Func] = lambda func: func

    def form(self, word: str) -> tuple[type[Op], str, Mapping[str, Any]] | None:
        """The form that starts with `word`: its op, the form, and the fields that it implies."""
        forms = ((c, *form) for c in self.ops for form in ((c.form, {}), *c.forms))
        return next((found for found in forms if found[1].split(" ")[0] == word), None)

    def of(self, base: type[Op]) -> type[Any] | None:
        """This rung's version of an op that several rungs share."""
        return next((c for c in self.ops if issubclass(c, base)), None)


_FIELDS: dict[type, tuple[str, ...]] = {}
_BLOCKS: dict[type, tuple[str, ...]] = {}  # the fields that may hold blocks


def attributes(op: Op) -> Iterator[tuple[str, Any]]:
    """(name, value) of every declared field of `op`, results apart."""
    names = _FIELDS.get(type(op))
    if names is None:
        names = tuple(f.name for f in fields(op) if f.name != "results")
        _FIELDS[type(op)] = names
    for name in names:
        yield name, getattr(op, name)


def _collect(x: object, found: list[Value]) -> None:
    if isinstance(x, Value):
        found.append(x)
    elif isinstance(x, tuple):
        for y in x:
            _collect(y, found)


def _substitute(x: Any, values: Mapping[Value, Value]) -> Any:
    if isinstance(x, Value):
        return values.get(x, x)
    if isinstance(x, tuple) and x:
        new = tuple(_substitute(y, values) for y in x)
        return new if any(a is not b for a, b in zip(new, x, strict=True)) else x
    return x


def expressions(x: Any) -> Iterator[Expr]:
    """The index expressions in an op's own fields, in order."""
    for y in x if isinstance(x, tuple) else (y for _, y in attributes(x)):
        if isinstance(y, Expr):
            yield y
        elif isinstance(y, tuple):
            yield from expressions(y)


def walk(block: Block) -> Iterator[Op]:
    """Every op of a block and of the blocks inside it, in text order."""
    for op in block.ops:
        yield op
        for inner in op.blocks():
            yield from walk(inner)


def made_by(func: Func) -> dict[Value, Op]:
    """The op that gives each value of a function's own block."""
    return {r: op for op in func.body.ops for r in op.results}


def reads(op: Op) -> set[Value]:
    """The values that an op reads, nested blocks included."""
    return {*op.operands(), *(v for b in op.blocks() for x in walk(b) for v in x.operands())}


def uses(block: Block) -> dict[Value, list[Op]]:
    """For each value read anywhere in `block`, the ops that read it (once per occurrence)."""
    table: dict[Value, list[Op]] = {}
    for op in walk(block):
        for value in op.operands():
            table.setdefault(value, []).append(op)
    return table


C_WORDS = frozenset({
    "auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else", "enum",
    "extern", "float", "for", "goto", "if", "inline", "int", "long", "register", "restrict",
    "return", "short", "signed", "sizeof", "static", "struct", "switch", "typedef", "union",
    "unsigned", "void", "volatile", "while"})

RESERVED = C_WORDS | frozenset({
    "alloc", "apply", "await", "axes", "barrier", "call", "check", "combine", "commit", "composite",
    "concat", "contract", "else", "exclusive", "fill", "fold", "for", "full", "gather", "if",
    "index", "inf", "iota", "item", "kernel", "lane", "like", "nan", "false", "None", "persistent",
    "prefix", "reduce", "return", "ring", "role", "roles", "scan", "scatter", "signal", "transfer",
    "true", "unroll", "wait", "write", "yield", *DTYPES})
"""Words of the dumps and of the sources that can name no value, axis or loop variable."""


def hashable(x: object) -> Hashable:
    """A hashable stand-in that distinguishes 1, 1.0, True, 0.0 and -0.0."""
    if isinstance(x, tuple):
        return tuple(map(hashable, x))
    return (type(x), repr(x)) if isinstance(x, int | float) else x


class Names:
    """Hands out names that are unique in a function and not reserved."""

    def __init__(self, taken: Sequence[str] = ()):
        self._next: dict[str, int] = {}
        self._taken = {*taken, *RESERVED}

    def take(self, names: Collection[str]) -> bool:
        """Take these very names, if all of them are free."""
        if not self._taken.isdisjoint(names) or any(map(is_size, names)):
            return False
        self._taken.update(names)
        return True

    def __call__(self, hint: str) -> str:
        if self.take((hint,)):
            return hint
        stem = hint.rstrip("0123456789") or "v"
        stem += "_" if is_size(f"{stem}0") else ""  # s1 is a size, never a value
        number = self._next.get(stem, 1)
        while f"{stem}{number}" in self._taken:
            number += 1
        self._next[stem] = number + 1
        self._taken.add(f"{stem}{number}")
        return f"{stem}{number}"


class Builder:
    """Appends ops to a block, inferring result types and choosing unique names."""

    def __init__(self, names: Names | None = None):
        self.names = names or Names()
        self.ops: list[Op] = []

    def add(self, op: Op, *hints: str) -> tuple[Value, ...]:
        """Append `op` with fresh results named after `hints` (default: its keyword)."""
        hints = hints or (op.keyword or "v",)
        results = tuple(Value(self.names(hints[min(i, len(hints) - 1)]), t)
                        for i, t in enumerate(op.infer()))
        self.ops.append(op.with_fields(results=results))
        return results

    def one(self, op: Op, hint: str = "") -> Value:
        """Append an op of one result and return that result."""
        (value,) = self.add(op, *([hint] if hint else []))
        return value

    def block(self, args: Sequence[Value] = ()) -> Block:
        return Block(tuple(args), tuple(self.ops))

    def inner(self) -> Builder:
        """A builder for a nested block, sharing this one's names."""
        return Builder(self.names)


def names_of(func: Func) -> Names:
    """All names in use in `func`: parameters, results, block arguments, loop variables."""
    taken = [v.name for v in (*func.params, *func.outs)]
    for op in walk(func.body):
        taken += [v.name for v in op.results]
        taken += [v.name for b in op.blocks() for v in b.args]
        if isinstance(var := getattr(op, "var", None), str):
            taken.append(var)
    return Names(taken)
