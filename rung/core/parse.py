"""One parser for every rung: the inverse of `core.text`.

`parse_module(text, vocabularies)` gives the functions in order; inline expressions come back as ops
in A-normal form. Raises ParseError with line and column (both from 1) for text that is not in the
language or whose types contradict its ops. All other rules are the verifier's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rung.core.errors import VerifyError
from rung.core.expr import Expr, sym
from rung.core.lexer import DEDENT, INDENT, NEWLINE, Cursor, Infix, error_at
from rung.core.op import RESERVED, Block, Builder, Func, Names, Op, Value, Vocabulary
from rung.core.ops import Cast, Const, IndexValue, LoadBase, Map, StoreBase, Sub
from rung.core.scalar import SCALARS
from rung.core.text import LANE, PLAIN, field_kinds, form_parts, kind
from rung.core.types import DTYPES, INDEX, DType

__all__ = ["Parser", "Vocabulary", "parse_module"]


def parse_module(text: str, vocabularies: Mapping[str, Vocabulary],
                 parse_mapping: Callable[[str], Any] | None = None) -> tuple[Func, ...]:
    """All functions in `text`; a `map NAME on MACHINE` section is attached to kernel NAME."""
    parser, funcs = Parser(text), dict[str, Func]()
    while parser.pos < len(parser.tokens) - 1:
        word, name = parser.peek(), parser.peek(1)
        if word == "map" and name in funcs and parse_mapping:
            funcs[name] = funcs[name].with_attr("mapping", parser.section(parse_mapping))
        elif word in vocabularies and name not in funcs:
            funcs[name] = parser.func(vocabularies[word])
        elif word in vocabularies:
            raise parser.fail(f"{name} is defined twice")
        else:
            known = ", ".join(sorted(vocabularies))
            raise parser.fail(f"expected one of {known}, or the mapping of a kernel above")
    return tuple(funcs.values())


class Parser(Cursor):
    """Parses the functions of one text."""

    vocabulary: Vocabulary

    def __init__(self, text: str):
        super().__init__(text)
        self.scope: dict[str, Value] = {}
        self.unroll: dict[str, int] = {}
        self.builder = Builder(Names([t.text for t in self.tokens if t.kind == "name"]))
        self._infix: Infix[Value] = {f.infix[0]: (f.infix[1], self._mapper(name))
                                     for name, f in SCALARS.items() if f.infix}

    def _mapper(self, fn: str) -> Callable[[Value, Value], Value]:
        return lambda left, right: self.builder.one(Map(fn, (left, right)))

    # --- functions and blocks
    def func(self, vocabulary: Vocabulary) -> Func:
        self.vocabulary, self.scope = vocabulary, {}
        self.take(vocabulary.kind)
        name = self.name()
        params = self.enclosed("()", lambda: self.listed(self._declaration))
        outs = self.listed(self._declaration) if self.accept("->") else ()
        self.take(NEWLINE)
        known, attrs, ops = dict(vocabulary.attrs), list[tuple[str, Any]](), tuple[Op, ...]()
        if self.accept(INDENT):
            while self.peek() in known:
                attrs.append((self.peek(), known[self.take()](self)))
                self.take(NEWLINE)
            self.unroll = dict(dict(attrs).get("unroll", ()))
            ops = self._ops(())
        return vocabulary.finish(
            Func(vocabulary.kind, name, params, outs, Block((), ops), tuple(attrs)))

    def section(self, parse: Callable[[str], Any]) -> Any:
        """What `parse` makes of this line and the block under it, given their text."""
        start = self.token.at
        while self.take() != NEWLINE:
            pass
        if self.accept(INDENT):
            while self.take() != DEDENT:
                pass
        return parse("\n" * self.text.count("\n", 0, start) + self.text[start:self.token.at])

    def _declaration(self) -> Value:
        name = self.name()
        self.take(":")
        found = self.type()
        return self.define(Value(name, found, self.take() if self.token.kind == "name" else ""))

    def define(self, value: Value) -> Value:
        if value.name in self.scope or value.name in RESERVED:
            state = "a reserved word" if value.name in RESERVED else "defined twice"
            raise self.fail(f"{value.name} is {state}")
        self.scope[value.name] = value
        return value

    def _ops(self, args: tuple[Value, ...]) -> tuple[Op, ...]:
        """Statements up to the end of the block; what they define ends with it."""
        outer, scope = self.builder, dict(self.scope)
        self.builder = outer.inner()
        for arg in args:
            self.define(arg)
        while not self.accept(DEDENT):
            start = self.token.at
            try:
                self._statement()
            except VerifyError as error:
                raise error_at(self.text, start, str(error)) from None
        ops, self.builder, self.scope = tuple(self.builder.ops), outer, scope
        return ops

    def _statement(self) -> None:
        names: tuple[str, ...] = ()
        if self.peek(1) in (",", "="):
            names = self.listed(self.name)
            self.take("=")
        if cls := self.vocabulary.keyword(self.peek()):
            self._formed(cls, names)
            return
        if self.peek(1) == "[" and not names:
            self._store()
        else:
            self._named(names, self.expression())
        self.take(NEWLINE)

    def _named(self, names: tuple[str, ...], value: Value) -> None:
        """Give the op that an expression statement ends in its printed name and check its type."""
        last = self.builder.ops[-1] if self.builder.ops else None
        if len(names) != 1 or last is None or value not in last.results:
            raise self.fail("a statement names the one result of its operation")
        self.take(":")
        if (found := self.type()) != value.type:
            raise self.fail(f"the type is {value.type}, not {found}", back=1)
        renamed = self.define(replace(value, name=names[0]))
        self.builder.ops[-1] = replace(last, results=(renamed,))

    # --- ops by their form
    def _formed(self, cls: type[Any], names: tuple[str, ...]) -> None:
        found: dict[str, Any] = {":": (), "carry": ()}
        for part in form_parts(cls.form):
            self._part(cls, part, found, bool(names))
        self.take(NEWLINE)
        types, carry = found.pop(":"), found.pop("carry")
        for n, field in enumerate(f for f, k in field_kinds(cls).items() if k == "Block"):
            found[field] = self._block(() if n else carry, after_else=n > 0)
        if "types" in field_kinds(cls):
            found["types"] = types
        op: Op = cls(**found)
        if (inferred := op.infer()) != types or len(types) != len(names):
            said, given = (", ".join(map(str, t)) or "nothing" for t in (types, inferred))
            raise VerifyError(f"the operation gives {given}, the text says {said}")
        results = tuple(self.define(Value(n, t)) for n, t in zip(names, types, strict=True))
        self.builder.ops.append(replace(op, results=results))

    def _block(self, args: tuple[Value, ...], after_else: bool) -> Block:
        if after_else:
            if not self.accept("else"):
                return Block((), ())
            self.take(NEWLINE)
        return Block(args, self._ops(args) if self.accept(INDENT) else ())

    def _part(self, cls: type[Op], part: Any, found: dict[str, Any], named: bool) -> None:
        match part:
            case str():
                for token in Cursor(part).tokens[:-2]:
                    self.take(token.text)
            case ("field", ":"):
                if named:
                    self.take(":")
                    found[":"] = self.listed(self.type)
            case ("field", "carry"):
                pairs = self.listed(self._carry)
                found["inits"] = tuple(start for _, start in pairs)
                found["carry"] = tuple(Value(name, start.type) for name, start in pairs)
            case ("field", name):
                found[name] = kind(field_kinds(cls)[name]).read(self)
            case (str(first), *_) if self.peek() == first.split()[0]:
                for inner in part:
                    self._part(cls, inner, found, named)

    def _carry(self) -> tuple[str, Value]:
        name = self.name()
        self.take("=")
        return name, self.expression()

    # --- expressions
    def expression(self) -> Value:
        """An infix expression, its ops appended to the block."""
        return self.climb(self._unit, self._infix)

    def _unit(self) -> Value:
        if self.peek() == "(":
            return self.enclosed("()", self.expression)
        if self.at_number():
            return self._constant()
        if self.peek(1) == "(":
            return self._call(self.name())
        return self._load() if self.peek(1) == "[" else self.value()

    def value(self) -> Value:
        name = self.name()
        if name not in self.scope:
            raise self.fail(f"no value is called {name}", back=1)
        return self.scope[name]

    def _constant(self, dtype: DType | None = None) -> Value:
        number = self.number()
        return self.builder.one(Const(number, dtype or DTYPES[PLAIN[type(number)]]))

    def _call(self, name: str) -> Value:
        dtype = DTYPES.get(name.removeprefix("round_"))
        if name == "index":
            return self.enclosed("()", self._index_value)
        if dtype is None:
            args = self.enclosed("()", lambda: self.listed(self.expression))
            return self.builder.one(Map(name, args))

        def converted() -> Value:
            if self.at_number() and dtype.name == name:
                return self._constant(dtype)
            return self.builder.one(Cast(self.expression(), dtype, dtype.name != name))

        return self.enclosed("()", converted)

    def _index_value(self) -> Value:
        expr = self.index()
        cls, family = self._family(IndexValue, self._lanes(), (expr,))
        return self.builder.one(cls(expr, **family))

    def _load(self) -> Value:
        buf, subs, mask, fill, lanes = self._element()
        cls, family = self._family(LoadBase, lanes, (*subs, *mask))
        return self.builder.one(cls(buf, subs, mask, fill, **family))

    def _store(self) -> None:
        buf, subs, mask, _, lanes = self._element()
        self.take("=")
        cls, family = self._family(StoreBase, lanes, (*subs, *mask))
        self.builder.add(cls(buf, subs, self.expression(), mask, **family))

    def _family(self, base: type[Op], lanes: int,
                read: tuple[Sub, ...]) -> tuple[type[Any], dict[str, Any]]:
        """This rung's class of a shared op, and its fields as a family of vectors, if it is one."""
        cls = self.vocabulary.of(base)
        if cls is None:
            raise self.fail(f"a {self.vocabulary.kind} has no {base.keyword} ops")
        if "lanes" not in field_kinds(cls):
            return cls, {}
        used = {s for e in read if isinstance(e, Expr) for s in e.symbols()}
        unroll = tuple(u for u in self.unroll.items() if u[0] in used)
        return cls, {"lanes": lanes, "unroll": unroll}

    def _lanes(self) -> int:
        if not self.accept(":"):
            return 1
        self.take(LANE)
        return self.integer()

    def _element(self) -> tuple[Value, tuple[Sub, ...], tuple[Expr, ...], float | int | bool, int]:
        """`buf[subscripts : lanes | mask else fill]`"""
        buf = self.value()
        self.take("[")
        runs = self.listed(self._run)
        lanes = max([self._lanes(), *(n for _, n in runs)])
        mask = self.listed(self.index) if self.accept("|") else ()
        fill = self.number() if self.accept("else") else 0
        self.take("]")
        return buf, tuple(sub for sub, _ in runs), mask, fill, lanes

    def _run(self) -> tuple[Sub, int]:
        """A subscript and its number of lanes: `j : 16` is j+lane for 16 lanes."""
        known = self.scope.get(self.peek())
        if (known and known.type != INDEX) or self.peek(1) == "(":
            return self._unit(), 1
        expr = self.index()
        if self.peek() != ":" or self.peek(1) == LANE:
            return expr, 1
        self.take(":")
        return expr + sym(LANE), self.integer()

    # --- arguments of library calls
    def keyword_argument(self) -> tuple[str, Any]:
        name = self.name() if self.peek(1) == "=" else ""
        if name:
            self.take("=")
        return name, self.argument()

    def argument(self) -> Any:
        """The inverse of `Printer.argument`."""
        if self.peek() == "[":
            return self.enclosed("[]", lambda: self.listed(self.argument))
        if self.accept("size"):
            return self.enclosed("()", self.index)
        if self.token.kind == "str":
            return self.word()
        if self.at_number():
            return self.number()
        if self.peek() in DTYPES and self.peek(1) != "(":
            return self.dtype()
        return None if self.accept("None") else self._unit()
