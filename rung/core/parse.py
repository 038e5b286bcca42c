"""One parser for every rung: the inverse of `core.text`.

`parse_module(text, vocabularies)` gives the functions in order; inline expressions come back as ops
in A-normal form. Raises ParseError with line and column (both from 1) for text that is not in the
language or whose types contradict its ops. All other rules are the verifier's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rung.core.errors import VerifyError
from rung.core.expr import sym
from rung.core.lexer import DEDENT, END, INDENT, NEWLINE, Cursor, error_at
from rung.core.op import Block, Builder, Func, Names, Op, Value, Vocabulary, expressions
from rung.core.ops import Cast, Const, IndexValue, LoadBase, Map, StoreBase, Sub
from rung.core.scalar import SCALARS
from rung.core.text import LANE, PLAIN, field_kinds, form_parts, kind
from rung.core.types import DTYPES, INDEX, DType, read_type


def parse_module(text: str, vocabularies: Mapping[str, Vocabulary],
                 parse_mapping: Callable[[str], Any] | None = None) -> tuple[Func, ...]:
    """All functions in `text`; a `map NAME on MACHINE` section is attached to kernel NAME."""
    parser, funcs = Parser(text), dict[str, Func]()
    while parser.peek() != END:
        word, name = parser.peek(), parser.peek(1)
        if word == "map" and name in funcs and parse_mapping:
            funcs[name] = funcs[name].with_attr("mapping", parser.section(parse_mapping))
        elif word in vocabularies and name not in funcs:
            funcs[name] = parser.func(vocabularies[word])
        else:
            known = ", ".join(sorted(vocabularies))
            parser.fail(f"expected a new {known}, or the mapping of a kernel above")
    return tuple(funcs.values())


_INFIX = {f.infix[0]: (name, f.infix[1]) for name, f in SCALARS.items() if f.infix}


class Parser(Cursor):
    """Parses the functions of one text."""

    vocabulary: Vocabulary

    def __init__(self, text: str):
        super().__init__(text)
        self.scope: dict[str, Value] = {}
        self.unroll: dict[str, int] = {}
        self.builder = Builder(Names([text for _, text, kind in self.tokens if kind == "name"]))

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
        """`parse` applied to the text of this line and of the block under it."""
        start = self.tokens[self.at][0]
        while self.take() != NEWLINE:
            pass
        if self.accept(INDENT):
            while self.take() != DEDENT:
                pass
        lines = "\n" * self.text.count("\n", 0, start)
        return parse(lines + self.text[start:self.tokens[self.at][0]])

    def _declaration(self) -> Value:
        name = self.name()
        self.take(":")
        found = read_type(self)
        return self.define(Value(name, found, self.take() if self.kind == "name" else ""))

    def define(self, value: Value) -> Value:
        if value.name in self.scope:
            self.fail(f"{value.name} is defined twice")
        self.scope[value.name] = value
        return value

    def _ops(self, args: tuple[Value, ...]) -> tuple[Op, ...]:
        """Statements up to the end of the block; what they define ends with it."""
        outer, scope = self.builder, dict(self.scope)
        self.builder = outer.inner()
        for arg in args:
            self.define(arg)
        while not self.accept(DEDENT):
            start = self.tokens[self.at][0]
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
        form = self.vocabulary.form(self.peek()) if not names or self.peek(1) != "(" else None
        if form:
            self._formed(*form, names)
            return
        if self.peek(1) == "[" and not names:
            lanes, buf, subs, mask, _ = self._element()
            by = "" if self.peek() == "=" else self.name()
            self.take("=")
            if by and "combine" not in field_kinds(self.vocabulary.of(StoreBase) or Op):
                self.fail(f"a {self.vocabulary.kind} has no stores that combine")
            op: Any = self._shared(StoreBase, lanes, buf, subs, self.expression(), mask)
            self.builder.add(replace(op, combine=by) if by else op)
        else:
            self._named(names, self.expression())
        self.take(NEWLINE)

    def _named(self, names: tuple[str, ...], value: Value) -> None:
        """Give the op that an expression statement ends in its printed name and check its type."""
        last = self.builder.ops[-1] if self.builder.ops else None
        if len(names) != 1 or last is None or value not in last.results:
            self.fail("a statement names the one result of its operation")
        self.take(":")
        if (found := read_type(self)) != value.type:
            self.fail(f"the type is {value.type}, not {found}", back=1)
        renamed = self.define(replace(value, name=names[0]))
        self.builder.ops[-1] = replace(last, results=(renamed,))

    # --- ops by their form
    def _formed(self, cls: type[Any], form: str, implied: Mapping[str, Any],
                names: tuple[str, ...]) -> None:
        found: dict[str, Any] = {":": (), "carry": (), **implied}
        for optional, parts in form_parts(form):
            if optional and self.peek() != parts[0].split()[0]:
                continue
            for text, field in zip(parts[::2], [*parts[1::2], ""], strict=True):
                for word in re.findall(r"->|<-|\.\.|\w+|\S", text):
                    self.take(word)
                if field:
                    self._field(cls, field, found, bool(names))
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

    def _field(self, cls: type[Op], name: str, found: dict[str, Any], named: bool) -> None:
        if name == "carry":
            starts = self.listed(lambda: (self.name(), self.take("="), self.expression()))
            found["inits"] = tuple(value for *_, value in starts)
            found["carry"] = tuple(Value(name, value.type) for name, _, value in starts)
        elif name != ":":
            found[name] = kind(field_kinds(cls)[name]).read(self)
        elif named:
            self.take(":")
            found[":"] = self.listed(lambda: read_type(self))

    # --- expressions
    def expression(self, level: int = 0) -> Value:
        """An infix expression of operators of precedence `level` or higher; appends its ops."""
        left = self._unit()
        while (found := _INFIX.get(self.peek())) and found[1] >= level:
            self.take()
            left = self.builder.one(Map(found[0], (left, self.expression(found[1] + 1))))
        return left

    def _unit(self) -> Value:
        if self.peek() == "(":
            return self.enclosed("()", self.expression)
        if self.kind == "num" or self.peek() == "-":
            return self._constant()
        if self.peek(1) == "(":
            return self._call(self.name())
        if self.peek(1) == "[" and self.vocabulary.of(LoadBase):
            return self.builder.one(self._shared(LoadBase, *self._element()))
        return self.known(self.scope, "value")

    def _constant(self, dtype: DType | None = None) -> Value:
        number = self.number()
        return self.builder.one(Const(number, dtype or DTYPES[PLAIN[type(number)]]))

    def _call(self, name: str) -> Value:
        number = self.at + 1 + (self.peek(1) == "-")  # alone, it is a constant
        at_number = self.tokens[number][2] == "num" and self.tokens[number + 1][1] == ")"
        dtype = DTYPES.get(name.removeprefix("round_"))
        if name == "index":
            expr, lanes = self.enclosed("()", lambda: (self.expr(), self._lanes()))
            return self.builder.one(self._shared(IndexValue, lanes, expr))
        if dtype is None:
            args = self.enclosed("()", lambda: self.listed(self.expression))
            return self.builder.one(Map(name, args))
        if at_number and dtype.name == name:
            return self.enclosed("()", lambda: self._constant(dtype))
        x = self.enclosed("()", self.expression)
        return self.builder.one(Cast(x, dtype, dtype.name != name))

    def _shared(self, base: type[Op], lanes: int, *fields: Any) -> Op:
        """This rung's version of an op; a family of vectors, if the rung knows families."""
        cls = self.vocabulary.of(base)
        if cls is None:
            self.fail(f"a {self.vocabulary.kind} has no {base.keyword} ops")
        op: Op = cls(*fields)
        used = {s for expr in expressions(op) for s in expr.symbols()}
        unroll = tuple(u for u in self.unroll.items() if u[0] in used)
        family: dict[str, Any] = {"lanes": lanes, "unroll": unroll}
        return replace(op, **family) if "lanes" in field_kinds(cls) else op

    def _lanes(self) -> int:
        if not self.accept(":"):
            return 1
        self.take(LANE)
        return self.integer()

    def _element(self) -> tuple[Any, ...]:
        """`buf[subscripts : lanes | mask else fill]`, the lanes first"""
        buf = self.known(self.scope, "value")
        self.take("[")
        runs = self.listed(self.subscript)
        lanes = max([self._lanes(), *(n for _, n in runs)])
        mask = self.listed(self.expr) if self.accept("|") else ()
        fill = self.number() if self.accept("else") else 0
        self.take("]")
        return lanes, buf, tuple(sub for sub, _ in runs), mask, fill

    def subscript(self) -> tuple[Sub, int]:
        """A subscript and its number of lanes: `j : 16` is j+lane for 16 lanes."""
        known = self.scope.get(self.peek())
        if (known and known.type != INDEX) or (self.kind, self.peek(1)) == ("name", "("):
            return self._unit(), 1
        expr = self.expr()
        if self.peek() != ":" or self.peek(1) == LANE:
            return expr, 1
        self.take(":")
        return expr + sym(LANE), self.integer()

    # --- arguments of library calls
    def keyword_argument(self) -> tuple[str, Any]:
        """`argument` or `name=argument`"""
        name = self.name() if self.peek(1) == "=" else ""
        if name:
            self.take("=")
        return name, self.argument()

    def argument(self) -> Any:
        """The inverse of `Printer.argument`."""
        if self.peek() == "[":
            return self.enclosed("[]", lambda: self.listed(self.argument))
        if self.kind == "num" or self.peek() == "-":
            return self.number()
        if self.kind == "str":
            return self.word()
        if self.accept("None"):
            return None
        if self.accept("size"):
            return self.enclosed("()", self.expr)
        return self.known(DTYPES, "dtype") if self.peek() in DTYPES else self.expression()
