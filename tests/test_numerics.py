"""What `docs/numerics.md` says, claim by claim."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import Prog

from rung.core.expr import Expr
from rung.core.op import Func, Value, walk
from rung.core.parse import parse_module
from rung.core.scalar import SCALARS, ScalarFn, round_bf16
from rung.core.types import BF16, BOOL, DTYPES, F16, F32, F64, I64, DType
from rung.frontends.torch import aten
from rung.loop import ir as loop
from rung.loop import simplify as loop_rules
from rung.pipeline import PASSES
from rung.program.ir import Module
from rung.targets.cpu.machine import NEEDS, features
from rung.tensor import ir as tensor
from rung.tensor import simplify as tensor_rules
from rung.tools.capture import capture
from rung.tools.check import results
from rung.tools.given import Given

DOCUMENT = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text()
FLOATS = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, 0.5, 3.0, -2.5, 65504.0, 1e5, 3e38, -3e38,
          1e-40, -1e-45]


def special(dtype: DType) -> np.ndarray:
    """Values at the edges of a type."""
    if dtype is BOOL:
        return np.array([False, True])
    if not dtype.is_float:
        info = np.iinfo(dtype.numpy)
        return np.array([info.min, info.max, 0, 1, 2, info.max - 1], dtype.numpy)
    with np.errstate(over="ignore"):
        found = np.array(FLOATS, np.float32 if dtype is BF16 else dtype.numpy)
    return round_bf16(found) if dtype is BF16 else found


def same_bits(old: np.ndarray, new: np.ndarray) -> bool:
    """Equal values, zeros of equal sign, NaN at the same places."""
    if old.dtype != new.dtype or not np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
        return False
    return old.dtype.kind != "f" or bool((np.signbit(old) == np.signbit(new))[~np.isnan(old)].all())


# --- the rules of both simplifiers

def kernel(body: str, dtype: str = "f32", out: str = "") -> Func:
    """A kernel over 6 or more elements that stores `body`, an expression of x0[i] and x1[i]."""
    n = len(special(DTYPES[dtype])) ** 2
    text = (f"kernel k(x0: {dtype}[{n}], x1: {dtype}[{n}]) -> y: {out or dtype}[{n}]\n"
            f"  y[i] = {body}\n")
    (made,) = parse_module(text, {"kernel": loop.VOCABULARY})
    return made


def run_kernel(func: Func, dtype: str) -> np.ndarray:
    pairs = np.array(list(product(special(DTYPES[dtype]), repeat=2)))
    arrays = {"x0": pairs[:, 0].copy(), "x1": pairs[:, 1].copy()}
    out = func.outs[0]
    arrays["y"] = np.zeros(len(pairs), loop.dtype_of(out.type).numpy)
    loop.run_kernel(func, arrays)
    return arrays["y"]


def takes_f32(fn: ScalarFn) -> bool:
    """Whether a function maps f32 to f32."""
    try:
        return fn.result((F32,) * fn.arity) == F32
    except ValueError:
        return False


Rows = list[tuple[str, str, str]]  # expression, type of x0 and x1, type of y if that is another
ZEROS_AND_ONES = list(product("+-*/", (0, 1, -1)))
LOOP: dict[Callable[..., Any], Rows] = {
    loop_rules.of_cast: [("f32(x0[i])", "f32", ""), *(
        (f"{wide}(where(x0[i] != x1[i], x0[i], x1[i]))", narrow, wide)
        for narrow, wide in (("f32", "f64"), ("i32", "i64"), ("i8", "i64")))],
    loop_rules.constant_index: [("x0[i] + index(3)", "i64", "")],
    loop_rules.identity_operand: [
        *((f"x0[i] {op} {dtype}({float(k)})", dtype, "") for op, k in ZEROS_AND_ONES
          for dtype in ("f32", "f64")),
        *((f"x0[i] {op} {dtype}({k})", dtype, "") for op, k in ZEROS_AND_ONES if op != "/"
          for dtype in ("i64", "i32", "i8")),
        *((f"f32({float(k)}) {op} x0[i]", "f32", "") for op, k in ZEROS_AND_ONES),
        *((f"i64({k}) {op} x0[i]", "i64", "") for op, k in ZEROS_AND_ONES if op != "/"),
        *((f"x0[i] {op} -0.0", "f32", "") for op in "+-*/")],
    loop_rules.of_where: [("where(x0[i] < x1[i], x0[i], x0[i])", "f32", ""),
                          ("where(x0[i] < x1[i], where(x0[i] < x1[i], x0[i], 2.0), x1[i])",
                           "f32", "")],
    loop_rules.idempotent: [
        *((f"{fn}(x0[i], x0[i])", dtype, "") for fn in ("max", "min") for dtype in ("f32", "i64")),
        *(("neg(neg(x0[i]))", dtype, "") for dtype in ("f32", "i64", "i8"))],
    loop_rules.folded_constant: [
        (f"x0[i] + {fn.name}({', '.join(args)})", "f32", "")
        for fn in SCALARS.values() if takes_f32(fn) and fn.arity < 3
        for args in product(("nan", "-inf", "-0.0", "2.5", "1e+38"), repeat=fn.arity)],
}


@pytest.mark.parametrize("rule", LOOP, ids=lambda r: r.__name__)
def test_rules_of_kernels_keep_every_bit(rule: Callable[..., Any],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    fired = 0
    for body, dtype, out in LOOP[rule]:
        func = kernel(body, dtype, out)
        for rules in (loop_rules.RULES, (rule,)):
            monkeypatch.setattr(loop_rules, "RULES", rules)
            for precision in loop_rules.ROUNDINGS:
                after = loop_rules.simplify(func, precision)
                fired += rules == (rule,) and str(after) != str(func)
                assert same_bits(run_kernel(func, dtype), run_kernel(after, dtype)), (body, after)
    assert fired


def test_dropping_a_rounding_keeps_what_is_special() -> None:
    func = kernel("f32(round_bf16(x0[i] * x1[i]))", "f32")
    after = loop_rules.simplify(func, "default")
    assert str(loop_rules.simplify(func, "eager")) == str(func) != str(after)
    old, new = run_kernel(func, "f32"), run_kernel(after, "f32")
    assert np.array_equal(np.isnan(old), np.isnan(new))
    assert np.array_equal(np.signbit(old)[~np.isnan(old)], np.signbit(new)[~np.isnan(new)])
    assert np.array_equal(np.isinf(old), np.isinf(new))


def test_roundings_that_overflow_stay() -> None:
    func = kernel("f32(round_f16(x0[i] * x1[i]))", "f32")
    assert str(loop_rules.simplify(func, "default")) == str(func)


def test_a_written_out_contraction_keeps_what_is_special() -> None:
    n = len(special(F32))
    (func,) = parse_module(f"""
kernel k(x0: f32[{n},{n}], x1: f32[{n},{n}]) -> y: f32[{n},{n}]
  s = fold add x0[i,k] * x1[k,j] over k {n} : f32 over i,j acc f32
  y[i,j] = s
""", {"kernel": loop.VOCABULARY})
    after = loop_rules.simplify(func, "eager")
    assert "contract add mul" in str(after)
    column = special(F32)[:, None].repeat(n, 1)
    a = np.where(np.eye(n, dtype=bool), column, np.float32(0))  # one special value a row
    found = []
    for k in (func, after):
        arrays = {"x0": a, "x1": np.ones((n, n), np.float32), "y": np.zeros((n, n), np.float32)}
        with np.errstate(all="ignore"):
            loop.run_kernel(k, arrays)
        found.append(arrays["y"])
    assert np.array_equal(*found, equal_nan=True)


def whole(p: Prog, dtype: DType) -> Value:
    return p.param("x", len(special(dtype)), dtype=dtype)


def casts(p: Prog, dtype: DType) -> list[Value]:
    x = whole(p, dtype)
    return [p.cast(p.cast(x, wide), dtype) for wide in DTYPES.values() if wide != dtype
            and not (dtype.is_float and wide.kind in "iu")] + [p.cast(x, dtype)]


def by_one(p: Prog, dtype: DType) -> list[Value]:
    if dtype in (BF16, F16, BOOL):
        return []
    x = whole(p, dtype)
    return [p.map(fn, x, k) for fn in ("mul", "add", "sub", *(["div"] if dtype.is_float else []))
            for k in ([1.0, 0.0, -0.0] if dtype.is_float else [1, 0])]


def of_full(p: Prog, dtype: DType) -> list[Value]:
    x = whole(p, dtype)
    fulls = [p.full(v, len(special(dtype)), dtype=dtype) for v in special(dtype).tolist()]
    if dtype in (BF16, F16, BOOL):
        return fulls
    return [p.b.one(tensor.Map(fn, (x, full))) for full in fulls for fn in ("max", "sub", "mul")]


def cast_fulls(p: Prog, dtype: DType) -> list[Value]:
    return [p.cast(p.full(v, 3, dtype=dtype), to) for v in special(dtype).tolist()
            for to in DTYPES.values() if not (dtype.is_float and to.kind in "iu")]


def index_of_full(p: Prog, dtype: DType) -> list[Value]:
    whole(p, dtype)
    return [p.index(p.full(v, 3, dtype=dtype), [7], lambda i: [i % 3], lambda i: [i - 1], fill)
            for v in special(dtype).tolist() for fill in special(dtype).tolist()[:6]]


def index_of_index(p: Prog, dtype: DType) -> list[Value]:
    x, n = whole(p, dtype), len(special(dtype))
    fills = special(dtype).tolist()[:6]
    return [p.index(p.index(x, [n + 2], lambda i: [i - 1], lambda i: [i - 1, Expr.of(n) - i], a),
                    [n + 4], lambda i: [i - 1], lambda i: [i - 1, Expr.of(n + 2) - i], b)
            for a in fills for b in fills]


def nothing_done(p: Prog, dtype: DType) -> list[Value]:
    x = whole(p, dtype)
    monoid = "or" if dtype is BOOL else "max"
    return [p.concat(0, x), p.index(x, tensor.shape_of(x), lambda i: [i]), *(
        [] if dtype in (BF16, F16) else [p.reduce(monoid, x)])]


TENSOR: dict[Callable[..., Any], Callable[[Prog, DType], list[Value]]] = {
    tensor_rules.cast_back: casts, tensor_rules.map_by_one: by_one,
    tensor_rules.map_of_full: of_full, tensor_rules.cast_of_full: cast_fulls,
    tensor_rules.index_of_full: index_of_full, tensor_rules.index_of_index: index_of_index,
    tensor_rules.identity_index: nothing_done, tensor_rules.concat_of_one: nothing_done,
    tensor_rules.reduce_over_nothing: nothing_done}


@pytest.mark.parametrize("rule", TENSOR, ids=lambda r: r.__name__)
def test_rules_of_tensors_keep_every_bit(rule: Callable[..., Any]) -> None:
    for dtype in DTYPES.values():
        p = Prog()
        made = TENSOR[rule](p, dtype)
        if not made:
            continue
        program = p.done(*made)
        inputs = [special(dtype)] * len(program.params)
        after = tensor_rules.simplify(program)
        assert rule is not tensor_rules.cast_of_full or len(after.body.ops) < len(program.body.ops)
        old, new = (results(Module((f,)), inputs) for f in (program, after))
        assert all(same_bits(np.asarray(a), np.asarray(b))
                   for a, b in zip(old, new, strict=True)), dtype


def test_every_rule_is_tried() -> None:
    """The last two by tests of their own: of one term in `loop/test_passes.py`."""
    assert {*LOOP, loop_rules.written_out, loop_rules.one_term} == set(loop_rules.RULES)
    assert set(TENSOR) == {r for rules in tensor_rules.RULES.values() for r in rules}


# --- passes and accumulators

def test_the_table_of_passes_is_the_pipeline() -> None:
    rows = re.findall(r"^\| (\w+\.\w+) \| (exact|reassociates|changes-values) \|$", DOCUMENT, re.M)
    assert rows == [(f"{p.rung}.{p.name}", p.kind) for p in PASSES]
    assert len(DOCUMENT.splitlines()) <= 110


def accumulators(fn: Callable[..., Any], dtype: torch.dtype) -> set[DType]:
    x = torch.ones(4, 4).to(dtype)
    (graph,) = capture(Given("fn", fn, (x,))).graphs
    assert graph.imported
    body = aten.lower(graph.imported.func).body
    return {op.acc for op in walk(body) if isinstance(op, tensor.Reduce | tensor.Contract)}


@pytest.mark.parametrize(("dtype", "acc"), [
    (torch.bfloat16, F32), (torch.float16, F32), (torch.float32, F32), (torch.float64, F64)])
def test_floats_accumulate_in_f32_or_wider(dtype: torch.dtype, acc: DType) -> None:
    for fn in (lambda x: x.sum(0), lambda x: x @ x):
        assert accumulators(fn, dtype) == {acc}
    for fn in (lambda x: x.mean(), lambda x: x.var(0)):
        assert accumulators(fn, dtype) == {F64}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_integers_are_summed_in_i64(dtype: torch.dtype) -> None:
    assert accumulators(lambda x: x.sum(0), dtype) == {I64}
    most = torch.full((3,), torch.iinfo(torch.int64).max)
    assert torch.equal(compiled(lambda x: x.sum(0))(most), most.sum(0))
    narrow = torch.full((3,), 100, dtype=torch.int8)
    assert torch.equal(compiled(lambda x: x + x)(narrow), narrow + narrow)


# --- what runs

def compiled(fn: Callable[..., Any], precision: str = "default") -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="rung", options={"strict": True, "precision": precision})


def chain(seed: int, jumps: bool) -> tuple[Callable[..., Any], str]:
    """Elementwise operators without transcendental functions, at random."""
    rng, names, lines = random.Random(seed), ["a", "b", "c"], list[str]()
    for n in range(8):
        x, y = rng.choice(names[-3:]), rng.choice(names)
        lines.append(f"v{n} = " + rng.choice((
            f"{x} + {y}", f"{x} - {y}", f"{x} * {y}", f"{x} / ({y} * {y} + 0.5)", f"-{x}",
            f"torch.maximum({x}, {y})", f"{x}.abs()", f"{x} * 0.25", f"torch.relu({x})",
            *((f"torch.where({x} > {y}, {x}, {y})", f"torch.floor({x} * 4)") if jumps else ()))))
        names.append(f"v{n}")
    text = "def chain(a, b, c):\n" + "".join(f"    {x}\n" for x in lines) + "    return v7\n"
    scope: dict[str, Any] = {"torch": torch}
    exec(text, scope)
    return scope["chain"], text


@pytest.mark.parametrize("seed", range(12))
def test_eager_gives_eagers_bits_and_default_rounds_once(seed: int) -> None:
    jumping, shown = chain(seed, True)
    fn, text = chain(seed, False)
    torch.manual_seed(seed)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        args = [torch.randn(5, 33).to(dtype) for _ in range(3)]
        assert torch.equal(compiled(jumping, "eager")(*args), jumping(*args)), shown
        wide = fn(*(x.float() for x in args)).to(dtype)
        want = fn(*args) if dtype is torch.float16 else wide
        assert torch.equal(compiled(fn)(*args).nan_to_num(), want.nan_to_num()), text


LEAVING: dict[str, Callable[..., torch.Tensor]] = {
    "a conversion": lambda a, b, c: (a + b).float(),
    "a conversion and back": lambda a, b, c: (a + b).float().bfloat16().float(),
    "a view": lambda a, b, c: (a + b).t().float() * 2,
    "a promotion": lambda a, b, c: (a * b) + c,
    "a promotion in place": lambda a, b, c: c.clone().add_(a * b),
    "a number": lambda a, b, c: (a[0, 0] * b[0, 0]) * c,
    "a choice": lambda a, b, c: torch.where(c > 0, a * b, c),
    "a copy": lambda a, b, c: c.clone().copy_(a * b),
    "a concatenation": lambda a, b, c: torch.cat([a * b, c]),
    "a comparison": lambda a, b, c: (a * b) < c,
    "f64": lambda a, b, c: (a * b).double(),
}


@pytest.mark.parametrize("name", LEAVING)
def test_what_leaves_bf16_has_its_bits(name: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 9, 33).bfloat16()
    args = a, b, (a * b).float() + torch.randn(9, 33) * 1e-3
    assert torch.equal(compiled(LEAVING[name])(*args), LEAVING[name](*args))


@pytest.mark.parametrize("fn", [torch.rsqrt, torch.sqrt, torch.exp, torch.tanh])
def test_eager_gives_eagers_bits_of_functions_that_round_more_than_once(fn: Any) -> None:
    """Of halves, eager rounds the root before it divides."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.linspace(0.01, 8, 999).to(dtype)
        assert torch.equal(compiled(fn, "eager")(x), fn(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_and_contractions_keep_their_bound(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(7, 515) * 100).to(dtype), torch.randn(515, 9).to(dtype)
    for fn, terms in ((lambda x, w: x.sum(1), x.double().abs().sum(1)),
                      (lambda x, w: x @ w, x.double().abs() @ w.double().abs())):
        exact = fn(x.double(), w.double())
        last = exact.abs() * torch.finfo(dtype).eps
        error = (compiled(fn)(x, w).double() - exact).abs()
        assert (error <= 515 * 2.0 ** -24 * terms + last).all()


def test_what_is_correctly_rounded() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(999) + 0.01, torch.randn(999)
    for fn in (lambda x, y: x / y, lambda x, y: x * y, lambda x, y: x + y, lambda x, y: x.sqrt(),
               lambda x, y: x.to(torch.bfloat16), lambda x, y: y.round()):
        want = fn(x.double(), y.double())
        assert torch.equal(compiled(fn)(x, y), want.to(fn(x, y).dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eager_gives_eagers_bits_of_powers(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x ** n for n in (-2, -1, 2, 3, 0.5, 1.5)]

    x = torch.rand(999).to(dtype) + 0.1
    assert all(map(torch.equal, compiled(fn, "eager")(x), fn(x)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", loop_rules.ROUNDINGS)
def test_numbers_are_rounded_to_the_type_that_holds_them(precision: str, dtype: torch.dtype
                                                         ) -> None:
    limit = torch.tensor(0.3, dtype=dtype).repeat(8)
    x = torch.cat([limit, -limit, torch.nextafter(limit, 2 * limit), torch.randn(8).to(dtype)])

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.full_like(x, 8.4) - x, x.masked_fill(x > 0, 8.4) - x,
                torch.where(x > 0, x, 8.4) - x, x.new_full((), 8.4) - x,
                torch.nn.functional.pad(x, (1, 1), value=8.4) - 1,
                torch.nn.functional.hardshrink(x, 0.3)]

    assert all(map(torch.equal, compiled(fn, precision)(x), fn(x)))
    given = x.clone().requires_grad_()
    for f in (torch.nn.functional.hardshrink, torch.nn.functional.softshrink):
        ours, eager = (torch.autograd.grad(y, given, x)[0] for y in (
            compiled(lambda x, f=f: f(x, 0.3), precision)(given), f(given, 0.3)))
        assert torch.equal(ours, eager)


def test_a_squared_error_in_f16_rounds_each_step() -> None:
    x, y = torch.randn(2, 999).half().unbind()
    given, loss = x.clone().requires_grad_(), torch.nn.functional.mse_loss
    ours, eager = (torch.autograd.grad(f(given, y).mul(3), given)[0]
                   for f in (compiled(loss, "eager"), loss))
    assert torch.equal(ours, eager)


def test_addcdiv_is_what_dynamo_writes_it_out_as() -> None:
    x, a, b = torch.randn(3, 999).unbind()
    for value, traced in ((1, torch.addcdiv(x, a, b)), (3.14, x + a / b * 3.14)):
        fn = compiled(lambda x, a, b, k=value: torch.addcdiv(x, a, b, value=k), "eager")
        assert torch.equal(fn(x, a, b), traced)


SPECIAL = torch.tensor(FLOATS, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_eager_gives_eagers_bits_of_gradients(dtype: torch.dtype) -> None:
    x, w = (torch.randn(2000).to(dtype) for _ in range(2))
    for fn in (torch.tanh, torch.sigmoid, torch.nn.functional.silu, torch.nn.functional.glu):
        given = x.clone().requires_grad_()
        ours, eager = (torch.autograd.grad(y, given, w[:len(y)])[0]
                       for y in (compiled(fn, "eager")(given), fn(given)))
        assert torch.equal(ours, eager), fn


@pytest.mark.parametrize("precision", loop_rules.ROUNDINGS)
@pytest.mark.parametrize("fn", [
    lambda x, y: x + 0.0, lambda x, y: x * 0.0, lambda x, y: x - x,
    lambda x, y: torch.relu(x * 1.0), lambda x, y: torch.maximum(x, y),
    lambda x, y: torch.where(x < y, x, y), lambda x, y: x / y,
    lambda x, y: x * 0.5, lambda x, y: (x + y) * y, lambda x, y: torch.clamp(x, -1, 1)])
def test_special_values_are_eagers(fn: Callable[..., Any], precision: str) -> None:
    x, y = SPECIAL[:, None].expand(-1, len(FLOATS)).contiguous(), SPECIAL.repeat(len(FLOATS), 1)
    got, want = compiled(fn, precision)(x, y), fn(x, y)
    known = ~want.isnan()
    assert torch.equal(got.isnan(), ~known) and torch.equal(got[known], want[known])
    either = torch.maximum(x, y) == 0 if "maximum" in fn.__code__.co_names else torch.zeros(())
    signs = known & ~either.bool()  # the larger of 0.0 and -0.0 is either
    assert torch.equal(got.signbit()[signs], want.signbit()[signs])


@pytest.mark.parametrize("dynamic", [False, True])
def test_variances_of_few_terms_are_eagers(dynamic: bool) -> None:
    corrections = [-1, 0, 0.5, 1, 2, 3]

    def fn(*xs: torch.Tensor) -> list[torch.Tensor]:
        found = [f(x, 0, correction=less) for x in xs for less in corrections
                 for f in (torch.var_mean, torch.std)]
        return torch.utils._pytree.tree_leaves(found)

    for dtype in (torch.float32, torch.bfloat16):
        xs = [torch.arange(2.0 * n).view(n, 2).to(dtype) for n in range(3)]
        run = torch.compile(fn, backend="rung", dynamic=dynamic, options={"strict": True})
        for got, want in zip(run(*xs), fn(*xs), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)


def test_a_variance_of_as_many_terms_as_data_say() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.var(x[x > 0], correction=less) for less in (-1, 0, 1)]

    run = torch.compile(fn, backend="rung", options={"strict": True})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for x in (-torch.ones(3), torch.tensor([1.0, -1, 3]), torch.tensor([-1.0, -1, 3])):
            for got, want in zip(run(x), fn(x), strict=True):
                torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("fn", [
    lambda x: torch.nn.functional.dropout(x, 0.4) * 2, lambda x: x + torch.rand_like(x),
    lambda x: torch.randn(3, 5) * x, lambda x: torch.bernoulli(torch.full_like(x, 0.3)) - x,
    lambda x: torch.rand(5) + torch.randint(0, 9, (3, 5)) + torch.rand(5) * x])
def test_random_numbers_are_eagers(fn: Callable[..., Any]) -> None:
    x = torch.randn(3, 5)
    for seed in (0, 1):
        found = []
        for run in (fn, compiled(fn)):
            torch.manual_seed(seed)
            found.append((run(x), torch.rand(4)))  # the generator stands where eager leaves it
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_left_of_a_variance_far_from_zero_is_eagers() -> None:
    """Its gradient is the distance from a mean whose last bit depends on the order of the sum."""
    torch.manual_seed(0)
    for size in (300, 301, 5000):
        x = (torch.randn(size) + 1e5).requires_grad_()
        ours, eager = (torch.autograd.grad(f(x), x)[0] for f in (compiled(torch.var), torch.var))
        torch.testing.assert_close(ours, eager)
        assert torch.equal(compiled(lambda x: x - x.mean())(x), x - x.mean())


@pytest.mark.parametrize("target", ["cpu.avx512", "cpu.avx2", "cpu.base"])
@pytest.mark.parametrize("k", [1024, 4096])
def test_products_are_summed_in_blocks(target: str, k: int) -> None:
    """Far below what one sum of all terms errs by, which is 0.4 u k."""
    if not NEEDS[target] <= features():
        pytest.skip(f"this CPU is no {target}")
    torch.manual_seed(0)
    x, w = torch.randn(48, k), torch.randn(k, 96)
    got = torch.compile(torch.mm, backend="rung", dynamic=False, options={
        "target": target, "strict": True})(x, w)
    error = (got.double() - x.double() @ w.double()).square().mean().sqrt()
    assert float(error) <= 2.0 ** -24 * math.sqrt(256 * k)


@pytest.mark.parametrize("target", ["cpu.avx512", "cpu.avx2", "cpu.base"])
def test_the_first_example_of_the_readme(target: str, settings: Callable[..., None]) -> None:
    """As it is printed, assertion included, with whatever numbers it draws."""
    if not NEEDS[target] <= features():
        pytest.skip(f"this CPU is no {target}")
    text = (Path(__file__).parents[1] / "README.md").read_text()
    example = text.partition("```python\n")[2].partition("```")[0]
    assert "assert_close" in example
    settings(target=target)
    for seed in range(8):
        torch.manual_seed(seed)
        exec(example, {})
