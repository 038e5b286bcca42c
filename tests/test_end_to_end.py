"""From `torch.compile(backend="rung")` to running code, against eager in float64."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import CASES, Case, Tensors, check_against_float64, copies, worst
from torch import nn

from rung.compilation import Compilation, History
from rung.core import trace
from rung.core.op import Func
from rung.program.ir import Call, KernelCall, Write

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (1, 13, 500, 512, 1000)

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[History]:
    """The history of every graph that is compiled in a test."""
    found: list[History] = []
    real = Compilation.lower

    def record(self: Compilation, program: Func) -> History:
        found.append(real(self, program))
        return found[-1]
    monkeypatch.setattr(Compilation, "lower", record)
    return found


def rung(fn: Callable[..., Any], dynamic: bool | None = False, **options: Any
         ) -> Callable[..., Any]:
    return torch.compile(fn, backend="rung", dynamic=dynamic, options={"strict": True, **options})


def run(case: Case, compiled: Callable[..., Any], args: Tensors) -> Any:
    given = copies(args)
    out = compiled(*given)
    if case.fn.__name__ == "cache_step":
        expected = copies(args)
        case.fn(*expected)
        assert worst(given[6], expected[6]) <= 0.04 * float(expected[6].abs().max())
    return out


def by_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=by_dtype)
@pytest.mark.parametrize("name", CASES)
def test_fixed_size(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    args = case.args(13, dtype)
    with torch.no_grad():
        check_against_float64(run(case, rung(case.fn), args), case.fn, args)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=by_dtype)
@pytest.mark.parametrize("name", CASES)
def test_every_fixed_size(name: str, dtype: torch.dtype, size: int) -> None:
    case = CASES[name]
    args = case.args(size, dtype)
    with torch.no_grad():
        check_against_float64(run(case, rung(case.fn), args), case.fn, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=by_dtype)
@pytest.mark.parametrize("name", CASES)
def test_symbolic_size(name: str, dtype: torch.dtype, stages: list[History]) -> None:
    case = CASES[name]
    compiled = rung(case.fn, dynamic=None)
    with torch.no_grad():
        for size in (*SIZES[1:], 16):
            args = case.args(size, dtype)
            given = copies(args)
            torch._dynamo.mark_dynamic(given[case.dynamic[0]], case.dynamic[1])
            check_against_float64(compiled(*given), case.fn, args)
    assert len(stages) == 1


@pytest.mark.parametrize("name", ["relu_mm", "softmax", "column_sum", "floor_add"])
def test_no_elements(name: str) -> None:
    case = CASES[name]
    args = case.args(0, torch.float32)
    out = rung(case.fn)(*args)
    assert torch.equal(out, case.fn(*args))


def test_cache_is_updated_in_place(stages: list[History]) -> None:
    case = CASES["cache_step"]
    args = case.args(64, torch.float32)
    compiled, cache, place = rung(case.fn), args[6], args[6].data_ptr()
    with torch.no_grad():
        compiled(*args)
        before = cache.clone()
        args[7].fill_(9)
        version = cache._version
        compiled(*args)
    assert cache.data_ptr() == place
    assert cache._version > version
    changed = (cache != before).any(-1).any(1)[0]
    assert changed.nonzero().flatten().tolist() == [9]
    (made,) = stages
    main = made.modules["kernel"].main
    assert not any(isinstance(op, Write | Call) for op in main.body.ops)
    assert not any(k.name.startswith("copy") for k in made.modules["kernel"].kernels)
    assert sum(len(op.updates) for op in main.body.ops if isinstance(op, KernelCall)) == 1


def test_index_out_of_range_is_eagers_error_before_any_write() -> None:
    case = CASES["cache_step"]
    args = case.args(16, torch.float32)
    compiled = rung(case.fn)
    with torch.no_grad():
        compiled(*args)
        before = args[6].clone()
        args[7].fill_(16)
        with pytest.raises(IndexError, match="out of bounds"):
            compiled(*args)
    assert torch.equal(args[6], before)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 48), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def test_training_step() -> None:
    model, twin = Mlp(), Mlp()
    twin.load_state_dict(model.state_dict())
    x, target = torch.randn(32, 20), torch.randint(10, (32,))
    compiled = rung(lambda x: nn.functional.cross_entropy(model(x), target))
    for step in range(2):
        for one, loss in ((model, compiled(x)),
                          (twin, nn.functional.cross_entropy(twin(x), target))):
            loss.backward()
            with torch.no_grad():
                for p in one.parameters():
                    p -= 0.1 * p.grad
                    assert step or p.grad.abs().max() > 0
                one.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_gradients_in_another_layout() -> None:
    w = torch.randn(8, 6, requires_grad=True)
    compiled = rung(lambda x: torch.tanh(x @ w) * 2)
    x = torch.randn(5, 8)
    weight = torch.randn(6, 5).t()
    (compiled(x) * weight).sum().backward()
    got, w.grad = w.grad, None
    ((torch.tanh(x @ w) * 2) * weight).sum().backward()
    torch.testing.assert_close(got, w.grad)


def test_graph_break() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.floor(x) + 1
        torch._dynamo.graph_break()
        return torch.softmax(y, -1)
    x = torch.randn(6, 10)
    torch.testing.assert_close(rung(fn)(x), fn(x))


def test_what_rung_does_not_lower_is_called(stages: list[History]) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, order = torch.sort(x * 2, -1)
        return torch.floor(values) + 1, order
    x = torch.randn(6, 10)
    for got, expected in zip(rung(fn)(x), fn(x), strict=True):
        assert torch.equal(got, expected)
    calls = [op.target for op in stages[0].modules["kernel"].main.body.ops if isinstance(op, Call)]
    assert calls == ["aten.sort.default"]


def test_random_numbers_are_eagers() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.floor(x + torch.rand(4, 5)) + torch.rand(4, 5)
    x, compiled = torch.randn(4, 5), rung(fn)
    torch.manual_seed(3)
    got = compiled(x)
    torch.manual_seed(3)
    assert torch.equal(got, fn(x))


def test_precision_eager_rounds_as_eager_does() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.floor((a + b) * c - a * 0.3) * (b - c) + 1
    args = [torch.randn(37, 53).to(torch.bfloat16) for _ in range(3)]
    assert torch.equal(rung(fn, precision="eager")(*args), fn(*args))
    assert not torch.equal(rung(fn)(*args), fn(*args))


def test_results_are_not_overwritten_by_the_next_call() -> None:
    case = CASES["relu_mm"]
    compiled, first = rung(case.fn), case.args(13, torch.float32)
    one = compiled(*first)
    kept = one.clone()
    compiled(*case.args(13, torch.float32))
    assert torch.equal(one, kept)


@pytest.mark.parametrize("layout", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:, 1:],
                                    lambda x: x[:1].expand(12, 12), lambda x: x.flip(0)[3]])
def test_layouts_of_inputs(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.floor(x) + 1, x.reshape(-1) * 2, x.sum(0)
    x = layout(torch.randn(12, 12))
    for got, expected in zip(rung(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()


def test_aliases_of_results() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.floor(x) + 1
        return y, y.view(-1), y.t(), x
    x = torch.randn(3, 4)
    y, flat, turned, same = rung(fn)(x)
    expected = fn(x)
    for got, want in zip((y, flat, turned, same), expected, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()
    assert same is x
    y.fill_(7)
    assert (flat == 7).all() and (turned == 7).all()


@pytest.mark.parametrize("fn", [
    lambda x: torch.view_as_real(x).reshape(-1).clone(),
    lambda x: torch.view_as_real(x.t()).transpose(0, 1).clone(
        memory_format=torch.contiguous_format)], ids=["flat", "strided"])
def test_a_copy_of_a_view_that_torch_makes_is_not_the_argument(
        fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(4, 6, dtype=torch.complex64)
    got = rung(fn)(x)
    assert torch.equal(got, fn(x))
    assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def _masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    old = x >= 0.25
    return x.copy_(y).masked_fill(old == 0, -0.5)


def _compared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    filled = y.masked_fill((y != x) == 0, -0.5)
    x.copy_(y)
    return filled


@pytest.mark.parametrize("fn, shape", [(_masked, (3, 8)), (_compared, (8,))])
def test_an_old_value_is_read_before_it_is_overwritten(
        fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
    x, y = torch.randn(3, 8).double(), torch.randn(shape).bfloat16()
    x[:, ::2] = y[..., ::2]
    mine = x.clone()
    assert torch.equal(rung(fn, precision="eager")(mine, y), fn(x, y)) and torch.equal(mine, x)


def test_threads() -> None:
    case = CASES["softmax"]
    compiled, args = rung(case.fn), case.args(500, torch.float32)
    expected, bad = compiled(*args), []

    def work() -> None:
        for _ in range(30):
            if not torch.equal(compiled(*args), expected):
                bad.append(1)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


def test_no_gradient_graph_is_traced_twice() -> None:
    case = CASES["floor_add"]
    args = case.args(13, torch.float32)
    compiled = rung(case.fn)
    compiled(*args)
    with trace.listen() as events:
        compiled(*args)
    assert not events


AGAIN = """
import torch
from rung.targets.cpu import build
def refuse(*_):
    raise SystemExit("the compiler ran")
if {refuse}:
    build._compile = refuse
x = torch.arange(12.0).reshape(3, 4) / 5
fn = lambda x: torch.floor(x) + 1
out = torch.compile(fn, backend="rung", options={{"strict": True}})(x)
assert torch.equal(out, fn(x))
"""


@pytest.mark.slow
def test_another_process_finds_the_library(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_CACHE_DIR", str(tmp_path))
    for refuse in (False, True):
        run = subprocess.run([sys.executable, "-c", AGAIN.format(refuse=refuse)],
                             capture_output=True, text=True, check=False)
        assert not run.returncode, run.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_eager_has_eagers_bits(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        h = (h.to(x.dtype) * g) @ w
        return torch.softmax(h * torch.sigmoid(h) - h.cos(), -1).cumsum(-1) + h.amax(-1, True)

    args = [torch.randn(s, generator=torch.Generator().manual_seed(n)).to(dtype)
            for n, s in enumerate(((33, 70), (70, 65), (70,)))]
    assert torch.equal(rung(fn, precision="eager")(*args), fn(*args))


@pytest.mark.parametrize("n", [5, 300])
def test_an_extreme_of_running_sums(n: int) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0).argmax(0)

    x = torch.randn(n, dtype=torch.float64)
    assert torch.equal(rung(fn)(x), fn(x))
