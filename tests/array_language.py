"""A front end for a language that nobody speaks, on NumPy: five words, one line a word.

    u = dot t w        t = flip x        y = square x        s = total x        z = sort x

`flip` transposes, `total` sums rows, and `sort`, which Rung does not know, stays NumPy's call. A
line `x <- y` writes into an argument; the last line names the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rung.compilation import compile_program
from rung.core.expr import Expr
from rung.core.op import Builder, Func, Names, Op, Value
from rung.core.ops import Map
from rung.core.options import Options
from rung.core.rewrite import rewrite
from rung.core.types import F32, DType, TensorType
from rung.program.externs import Externs, Tensors, Texts
from rung.program.ir import Call, Return, Write
from rung.tensor.ir import Contract, Index, Reduce, axis_names, shape_of, symbols

Array = np.ndarray[Any, Any]


# --- NumPy's arrays, as the host's code has them

def empty(shape: Sequence[int], strides: Sequence[int], dtype: Any) -> Array:
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    return laid_out(np.empty(last + 1, dtype), shape, strides)


def laid_out(x: Array, shape: Sequence[int], strides: Sequence[int]) -> Array:
    return as_strided(x, shape, [s * x.itemsize for s in strides])


def steps(x: Array) -> tuple[int, ...]:
    return tuple(s // x.itemsize for s in x.strides)


def fit(x: Array, shape: Sequence[int], strides: Sequence[int], dtype: Any) -> Array:
    made = empty(shape, strides, dtype)
    made[...] = x
    return made


def address(x: Array, name: str, shape: Sequence[int], strides: Sequence[int], dtype: Any) -> int:
    if (x.shape, steps(x), x.dtype) != (shape, strides, dtype):
        raise RuntimeError(f"{name} is {x.shape} of {x.dtype}, laid out as {steps(x)}")
    return x.ctypes.data


def memory(count: int) -> tuple[Array, int]:
    made = np.empty(count, np.uint8)
    return made, made.ctypes.data


def dtype_text(dtype: DType) -> str:
    return f"dtype({dtype.numpy.name!r})"


TENSORS = Tensors(
    Texts(dtype_text, "steps({0})", "{0}.flags.c_contiguous", "{0}.reshape({1})",
          "laid_out({0}, {1}, {2})", "{0}[...] = {1}", "{0}.ctypes.data"),
    {"empty": empty, "fit": fit, "address": address, "leaves": lambda out, *_: list(out),
     "bump": lambda _: None, "steps": steps, "laid_out": laid_out, "dtype": np.dtype}, memory)


# --- the words: NumPy's meaning, and Rung's

def flip(x: Value) -> Op:
    i, j = axis_names(2)
    return Index(x, (i, j), shape_of(x)[::-1], symbols((j, i)))


WORDS: dict[str, tuple[Callable[..., Array], Callable[..., Op] | None]] = {
    "square": (np.square, lambda x: Map("mul", (x, x))),
    "flip": (np.transpose, flip),
    "total": (lambda x: x.sum(1), lambda x: Reduce("add", x, (1,), F32)),
    "dot": (np.matmul, lambda a, b: Contract("add", "mul", a, ("i", "k"), b, ("k", "j"),
                                             ("i", "j"), F32)),
    "sort": (np.sort, None)}


def lower(program: Func, precision: str) -> Func:
    def rule(op: Op, out: Builder) -> list[Value] | None:
        meaning = WORDS[op.target][1] if isinstance(op, Call) and op.target in WORDS else None
        return [out.one(meaning(*op.operands()))] if meaning else None
    return rewrite(program, rule)


def callee(word: str) -> Callable[..., Any]:
    return {"copy": np.copy, "empty": empty}.get(word) or WORDS[word][0]


def run(call: Call, operands: Mapping[Value, Array], interp: object) -> Array:
    out: Array = callee(call.target)(*operands.values())
    return out


EXTERNS = Externs(lower, run, callee, TENSORS, lambda: f"1 on numpy {np.__version__}")


# --- its texts

def parse(text: str, shapes: Mapping[str, Sequence[int | str]]) -> Func:
    """The program of a text whose arguments have these shapes, one call a word."""
    lines = [line.split() for line in text.strip().splitlines()]
    written, out = {line[0] for line in lines if line[1:2] == ["<-"]}, Builder(Names())
    known = {name: Value(out.names(name), TensorType(F32, tuple(map(Expr.of, shape))),
                         "mutated" if name in written else "input")
             for name, shape in shapes.items()}
    params = tuple(known.values())
    for name, mark, word, *rest in lines[:-1]:
        if mark == "<-":
            out.add(Write(known[name], known[word]))
            continue
        given = [known[x] for x in rest]
        meaning = WORDS[word][1]
        kinds = meaning(*given).infer() if meaning else (given[0].type,)
        known[name] = out.one(Call(word, tuple(("", x) for x in given), kinds), name)
    out.add(Return(tuple(known[name] for name in lines[-1])))
    return Func("program", "main", params, (), out.block())


def interpret(text: str, args: Mapping[str, Array]) -> list[Array]:
    """What NumPy makes of a text."""
    known, lines = dict(args), [line.split() for line in text.strip().splitlines()]
    for name, mark, word, *rest in lines[:-1]:
        if mark == "<-":
            known[name][...] = known[word]
        else:
            known[name] = WORDS[word][0](*(known[x] for x in rest))
    return [known[name] for name in lines[-1]]


def compiled(text: str, shapes: Mapping[str, Sequence[int | str]], target: str
             ) -> Callable[[list[Any]], Sequence[Any]]:
    """The callable of a text, on the list of its arguments."""
    return compile_program(parse(text, shapes), Options(target=target), (), {}, EXTERNS)
