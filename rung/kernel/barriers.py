"""Barriers between the threads of a block: insertion for shared arrays, and a check.

In: Kernel IR of a machine with threads, and the spaces that a block's threads share. An element of
such an array is read after another thread wrote it, or overwritten after another thread read it,
only with a barrier in between. The analysis is per array, not per element. A transfer in flight
counts as written at its wait: its thread sees it then, others after a barrier. Roles have separate
barriers, and arrays of rings need none: tokens order their accesses.

    a[it,k] = ...                a[it,k] = ...
    t = a[0,k]             ->    barrier shared
                                 t = a[0,k]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from rung.core.errors import VerifyError
from rung.core.op import Block, Func, Op, Value, walk
from rung.core.types import ArrayType
from rung.kernel.ir import Alloc, Barrier, For, If, Load, Ring, Role, Roles, Store, Transfer, Wait


@dataclass
class State:
    """Arrays touched since the last barrier, and those with transfers in flight by group."""

    read: set[Value] = field(default_factory=set)
    written: set[Value] = field(default_factory=set)
    flying: dict[str, set[Value]] = field(default_factory=dict)

    def copy(self) -> State:
        return State(set(self.read), set(self.written),
                     {g: set(v) for g, v in self.flying.items()})

    def join(self, other: State) -> None:
        self.read |= other.read
        self.written |= other.written
        for group, values in other.flying.items():
            self.flying.setdefault(group, set()).update(values)

    def clear(self) -> None:
        self.read.clear()
        self.written.clear()


def insert_barriers(func: Func, spaces: Collection[str]) -> Func:
    """The kernel with barriers for the arrays in `spaces`."""
    return replace(func, body=_Pass(spaces, insert=True).block(func.body, State()))


def check_barriers(func: Func, spaces: Collection[str]) -> None:
    """Raise VerifyError at an access that needs a barrier before it."""
    _Pass(spaces, insert=False).block(func.body, State())


class _Pass:
    """One walk in text order; a loop's body is walked twice, the second time from the state at its
    end."""

    def __init__(self, spaces: Collection[str], insert: bool):
        self.spaces, self.insert = spaces, insert
        self.guarded: set[Value] = set()  # by the tokens of rings

    def block(self, block: Block, state: State) -> Block:
        out: list[Op] = []
        for op in block.ops:
            if late := self._late(op, state):
                if not self.insert:
                    names = ", ".join(sorted(v.name for v in late))
                    raise VerifyError(f"{names} needs a barrier before this", op)
                (space,) = {v.type.space for v in late if isinstance(v.type, ArrayType)}
                out.append(Barrier(space))
                state.clear()
            out.append(self._through(op, state))
            self._note(op, *self._touches(op), state)
        return Block(block.args, tuple(out))

    def _late(self, op: Op, state: State) -> set[Value]:
        """Arrays for which an op, or a block in it, needs a barrier before the op.

        Stores may follow stores: those of one array give each element to one thread.
        """
        late: set[Value] = set()
        inside = [x for b in op.blocks() for x in walk(b)] if not _launch(op) else []
        for inner in (op, *inside):
            reads, writes = self._touches(inner)
            late |= reads & state.written | writes & state.read
            late |= writes & state.written if isinstance(inner, Transfer) else set()
        return late

    def _touches(self, op: Op) -> tuple[set[Value], set[Value]]:
        match op:
            case Load():
                return self._shared([op.buf]), set()
            case Store():
                return set(), self._shared([op.buf])
            case Transfer():
                return self._shared([op.src]), self._shared([op.dst])
        return set(), set()

    def _shared(self, values: Iterable[Value]) -> set[Value]:
        return {v for v in values if isinstance(v.type, ArrayType) and v.type.space in self.spaces
                and v not in self.guarded}

    def _through(self, op: Op, state: State) -> Op:
        """The op with its blocks transformed; `state` becomes the one after it."""
        match op:
            case For():
                once = state.copy()
                body = self.block(op.body, once)
                if not _launch(op):  # again, as a later step finds it
                    once.join(state)
                    body = self.block(body, once)
                state.join(once)
                return replace(op, body=body)
            case If():
                other = state.copy()
                then, orelse = self.block(op.then, state), self.block(op.orelse, other)
                state.join(other)
                return replace(op, then=then, orelse=orelse)
            case Ring():
                self.guarded.update(op.arrays)
            case Roles():
                return replace(op, body=self.block(op.body, state))
            case Role():
                return replace(op, body=self.block(op.body, State()))
            case Barrier():
                state.clear()
        return op

    def _note(self, op: Op, reads: set[Value], writes: set[Value], state: State) -> None:
        match op:
            case Transfer() if op.group:
                state.flying.setdefault(op.group, set()).update(writes)
                state.read |= reads
            case Wait():
                state.written |= state.flying.get(op.group, set())
            case Alloc():
                pass
            case _:
                state.read |= reads
                state.written |= writes


def _launch(op: Op) -> bool:
    """Whether the body starts with a fresh state: blocks, threads, roles."""
    return isinstance(op, Roles | Role) or (isinstance(op, For) and op.level not in ("", "unroll"))
