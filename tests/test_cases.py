"""Behaviours that compilers get wrong: each program gives what eager gives, or raises as it does.

Values, dtypes, strides, gradients, who shares memory with whom, and the state of the inputs are
compared with eager's; nothing may fall back unless the case says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from agreement import agrees, outcome, rung, same
from kernels import kernels_of
from torch import nn
from torch.nn import functional as F

from rung.core.op import walk
from rung.kernel.ir import For
from rung.targets.cpu.machine import NEEDS, features

Tensors = list[torch.Tensor]

pytestmark = pytest.mark.usefixtures("fresh")


# ---- who shares memory with whom
def _views_of_a_result(x: torch.Tensor) -> Any:
    z = x + 1
    return z, z * 1, z.view(-1), z[0], z[1:], z.t()


def _parts(x: torch.Tensor) -> Any:
    z = x.exp()
    return (*z.split(1), z.unsqueeze(0), torch.cat([z]), z.reshape(-1).clone())


def _updated(x: torch.Tensor) -> Any:
    x.add_(1)
    return x.view(-1), x.clone(), x * 1


def _equal(x: torch.Tensor) -> Any:
    return ((x * 3).sum(), x * 3, x * 3, (x * 5).t(), x * 5, x.sort()[0], x.sort()[0].t(),
            x.cumprod(0), x.cumprod(0)[1:])


def _nothing_added(x: torch.Tensor) -> Any:
    none, i = x[:0], torch.zeros(0, dtype=torch.int64)
    return (x.index_add(0, i, none), x.index_put((i,), none), x.scatter(0, i[:, None], 2.0),
            x.index_copy(0, i, none).t(), torch.cat([none, x]), x.slice_scatter(none, 0, 1, 1))


def _not_dropped(x: torch.Tensor) -> Any:
    y = F.dropout(x, 0.5, training=False)
    y.detach().add_(1)
    return y, F.dropout(x, 0.0), F.dropout(x[:0], 0.5), F.dropout(x * 2, 0.0), x * 2


def _later(x: torch.Tensor) -> Any:
    z = x + 1
    y = z.view(-1)
    z.mul_(2)
    return y, z, z.clone().view(-1)


SHARING: dict[str, Callable[[torch.Tensor], Any]] = {
    "a copy of an argument": lambda x: x.reshape(-1).clone(),
    "views of a result": _views_of_a_result,
    "equal casts": lambda x: (x.to(torch.int64), x.to(torch.int64), x * 1, x + 0),
    "equal results in another order of memory": lambda x: (
        x.t() * 2, x.t() * 2.0, (x.t() + 1)[0], (1 + x.t())[0]),
    "views without their base": lambda x: ((z := x + 1)[0], z[1], z[0].clone()),
    "views of an argument": lambda x: (x, x.view(-1), x.t(), x[1], x.detach(), x.contiguous()),
    "copies of an argument": lambda x: (x.view(-1)[2:4].clone(), x.clone(), x.repeat(1, 1)),
    "parts": _parts,
    "an updated argument": _updated,
    "a view taken before an update": _later,
    "expanded": lambda x: (z := x.sum(0), z.expand(4, 3), z.expand(4, 3).clone()),
    "constants": lambda x: (z := torch.zeros(2, 3), torch.zeros(2, 3), z.expand(2, 2, 3)),
    "views of a library's result": lambda x: (z := x @ x.t(), z.t(), z.diagonal(), z.view(-1)),
    "equal results, and views of them": _equal,
    "results that nothing is added to": _nothing_added,
    "nothing dropped": _not_dropped,
    "views of moves that move nothing": lambda x: (
        torch.cat([x]).view(-1), x.roll(0).view(-1), F.pad(x, (0, 0))[1:], x.repeat(1, 1)[0]),
    "moves that move nothing": lambda x: (F.pad(x, (0, 0)), x.flip(0).flip(0), x.double().float()),
}


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("grad", [False, True])
def test_results_share_memory_as_in_eager(name: str, grad: bool) -> None:
    writes = name in ("an updated argument",)
    if grad and (writes or name == "constants"):
        pytest.skip("a leaf cannot be updated, and constants have no gradient")
    agrees(SHARING[name], [torch.randn(2, 3, requires_grad=grad)])


def test_results_without_elements_are_no_arguments() -> None:
    x = torch.randn(0, 4)
    found = rung(lambda x: (x.softmax(0), x.tril(), x.relu(), x.scatter(0, x.long(), x)))(x)
    assert len({id(r) for r in (x, *found)}) == 5


# ---- programs that went wrong, here or elsewhere
def _many_parts(*xs: torch.Tensor) -> Any:
    return torch.cat([x * (i % 7) + 1 for i, x in enumerate(xs)]), torch.stack(
        [x.sum() for x in xs])


def _extremes(x: torch.Tensor) -> Any:
    return x.amax(-1), x.argmax(-1), x.clamp(-1, 1), torch.maximum(x, x.flip(-1)), x.relu()


def _integers(x: torch.Tensor) -> Any:
    return -x, x * x, x + 100, x // 3, x % 3, x.sum(), x.to(torch.int64) * 1_000_000_007


def _rows(n: int) -> Tensors:
    return [torch.randn(1 + i % 3, 2) for i in range(n)]


SPECIALS = torch.tensor([[1.0, float("nan"), -0.0, 3.0], [float("inf"), -1e30, float("-inf"), 0.0]])
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], Sequence[Any]]]] = {
    "more axes than letters": (_many_parts, lambda: _rows(30)),
    "a condition that is a constant": (
        lambda x: torch.where(torch.tensor(True), x, x), lambda: [torch.randn(2, 3)]),
    "memory with the opposite sign": (
        lambda y: (y * 2 + 1, y.sum()),
        lambda: [torch.randn(4, dtype=torch.complex64).conj().imag]),
    "NaN and infinities": (_extremes, lambda: [SPECIALS]),
    "integers that wrap": (_integers, lambda: [torch.arange(-128, 128, dtype=torch.int8)]),
    "overlapping memory": (lambda x: x * 2 + x.sum(), lambda: [
        torch.randn(10).as_strided((3, 4), (2, 1))]),
    "a view of every second": (lambda x: x.mul(2).sum(1), lambda: [torch.randn(8, 6)[::2, 1::2]]),
    "channels last": (lambda x: (x.relu(), x.sum(1), x + x.contiguous()), lambda: [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_do_as_eager_does(name: str) -> None:
    fn, args = PROGRAMS[name]
    given = args()
    if any(isinstance(x, torch.Tensor) and x.is_neg() for x in given):
        for a, b in zip(rung(fn)(*given), fn(*given), strict=True):
            same(a, b)
        return
    agrees(fn, given)


def test_a_library_result_of_another_type_than_announced() -> None:
    """The statistics of a bf16 batch norm are bf16, although torch announces f32."""
    norms = [nn.BatchNorm2d(8).bfloat16() for _ in range(2)]
    x = torch.randn(2, 8, 4, 4).bfloat16()
    same(rung(norms[1])(x), norms[0](x))
    for a, b in zip(norms[1].buffers(), norms[0].buffers(), strict=True):
        same(a, b)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("shape", [(1 << 17, 4), (4, 1 << 17)])
def test_long_sums_are_near(dim: int | None, shape: tuple[int, int]) -> None:
    x = torch.rand(shape) + 0.1
    got, exact = rung(lambda x: x.sum(dim))(x), x.double().sum(dim)
    assert float(((got - exact) / exact).abs().max()) <= 4e-7


COUNTED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
           torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.report(241)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", COUNTED, ids=str)
def test_counts_over_merged_dimensions(dtype: torch.dtype, dynamic: bool) -> None:
    """Sums of comparisons and conversions, of which gcc 12.2's vectorisers made half."""
    def fn(x: torch.Tensor) -> Any:
        flat = x.reshape(-1)
        return (flat.count_nonzero(0), (flat != 0).sum(0), flat.reshape(2, -1).count_nonzero(1),
                (x == 1).sum((0, 2)), x.to(torch.int64).sum(), x.to(torch.int64).sum((1, 2)),
                x.to(torch.int8).sum(0), (x > 0).any(), (x > 0).all(2), (x != 0).to(x.dtype).sum())
    run = rung(fn, dynamic=dynamic)
    for shape in ((2, 16, 4), (2, 3, 7), (6, 41, 13), (2, 1, 64)):
        x = torch.arange(math.prod(shape)).remainder(3).sub(1).to(dtype).reshape(shape)
        assert all(map(torch.equal, run(x), fn(x)))


def test_the_largest_of_truths_as_numbers() -> None:
    """gcc 12 takes the least integer > -(a == b), of signed vectors, for true."""
    def fn(x: torch.Tensor) -> Any:
        found = (x.int() == 99).int()
        return found.amax(-1), found.argmax(-1), found.amin(-1), (x.long() == 99).long().amax(0)

    for shape in ((2, 12), (3, 64), (5, 7)):
        for x in (torch.zeros(shape, dtype=torch.int64), torch.full(shape, 99)):
            assert all(map(torch.equal, rung(fn)(x), fn(x)))


@pytest.mark.skipif(not NEEDS["cpu.avx512"] <= features(), reason="this CPU has no AVX-512")
def test_folds_run_in_vectors() -> None:
    """Of the widest type in them that a register holds, over all dimensions that are contiguous."""
    x = torch.randn(6, 32, 64)
    for fn, lanes in ((torch.sum, 8), (torch.Tensor.count_nonzero, 16), (torch.amax, 16),
                      (lambda x: x.double().amax((1, 2)), 8), (torch.argmax, 16),
                      (lambda x: x.reshape(-1).long().sum(0), 8), (lambda x: x.sum((1, 2)), 16),
                      (lambda x: x.mul(3).bool().all(), 16), (lambda x: x.double().norm(), 8)):
        made = kernels_of(fn, [x], target="cpu.avx512")
        folds = [op for k in made for op in walk(k.lowered.body) if isinstance(op, For) and op.inits
                 and not any(isinstance(inner, For) for inner in walk(op.body))]
        assert folds and {v.type.lanes for op in folds for v in op.inits} == {lanes}


# ---- sizes that are not known
def _normed(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = F.layer_norm(x, (x.shape[-1],)) @ w
    return torch.softmax(y, -1).flip(0), y.reshape(-1), torch.cat([x, x]).sum(0), y.amax(-1)


@pytest.mark.parametrize("grad", [False, True])
def test_one_graph_for_all_sizes(grad: bool) -> None:
    fn = rung(_normed, dynamic=True)
    for n in (3, 1, 2, 7, 64, 0):
        x, w = torch.randn(n, 8, requires_grad=grad), torch.randn(8, 5, requires_grad=grad)
        got, want = outcome(fn, [x, w]), outcome(_normed, [x, w])
        for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
            same(a, b)


def test_gradients_of_windows_that_overlap() -> None:
    """Into memory of a size that the program computes: what checks against it comes later."""
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((3, 3), (1, 1)) * 2
    agrees(fn, [torch.randn(8, requires_grad=True)], dynamic=True,
           more=[[torch.randn(5, requires_grad=True)]])


@pytest.mark.parametrize("batch", [1, 2])
def test_pooled_rows_times_a_matrix(batch: int) -> None:
    """A contraction over an axis of what two nested folds give."""
    agrees(lambda x, w: torch.relu(x).mean((2, 3)) @ w, [
        torch.randn(batch, 16, 4, 4), torch.randn(16, 10)])


def test_attention_on_unprojected_values() -> None:
    """Softmax and the projection of the values in one kernel, if fusion will have it."""
    agrees(lambda s, x, w: torch.softmax(s, -1) @ (x @ w).view(2, 17, 4, 8).transpose(1, 2), [
        torch.randn(2, 4, 17, 17), torch.randn(2, 17, 32), torch.randn(32, 32)])


def test_effects_that_torch_orders() -> None:
    """Checks of linear algebra come with tokens, which are no tensors when the graph runs."""
    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        s = a @ a.t() + 3 * torch.eye(4, dtype=a.dtype)
        return torch.linalg.solve(s, b).sin() + 1, torch.linalg.inv(s).sum(0), len(a)
    agrees(fn, [torch.randn(4, 4, dtype=torch.float64, requires_grad=g) for g in (True, False)])
    # the check is in the backward graph, whose token comes last
    agrees(lambda a: torch.linalg.eig(a)[1].abs() + 1, [
        torch.randn(4, 4, dtype=torch.float64, requires_grad=True)])
    run = rung(lambda a: torch.linalg.inv(a * 2).relu(), dynamic=True)
    for n in (3, 5):
        torch.testing.assert_close(run(torch.eye(n)), torch.eye(n) / 2)
    with pytest.raises(torch.linalg.LinAlgError):
        run(torch.zeros(4, 4))


class Decoder(nn.Module):
    """Attention over pixels, and two equal blocks that begin with a group norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out, self.blocks = nn.Linear(width, width), nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1),
                          nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, *size = x.shape
        t = x.flatten(2).transpose(1, 2).view(batch, -1, 8, width // 8).transpose(1, 2)
        t = F.scaled_dot_product_attention(t, t, t).transpose(1, 2).reshape(batch, -1, width)
        x = self.out(t).transpose(1, 2).reshape(batch, width, *size) + x
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_norms_of_one_image_after_attention(dynamic: bool | None) -> None:
    net = Decoder(64)
    run = rung(net, dynamic=dynamic)
    for batch in (1, 2):
        x = torch.randn(batch, 64, 16, 16)
        torch.testing.assert_close(run(x), net(x))


NORMED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sorted": lambda t: t.sort(1)[0],
    "attended": lambda t: F.scaled_dot_product_attention(t[:, None], t[:, None], t[:, None])[:, 0]}


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("batch", [1, 2])
def test_operators_that_refuse_a_layout(name: str, batch: int) -> None:
    """Views of one image have other strides of its first dimension than in the trace, so that the
    norm would take it for another layout."""
    def fn(t: torch.Tensor) -> torch.Tensor:
        return F.group_norm(NORMED[name](t).transpose(1, 2).reshape(batch, 8, 4, 4), 2)

    x = torch.randn(batch, 16, 8)
    run = torch.compile(fn, backend="rung", options={"strict": True, "precision": "eager"})
    torch.testing.assert_close(run(x), fn(x))


def test_an_operator_that_moves_nothing_leaves_with_the_layout_of_its_own() -> None:
    """Eager's roll by the whole size is contiguous, whatever its argument is."""
    def fn(x: torch.Tensor) -> Any:
        y = F.gelu(x)
        return torch.roll(y, 2, 0), y, x.mT.unfold(1, 1, 1) * 2

    x = torch.randn(2, 2, 7).mT
    found, wanted = rung(fn)(x), fn(x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert [a.stride() for a in found[:2]] == [b.stride() for b in wanted[:2]]
