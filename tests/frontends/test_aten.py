"""Each overload of the table against eager: dtype, shape, strides and elements, errors too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from frontends import test_pointwise, test_scans, test_scatters
from frontends.capture import declined, run, traced
from frontends.overloads import (
    BF16,
    BOOL,
    F32,
    F64,
    I8,
    I32,
    I64,
    Case,
    caller,
    case,
    check_overload,
    data,
    tame,
)

from rung.core import trace
from rung.frontends.torch.aten import TABLE, target_of
from rung.frontends.torch.calls import schema_of


def views() -> list[Case]:
    x = data((4, 6, 5))
    out = [case("view", x, s) for s in ([24, 5], [4, 30], [2, 2, 3, 2, 5], [-1], [6, 4, 5],
                                         [1, 4, 1, 6, 5], [5, 24], [8, 15])]
    out += [case("view", data((1, 1)), []), case("view", data(()), [1, 1]),
            case("view", data((0, 4)), [2, 0, 2]), case("_unsafe_view", x, [4, 30]),
            case("squeeze", data((1, 3, 1))), case("squeeze.dim", data((1, 3, 1)), -1),
            case("squeeze.dim", data((1, 3)), 1), case("squeeze.dims", data((1, 3, 1)), [0, 2]),
            case("unsqueeze", x, -1), case("unsqueeze", data(()), 0), case("t", data((3, 4))),
            case("t", data((3,))), case("permute", x, [2, 0, -2]), case("permute", data(()), []),
            case("transpose.int", x, 0, -1), case("expand", data((4, 1, 5)), [2, 4, 6, -1]),
            case("expand", data(()), [2, 3]), case("flip", x, [0, -1]),
            case("view", data((3, 4), BF16), [12]), case("t", data((3, 4), BOOL)),
            case("t", data((3, 4), I64))]
    out += [case("slice.Tensor", x, d, a, b, s) for d, a, b, s in (
        (0, 1, 3, 1), (-2, 0, 2**63 - 1, 1), (1, -3, -1, 1), (1, 1, 6, 2), (1, 4, 2, 1),
        (2, -10, 10, 3), (0, None, None, 1), (1, 9, 12, 1))]
    out += [case("select.int", x, 1, -2), case("select.int", x, -1, 0), case("unbind.int", x, 1),
            case("split.Tensor", x, 4, 1), case("split_with_sizes", x, [1, 0, 5], -2)]
    return out


def moves() -> list[Case]:
    x, y = data((4, 6)), data((4, 2))
    out = [case("cat", [x, y], 1), case("cat", [x, y.bfloat16()], -1), case("cat", [x]),
           case("cat", [torch.empty(0), x], 1), case("cat", [data((2,), I64), data((3,), I64)]),
           case("stack", [x, x], 1), case("stack", [data(()), data(())]),
           case("slice_scatter", x, y, 1, 2, 4), case("slice_scatter", x, y, -1, -2),
           case("slice_scatter", x, x, 1), case("slice_scatter", x, data((4, 0)), 1, 3, 3),
           case("slice_scatter", x, data((4, 3)), 1, 1, 6, 2),
           case("slice_scatter", x, data((2, 6)), 0, -4, 99, 3),
           case("slice_scatter", x.long(), data((4, 1), I64), 1, 5, 6, 2),
           case("select_scatter", x, data((4,)), 1, -1),
           case("select_scatter", x, data((6,)), 0, 0), case("constant_pad_nd", x, [1, 2], 0.5),
           case("constant_pad_nd", x, [-1, 2, 0, 3]),
           case("constant_pad_nd", x, [0, 0]), case("repeat", x, [2, 1, 3]),
           case("repeat", data(()), [2]), case("tril", x), case("triu", data((2, 3, 3), I64), 1),
           case("tril", x, -2)]
    out += [case("full", [2, 3], v, dtype=d) for v, d in ((1.5, F32), (2, I64), (True, BOOL),
                                                          (-math.inf, BF16), (3, None))]
    out += [case("full_like", x, 2), case("zeros_like", x), case("ones_like", data((3,), I64)),
            case("zeros", [2, 0]), case("ones", [2], dtype=BF16), case("new_zeros", x, [3]),
            case("new_ones", x, [3]), case("scalar_tensor", 2.5), case("full_like", x.t(), 2),
            case("arange", 5), case("arange.start", 2, 7), case("arange.start_step", 7, -2, -3),
            case("arange.start_step", 0, 6, 2, dtype=F32), case("arange", 0),
            case("arange", 2.5), case("arange.start", 0.5, 3, lowers=False)]
    return out


def rearranged() -> list[Case]:
    x, y = data((4, 6, 5)), data((2, 3, 4, 6))
    out = [case("roll", x, *by) for by in (([2], [0]), ([-7, 3], [1, -1]), ([5], []), ([0], [0]))]
    out += [case(name, x, *by) for name in ("unfold", "unfold_copy")
            for by in ((1, 3, 2), (-1, 4, 1), (0, 1, 3))]
    out += [case(name, x, *by) for name in ("diagonal", "diagonal_copy")
            for by in ((0,), (1, 1, 2), (-2, 1, 0), (4, 0, 2), (0, -1, 0))]
    out += [case("diag_embed", x[0], *by) for by in ((), (1,), (-2, 0, 2), (1, 0, 1), (0, 2, 1))]
    out += [case("diagonal_scatter", x, torch.diagonal(x, *by) + 1, *by)
            for by in ((0,), (1, 1, 2), (-2, 1, 0))]
    out += [case("eye", 4), case("eye.m", 2, 3, dtype=I64), case("eye.m", 3, 0),
            case("copy", x, data((5,), I64)), case("copy", x.long(), tame((4, 6, 5)))]
    for n in (1, 2, 3):
        v = data((2, 3, 4, 5, 3)[:n + 2], BF16)
        out += [case(f"reflection_pad{n}d", v, [2, 1, 0, 3, 1, 1][:2 * n]),
                case(f"replication_pad{n}d", v, [2, 3, -1, 4, 0, -2][:2 * n])]
    for name in ("upsample_nearest", "_upsample_nearest_exact"):
        out += [case(f"{name}1d", y[0], [size]) for size in (6, 12, 30, 9, 3, 4)]
        out += [case(f"{name}2d", y.to(d), [12, 6]) for d in (F32, BF16)]
        out += [case(f"{name}2d", y, [8, 12], 2.0, 2.0), case(f"{name}3d", y[None], [6, 4, 12]),
                case(f"{name}1d_backward", y[0], [6], [3, 4, 3], close=4),
                case(f"{name}2d_backward", y, [4, 6], [2, 3, 2, 2], 2.0, 3.0, close=8),
                case(f"{name}3d_backward", y[None], [3, 4, 6], [1, 2, 3, 2, 2], close=8)]
    return out


def reductions() -> list[Case]:
    out = []
    for d in (F32, BF16, F64, I64, BOOL):
        x = tame((4, 6, 5), d)
        out += [case("sum.dim_IntList", x, dims, keep, close=16)
                for dims in ([0], [-1], [0, 2], [], None) for keep in (False, True)]
        out += [case("sum", x, close=64)]
        if d.is_floating_point:
            out += [case("prims.sum.default", x, [1], close=64)]
            out += [case("mean.dim", x, dims, keep, close=16)
                    for dims in ([1], [0, -1], None) for keep in (False, True)]
            out += [case("mean", x, close=64)]
        if d is not BOOL:
            out += [case(n, x, dims, keep) for n in ("amax", "amin") for dims in ([1], [0, -1], [])
                    for keep in (False, True)]
            out += [case("max", x), case("min", x), case("amax", data((6, 8), d), [0])]
        out += [case("any", x), case("all", x), case("any.dim", x, 1), case("all.dim", x, -1, True),
                case("any.dims", x, [0, 1])]
    return [*out, *extremes_and_norms(), case("sum", data(())), case("mean", data((0,))),
            case("sum.dim_IntList", data((0, 3)), [0]), case("sum", tame((3, 4)), dtype=F64),
            case("sum", tame((3, 4), I64), dtype=F32), case("amax", data(()), [0])]


def extremes_and_norms() -> list[Case]:
    out = []
    for d in (F32, BF16, F64, I64, I32):
        x, ties = data((7, 6), d), tame((5, 9), d).div(2).round().to(d)
        for name in ("max", "min"):
            out += [case(f"{name}.dim", v, dim, keep) for v in (x, ties) for dim in (0, -1)
                    for keep in (False, True)]
            out += [case(f"arg{name}", v, dim) for v in (x, ties) for dim in (0, 1, None)]
            out += [case(f"arg{name}", x, None, True)]
        out += [case("aminmax", ties), case("aminmax", ties, dim=1, keepdim=True),
                case("prod.dim_int", ties.clamp(-2, 2), 1, True, close=16),
                case("prod", ties[0].clamp(-2, 2), close=16), case("count_nonzero", ties),
                case("count_nonzero", x, 0), case("count_nonzero.dim_IntList", x, [0, 1])]
    for d in (F32, BF16, F64):
        x = tame((4, 6), d)
        out += [case("linalg_vector_norm", x, p, dims, keep, close=16)
                for p in (2, 1.0, 0, math.inf, -math.inf) for dims in (None, [1])
                for keep in (False, True)]
        out += [case("norm.Scalar", x, close=16),
                case("norm.ScalarOpt_dim", x, None, [0], close=16),
                case("logsumexp", data((7, 6), d), [1], close=16), case("all.dims", x, [0, 1]),
                case("logsumexp", x, [0, 1], True, close=16)]
    return [*out, case("argmax", data(()), 0), case("argmax", data(())),
            case("max.dim", data(()), 0), case("prod", data((0,))),
            case("prod.dim_int", data((2,), BOOL), 0),
            case("linalg_vector_norm", tame((4, 6)), 3, lowers=False),
            case("argmax", data((0, 3)), 1), case("count_nonzero", data((0, 3)), 0)]


def composites() -> list[Case]:
    out = []
    for d in (F32, BF16, F64):
        x = tame((4, 6), d)
        for name in ("_softmax", "_log_softmax"):
            out += [case(name, x, dim, False, close=16) for dim in (0, -1)]
            out += [case(name, data((3, 8), d), 1, False, close=16)]
            out += [case(f"{name}_backward_data", x.abs(), tame((4, 6), d, 3).abs(), 1, d,
                         close=16)]
        out += [case("var.correction", x, dims, correction=c, keepdim=k, close=32)
                for dims in ([1], None) for c in (None, 0, 2) for k in (False, True)]
        out += [case("var_mean.correction", x, [0], correction=1, close=32),
                case("std_mean.correction", x, [0], correction=1, close=32),
                case("std.correction", x, [1], correction=1, close=32)]
        low = x.clone()
        low[0, 1], low[1] = -math.inf, -math.inf
        out += [case("_safe_softmax", v, 1, close=16) for v in (x, low, data((3, 8), d))]
        q, k, v = (tame((2, 3, n, 8), d, n) for n in (4, 5, 5))
        mask = tame((2, 1, 4, 5), d)
        mask[0, 0, 1] = mask[0, 0, 2, 1:] = -math.inf
        out += [case("_scaled_dot_product_flash_attention_for_cpu", q, k, v, close=99, **named)
                for named in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3})]
        out += [case("_scaled_dot_product_flash_attention_for_cpu", tame((2, 6, 4, 8), d), k, v,
                     attn_mask=mask, close=99)]  # two query heads share a key
        out += [gradients_of(q / 4, k / 4, v / 4, causal, **named) for causal, named in (
            (False, {}), (True, {}), (False, {"attn_mask": mask}), (False, {"scale": 0.3}))]
        out += [gradients_of(tame((2, 6, 4, 8), d) / 4, k / 4, v / 4, False, attn_mask=mask)]
    return [*out, case("_softmax", tame(()), 0, False), case("_softmax", data((2, 0)), 1, False)]


def gradients_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **named: Any
                 ) -> Case:
    """The backward pass of an attention, whose results it reads."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    kept = getattr(torch.ops.aten, name)(q, k, v, 0.0, causal, **named)
    return case(f"{name}_backward", tame(tuple(q.shape), q.dtype, 9) / 4, q, k, v, *kept, 0.0,
                causal, close=99, **named)


def norms() -> list[Case]:
    out = []
    for d in (F32, BF16, F64):
        x, g, mean, rstd = (tame(s, d, n) for n, s in enumerate(((4, 6), (4, 6), (4, 1), (4, 1))))
        for size, m in (([6], (mean, rstd)), ([4, 6], (mean[:1], rstd[:1]))):
            both = (tame(size, d, 2), tame(size, d, 3))
            out += [case("native_layer_norm", x, size, *wb, 1e-5, close=32)
                    for wb in (both, (None, None), (both[0], None))]
            out += [case("native_layer_norm_backward", g, x, size, *m, *both, mask, close=64)
                    for mask in ([True] * 3, [True, False, False], [False, True, False])]
            out += [case("_fused_rms_norm", x, size, both[0], 1e-5, close=16),
                    case("_fused_rms_norm", x, size, None, None, close=16)]
        out += batches(d)
    return out


def batches(d: torch.dtype) -> list[Case]:
    """Batch and group norm; of bf16, torch states the statistics' type otherwise than it is."""
    w, b, mean, var, scale = (tame((6,), d, n).abs() + n / 2 for n in range(5))
    out = []
    for shape in ((4, 6), (3, 6, 5), (2, 6, 2, 3)):
        x, g = tame(shape, d), tame(shape, d, 1)
        for train in (True, False) if d is not BF16 else ():
            out += [case("_native_batch_norm_legit_functional", x, w, b, mean, var, train, 0.1,
                         1e-5, close=64)]
            out += [case("native_batch_norm_backward", g, x, w, mean, var, mean, scale, train, 1e-5,
                         mask, close=99) for mask in ([True] * 3, [True, False, True])]
        out += [case("_native_batch_norm_legit_no_training", x, w, b, mean, var, 0.1, 1e-5,
                     close=64),
                case("_native_batch_norm_legit.no_stats", x, w, None, True, 0.1, 1e-5, close=64)]
        sizes, kept = (shape[0], 6, math.prod(shape[2:])), tame((shape[0], 3), d).abs()
        out += [case("native_group_norm_backward", g, x, kept, kept, w, *sizes, 3, [True] * 3,
                     close=99), case("native_group_norm", x, w, None, *sizes, 3, 1e-5, close=64),
                case("native_group_norm", x, None, b, *sizes, 2, 1e-5, close=64)]
    return out


def contractions() -> list[Case]:
    out = []
    for d in (F32, BF16, F64):
        a, b = tame((4, 6), d), tame((6, 5), d, 1)
        out += [case("mm", a, b, close=32), case("mm", a, tame((5, 6), d).t(), close=32),
                case("addmm", tame((5,), d), a, b, close=32), case("mv", a, b[:, 0], close=32),
                case("addmm", tame((4, 5), d), a, b, close=32),
                case("dot", a[0], b[:, 1], close=32),
                case("bmm", tame((2, 4, 6), d), tame((2, 6, 5), d), close=32),
                case("baddbmm", tame((4, 5), d), tame((2, 4, 6), d), tame((2, 6, 5), d), close=32)]
    a, b = tame((4, 6)), tame((6, 5), F32, 1)
    return [*out, case("mm", a[:0], b), case("mm", a[:, :0], b[:0]),
            case("addmm", tame((5,)), a, b, alpha=0.5, beta=2, close=32),
            case("addmm", torch.full((5,), math.nan), a, b, beta=0, close=32),
            case("addmm", tame((5,), BF16), a.bfloat16(), b.bfloat16(), alpha=0.5, beta=3, close=8),
            case("addmv", tame((4,)), a, b[:, 0], alpha=3, close=32),
            case("_int_mm", data((4, 6), I8), data((6, 5), I8, 1)),
            case("_int_mm", data((4, 6), I8), data((5, 6), I8, 1).t()),
            case("mm", a.long(), b.long(), lowers=False)]


def indexing() -> list[Case]:
    x, at = data((6, 5)), torch.tensor([3, 0, 5])
    put = torch.tensor([1, -1, 2])
    out = [case("embedding", x, torch.tensor([[3, 0], [5, 1]])), case("embedding", x, at.int()),
           case("index_select", x, 0, at), case("index_select", x, -1, at.int() // 2),
           case("index_copy", x, 0, at, data((3, 5))), case("index_copy", x, -1, at[:1], x[:, :1]),
           case("index.Tensor", x, [put]), case("index.Tensor", x, [None, put]),
           case("index.Tensor", x, [put.reshape(1, 3)]), case("index.Tensor", x, [put[0]]),
           case("index_put", x, [put], data((3, 5))), case("index_put", x, [put], data(())),
           case("index_put", x, [None, put], data((6, 3))), case("index_put", x, [put[0]], x[0]),
           case("index_put", x, [put[0]], data(())), case("index_put", x, [put.int()], data((5,))),
           case("index.Tensor", x, [put, put]),
           case("index.Tensor", data((2, 3, 4, 5)), [None, put.reshape(3, 1), put.int(), None]),
           case("index.Tensor", data((2, 3, 4)), [put[:2] - 1, None, put[:2]]),
           case("index.Tensor", data((2, 3, 4, 5)), [None, put[:2], None, put.reshape(3, 1)])]
    along = torch.tensor([[3, 0, 4], [1, 1, 2]])
    out += [case("gather", x.t(), dim, along) for dim in (0, 1, -1)]
    out += [case("gather", x.bfloat16(), 1, along[:, :2]),
            case("gather", x, 0, along[:0], lowers=False),
            case("gather", data(()), 0, torch.tensor(0), lowers=False)]
    return [*out, *losses(),
            *(case("index_copy", x.to(d), 0, at, data((3, 5), d)) for d in (BF16, I64, BOOL))]


def losses() -> list[Case]:
    """Reductions 0 to 2 (none, mean, sum); class 1 is ignored, or none is."""
    out = []
    for d in (F32, BF16, F64):
        for shape, name in (((6, 5), "nll_loss"), ((5,), "nll_loss"), ((2, 5, 3, 2), "nll_loss2d")):
            x, w = tame(shape, d), tame((5,), d, 1).abs() + 0.5
            t = torch.randint(5, shape[:1] * (len(shape) > 1) + shape[2:],
                              generator=torch.Generator().manual_seed(1))
            for reduction in (0, 1, 2):
                g = tame(tuple(t.shape) if reduction == 0 else (), d, 2)
                out += [case(f"{name}_forward", x, t, v, reduction, ignored, close=16)
                        for v in (None, w) for ignored in (-100, 1)]
                out += [case(f"{name}_backward", g, x, t, v, reduction, ignored,
                             torch.tensor(2.5, dtype=d), close=16)
                        for v in (None, w) for ignored in (-100, 1)]
    x, t = tame((4, 5)), torch.tensor([2, -100, 2, 0])
    return [*out, case("nll_loss_forward", x, t * 0 - 100, None, 1, -100),
            case("nll_loss_forward", x[:0], t[:0], None, 1, -100, lowers=False),
            case("nll_loss_forward", x, t, None, 1, -100, close=4)]


CASES = [*views(), *moves(), *rearranged(), *reductions(), *composites(), *norms(),
         *contractions(), *indexing()]


@pytest.mark.parametrize("c", CASES, ids=str)
def test_overload(c: Case) -> None:
    check_overload([c])


OUTSIDE = [
    case("embedding", data((6, 5)), torch.tensor([6])),
    case("embedding", data((6, 5)), torch.tensor([-1])),
    case("index_select", data((6, 5)), 1, torch.tensor([0, 5])),
    case("index_select", data((6, 5)), 0, torch.tensor([-1])),
    case("index_copy", data((6, 5)), 0, torch.tensor([6]), data((1, 5))),
    case("index_copy", data((6, 5)), 0, torch.tensor([-1]), data((1, 5))),
    case("index.Tensor", data((6, 5)), [torch.tensor([6])]),
    case("index.Tensor", data((6, 5)), [None, torch.tensor([-6])]),
    case("index_put", data((6, 5)), [torch.tensor([6])], data(())),
    case("index_put", data((6, 5)), [torch.tensor(-7)], data(())),
    case("gather", data((6, 5)), 1, torch.tensor([[5]])),
    case("gather", data((6, 5)), 0, torch.tensor([[-1]])),
    case("nll_loss_forward", data((2, 5)), torch.tensor([1, 5]), None, 1, -100),
    case("nll_loss_forward", data((2, 5)), torch.tensor([1, -1]), None, 0, 1),
    case("nll_loss_backward", data(()), data((2, 5)), torch.tensor([1, 5]), None, 1, -100,
         data(())),
]


@pytest.mark.parametrize("c", OUTSIDE, ids=str)
def test_an_index_outside_is_the_error_of_eager(c: Case) -> None:
    fn, tensors = caller(c)
    with pytest.raises((IndexError, RuntimeError)) as eager:
        fn(*tensors)
    with trace.listen() as events, pytest.raises(eager.type):
        run(traced(fn, tensors), tensors)
    assert declined(events) == []


def test_every_entry_is_tried() -> None:
    tried = (*CASES, *test_pointwise.CASES, *test_scans.CASES, *test_scatters.CASES)
    assert set(TABLE) - {c.target for c in tried if c.lowers} <= {
        "aten._reshape_alias.default", "aten._unsafe_index.Tensor",
        "aten.reshape.default", "aten.lift_fresh_copy.default"}


def test_schemas_are_those_of_this_torch() -> None:
    for target, entry in TABLE.items():
        assert schema_of(target) == entry.schema
        assert target_of(entry.schema) == target
