"""An ATen graph of AOTAutograd to a program with one `call` per node.

    add: f32[s0, 8] = torch.ops.aten.add.Tensor(arg0_1, 2)     # the fx node
    add = call aten.add.Tensor(arg0_1, 2) : f32[s0,8]          # the op

Sizes become `Expr`s here, and sympy goes no further. Other numbers are computed by the host, and so
are sizes that no `Expr` is equal to: they get a symbol of their own.

    sym_min = torch.sym_min(arg0_1, 5);  truediv = 1 / arg0_1
    u10000 = call builtins.min(5, size(s0)) : index
    truediv = call _operator.truediv(1, size(s0)) : f64

What the program cannot say (subclasses, several devices) raises Unsupported: the graph then runs as
it is.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pkgutil import resolve_name
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from rung.core import origins
from rung.core.errors import Unsupported
from rung.core.expr import ONE, ZERO, Expr, is_size, may_be_negative, sym
from rung.core.op import RESERVED, Block, Func, Names, Op, Value, expressions
from rung.core.types import INDEX, TensorType, Type, contiguous, shape_of
from rung.frontends.torch.aligned import align
from rung.frontends.torch.calls import effect_of, memory_of
from rung.frontends.torch.compat import (
    Sympy,
    auto_functionalized,
    constant_of,
    is_signed,
    mutable,
    size_expr,
    with_effects,
)
from rung.frontends.torch.higher import APPLY, FUNCTION, Applied, View
from rung.frontends.torch.places import brought, home_of, is_scalar, takes_scalars
from rung.frontends.torch.promises import is_promised, promise
from rung.frontends.torch.sources import origin_of
from rung.frontends.torch.tensors import HOST
from rung.frontends.torch.types import (
    TORCH_DTYPES,
    order_of,
    to_expr,
    type_of,
)
from rung.program import ir as program

NUMBERS = int | float | torch.SymInt | torch.SymFloat | torch.SymBool
Result = Value | Expr | float | None
"""One output of the graph: a tensor or computed number, a size, a constant or nothing."""


@dataclass(frozen=True)
class Imported:
    """`func` takes the graph's inputs, but for those at `tokens`, and then `constants`; it returns
    the tensors of `results`. It runs on the device `home`."""

    func: Func
    constants: tuple[torch.Tensor | Applied, ...]
    results: tuple[Result, ...]
    tokens: tuple[int, ...] = ()  # of inputs by which torch orders effects, and which hold nothing
    home: torch.device = HOST


def import_graph(gm: fx.GraphModule, name: str = "main",
                 static: Collection[int] = ()) -> Imported:
    """The program of an inference, forward or backward graph.

    `static` are the positions of the inputs that are parameters or buffers. Raises Unsupported.
    Large products of the graph get rows that begin at multiples.
    """
    if align(gm.graph):
        gm.recompile()
    return _Importer(gm, frozenset(static)).run(name)


FUNCTIONS = {"Max": "builtins.max", "Min": "builtins.min", "Abs": "builtins.abs",
             "FloorDiv": "_operator.floordiv", "CleanDiv": "_operator.floordiv",
             "Mod": "_operator.mod", "PythonMod": "_operator.mod"}
"""Sympy's names of functions of integers that the host computes."""


def function_name(function: object) -> str:
    """The target of a call of an operator or of a function of numbers."""
    if isinstance(function, torch._ops.OpOverload):
        return str(function)
    name = f"{function.__module__}.{getattr(function, '__name__', '')}"
    if name.count(".") > 1 or resolve_name(name) is not function:
        raise Unsupported(name)
    return name


def _leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples and lists that are not None, in order."""
    if isinstance(tree, tuple | list):
        for x in tree:
            yield from _leaves(x)
    elif tree is not None:
        yield tree


def _like(tree: Any, leaves: Iterator[Value | Expr]) -> Any:
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
        self.tokens: list[int] = []
        self.constants: dict[str, tuple[Value, torch.Tensor | Applied]] = {}
        self.ops: list[Op] = []
        self.computes = False
        self.fresh = count(10000)
        self.symbols: set[str] = set()  # names of sizes and numbers that are taken
        self.unread: set[str] = set()  # sizes that the result of a call tells
        self.home = home_of(gm)
        self.known: dict[Sympy, Expr] = {}  # what sympy's expressions are called here
        self.promises: list[program.Call] = []  # checks of sizes, some of which are not read yet
        self.written = {n.args[0] for n in gm.graph.nodes if _writes_back(n)}

    def run(self, name: str) -> Imported:
        results: tuple[Result, ...] = ()
        exact: dict[Value, Type] = {}
        for node in self.gm.graph.nodes:
            self.computes = node.op != "placeholder"
            match node.op:
                case "placeholder":
                    self._placeholder(node)
                case "get_attr":
                    self._constant(node)
                case "call_function":
                    self._function(node)
                case "output":
                    results = tuple(self._result(x) for x in node.args[0])
                    exact = {r: self._laid_out(r.type, x.meta["val"]) for x, r in zip(
                        node.args[0], results, strict=True)
                        if isinstance(r, Value) and r not in self.params}
                case _:
                    raise Unsupported(f"fx node {node.op} {node.target}")
        if self.promises:
            raise Unsupported("a size that is promised, but never told")
        values = tuple(r for r in results if isinstance(r, Value))
        layouts = tuple(exact.get(v, v.type) for v in values)
        strided = any(isinstance(t, TensorType) and t.strides for t in layouts)
        self.ops.append(program.Return(values, layouts if strided else ()))
        constants = tuple(self.constants.values())
        params = (*self.params, *(value for value, _ in constants))
        func = Func("program", name, params, (), Block((), tuple(self.ops)))
        _check_sizes(func)
        return Imported(func, tuple(c for _, c in constants), results, tuple(self.tokens),
                        self.home)

    def _placeholder(self, node: fx.Node) -> None:
        position = len(self.tokens) + len(self.params)
        if any(u.target is with_effects and u.args[0] is node for u in node.users):
            self.env[node] = None
            self.tokens.append(position)
            return
        val: Any = node.meta.get("val")
        kind = self._type(val)
        if isinstance(val, torch.Tensor) and val.layout is not torch.strided:
            raise Unsupported(f"an argument of layout {val.layout}")
        role = "" if not isinstance(kind, TensorType) else (
            "mutated" if node in self.written else "input")
        if position in self.static and role == "input":
            role = "param"
        hint = node.name
        if kind == INDEX:
            size = self.env[node] = self._size(val)
            taken = {p.name for p in self.params}
            hint = str(size) if size.is_symbol() and str(size) not in taken else hint
        value = self.value(hint, kind, role)
        self.params.append(value)
        self.env.setdefault(node, value)

    def _constant(self, node: fx.Node) -> None:
        path = str(node.target)
        found = operator.attrgetter(path)(self.gm)
        if isinstance(found, torch.Tensor) and path not in self.constants:
            value = self.value(path.replace(".", "_").lstrip("_"), self._type(found), "const")
            self.constants[path] = value, found
        self.env[node] = self.constants[path][0] if path in self.constants else found

    def value(self, hint: str, kind: Type, role: str = "") -> Value:
        """A new value; one that is a size is called by its symbol, as types refer to it."""
        return Value(hint if kind == INDEX and is_size(hint) else self.names(hint), kind, role)

    def _type(self, val: Any) -> Type:
        kind = type_of(val, self._extent)
        away = isinstance(val, torch.Tensor) and val.device != self.home
        return replace(kind, device=val.device.type) if away and isinstance(
            kind, TensorType) else kind

    def _laid_out(self, kind: Type, val: Any) -> Type:
        """The type with the strides of all dimensions, also where one of size 1 leads nowhere:
        Dynamo guards on them too."""
        if not isinstance(kind, TensorType) or kind.strides or ZERO in kind.shape or (
                val.layout is not torch.strided):
            return kind
        strides = tuple(self._extent(n) for n in val.stride())
        return kind if strides == contiguous(kind.shape) else replace(kind, strides=strides)

    # ---- numbers
    def _size(self, x: int | torch.SymInt) -> Expr:
        """A size or number as an expression; Unsupported where only a node can compute it."""
        if not isinstance(x, torch.SymInt):
            return Expr.of(int(x))

        def other(e: Sympy, args: Sequence[Expr]) -> Expr:
            target = FUNCTIONS.get(type(e).__name__)
            if not e.is_Symbol and target is None:
                raise Unsupported(f"size {e}")
            signed = is_signed(x, e)
            self.known[e] = self._symbol(e.name) if e.is_Symbol and not signed else self._host(
                target, args, signed)
            if self.computes and e.is_Symbol:
                self.unread.add(str(self.known[e]))
            return self.known[e]

        return to_expr(size_expr(x), self.known, other)

    def _extent(self, x: int | torch.SymInt) -> Expr:
        """A size or stride of a tensor: what is in it is not negative."""
        size = self._size(x)
        if may_be_negative(size) and isinstance(x, torch.SymInt):
            size = self.known[size_expr(x)] = self._host("builtins.int", (size,))
        return size

    def _host(self, target: str | None, args: Sequence[object], signed: bool = False) -> Expr:
        """A new symbol for an integer that the host computes, or is given."""
        symbol = self._symbol(f"{'z' if signed else 'u'}{next(self.fresh)}")
        if self.computes and target:
            self.compute(Value(str(symbol), INDEX), target, args)
        return symbol

    def _symbol(self, name: str) -> Expr:
        """A new symbol, called `name` unless that says something else here: torch's eighth size
        that follows data is u8."""
        while not is_size(name) or name in self.symbols | RESERVED:
            name = f"u{next(self.fresh)}"
        self.symbols.add(name)
        return sym(name)

    def compute(self, value: Value, target: str, args: Sequence[object], **named: object) -> Value:
        given = (*(("", a) for a in args), *named.items())
        self.ops.append(program.Call(target, given, (value.type,), results=(value,)))
        return value

    def _resized(self, value: Value, other: Value) -> Value:
        """`value` with the sizes of `other`, which it has by torch's guards under other names: an
        argument of n elements comes back from a view by b and n//b with b*(n//b)."""
        given, shape = value.type, shape_of(other.type)
        assert isinstance(given, TensorType)
        if given.shape == shape or len(given.shape) != len(shape) or any(
                a is ONE is not b for a, b in zip(given.shape, shape, strict=True)):
            return value
        made = self.value(value.name, replace(given, shape=shape, strides=None))
        return self.compute(made, "aten.reshape.default", (value, shape))

    def _number(self, node: fx.Node) -> Value | Expr | float:
        """What a node makes of numbers: an expression, or a value that the host computes."""
        x = node.meta["val"]
        if isinstance(x, int | torch.SymInt) and not isinstance(x, bool):
            with suppress(Unsupported):
                return self._size(x)
        target, args = function_name(node.target), tuple(map(self._arg, node.args))
        if isinstance(x, torch.SymInt):
            e = size_expr(x)
            return self.known.setdefault(e, self._host(target, args, is_signed(x, e)))
        return self.compute(self.value(node.name, type_of(x)), target, args)

    def _function(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            self.env[node] = self.env[node.args[0]][node.args[1]]
        elif isinstance(val, NUMBERS) and (not isinstance(node.target, torch._ops.OpOverload)
                                           or str(node.target).startswith("aten.sym_")):
            self.env[node] = self._number(node)
        elif _writes_back(node):
            dst, src = (self._arg(x) for x in node.args[:2])
            self._add(node, program.Write(dst, self._resized(src, dst)), None)
            self.env[node] = dst  # the graph may return what it wrote
        elif node.target is torch.ops.aten._assert_scalar.default and node.args[0] is True:
            pass  # what makes it true is compared where it is made
        elif isinstance(node.target, torch._ops.OpOverload):
            self._call(node, node.target, node.args, node.kwargs, val, effect_of(node))
        elif node.target is with_effects:  # (token, op, *arguments), and gives (token, *results)
            _, op, *args = node.args
            _, *made = node.meta["val"]
            self._call(node, op, args, node.kwargs, made[0] if len(made) == 1 else tuple(made),
                       "ordered")
            found = self.env[node] if len(made) > 1 else (self.env[node],)
            self.env[node] = (None, *found)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self._higher(node, node.target, val)
        else:
            raise Unsupported(f"{node.target}")

    def _higher(self, node: fx.Node, target: Any, val: Any) -> None:
        operands, bases = dict[Value | Expr, None](), list[fx.Node]()
        args, named = list(node.args), dict[str, Any](node.kwargs)
        if self._updates(node):
            (target, *args), bases = args, named.pop("_all_bases")
            named |= mutable(target, named, [b.meta["val"] for b in bases], self._view)
            val = (*val[-len(bases):], *val[:-len(bases)])

        def leaf(x: object) -> object:
            if isinstance(x, fx.Node):
                x = self.env[x] if x.op == "get_attr" else self._arg(x)
            sizes = x.sizes() if isinstance(x, View) else (x,)
            operands.update((n, None) for n in sizes if isinstance(n, Value | Expr))
            return x

        given = tree_map(leaf, (tuple(args), named))
        function = self.value(node.name, FUNCTION, "const")
        self.constants[f"{node.name}()"] = function, Applied(target, given, tuple(operands))
        self._call(node, APPLY, (function, *operands), {}, val, "ordered", bases)
        if bases:  # whose states come last in torch's graph
            made = self.env[node]
            self.env[node] = (*made[len(bases):], *made[:len(bases)])

    def _updates(self, node: fx.Node) -> bool:
        """Whether a node runs a mutable operator on copies of tensors, which can be told to update
        them in place: all are dense, and nothing else that it gives lies in them."""
        bases, op = node.kwargs.get("_all_bases"), node.args[0] if node.args else None
        return (node.target is auto_functionalized and isinstance(op, torch._ops.OpOverload)
                and isinstance(bases, list) and len(bases) > 0
                and not any(r.alias_info for r in op._schema.returns)
                and all(order_of(self.env[b].type) is not None for b in bases))

    def _view(self, number: int, base: torch.Tensor, view: torch.Tensor) -> View:
        """A mutable argument as elements of the operand with that number, which may start at
        another place of a storage than the `base` in the trace."""
        def known(n: int | torch.SymInt) -> int | Expr:
            e = self._extent(n)
            return e if e.const_value is None else e.const_value

        if view is base:
            return View(number)
        return View(number, tuple(map(known, view.shape)), tuple(map(known, view.stride())),
                    known(view.storage_offset() - base.storage_offset()))

    def _call(self, node: fx.Node, op: object, args: Sequence[object],
              named: Mapping[str, object], val: object, effect: str,
              updates: Sequence[fx.Node] = ()) -> None:
        types = tuple(self._type(v) for v in _leaves(val))
        if op is torch.ops.aten._unique.default and shape_of(types[0])[0].const_value is not None:
            raise Unsupported("_unique, of whose result torch 2.11 says that it has one element")
        given = (*(("", self._arg(a)) for a in args),
                 *((k, self._arg(a)) for k, a in named.items()))
        if isinstance(op, torch._ops.OpOverload) and takes_scalars(op):
            given = tuple((name, brought(self, a) if is_scalar(a) else a) for name, a in given)
        states = tuple(map(self._arg, updates))
        memory = memory_of(str(op))
        if memory != "unwritten" and not (given and isinstance(given[0][1], Value)):
            memory = ""  # what it would be of is no tensor of the graph
        made = tuple(val) if isinstance(val, tuple | list) else ()
        places = tuple(n for n, x in enumerate(made) if x is not None)
        self._add(node, program.Call(str(op), given, types, effect, states, memory,
                                     places if len(places) < len(made) else ()), val)

    def _add(self, node: fx.Node, op: program.Call | program.Write, val: Any) -> None:
        op.check()
        leaves = tuple(_leaves(val))
        sizes = [self._size(v) if isinstance(v, torch.SymInt) else None for v in leaves]
        values = tuple(self.value(str(n) if str(n) in self.unread else node.name, t)
                       for n, t in zip(sizes, op.infer(), strict=True))
        origin = origin_of(node, len(self.ops))
        self.ops.append(replace(op, results=values))
        for value in values:
            origins.record(value, [origin])
        told = [self._told(node, *pair) for pair in zip(values, leaves, strict=True)]
        for value, leaf, rest in zip(values, leaves, told, strict=True):
            if not getattr(op, "updates", ()) and is_promised(node, rest):
                self._promise(node, value, leaf)
        self._compare()
        found = (v if n is None else n for n, v in zip(sizes, values, strict=True))
        self.env[node] = _like(val, found)

    def _told(self, node: fx.Node, value: Value, leaf: Any) -> list[Any]:
        """Note the sizes that a result is the first to tell; its other sizes, or its number."""
        if value.name in self.unread:
            self.unread.discard(value.name)
            return []
        if not isinstance(value.type, TensorType):
            return [leaf]
        rest = []
        for what, told, given in (("size", value.type.shape, leaf.shape),
                                  ("stride", value.type.strides or (), leaf.stride())):
            for dim, (size, number) in enumerate(zip(told, given, strict=False)):
                if str(size) not in self.unread:
                    rest += [number] * (what == "size")
                    continue
                self.unread.discard(str(size))
                self.compute(Value(str(size), INDEX), f"aten.sym_{what}.int", (value, dim))
        start = leaf.storage_offset() if leaf.layout is torch.strided else 0
        if "unbacked_bindings" in node.meta and isinstance(start, torch.SymInt) and (
                name := str(self._size(start))) in self.unread:  # of a slice from where data say
            self.unread.discard(name)
            self.compute(Value(name, INDEX), "aten.sym_storage_offset.default", (value,))
        return rest

    def _promise(self, node: fx.Node, value: Value, leaf: Any) -> None:
        """Have a result compared with what is known of it, if that is anything."""
        known: tuple[object, ...] = (constant_of(leaf),)
        if isinstance(leaf, torch.Tensor):
            known = shape_of(value.type), self._arg(leaf.dtype)
            if self.home != HOST:  # where a fake implementation may name another device
                known = (*known, f"device:{self.home}")
        elif isinstance(leaf, torch.SymInt):
            known = (self._size(leaf),)
        if known[0] is not None:
            self.promises.append(promise(node, value, known))

    def _compare(self) -> None:
        """Make the comparisons whose sizes are known by now."""
        for call in self.promises.copy():
            if self.unread.isdisjoint(s for e in expressions(call) for s in e.symbols()):
                self.promises.remove(call)
                self.ops.append(call)

    def _arg(self, x: Any) -> Any:
        """An argument of a node as one of a `call`."""
        match x:
            case fx.Node():
                found = self.env.get(x)
                if found is None or isinstance(found, fx.GraphModule):
                    raise Unsupported(f"the value of {x.target} as an operand")
                return found
            case None | bool() | int() | float() | complex() | str() | Value() | Expr():
                return x
            case tuple() | list():
                return tuple(self._arg(y) for y in x)
            case torch.dtype():
                return TORCH_DTYPES.get(x, f"dtype:{x}")
            case torch.device() | torch.layout() | torch.memory_format():
                return f"{type(x).__name__}:{x}"
        raise Unsupported(f"an argument of {type(x).__name__}")

    def _result(self, x: Any) -> Result:
        found = self.env.get(x, x)
        if found is not None and not isinstance(found, Value | Expr | int):
            raise Unsupported(f"the value of {x} as a result")
        if isinstance(found, Expr) and not found.symbols() <= {p.name for p in self.params}:
            return self.compute(self.value("size", INDEX), "builtins.int", (found,))
        return found


def _writes_back(node: fx.Node) -> bool:
    """Whether a node is AOTAutograd's update of a mutated input."""
    return (node.target is torch.ops.aten.copy_.default and isinstance(node.args[0], fx.Node)
            and node.args[0].op == "placeholder")


def _check_sizes(func: Func) -> None:
    """Unsupported if a size in a type cannot be read off the arguments at run time."""
    results = [r for op in func.body.ops for r in op.results]
    types = [v.type for v in (*func.params, *results) if isinstance(v.type, TensorType)]
    shapes = [(*t.shape, *(t.strides or ())) for t in types]
    known = {str(size) for t in types for size in t.shape if size.is_symbol()}
    known |= {v.name for v in (*func.params, *results) if v.type == INDEX}
    free = {s for shape in shapes for size in shape for s in size.symbols()} - known
    if free:
        raise Unsupported(f"no argument gives the sizes {', '.join(sorted(free))}")
