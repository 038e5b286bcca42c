"""The host's code of a program: Python text that allocates, runs stretches and calls libraries.

    program f(x: f32[4,8] input) -> ...      ->    def stretch_0(x, at):
      t = kernel add(x)                              # add(x, at)
      u = kernel mul(t)                              # mul(at, u)
      return u                                       u = empty((4, 8), (8, 1), torch.float32)
                                                     launch_stretch_0([address(x, ...), ...], [])
                                                     return u,

                                                   def run(args):
                                                     x, = args
                                                     args.clear()
                                                     w = take(128)
                                                     at = w.address
                                                     u, = stretch_0(x, at)
                                                     give(w)
                                                     return u,

A temporary that only kernels see is an address in the workspace; any other value is a tensor.
A target may do in native code what `stretch_0` says, and `run` where it does nothing else.
"""

from __future__ import annotations

import keyword
from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from typing import Any

from rung.core import origins
from rung.core.errors import LoweringError
from rung.core.expr import ONE, Expr
from rung.core.op import Op, Value
from rung.core.types import BF16, F16, DType, IndexType, TensorType, dtype_of, shape_of
from rung.program import memory
from rung.program.externs import Externs, Texts
from rung.program.ir import Call, Check, KernelCall, Module, Return, Write, states, strided
from rung.program.memory import Step, Storage
from rung.program.storage import RESHAPE, UPDATE, Aliases, is_reshape
from rung.runtime.checks import Site
from rung.runtime.code import Bound, Code
from rung.runtime.stretches import Builder, Built, Part, buffers, native, parts
from rung.targets.base import buffers_of, strides_of
from rung.targets.device import Signature, Stretch


def host_code(module: Module, externs: Externs, constants: int = 0) -> tuple[Code, list[Stretch]]:
    """The code of the main program, whose last parameters are so many constants, and the stretches
    in it. LoweringError for an op that the host cannot do."""
    host = _Host(module, externs, constants)
    return host.run(), list(host.stretches.values())


class _Host:
    def __init__(self, module: Module, externs: Externs, constants: int):
        self.externs = externs
        self.module, self.program, self.native = module, module.main, native(module)
        self.plan = plan = memory.plan(self.program, self.native)
        count = len(self.program.params) - constants
        self.constants = {p: n for n, p in enumerate(self.program.params[count:])}
        self.code = Code()
        self.stretches: dict[tuple[Stretch, tuple[Site, ...]], Stretch] = {}  # equal ones once
        self.known: set[str] = set()  # size symbols that have a variable
        self.addresses: dict[Storage, str] = {}
        self.dying = defaultdict[int, list[str]](list)  # variables, by the step of their last use
        self.returned = set(self.program.body.last.operands())
        self.read = {v for s in plan.steps if not isinstance(s.op, Call | Return)
                     for v in s.op.operands()}
        self.given = {v for s in plan.steps if isinstance(s.op, Call) for v in s.op.operands()}
        lies = Aliases((s.op for s in plan.steps), (RESHAPE, UPDATE))
        self.needed = lies.behind(plan.tensors)  # these have variables
        last = self.program.body.last
        self.relaid = dict(last.relaid()) if isinstance(last, Return) else {}
        self.allocated = self.leaving()
        self.builder = Builder(plan, module, self.type_of)
        self.names: dict[Value, str] = {}
        self.called: list[Value] = []  # results of calls that may be laid out in another way
        self.copied: list[tuple[str, str]] = []  # (mutated argument, its copy in another layout)

    @property
    def texts(self) -> Texts:
        return self.externs.tensors.texts

    @property
    def reserved(self) -> tuple[str, ...]:
        """Names that the code has for something else than values and calls."""
        return (*self.externs.tensors.functions, "check", "take", "give", "args", "w", "at", "run",
                "lines")

    def line(self, text: str) -> None:
        self.code.lines.append(text)

    def run(self) -> Code:
        self.inputs()
        if self.plan.workspace:
            self.line(f"w = take({self.plan.workspace})")
            self.line("at = w.address")
        for part in parts(self.plan, self.native):
            ops = [step.op for step in part.steps]
            if not isinstance(ops[0], Call) or ops[0].results:
                self.distrust()
            if any(map(self.native, ops)):
                self.stretch(part)
            else:
                for op in ops:
                    self.step(op)
            if not isinstance(ops[-1], Return):
                self.drop(part)
        return self.code

    def leaving(self) -> set[Value]:
        """Results under another type than their own that are allocated so: what kernels make, and
        read by their address alone."""
        made = {v for s in self.plan.steps if self.native(s.op) and isinstance(s.op, KernelCall)
                for v in s.op.results[len(s.op.updates):]}
        other = {v for s in self.plan.steps if not self.native(s.op)
                 and not isinstance(s.op, Return) for v in s.op.operands()}
        return {v for v in self.relaid if v in made - other and not strided(v)}

    def type_of(self, value: Value) -> TensorType:
        """The type as which a tensor is allocated."""
        kind = self.relaid[value] if value in self.allocated else value.type
        assert isinstance(kind, TensorType)
        return kind

    # ---- arguments
    def inputs(self) -> None:
        given = [p for p in self.program.params if p not in self.constants]
        names = "".join(f"{self.name(p)}, " for p in given)
        if names:
            self.line(f"{names}= args")
        self.line("args.clear()")
        for param, number in self.constants.items():
            self.names[param] = self.code.bind(
                self.name(param), "constant", number, self.reserved)
        self.known |= {p.name for p in given if isinstance(p.type, IndexType)}
        for param in given:
            self.sizes(param)
        for param in given:
            if isinstance(param.type, TensorType):
                self.own(param)
                self.fit(param)

    def sizes(self, value: Value) -> None:
        """Read the sizes that are not known yet off a tensor, where it has them as sizes or
        strides."""
        strides = value.type.strides or () if isinstance(value.type, TensorType) else ()
        for what, told in ("{}.shape", shape_of(value.type)), (self.texts.strides, strides):
            for dim, size in enumerate(told):
                if size.is_symbol() and str(size) not in self.known:
                    self.known.add(str(size))
                    self.line(f"{size} = {what.format(self.name(value))}[{dim}]")

    def fit(self, param: Value) -> None:
        """Bring an argument into the layout that its type declares, where it has another one.

        Parameters of a module stay as they are, and torch guards the layout of most inputs; the
        gradients that come into a backward graph have any. What a library's forward op saved for
        it in half precision may be of another type than torch said: kernels get it in theirs.
        """
        if param.role == "param":
            return
        if param.role == "mutated":
            name = self.name(param)
            if self.texts.writable:
                self.line(self.texts.writable.format(name))
            self.line(f"{name}_given = {name}")
            self.copied.append((f"{name}_given", name))
        doubted = param in self.read and dtype_of(param.type) in (BF16, F16)
        self.refit(param, self.other(param) if doubted else self.layout(param))

    def layout(self, value: Value) -> str:
        """A test of whether a tensor has another layout than its type."""
        assert isinstance(value.type, TensorType)
        name, strides = self.name(value), value.type.strides
        return f"not {self.texts.contiguous.format(name)}" if strides is None else \
            f"{self.texts.strides.format(name)} != {self.tuple(strides)}"

    def other(self, value: Value) -> str:
        """A test of whether a tensor has another layout or element type than its type."""
        assert isinstance(value.type, TensorType)
        dtype = self.texts.dtype(value.type.dtype)
        return f"{self.name(value)}.dtype is not {dtype} or {self.layout(value)}"

    def refit(self, value: Value, test: str) -> None:
        self.line(f"if {test}: {self.name(value)} = fit({self.name(value)}, {self.form(value)})")

    def distrust(self) -> None:
        """A library's result may be another than torch said it would be: of another type (bf16
        statistics of a batch norm), or laid out otherwise. Kernels read it as its type says, and
        calls that check what it is, it as it is; others may refuse strides, of dimensions of size 1
        too, that are not those of its type."""
        for result in self.called:
            kind = result.type
            if not isinstance(kind, TensorType):
                continue
            if result in self.read:
                self.refit(result, self.other(result))
            if result in self.given and strided(result) and ONE in kind.shape:
                name = self.name(result)
                layout = self.tuple(kind.shape), self.tuple(strides_of(kind))
                fitted = f"fit({name}, {', '.join(layout)}, {name}.dtype)"
                self.line(f"if {self.layout(result)}: "
                          f"{name} = {self.texts.strided.format(fitted, *layout)}")
        self.called.clear()

    # ---- values
    def name(self, value: Value) -> str:
        """The variable of a value; helpers and keywords keep their names."""
        if value not in self.names:
            name = value.name
            taken = (keyword.iskeyword(name) or name in self.reserved
                     or name.startswith(("stretch_", "launch_", "run_")))
            self.names[value] = f"{name}_" if taken else name
        return self.names[value]

    def own(self, value: Value) -> None:
        """Note that a value has a variable, which dies with its memory."""
        if value in self.constants or not isinstance(value.type, TensorType):
            return
        home = self.plan.home[value]
        if home.role != "mutated" and not self.returned.intersection(home.values):
            self.dying[home.last].append(self.name(value))

    def place(self, value: Value) -> str:
        """Where a kernel finds a value: a variable, or an address in the workspace."""
        root = self.builder.root(value)
        offset = self.plan.home[value].offset
        return self.name(root) if root else f"at + {offset}" if offset else "at"

    def tuple(self, exprs: Sequence[Expr]) -> str:
        return f"({', '.join(map(str, exprs))}{',' * (len(exprs) == 1)})"

    # ---- steps
    def step(self, op: Op) -> None:
        match op:
            case KernelCall():
                self.library(op)
            case Call():
                self.call(op)
            case Check():
                self.check(op)
            case Write():
                self.line(self.texts.copy.format(self.name(op.dst), self.name(op.src)))
            case Return():
                self.leave(op)
            case _ if is_reshape(op):
                self.view(op)
            case _:
                raise LoweringError(f"the host cannot do {op.keyword}")

    def stretch(self, part: Part) -> None:
        """One call for several kernels and checks, and the names of what they leave."""
        built = self.builder.build(f"stretch_{len(self.stretches)}", part)
        sites = tuple(map(self.site, built.checks))
        name = self.stretches.setdefault((built.stretch, sites), built.stretch).name
        sizes = list(map(self.known_size, built.stretch.sizes))
        given = [*map(self.name, built.given), *sizes, *(["at"] if built.workspace else [])]
        call, results = f"{name}({', '.join(given)})", self.listed(built.made)
        self.line(f"{results} = {call}" if results else call)
        self.code.steps.append((len(self.code.lines), [
            (op.callee if isinstance(op, KernelCall) else op.keyword, last_of(op))
            for op in (step.op for step in part.steps) if isinstance(op, KernelCall | Check)]))
        if name not in self.code.stretches:
            self.define(built, call, part)
        before = len(self.code.lines)
        for value in built.made:
            self.own(value)
        for step in part.steps:
            self.rename(step.op)
        if part.first == 0 and len(self.code.lines) == before:
            self.box(built, self.plan.steps[part.last + 1:])

    def define(self, built: Built, call: str, part: Part) -> None:
        """Note a stretch that no earlier one is equal to."""
        kinds = (*map(kind_of, built.given), *("size" for _ in built.stretch.sizes),
                 *(["address"] if built.workspace else []))
        made = tuple(map(kind_of, built.made))
        self.code.functions += self.twin(built, call, part)
        self.code.stretches[built.stretch.name] = Bound(
            Signature(kinds, made, tuple(range(len(made)))), tuple(map(self.site, built.checks)))

    def listed(self, values: Sequence[Value]) -> str:
        return ", ".join(map(self.name, values)) + "," * (len(values) == 1)

    def twin(self, built: Built, head: str, part: Part) -> list[str]:
        """The function of a stretch in Python."""
        addresses = [f"address({self.name(v)}, {v.name!r}, {self.form(v)})" for v in built.given]
        addresses += [self.texts.address.format(self.name(v)) for v in built.made]
        addresses += ["at"] if built.workspace else []
        done = [f"    # {op.callee if isinstance(op, KernelCall) else op.keyword}"
                f"({', '.join(map(self.place, buffers(op)))})"
                for op in (step.op for step in part.steps) if buffers(op)]
        return [f"def {head}:", *done, *(f"    {self.allocation(v)}" for v in built.made),
                f"    launch_{built.stretch.name}([{', '.join(addresses)}], "
                f"[{', '.join(built.stretch.sizes)}])",
                f"    return ({self.listed(built.made)})", ""]

    def box(self, built: Built, rest: Sequence[Step]) -> None:
        """Note a stretch that is all of `run`: it can take the list of arguments by itself."""
        params, sizes = self.program.params, built.stretch.sizes
        kinds = tuple("size" if p.name in sizes and isinstance(p.type, IndexType) else
                      kind_of(p) if p in built.given else "unused" for p in params)
        returned = rest[0].op.operands() if len(rest) == 1 else ()
        if (len(rest) == 1 and set(returned) <= set(built.made) and not self.copied
                and self.allocated.issuperset(self.relaid)
                and not built.workspace and kinds.count("size") == len(sizes)):
            bound = self.code.stretches[built.stretch.name]
            results = tuple(map(built.made.index, returned))
            self.code.stretches["run"] = Bound(
                Signature(kinds, bound.signature.made, results, boxed=True), bound.sites)
            self.code.whole = built.stretch.name

    def site(self, op: Check) -> Site:
        return Site(op.error, op.message, op.node)

    def rename(self, op: Op) -> None:
        """The variables of views and of later states of a tensor."""
        if is_reshape(op):
            self.view(op)
        for new, old in states(op).items():
            self.alias(new, old)
            if self.plan.home[old].role == "mutated":
                self.line(f"bump({self.name(self.plan.home[old].values[0])})")

    def library(self, op: KernelCall) -> None:
        """A kernel that a library runs on tensors; it makes the result, or updates the last one."""
        kernel = self.module.kernel(op.callee)
        values = [v for v in op.args if isinstance(v.type, TensorType)]
        given = [self.shaped(v, b) for v, b in zip(values, buffers_of(kernel), strict=False)]
        run = self.code.bind(f"run_{kernel.name}", "library", kernel.name, self.reserved)
        call = f"{run}({', '.join(given)})"
        for new, out in zip(op.results[len(op.updates):], kernel.outs, strict=True):
            same = shape_of(new.type) == shape_of(out.type)
            call = f"{self.name(new)} = {call if same else self.reshaped(call, new)}"
            self.own(new)
        self.line(call)
        self.rename(op)

    def shaped(self, value: Value, buffer: Value) -> str:
        """A tensor in the shape that a kernel declares, which may be flatter."""
        shape = shape_of(buffer.type)
        same, name = shape_of(value.type) == shape, self.name(value)
        return name if same else self.texts.view.format(name, self.tuple(shape))

    def known_size(self, symbol: str) -> str:
        if symbol not in self.known:
            raise LoweringError(f"no argument gives the size {symbol}")
        return symbol

    def allocation(self, value: Value) -> str:
        """The line that makes the tensor of a kernel's result."""
        return f"{self.name(value)} = empty({self.form(value)})"

    def form(self, value: Value) -> str:
        """Shape, strides and element type of a tensor, as arguments."""
        kind = self.type_of(value)
        return f"{self.tuple(kind.shape)}, {self.tuple(strides_of(kind))}, " \
            f"{self.texts.dtype(kind.dtype)}"

    def alias(self, new: Value, old: Value) -> None:
        """`new` is the state of the tensor `old`."""
        if new in self.needed:
            self.line(f"{self.name(new)} = {self.name(old)}")
            self.own(new)

    def view(self, op: Op) -> None:
        (old,) = op.operands()
        if op.result in self.needed:
            text = self.reshaped(self.name(old), op.result, strided(old))
            self.line(f"{self.name(op.result)} = {text}")
            self.own(op.result)

    def reshaped(self, tensor: str, value: Value, strided: bool = False) -> str:
        """A tensor, which may be strided, in the shape of `value`. What leaves is no view: autograd
        forbids writes to some, and nothing else that leaves shares its memory."""
        assert isinstance(value.type, TensorType)
        made = self.texts.strided if strided else self.texts.view
        text = made.format(tensor, self.tuple(value.type.shape),
                           self.tuple(strides_of(value.type)))
        return self.texts.alone.format(text) if value in self.returned else text

    def check(self, op: Check) -> None:
        self.line(f"check({self.name(op.value)}, {op.lo}, {op.hi}, "
                  f"{op.error!r}, {op.message!r}, lines.get({op.node!r}, ''))")

    def leave(self, op: Return) -> None:
        for value, kind in self.relaid.items():
            if value not in self.allocated and isinstance(kind, TensorType):
                name, sizes = self.name(value), (kind.shape, strides_of(kind))
                shape, strides = map(self.tuple, sizes)
                dtype, view = self.texts.dtype(kind.dtype), self.texts.strided
                self.line(f"{name} = fit({name}, {shape}, {strides}, {dtype})" if strided(value)
                          else f"{name} = "
                          + self.texts.alone.format(view.format(name, shape, strides)))
        for given, copy in self.copied:
            self.line(f"if {given} is not {copy}: {self.texts.copy.format(given, copy)}")
        if self.plan.workspace:
            self.line("give(w)")
        self.line(f"return ({self.listed(op.values)})")

    def drop(self, part: Part) -> None:
        """Forget the tensors whose last use was in these steps."""
        dead = [name for n in range(part.first, part.last + 1) for name in self.dying[n]]
        if dead:
            self.line(f"del {', '.join(dict.fromkeys(dead))}")

    # ---- calls of libraries
    def call(self, op: Call) -> None:
        if op.results and self.known.issuperset(r.name for r in op.results):
            return  # a size that is read off a tensor already
        run = self.code.bind(op.target.replace(".", "_"), "call", op.target, self.reserved)
        args = [self.argument(a) for name, a in op.args if not name]
        args += [*map(self.name, op.updates)]
        args += [f"{name}={self.argument(a)}" for name, a in op.args if name]
        text, made = f"{run}({', '.join(args)})", op.results[len(op.updates):]
        names = [self.name(r) for r in made]
        if len(names) == 1 and self.externs.gives_one(op.target):
            self.line(f"{names[0]} = {text}")
        elif names:
            which = f", {op.places}" if op.places else ""
            self.line(f"{''.join(f'{n}, ' for n in names)}= leaves({text}, {len(names)}, "
                      f"{op.target!r}{which})")
        else:
            self.line(text)
        for new, old in states(op).items():
            self.alias(new, old)
        for result in made:
            self.own(result)
            self.sizes(result)
            if isinstance(result.type, IndexType):
                self.known.add(result.name)
        self.called += op.results

    def argument(self, x: Any) -> str:
        """An argument of a call, in Python."""
        match x:
            case Value():
                return self.name(x)
            case Expr():
                return str(x)
            case tuple():
                return f"[{', '.join(map(self.argument, x))}]"
            case float():
                return repr(x) if isfinite(x) else f"float('{x}')"
            case DType():
                return self.texts.dtype(x)
            case str():
                return self.externs.text(x)
        return repr(x)


def last_of(op: Op) -> int:
    """The place, among the ops of the imported program, of the last one that `op` computes."""
    return max((o.place for o in origins.of_all(op.results)), default=-1)


def kind_of(value: Value) -> str:
    """A tensor's word in a `Signature`."""
    assert isinstance(value.type, TensorType)
    return f"{value.type.dtype}/{len(value.type.shape)}"

