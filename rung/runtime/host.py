"""The host's code of a program: Python text that allocates, launches kernels and calls torch.

    program f(x: f32[4,8] input) -> ...      ->    def run(args):
      t = kernel add(x)                              (x,) = args
      u = kernel mul(t)                              args.clear()
      return u                                       w = take(128)
                                                     add(x.data_ptr(), w.address)
                                                     u = empty((4, 8), (8, 1), f32)
                                                     mul(w.address, u.data_ptr())
                                                     give(w)
                                                     return (u,)

A temporary that only kernels see is an address in the workspace; any other value is a tensor.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rung.core.errors import LoweringError
from rung.core.expr import ONE, Expr
from rung.core.op import Op, Value
from rung.core.types import IndexType, TensorType
from rung.frontends.torch.calls import DTYPES, overload, to_torch
from rung.program.ir import ERRORS, Call, Check, KernelCall, Module, Return, Write
from rung.program.memory import Plan, Storage
from rung.program.views import is_view
from rung.runtime import pool, tensors
from rung.targets.base import Launch, buffers_of, symbols_of

HELPERS = {"take": pool.take, "give": pool.give, "empty": tensors.empty, "fit": tensors.fit,
           "leaves": tensors.leaves, "check": tensors.check, "bump": tensors.bump}


@dataclass
class Code:
    """Lines of the body of `run`, and the objects that they name."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=lambda: dict(HELPERS))

    @property
    def text(self) -> str:
        return "\n".join(["def run(args):", *(f"    {line}" for line in self.lines), ""])

    def bind(self, hint: str, thing: Any) -> str:
        """A name for an object."""
        name, n = hint, 1
        while name in self.names and self.names[name] is not thing:
            name, n = f"{hint}_{n}", n + 1
        self.names[name] = thing
        return name


def host_code(plan: Plan, module: Module, launches: Mapping[str, Launch],
              calls: Mapping[str, Launch], constants: Sequence[torch.Tensor] = ()) -> Code:
    """The code of the main program. LoweringError for an op that the host cannot do."""
    return _Host(plan, module, launches, calls, constants).run()


class _Host:
    def __init__(self, plan: Plan, module: Module, launches: Mapping[str, Launch],
                 calls: Mapping[str, Launch], constants: Sequence[torch.Tensor]):
        self.plan, self.module, self.launches, self.calls = plan, module, launches, calls
        self.program = module.main
        self.constants = dict(zip(self.program.params[::-1], constants[::-1], strict=False))
        self.code = Code()
        self.known: set[str] = set()  # size symbols that have a variable
        self.addresses: dict[Storage, str] = {}
        self.variables: dict[Storage, list[str]] = {}
        self.returned = set(self.program.body.last.operands())
        self.held = {v for s in plan.steps if s.kind != "view" and not self.takes_addresses(s.op)
                     for v in (*s.op.operands(), *s.op.results)}
        self.read = {v for s in plan.steps if not isinstance(s.op, Call | Return)
                     for v in s.op.operands()}
        self.names: dict[Value, str] = {}
        self.copied: list[tuple[str, str]] = []  # (mutated argument, its copy in another layout)

    def line(self, text: str) -> None:
        self.code.lines.append(text)

    def run(self) -> Code:
        self.inputs()
        if self.plan.workspace:
            self.line(f"w = take({self.plan.workspace})")
            self.line("at = w.address")
        for number, step in enumerate(self.plan.steps):
            self.step(step.op)
            if not isinstance(step.op, Return):
                self.drop(number)
        return self.code

    def takes_addresses(self, op: Op) -> bool:
        return isinstance(op, KernelCall) and op.callee in self.launches

    # ---- arguments
    def inputs(self) -> None:
        given = [p for p in self.program.params if p not in self.constants]
        names = "".join(f"{self.name(p)}, " for p in given)
        if names:
            self.line(f"{names}= args")
        self.line("args.clear()")
        for param, tensor in self.constants.items():
            self.names[param] = self.code.bind(self.name(param), tensor)
        self.known |= {p.name for p in given if isinstance(p.type, IndexType)}
        for param in given:
            for dim, size in enumerate(_shape(param)):
                if size.is_symbol() and str(size) not in self.known:
                    self.known.add(str(size))
                    self.line(f"{size} = {self.name(param)}.shape[{dim}]")
        for param in given:
            if isinstance(param.type, TensorType):
                self.own(param)
                self.fit(param)

    def fit(self, param: Value) -> None:
        """Bring an argument into the layout that its type declares, where it has another one.

        Parameters of a module stay as they are, and torch guards the layout of most inputs; the
        gradients that come into a backward graph have any.
        """
        if param.role == "param":
            return
        if param.role == "mutated":
            name = self.name(param)
            self.line(f"{name}_given = {name}")
            self.copied.append((f"{name}_given", name))
        self.refit(param, self.layout(param))

    def layout(self, value: Value) -> str:
        """A test of whether a tensor has another layout than its type."""
        assert isinstance(value.type, TensorType)
        name, strides = self.name(value), value.type.strides
        return f"not {name}.is_contiguous()" if strides is None else \
            f"{name}.stride() != {self.tuple(strides)}"

    def refit(self, value: Value, test: str) -> None:
        assert isinstance(value.type, TensorType)
        name, kind = self.name(value), value.type
        strides = kind.strides or dense(kind.shape)
        self.line(f"if {test}: {name} = fit({name}, {self.tuple(kind.shape)}, "
                  f"{self.tuple(strides)}, {self.dtype(kind)})")

    def distrust(self, result: Value) -> None:
        """A library's result may be another than torch said it would be: of another type (bf16
        statistics of a batch norm), or laid out otherwise. Kernels read it as its type says."""
        if result in self.read and isinstance(result.type, TensorType):
            test = f"{self.name(result)}.dtype is not {self.dtype(result.type)}"
            self.refit(result, f"{test} or {self.layout(result)}")

    # ---- values
    def name(self, value: Value) -> str:
        """The variable of a value; helpers and keywords keep their names."""
        if value not in self.names:
            name = value.name
            taken = keyword.iskeyword(name) or name in (*HELPERS, "args", "w", "at", "run")
            self.names[value] = f"{name}_" if taken else name
        return self.names[value]

    def own(self, value: Value) -> None:
        """Note that a value has a variable."""
        if value not in self.constants and isinstance(value.type, TensorType):
            self.variables.setdefault(self.plan.home[value], []).append(self.name(value))

    def raw(self, storage: Storage) -> bool:
        """Whether only kernels see a storage."""
        return storage.offset is not None and not any(
            v in self.held for v in storage.values)

    def address(self, value: Value) -> str:
        storage = self.plan.home[value]
        if self.raw(storage):
            return f"at + {storage.offset}" if storage.offset else "at"
        return f"{self.name(storage.values[0])}.data_ptr()"

    def size(self, expr: Expr) -> str:
        return str(expr)

    def tuple(self, exprs: Sequence[Expr]) -> str:
        return f"({', '.join(map(self.size, exprs))}{',' * (len(exprs) == 1)})"

    # ---- steps
    def step(self, op: Op) -> None:
        match op:
            case KernelCall():
                self.launch(op)
            case Call():
                self.call(op)
            case Check():
                self.check(op)
            case Write():
                self.line(f"{self.name(op.dst)}.copy_({self.name(op.src)})")
            case Return():
                self.leave(op)
            case _ if is_view(op):
                self.view(op)
            case _:
                raise LoweringError(f"the host cannot do {op.keyword}")

    def launch(self, op: KernelCall) -> None:
        kernel = self.module.kernel(op.callee)
        outs = op.results[len(op.updates):]
        for new in outs:
            self.allocate(new)
        values = [v for v in (*op.args, *outs) if isinstance(v.type, TensorType)]
        if self.takes_addresses(op):
            run, given = self.launches[kernel.name], [self.address(v) for v in values]
            given += [self.known_size(s) for s in symbols_of(kernel)]
        else:
            run = self.calls[kernel.name]
            given = [self.shaped(v, b) for v, b in zip(values, buffers_of(kernel), strict=True)]
        self.line(f"{self.code.bind(f'run_{kernel.name}', run)}({', '.join(given)})")
        for new, old in zip(op.results, op.updates, strict=False):
            self.alias(new, old)
            if self.plan.home[old].role == "mutated":
                self.line(f"bump({self.name(self.plan.home[old].values[0])})")

    def shaped(self, value: Value, buffer: Value) -> str:
        """A tensor in the shape that a kernel declares, which may be flatter."""
        same = _shape(value) == _shape(buffer)
        return self.name(value) + ("" if same else f".view({self.tuple(_shape(buffer))})")

    def known_size(self, symbol: str) -> str:
        if symbol not in self.known:
            raise LoweringError(f"no argument gives the size {symbol}")
        return symbol

    def allocate(self, value: Value) -> None:
        """The tensor of a kernel's result, where it is more than an address."""
        if self.raw(self.plan.home[value]):
            return
        assert isinstance(value.type, TensorType)
        shape, dtype = value.type.shape, self.dtype(value.type)
        strides = value.type.strides or dense(shape)
        self.line(f"{self.name(value)} = empty({self.tuple(shape)}, {self.tuple(strides)}, "
                  f"{dtype})")
        self.own(value)

    def dtype(self, kind: TensorType) -> str:
        found = DTYPES.get(kind.dtype) or getattr(torch, kind.dtype.name)
        return self.code.bind(str(found).removeprefix("torch."), found)

    def alias(self, new: Value, old: Value) -> None:
        """`new` is the state of the tensor `old`."""
        if not self.raw(self.plan.home[old]):
            self.line(f"{self.name(new)} = {self.name(old)}")
            self.own(new)

    def view(self, op: Op) -> None:
        (old,) = op.operands()
        if not self.raw(self.plan.home[old]):
            shape = self.tuple(_shape(op.result))
            self.line(f"{self.name(op.result)} = {self.name(old)}.view({shape})")
            self.own(op.result)

    def check(self, op: Check) -> None:
        error = self.code.bind(op.error, ERRORS[op.error])
        self.line(f"check({self.name(op.value)}, {self.size(op.lo)}, {self.size(op.hi)}, {error}, "
                  f"{op.message!r})")

    def leave(self, op: Return) -> None:
        for given, copy in self.copied:
            self.line(f"if {given} is not {copy}: {given}.copy_({copy})")
        if self.plan.workspace:
            self.line("give(w)")
        self.line(f"return ({''.join(f'{self.name(v)}, ' for v in op.values)})")

    def drop(self, number: int) -> None:
        """Forget the tensors whose last use was this step."""
        dead = [name for s, names in self.variables.items() for name in names
                if s.last == number and not self.returned.intersection(s.values)
                and s.role != "mutated"]
        if dead:
            self.line(f"del {', '.join(dict.fromkeys(dead))}")

    # ---- calls of torch
    def call(self, op: Call) -> None:
        run = self.code.bind(op.target.replace(".", "_"), overload(op.target))
        args = [self.argument(a) for name, a in op.args if not name]
        args += [f"{name}={self.argument(a)}" for name, a in op.args if name]
        text = f"{run}({', '.join(args)})"
        names = [self.name(r) for r in op.results]
        if len(names) == 1 and len(overload(op.target)._schema.returns) == 1 and isinstance(
                op.result.type, TensorType) and _is_tensor(op):
            self.line(f"{names[0]} = {text}")
        elif names:
            self.line(f"{''.join(f'{n}, ' for n in names)}= leaves({text})")
        else:
            self.line(text)
        for result in op.results:
            self.own(result)
            self.distrust(result)
            if isinstance(result.type, IndexType):
                self.known.add(result.name)

    def argument(self, x: Any) -> str:
        """An argument of a call, in Python."""
        match x:
            case Value():
                return self.name(x)
            case Expr():
                return self.size(x)
            case tuple():
                return f"[{', '.join(map(self.argument, x))}]"
            case None | bool() | int():
                return repr(x)
        return self.code.bind("const", to_torch(x, _no_value, {}))


def _no_value(value: Value) -> Any:
    raise LoweringError(f"{value.name} is no constant")


def _is_tensor(op: Call) -> bool:
    return str(overload(op.target)._schema.returns[0].type) == "Tensor"


def _shape(value: Value) -> tuple[Expr, ...]:
    return value.type.shape if isinstance(value.type, TensorType) else ()


def dense(shape: Sequence[Expr]) -> tuple[Expr, ...]:
    """Strides of a contiguous tensor, of which none is 0."""
    strides = [ONE]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * (ONE if size.is_const(0) else size))
    return tuple(reversed(strides)) if shape else ()

