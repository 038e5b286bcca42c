"""An ATen graph of AOTAutograd to a program with one `call` per node.

    add: f32[s0, 8] = torch.ops.aten.add.Tensor(arg0_1, 2)     # the fx node
    add = call aten.add.Tensor(arg0_1, 2) : f32[s0,8]          # the op

Sizes become `Expr`s here, and sympy goes no further. What the program cannot say (higher-order ops,
subclasses, several devices, symbolic floats) raises Unsupported: the graph then runs as it is.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rung.core import origins
from rung.core.errors import Unsupported
from rung.core.expr import ONE, Expr, is_size, sym
from rung.core.op import Block, Func, Names, Op, Value
from rung.core.origins import Origin
from rung.core.types import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    INDEX,
    U8,
    DType,
    TensorType,
    Type,
)
from rung.frontends.torch.compat import is_signed, size_expr, with_effects
from rung.program import ir as program

TORCH_DTYPES = {
    torch.float64: F64, torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16,
    torch.int64: I64, torch.int32: I32, torch.int16: I16, torch.int8: I8, torch.uint8: U8,
    torch.bool: BOOL}

Result = Value | Expr | int | None
"""One output of the graph: a tensor, a size (symbolic or not) or nothing."""


@dataclass(frozen=True)
class Imported:
    """`func` takes the graph's inputs, but for `tokens`, and then `constants`; it returns the
    tensors of `results`."""

    func: Func
    constants: tuple[torch.Tensor, ...]
    results: tuple[Result, ...]
    tokens: int = 0  # at the front, by which torch orders effects, and which hold nothing


def import_graph(gm: fx.GraphModule, name: str = "main",
                 static: Collection[int] = ()) -> Imported:
    """The program of an inference, forward or backward graph.

    `static` are the positions of the inputs that are parameters or buffers. Raises Unsupported.
    """
    return _Importer(gm, frozenset(static)).run(name)


def to_expr(e: Any) -> Expr:
    """A sympy expression of a size; Unsupported for other functions than + * // %."""
    if e.is_Integer:
        return Expr.of(int(e))
    if e.is_Symbol:
        return sym(e.name)
    args = [to_expr(x) for x in e.args]
    match type(e).__name__, args:
        case "Add", _:
            return sum(args, Expr.of(0))
        case "Mul", _:
            product = ONE
            for x in args:
                product = product * x
            return product
        case "Pow", [x, n] if n.const_value is not None and n.const_value > 0:
            return to_expr(e.args[0] ** (n.const_value - 1)) * x
        case ("FloorDiv" | "CleanDiv"), [x, y] if (y.const_value or 1) > 0:
            return x // y
        case ("Mod" | "PythonMod"), [x, y] if (y.const_value or 1) > 0:
            return x % y
        case "ModularIndexing", [x, y, z]:
            return x // y % z
        case "Max", [x, y] if ONE in (x, y):  # strides of sizes that could be 0
            return y if x is ONE else x
    raise Unsupported(f"size {e}")


def _divisors(e: Any) -> set[str]:
    """The symbols of a sympy expression that change more than sums and products."""
    bent = () if type(e).__name__ in ("Add", "Mul") else e.args[1:]
    return {s.name for x in bent for s in x.free_symbols}.union(*map(_divisors, e.args))


def size_of(size: int | torch.SymInt) -> Expr:
    return to_expr(size_expr(size)) if isinstance(size, torch.SymInt) else Expr.of(int(size))


def dtype_of(dtype: torch.dtype, negated: bool = False) -> DType:
    """The type of elements; those that Rung cannot compute with have kind x (or c, complex).

    `negated`: the memory holds them with the opposite sign, as that of `z.conj().imag` does.
    """
    found = None if negated else TORCH_DTYPES.get(dtype)
    return found or DType(str(dtype).removeprefix("torch."), "c" if dtype.is_complex else "x",
                          8 * dtype.itemsize)


def contiguous_strides(shape: Sequence[Expr]) -> tuple[Expr, ...]:
    strides = [ONE]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def type_of(val: Any) -> Type:
    """The type of a node's `meta['val']`."""
    if isinstance(val, int | torch.SymInt) and not isinstance(val, bool):
        return INDEX
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided or val.is_quantized:
        raise Unsupported(f"a value of {type(val).__name__}")
    dtype = dtype_of(val.dtype, val.is_neg())
    shape = tuple(size_of(s) for s in val.shape)
    strides = tuple(size_of(s) for s in val.stride())
    plain = zip(shape, strides, contiguous_strides(shape), strict=True)
    if any(s.is_const(0) for s in shape) or all(s is ONE or a is b for s, a, b in plain):
        return TensorType(dtype, shape)
    return TensorType(dtype, shape, strides)


def _leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples and lists that are not None, in order."""
    if isinstance(tree, tuple | list):
        for x in tree:
            yield from _leaves(x)
    elif tree is not None:
        yield tree


def _like(tree: Any, leaves: Iterator[Value]) -> Any:
    """`leaves` in the structure of `tree`."""
    if isinstance(tree, tuple | list):
        return tuple(_like(x, leaves) for x in tree)
    return None if tree is None else next(leaves)


class _Importer:
    """State of one import: `env` gives a node's values in the structure of its result."""

    def __init__(self, gm: fx.GraphModule, static: frozenset[int]):
        self.gm, self.static = gm, static
        self.names = Names()
        self.env: dict[fx.Node, Any] = {}
        self.params: list[Value] = []
        self.tokens = 0
        self.constants: dict[str, tuple[Value, torch.Tensor]] = {}
        self.ops: list[Op] = []
        self.devices: set[torch.device] = set()
        self.signed: dict[str, Expr | int] = {}  # what symbols that may be negative are here
        self.written = {n.args[0] for n in gm.graph.nodes if _writes_back(n)}

    def run(self, name: str) -> Imported:
        results: tuple[Result, ...] = ()
        for node in self.gm.graph.nodes:
            match node.op:
                case "placeholder":
                    self._placeholder(node)
                case "get_attr":
                    self.env[node] = self._constant(str(node.target))
                case "call_function":
                    self._function(node)
                case "output":
                    results = tuple(self._result(x) for x in node.args[0])
                case _:
                    raise Unsupported(f"fx node {node.op} {node.target}")
        if len(self.devices) > 1:
            raise Unsupported(f"tensors on {' and '.join(sorted(map(str, self.devices)))}")
        self.ops.append(program.Return(tuple(r for r in results if isinstance(r, Value))))
        constants = tuple(self.constants.values())
        params = (*self.params, *(value for value, _ in constants))
        func = Func("program", name, params, (), Block((), tuple(self.ops)))
        _check_sizes(func)
        return Imported(func, tuple(c for _, c in constants), results, self.tokens)

    def _placeholder(self, node: fx.Node) -> None:
        if not self.params and any(u.target is with_effects and u.args[0] is node
                                   for u in node.users):
            self.env[node] = None
            self.tokens += 1
            return
        val: Any = node.meta.get("val")
        kind = self._type(val)
        role = "mutated" if node in self.written else "input"
        if self.tokens + len(self.params) in self.static and role == "input":
            role = "param"
        hint = node.name
        if kind == INDEX:
            if isinstance(val, torch.SymInt) and is_signed(val):
                self.signed |= {s: sym(f"z{s[1:]}") for s in size_of(val).symbols()}
            size = self.env[node] = self._number(val)
            taken = {p.name for p in self.params}
            hint = str(size) if size.is_symbol() and str(size) not in taken else hint
            role = ""
        value = self._value(hint, kind, role)
        self.params.append(value)
        self.env.setdefault(node, value)

    def _constant(self, path: str) -> Value:
        if path not in self.constants:
            tensor = operator.attrgetter(path)(self.gm)
            if not isinstance(tensor, torch.Tensor):
                raise Unsupported(f"the graph's attribute {path}, which is no tensor")
            kind = self._type(tensor)
            value = self._value(path.replace(".", "_").lstrip("_"), kind, "const")
            self.constants[path] = value, tensor
        return self.constants[path][0]

    def _value(self, hint: str, kind: Type, role: str = "") -> Value:
        """A new value; one that is a size is called by its symbol, as types refer to it."""
        name = hint if kind == INDEX and is_size(hint) else self.names(hint)
        return Value(name, kind, role)

    def _type(self, val: Any) -> Type:
        if isinstance(val, torch.Tensor):
            self.devices.add(val.device)
        kind = type_of(val)
        if isinstance(kind, TensorType) and self.signed.keys() & {
                s for e in (*kind.shape, *(kind.strides or ())) for s in e.symbols()}:
            raise Unsupported(f"a tensor of type {kind}, whose sizes may be negative")
        return kind

    def _number(self, x: int | torch.SymInt) -> Expr:
        if isinstance(x, torch.SymInt) and _divisors(size_expr(x)) & self.signed.keys():
            raise Unsupported(f"number {x}, whose divisor may be negative")
        return size_of(x).subs(self.signed)

    def _function(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            self.env[node] = self.env[node.args[0]][node.args[1]]
        elif isinstance(val, int | torch.SymInt) and _is_size(node.target):
            self.env[node] = self._number(val)
        elif isinstance(val, torch.SymBool | torch.SymFloat | bool | float):
            pass  # an error only where it is used
        elif _writes_back(node):
            dst, src = (self._arg(x) for x in node.args[:2])
            self._add(node, program.Write(dst, src), None)
            self.env[node] = src  # the graph may return what it wrote
        elif isinstance(node.target, torch._ops.OpOverload):
            self._call(node, node.target, node.args, val, effect_of(node))
        elif node.target is with_effects:  # (token, op, *arguments), and gives (token, *results)
            _, op, *args = node.args
            _, *made = node.meta["val"]
            self._call(node, op, args, made[0] if len(made) == 1 else tuple(made), "ordered")
            found = self.env[node] if len(made) > 1 else (self.env[node],)
            self.env[node] = (None, *found)
        else:
            raise Unsupported(f"{node.target}")

    def _call(self, node: fx.Node, op: object, args: Sequence[object], val: object,
              effect: str) -> None:
        types = tuple(self._type(v) for v in _leaves(val))
        given = (*(("", self._arg(a)) for a in args),
                 *((k, self._arg(a)) for k, a in node.kwargs.items()))
        self._add(node, program.Call(str(op), given, types, effect), val)

    def _add(self, node: fx.Node, op: program.Call | program.Write, val: Any) -> None:
        op.check()
        hints = (str(self._number(v)) if isinstance(v, torch.SymInt) else node.name
                 for v in _leaves(val))
        values = tuple(self._value(h, t) for h, t in zip(hints, op.infer(), strict=True))
        for value in values:
            origins.record(value, [origin_of(node)])
        self.ops.append(replace(op, results=values))
        self.env[node] = _like(val, iter(values))

    def _arg(self, x: Any) -> Any:
        """An argument of a node as one of a `call`."""
        match x:
            case fx.Node():
                found = self.env.get(x)
                if found is None:
                    raise Unsupported(f"the value of {x.target} as an operand")
                return found
            case None | bool() | int() | float() | str():
                return x
            case tuple() | list():
                return tuple(self._arg(y) for y in x)
            case torch.SymInt():
                return self._number(x)
            case torch.dtype():
                return TORCH_DTYPES.get(x, f"dtype:{x}")
            case torch.device() | torch.layout() | torch.memory_format():
                return f"{type(x).__name__}:{x}"
        raise Unsupported(f"an argument of {type(x).__name__}")

    def _result(self, x: Any) -> Result:
        if x is None or isinstance(x, int):
            return x
        found = self.env.get(x, x)
        if found is not None and not isinstance(found, Value | Expr):
            raise Unsupported(f"the value of {x} as a result")
        return found


def _is_size(target: Any) -> bool:
    """Whether a node with a size as its result only computes with sizes."""
    return not isinstance(target, torch._ops.OpOverload) or str(target).startswith("aten.sym_")


def _writes_back(node: fx.Node) -> bool:
    """Whether a node is AOTAutograd's update of a mutated input."""
    return (node.target is torch.ops.aten.copy_.default and isinstance(node.args[0], fx.Node)
            and node.args[0].op == "placeholder")


def effect_of(node: fx.Node) -> str:
    """The effect of a call of an operator, "" if there is none."""
    op: Any = node.target
    schema = op._schema
    if schema.is_mutable:
        return "mutates"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "" if _drops_nothing(node, schema) else "rng"
    if op.namespace == "_c10d_functional":
        return "ordered"
    return "" if schema.returns else "raises"


def _drops_nothing(node: fx.Node, schema: Any) -> bool:
    """Whether an op is random only by a dropout that is 0 here, as attention in inference."""
    for n, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[n] if n < len(node.args) else node.kwargs.get(
                argument.name, argument.default_value)
            return bool(given == 0)
    return False


def _check_sizes(func: Func) -> None:
    """Unsupported if a size in a type cannot be read off the arguments at run time."""
    results = [r for op in func.body.ops for r in op.results]
    shapes = [v.type.shape for v in (*func.params, *results) if isinstance(v.type, TensorType)]
    given = [v.type.shape for v in func.params if isinstance(v.type, TensorType)]
    known = {str(size) for shape in given for size in shape if size.is_symbol()}
    known |= {v.name for v in (*func.params, *results) if v.type == INDEX}
    free = {s for shape in shapes for size in shape for s in size.symbols()} - known
    if free:
        raise Unsupported(f"no argument gives the sizes {', '.join(sorted(free))}")


FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n\s+([^\n]*))?')
TORCH = os.path.dirname(torch.__file__)


def origin_of(node: fx.Node) -> Origin:
    """The node and the innermost line of the user's code that made it."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if not f[0].startswith(TORCH)] or frames
    path, line, code = own[-1] if own else ("", "", "")
    return Origin(node.name, str(node.target), f"{path}:{line}" if path else "", code)
