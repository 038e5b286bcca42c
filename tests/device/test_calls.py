"""Small functions through torch.compile on a GPU: where tensors are, streams, threads, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import rung
from rung.core import trace
from rung.targets.cpu import glue
from rung.targets.cuda import device as cuda

Fn = Callable[..., Any]


def compiled(fn: Fn, **given: Any) -> Fn:
    """`fn` by Rung, which may not hand a graph back."""
    return torch.compile(fn, backend="rung", options={"strict": True}, **given)


def agree(fn: Fn, *args: Any, **given: Any) -> None:
    """Rung errs, against float64, at most twice as much as eager, and a little."""
    got, want = compiled(fn, **given)(*args), fn(*args)
    wide = fn(*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in args))
    for g, w, true in zip(*(torch.utils._pytree.tree_leaves(x) for x in (got, want, wide)),
                          strict=True):
        assert (g.dtype, g.shape, g.device, g.stride()) == (w.dtype, w.shape, w.device, w.stride())
        err, allowed = ((x.double() - true).abs().max() if x.numel() else torch.zeros(())
                        for x in (g, w))
        top = true.abs().max() if true.numel() else 0
        assert err <= 2 * allowed + 4 * torch.finfo(
            g.dtype if g.is_floating_point() else torch.float32).eps * top


def randn(*shape: int, dtype: torch.dtype = torch.float32, **given: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, **given)


FUNCTIONS: dict[str, tuple[Fn, Callable[[torch.dtype], tuple[Any, ...]]]] = {
    "add": (lambda x, y: x + y, lambda t: (randn(4, dtype=t), randn(4, dtype=t))),
    "large": (lambda x: torch.floor(x) + 1, lambda t: (randn(1 << 20, dtype=t),)),
    "odd": (lambda x: x.exp() * 2, lambda t: (randn(1001, dtype=t)[1:],)),
    "softmax": (lambda x: x.softmax(-1), lambda t: (randn(300, 1000, dtype=t),)),
    "long rows": (lambda x: x.softmax(-1), lambda t: (randn(3, 50000, dtype=t),)),
    "layer_norm": (lambda x: F.gelu(F.layer_norm(x, (96,))), lambda t: (randn(50, 96, dtype=t),)),
    "column sum": (lambda x: x.sum(0), lambda t: (randn(3000, 77, dtype=t),)),
    "full sum": (lambda x: x.sum(), lambda t: (randn(1000, 77, dtype=t),)),
    "transpose": (lambda x: x.t().contiguous() + 1, lambda t: (randn(130, 70, dtype=t),)),
    "cumsum": (lambda x: x.cumsum(-1), lambda t: (randn(20, 500, dtype=t),)),
    "cat": (lambda x, y: torch.cat([x, y * 2], 1), lambda t: (
        randn(20, 5, dtype=t), randn(20, 9, dtype=t))),
    "linear": (lambda x, w, b: torch.relu(F.linear(x, w, b)), lambda t: (
        randn(64, 256, dtype=t), randn(100, 256, dtype=t), randn(100, dtype=t))),
    "gemv": (lambda x, w: x @ w, lambda t: (randn(1, 512, dtype=t), randn(512, 300, dtype=t))),
    "bmm": (lambda x, y: (x @ y).sum(-1), lambda t: (
        randn(6, 33, 20, dtype=t), randn(6, 20, 44, dtype=t))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), lambda t: tuple(
        randn(2, 4, 40, 32, dtype=t) for _ in range(3))),
    "argmax": (lambda x: x.argmax(-1), lambda t: (randn(30, 200, dtype=t),)),
    "conv": (lambda x, w: F.relu(F.conv2d(x, w)), lambda t: (
        randn(2, 3, 16, 16, dtype=t), randn(8, 3, 3, 3, dtype=t)))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_small_functions(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fn, make = FUNCTIONS[name]
    agree(fn, *make(dtype))


@pytest.mark.parametrize("name", ["softmax", "linear", "column sum", "odd", "cat"])
def test_symbolic_sizes(name: str) -> None:
    fn, make = FUNCTIONS[name]
    run = compiled(fn, dynamic=True)
    args = make(torch.float32)
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(run(*args), fn(*args), **near)
    fewer = tuple(x[:-1] if n == 0 else x for n, x in enumerate(args))
    if name != "cat":
        torch.testing.assert_close(run(*fewer), fn(*fewer), **near)


def test_training() -> None:
    def make() -> Any:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(),
                                  torch.nn.LayerNorm(128), torch.nn.Linear(128, 10)).cuda()
        return net, torch.optim.SGD(net.parameters(), 0.1)
    x, y = randn(32, 64), torch.randint(0, 10, (32,), device="cuda")
    losses = []
    for how in (lambda net: net, compiled):
        net, opt = make()
        run, found = how(net), []
        for _ in range(5):
            loss = F.cross_entropy(run(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_without_glue_and_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(20, 30)
    monkeypatch.setattr(glue, "glue", lambda: None)
    torch.testing.assert_close(compiled(lambda x: x.softmax(-1))(x), x.softmax(-1))
    torch._dynamo.reset()
    monkeypatch.setattr(cuda, "_library", lambda _: "")
    torch.testing.assert_close(compiled(lambda x: x.softmax(0) * 3)(x), x.softmax(0) * 3)


def test_tensors_elsewhere() -> None:
    limit, two = torch.tensor(-1e4), torch.tensor(2.0)
    x, m = randn(5, 6), randn(5, 6) > 0
    for fn in (lambda x, m: torch.where(m, x, limit) * two, lambda x, m: x + two.cos(),
               lambda x, m: (x.cpu() + 1, x * 2, torch.zeros(3) + 1)):
        for g, w in zip(*(torch.utils._pytree.tree_leaves(f(x, m)) for f in (compiled(fn), fn)),
                        strict=True):
            torch.testing.assert_close(g, w)


def test_a_side_stream() -> None:
    run, x = compiled(lambda x: (x * 2).softmax(-1)), randn(1000, 1000)
    run(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        big = x
        for _ in range(20):
            big = big @ x / 100
        got = run(big)
        want = (big * 2).softmax(-1)
    side.synchronize()
    torch.testing.assert_close(got, want)


def test_a_thread_without_a_context() -> None:
    run, x, found = compiled(lambda x: x.mul_(2)), randn(100), []
    want = x.clone() * 4
    run(x)
    thread = threading.Thread(target=lambda: found.append(run(x)))
    thread.start()
    thread.join()
    assert found
    torch.testing.assert_close(x, want)


def test_captured_by_the_user() -> None:
    run, x = compiled(lambda x: (x * 2).softmax(-1).sum(0)), randn(64, 64)
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    x.copy_(randn(64, 64))
    graph.replay()
    torch.testing.assert_close(y, (x * 2).softmax(-1).sum(0))


def test_reduce_overhead_gives_results_of_the_callers_own() -> None:
    w = randn(256, 256) / 16
    run = torch.compile(lambda x: (torch.relu(x @ w) @ w).softmax(-1).sum(0), backend="rung",
                        mode="reduce-overhead")
    given = [randn(8, 256) for _ in range(8)]
    with trace.listen() as events:
        found = [run(x) for x in given]
    for x, y in zip(given, found, strict=True):
        torch.testing.assert_close(y, (torch.relu(x @ w) @ w).softmax(-1).sum(0))
    assert [e for e in events if e.place == "graphs" and e.kind == "fired"]


def test_reduce_overhead_captures_attention() -> None:
    q, k, v = (randn(2, 8, 128, 64, dtype=torch.bfloat16) for _ in "qkv")

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v).float().sum(1)
    run = torch.compile(fn, backend="rung", mode="reduce-overhead")
    with trace.listen() as events, torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(run(q, k, v), fn(q, k, v), rtol=0.05, atol=0.05)
    assert [e for e in events if e.place == "graphs" and e.kind == "fired"]


def test_a_mask_that_hides_nothing_leaves_attention_to_a_fast_kernel() -> None:
    q = randn(2, 8, 197, 64, dtype=torch.bfloat16)

    def attend(q: torch.Tensor) -> torch.Tensor:
        at = torch.arange(q.shape[2], device=q.device)
        mask = (at[None, None, :, None] >= 0).expand(q.shape[0], -1, q.shape[2], q.shape[2])
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    with trace.listen() as events, torch.no_grad():
        got = compiled(attend, dynamic=False)(q)
    torch.testing.assert_close(got, attend(q), rtol=0.02, atol=0.02)
    assert [e for e in events if e.place == "masks" and e.kind == "fired"]


@pytest.mark.parametrize("classes", [1001, 1000, 2050])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_rows_that_begin_at_odd_addresses(classes: int, bias: bool) -> None:
    """Results, and gradients of a loss over them, for halves and under autocast."""
    x, y = randn(512, 256), torch.randint(classes, (512,), device="cuda")
    net = torch.nn.Linear(256, classes, bias).cuda()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = net(x)
        return F.cross_entropy(logits.float(), y)
    parameters = list(net.parameters())
    want = torch.autograd.grad(loss(x, y), parameters)
    with trace.listen() as events:
        got = torch.autograd.grad(compiled(loss)(x, y), parameters)
    assert bool([e for e in events if e.place == "aligned"]) == (classes % 8 > 0)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0.02, atol=2e-4)
    agree(lambda x, w: x @ w.t(), x.bfloat16(), net.weight.detach().bfloat16())


def test_reduce_overhead_trains() -> None:
    def losses(**how: Any) -> list[float]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(),
                                  torch.nn.Linear(64, 4)).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        run, found = torch.compile(net, backend="rung", **how), []
        for n in range(8):
            loss = (run(torch.full((16, 32), n / 8., device="cuda")) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found
    assert losses(mode="reduce-overhead") == pytest.approx(losses(), rel=1e-4)


@pytest.mark.parametrize("why, fn", [
    ("MiB", lambda x: torch.zeros(2 << 20, device="cuda") + x.sum()),
    ("a tensor on cpu", lambda x: x.cpu() + 1),
    ("view of an argument", lambda x: (x.t(), x + 1))])
def test_reduce_overhead_says_what_it_declines(why: str, fn: Fn) -> None:
    run, x = torch.compile(fn, backend="rung", mode="reduce-overhead"), randn(4, 4)
    with trace.listen() as events:
        for _ in range(4):
            torch.testing.assert_close(run(x), fn(x))
    assert any(why in e.detail for e in events if e.place == "graphs")


def test_an_index_out_of_range_is_told_by_the_next_call() -> None:
    w = randn(10, 8)
    run = compiled(lambda i: F.embedding(i, w) * 2)
    good = torch.arange(5, device="cuda")
    torch.testing.assert_close(run(good), F.embedding(good, w) * 2)
    run(torch.tensor([1, 77, 3], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="index out of range"):
        run(good)
    torch.testing.assert_close(run(good), F.embedding(good, w) * 2)
    run(torch.tensor([1, -30, 3], device="cuda"))
    with pytest.raises(IndexError, match="index out of range") as caught:
        rung.check()
    assert "F.embedding(i, w)" in "".join(caught.value.__notes__)
    rung.check()
    torch.testing.assert_close(run(good), F.embedding(good, w) * 2)


def test_modes_of_torch() -> None:
    run, x = compiled(lambda x: (x @ x).relu()), randn(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(run(x), (x @ x).relu())
    with torch.autocast("cuda", torch.bfloat16):
        assert run(x).dtype is torch.bfloat16


def test_dropout_is_torchs_own() -> None:
    x = randn(1000)
    run = compiled(lambda x: F.dropout(x, 0.3) + 1)
    torch.manual_seed(3)
    want = F.dropout(x, 0.3) + 1
    torch.manual_seed(3)
    assert torch.equal(run(x), want)


WARM = """
import torch, rung.entry
from rung.compilation import Compilation
if {warm}:
    def lower(*_): raise AssertionError("lowered again")
    Compilation.lower = lower
x = torch.arange(2000., device="cuda").reshape(20, 100)
f = torch.compile(lambda x: x.softmax(-1) + x.sum(), backend="rung", options={{"strict": True}})
torch.testing.assert_close(f(x), x.softmax(-1) + x.sum())
"""


def test_a_warm_start_lowers_nothing(tmp_path: Path) -> None:
    env = os.environ | {"RUNG_CACHE_DIR": str(tmp_path), "RUNG_FRESH": "0",
                        "PYTHONPATH": os.pathsep.join(sys.path)}
    for warm in (False, True):
        subprocess.run([sys.executable, "-c", WARM.format(warm=warm)], check=True, env=env)


def test_kernels_that_are_launched_alike_stay_apart() -> None:
    x = randn(1 << 12)
    one, two = compiled(lambda x: x + 1), compiled(lambda x: x * 2)
    for _ in range(2):
        torch.testing.assert_close(one(x), x + 1)
        torch.testing.assert_close(two(x), x * 2)
