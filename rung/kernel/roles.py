"""Roles: concurrent streams of ops, synchronized by the tokens of rings.

    ring k slots 2 of x_tile, w_tile
    roles
      role load
        for kb in 0..16
          await k free step kb
          transfer x_tile at [kb%2,0] from x ... group k
          signal k full step kb
      role math
        mm = for kb in 0..16 carry ...
          await k full step kb
          ... reads x_tile[kb%2,..]
          signal k free step kb

A ring's slots start free. One role fills them in order, another drains them; a token each way hands
over a slot. A token has one consumer, so `step` counts equally on both sides.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rung.core.errors import LaunchError, VerifyError
from rung.core.expr import Expr
from rung.core.interp import Interp
from rung.core.op import Block, Effect, Op, Value, walk
from rung.core.types import ArrayType
from rung.kernel.loops import For
from rung.kernel.moves import Engine

FULL, FREE = "full", "free"  # the tokens of a slot: it can be drained, it can be filled


@dataclass(frozen=True, eq=False)
class Ring(Op):
    """`slots` copies of some arrays, filled by one role and drained by another, in order."""

    name: str
    slots: int
    arrays: tuple[Value, ...]
    keyword: ClassVar[str] = "ring"
    form: ClassVar[str] = "ring {name} slots {slots} of {arrays}"
    effect: ClassVar[Effect] = Effect.ORDERED

    def check(self) -> None:
        if self.slots < 1:
            raise VerifyError("a ring has a slot at least")
        for v in self.arrays:
            if not isinstance(v.type, ArrayType):
                raise VerifyError(f"{v.name} is no array")
            if self.slots > 1 and v.type.shape[:1] != (self.slots,):
                raise VerifyError(f"{v.name} is {v.type}, without {self.slots} slots")

    def run(self, interp: Interp, *operands: Any) -> Any:
        assert isinstance(interp, Engine)
        interp.tokens[self.name, FREE], interp.tokens[self.name, FULL] = self.slots, 0
        for token in (FREE, FULL):
            interp.counts[self.name, token, Await] = interp.counts[self.name, token, Signal] = 0


@dataclass(frozen=True, eq=False)
class Role(Op):
    """One stream: `count` queues, or teams of threads with `regs` registers each (0: default)."""

    name: str
    body: Block
    count: int = 1
    regs: int = 0
    keyword: ClassVar[str] = "role"
    form: ClassVar[str] = "role {name}< count {count}>< regs {regs}>"
    effect: ClassVar[Effect] = Effect.ORDERED


@dataclass(frozen=True, eq=False)
class Roles(Op):
    """Runs the roles in its body concurrently, until all have ended."""

    body: Block
    keyword: ClassVar[str] = "roles"
    form: ClassVar[str] = "roles"
    effect: ClassVar[Effect] = Effect.ORDERED

    def check(self) -> None:
        if wrong := [op for op in self.body.ops if not isinstance(op, Role)]:
            raise VerifyError(f"a {wrong[0].keyword} among roles")

    def run(self, interp: Interp, *operands: Any) -> Any:
        assert isinstance(interp, Engine)
        _take_turns(interp, [op for op in self.body.ops if isinstance(op, Role)])


@dataclass(frozen=True, eq=False)
class _Token(Op):
    """Base of `await` and `signal`: a token of a ring, for the `step`th time."""

    ring: str
    token: str
    step: Expr
    effect: ClassVar[Effect] = Effect.ORDERED

    def check(self) -> None:
        if self.token not in (FULL, FREE):
            raise VerifyError(f"a ring has no token {self.token!r}")

    def count(self, engine: Engine) -> None:
        """Increments the count; on a GPU a wrong step would match another one's parity."""
        key = self.ring, self.token, type(self)
        if int(engine.index(self.step)) != engine.counts[key]:
            raise LaunchError(f"{self.keyword} {self.ring} {self.token} for step "
                              f"{engine.index(self.step)}, not {engine.counts[key]}")
        engine.counts[key] += 1


@dataclass(frozen=True, eq=False)
class Await(_Token):
    """Waits for the token and takes it; with `full` the slot's transfers have arrived."""

    keyword: ClassVar[str] = "await"
    form: ClassVar[str] = "await {ring} {token} step {step}"

    def run(self, interp: Interp, *operands: Any) -> Any:
        assert isinstance(interp, Engine)
        self.count(interp)
        interp.tokens[self.ring, self.token] -= 1
        if self.token == FULL and interp.flying.get(self.ring):
            interp.wait(self.ring, len(interp.flying[self.ring]) - 1)


@dataclass(frozen=True, eq=False)
class Signal(_Token):
    """Gives the token; `full` after earlier transfers of the ring's group have arrived."""

    keyword: ClassVar[str] = "signal"
    form: ClassVar[str] = "signal {ring} {token} step {step}"

    def run(self, interp: Interp, *operands: Any) -> Any:
        assert isinstance(interp, Engine)
        self.count(interp)
        interp.tokens[self.ring, self.token] += 1
        if self.token == FULL and self.ring in interp.open:
            interp.commit(self.ring)


# ---- running

Stream = Generator[Op, None, Any]


def _take_turns(engine: Engine, roles: Sequence[Role]) -> None:
    """Runs one role at a time up to its next token, by `engine.turn`. Raises LaunchError for a
    deadlock."""
    streams: dict[str, Stream] = {r.name: _stream(engine.fork(), r.body) for r in roles}
    at: dict[str, Op] = {}  # before which token each stands

    def go_on(name: str) -> None:
        at.pop(name, None)
        if (op := next(streams[name], None)) is not None:
            at[name] = op

    for name in streams:
        go_on(name)
    while at:
        ready = [name for name, op in at.items()
                 if not isinstance(op, Await) or engine.tokens[op.ring, op.token] > 0]
        if not ready:
            stuck = "; ".join(f"{name} awaits {op.ring} {op.token}"  # type: ignore[attr-defined]
                              for name, op in at.items())
            raise LaunchError(f"deadlock: {stuck}")
        go_on(engine.turn(sorted(ready, key=list(streams).index)))


def _stream(engine: Engine, block: Block, args: Sequence[Any] = ()) -> Stream:
    """Runs a block, suspended before each of its tokens."""
    engine.values.update(zip(block.args, args, strict=True))
    out: Any = ()
    for op in block.ops:
        if isinstance(op, For) and _has_tokens(op.body):
            state: Any = [engine.values[v] for v in op.inits]
            for _ in op.steps(engine):
                out = yield from _stream(engine, op.body, state)
                state = out if op.inits else state
            engine.bind(op, state if len(op.inits) != 1 else state[0])
            continue
        if isinstance(op, _Token):
            yield op
        out = engine.step(op)
    return out


def _has_tokens(block: Block) -> bool:
    return any(isinstance(op, _Token) for op in walk(block))
