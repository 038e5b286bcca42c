"""Program: SSA over immutable tensors, with the storage and the effect of everything.

    program relu_mm(x: f32[504,512] input, bias: f32[512] param, w: f32[512,512] param)
      t = call aten.add.Tensor(x, bias) : f32[504,512]
      t1 = call aten.mm.default(t, w) : f32[504,512]
      t2 = call aten.relu.default(t1) : f32[504,512]
      return t2

`call` is a library call: an extern, or with a body a composite that policy may open. After fusion
a program holds `kernel` calls. `write x <- v` is the only mutation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.expr import Expr, is_size
from rung.core.interp import Interp
from rung.core.op import Block, Effect, Func, Op, Value, Vocabulary, expressions, walk
from rung.core.ops import IndexValue, Yield
from rung.core.types import BOOL, I32, I64, TensorType, Type, contiguous
from rung.tensor import ir as tensor

MEMORY = ("", "view", "copy", "unwritten")
"""What the results of a call are: views of its first operand, a copy of it, memory as it is."""

ROLES = ("input", "param", "const", "mutated", "")
_EFFECTS = {"": Effect.PURE} | {e.value: e for e in Effect}
Args = tuple[tuple[str, Any], ...]  # (keyword or "", argument)


@dataclass(frozen=True, eq=False)
class Call(Op):
    """A library call: an operator of the front end, or `copy` or `empty`, which every host has.

    `updates` are further operands, which the call writes in place: the first results are their new
    states, in the same storage. `memory`, one of `MEMORY`, describes the storage of its results;
    without it they may alias any operand. `places` are those of its results among what the operator
    returns, where that is more.
    """

    target: str
    args: Args
    types: tuple[Type, ...] = ()
    impure: str = ""
    updates: tuple[Value, ...] = ()
    memory: str = ""
    places: tuple[int, ...] = ()
    keyword: ClassVar[str] = "call"
    form: ClassVar[str] = ("call {target}({args})< in place {updates}>< effect {impure}>"
                           "< as {memory}>< at {places}>")

    @property
    def effect(self) -> Effect:  # type: ignore[override]
        return _EFFECTS.get(self.impure, Effect.ORDERED)

    def infer(self) -> tuple[Type, ...]:
        return self.types

    def check(self) -> None:
        if self.impure not in _EFFECTS:
            raise VerifyError(f"no effect is called {self.impure!r}")
        if self.memory not in MEMORY:
            raise VerifyError(f"{self.memory} is none of {', '.join(filter(None, MEMORY))}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        return interp.callees["call"](self, dict(zip(self.operands(), operands, strict=True)),
                                      interp)


@dataclass(frozen=True, eq=False)
class Composite(Op):
    """An ATen overload together with its meaning; policy opens it or keeps the call."""

    target: str
    args: Args
    body: Block
    types: tuple[Type, ...] = ()
    keyword: ClassVar[str] = "composite"
    form: ClassVar[str] = "composite {target}({args})"

    def infer(self) -> tuple[Type, ...]:
        return self.types

    def check(self) -> None:
        given = self.body.last.operands() if self.body.ops else ()
        if tuple(v.type for v in given) != self.types:
            raise VerifyError("the body yields other types than the call")

    def run(self, interp: Interp, *operands: Any) -> Any:
        out = interp.block(self.body)
        return out if len(self.types) > 1 else out[0]


@dataclass(frozen=True, eq=False)
class KernelCall(Op):
    """Runs a kernel of the module. `updates` are operands that the kernel writes in place: the
    result with the same position in `updates` is that operand's new state in the same storage."""

    callee: str
    args: tuple[Value, ...]
    updates: tuple[Value, ...] = ()
    types: tuple[Type, ...] = ()
    keyword: ClassVar[str] = "kernel"
    form: ClassVar[str] = "kernel {callee}({args})< in place {updates}>"

    def infer(self) -> tuple[Type, ...]:
        return self.types

    def run(self, interp: Interp, *operands: Any) -> Any:
        return interp.callees["kernel"](self, operands[: len(self.args)], interp)


@dataclass(frozen=True, eq=False)
class Apply(Op):
    """Runs an outlined program (a repeated layer) on its arguments; `impure` is its effect."""

    callee: str
    args: tuple[Value, ...]
    types: tuple[Type, ...] = ()
    impure: str = ""
    keyword: ClassVar[str] = "apply"
    form: ClassVar[str] = "apply {callee}({args})< effect {impure}>"

    @property
    def effect(self) -> Effect:  # type: ignore[override]
        return _EFFECTS.get(self.impure, Effect.ORDERED)

    def infer(self) -> tuple[Type, ...]:
        return self.types

    def run(self, interp: Interp, *operands: Any) -> Any:
        return interp.callees["apply"](self, operands, interp)


@dataclass(frozen=True, eq=False)
class Write(Op):
    """The storage of parameter `dst` takes the value `src`."""

    dst: Value
    src: Value
    keyword: ClassVar[str] = "write"
    form: ClassVar[str] = "write {dst} <- {src}"
    effect: ClassVar[Effect] = Effect.MUTATES

    def check(self) -> None:
        if self.dst.role != "mutated":
            raise VerifyError(f"{self.dst.name} is not a mutated parameter")
        a, b = self.dst.type, self.src.type
        if not (isinstance(a, TensorType) and isinstance(b, TensorType)
                and (a.dtype, a.shape) == (b.dtype, b.shape)):
            raise VerifyError(f"writes {b} into {a}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        np.copyto(operands[0], operands[1])


@dataclass(frozen=True, eq=False)
class Check(Op):
    """Raises `error` unless every element of `value` lies in lo <= v < hi.

    `node` is the result of the checked call, which leads to the user's line.
    """

    value: Value
    lo: Expr
    hi: Expr
    error: str
    message: str
    node: str = ""
    keyword: ClassVar[str] = "check"
    form: ClassVar[str] = "check {value} in {lo}..{hi} else {error} {message}< for {node}>"
    effect: ClassVar[Effect] = Effect.RAISES

    def check(self) -> None:
        if self.error not in ERRORS:
            raise VerifyError(f"{self.error} is none of {', '.join(ERRORS)}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        low, high = int(interp.index(self.lo)), int(interp.index(self.hi))
        if operands[0].size and (operands[0].min() < low or operands[0].max() >= high):
            raise ERRORS[self.error](self.message)


@dataclass(frozen=True, eq=False)
class Return(Op):
    """The program's results, in order; last op of every program. With `layouts` each value's memory
    is returned under the sizes and strides of that type; a strided value is copied into them."""

    values: tuple[Value, ...]
    layouts: tuple[Type, ...] = ()
    keyword: ClassVar[str] = "return"
    form: ClassVar[str] = "return {values}< as {layouts}>"
    effect: ClassVar[Effect] = Effect.ORDERED

    def check(self) -> None:
        for value, kind in self.relaid():
            given = value.type
            if not (isinstance(given, TensorType) and isinstance(kind, TensorType)
                    and given.dtype == kind.dtype and len(given.shape) == len(kind.shape)
                    and (given.strides is None or given.shape == kind.shape)):
                raise VerifyError(f"{value.name}: {given} cannot leave as {kind}")
        if self.layouts and len(self.layouts) != len(self.values):
            raise VerifyError("as many layouts as values, or none")

    def relaid(self) -> Iterator[tuple[Value, Type]]:
        """The values returned under another type than their own, and that type."""
        pairs = zip(self.values, self.layouts, strict=False)
        return ((value, kind) for value, kind in pairs if kind != value.type)

    def run(self, interp: Interp, *operands: Any) -> Any:
        kinds = dict(self.relaid())
        return tuple(
            laid_out(x, kinds[value], interp) if value in kinds and not strided(value) else x
            for value, x in zip(self.values, operands, strict=True))


def strided(value: Value) -> bool:
    """Whether a tensor is not contiguous."""
    return isinstance(value.type, TensorType) and value.type.strides is not None


def laid_out(x: Any, kind: Type, interp: Interp) -> Any:
    """The elements of `x`, in order, under the sizes and strides of a type."""
    assert isinstance(kind, TensorType)
    memory = np.ascontiguousarray(x)
    shape, steps = ([int(interp.index(e)) for e in es] for es in (kind.shape, kind.strides or ()))
    if kind.strides is None:
        return memory.reshape(shape)
    return np.lib.stride_tricks.as_strided(memory, shape, [n * memory.itemsize for n in steps])


def copied(value: Value, results: tuple[Value, ...] = ()) -> Call:
    """A call of the host's `copy`."""
    return Call("copy", (("", value),), (value.type,), memory="copy", results=results)


def unwritten(kind: TensorType) -> Call:
    """A call of the host's `empty`: contiguous memory."""
    args = (("", kind.shape), ("", contiguous(kind.shape)), ("", kind.dtype))
    return Call("empty", args, (kind,), memory="unwritten")


def is_view(op: Op | None) -> bool:
    """Whether an op is a call whose results alias its first operand."""
    return isinstance(op, Call) and op.memory == "view"


def states(op: Op) -> dict[Value, Value]:
    """The new states of operands that an op updates in place, with these operands."""
    updates = op.updates if isinstance(op, KernelCall | Call) else ()
    return dict(zip(op.results, updates, strict=False))


CHECKED = (I32, I64, BOOL)  # element types of what a check reads
ERRORS: dict[str, type[Exception]] = {"IndexError": IndexError, "RuntimeError": RuntimeError}
OPS = (Call, Composite, KernelCall, Apply, Write, Check, Yield, Return)
VOCABULARY = Vocabulary("program", (*OPS, *tensor.OPS, IndexValue))


def verify_program(func: Func) -> None:
    """Rules of a whole program: a return at the end, known roles, checks before writes."""
    last = func.body.last if func.body.ops else None
    if not isinstance(last, Return):
        raise VerifyError("a program ends in `return`", last)
    for param in func.params:
        if param.role not in ROLES:
            raise VerifyError(f"{param.name} has role {param.role}, not one of {', '.join(ROLES)}")
    if func.outs:
        raise VerifyError(f"a program returns values, it has no output {func.outs[0].name}")
    wrote, arguments = False, set(func.params)  # and their later states
    for op in walk(func.body):
        if isinstance(op, Check) and wrote:
            raise VerifyError("a check stands before the first write to an argument", op)
        updated = {new for new, old in states(op).items() if old in arguments}
        arguments |= updated
        wrote |= bool(updated)
        wrote |= isinstance(op, Write)
        for expr in expressions(op) if not isinstance(op, tensor.Index) else ():
            if loose := {s for s in expr.symbols() if not is_size(s)}:
                raise VerifyError(f"{', '.join(sorted(loose))} is no size", op)


@dataclass(frozen=True)
class Module:
    """Programs (the main one first, then outlined layers) and the kernels that they call."""

    programs: tuple[Func, ...]
    kernels: tuple[Func, ...] = ()

    @property
    def main(self) -> Func:
        return self.programs[0]

    def program(self, name: str) -> Func:
        return next(f for f in self.programs if f.name == name)

    def kernel(self, name: str) -> Func:
        return next(f for f in self.kernels if f.name == name)

    def __str__(self) -> str:
        return "\n\n".join(map(str, (*self.programs, *self.kernels)))


def verify_calls(module: Module) -> None:
    """Arguments of programs and kernels have the memory layout of the parameters."""
    callees = {f.name: f for f in (*module.programs, *module.kernels)}
    for op in (op for program in module.programs for op in walk(program.body)):
        if not isinstance(op, Apply | KernelCall) or op.callee not in callees:
            continue
        for param, arg in zip(callees[op.callee].params, op.args, strict=False):
            a, b = param.type, arg.type
            if isinstance(a, TensorType) and isinstance(b, TensorType) and a.strides != b.strides:
                raise VerifyError(f"{op.callee} is given {arg.name}: {b} as {param.name}: {a}", op)
