"""`torch.compile(backend=rung)` on whole graphs; the oracle stands in for the pipeline."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from frontends.capture import OraclePipeline, calls, composites
from torch import Tensor, fx, nn

from rung import entry
from rung.core import origins
from rung.core.errors import RungError, Unsupported
from rung.core.op import Value
from rung.core.options import MODES, Options
from rung.frontends.torch import aten, backend, compat
from rung.frontends.torch.emit import Emit
from rung.program.ir import Check, Write

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[OraclePipeline]:
    torch._dynamo.reset()
    stand_in = OraclePipeline()
    monkeypatch.setattr(entry.rung, "compiled", stand_in.compiled)
    yield stand_in
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend=entry.rung, dynamic=dynamic, fullgraph=True,
                         options={"strict": True, **options})


def check_close(a: Any, b: Any) -> None:
    if isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            check_close(x, y)
    elif isinstance(b, Tensor):
        assert a.stride() == b.stride()
        tolerance = 4e-2 if b.dtype == BF16 else 2e-5
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert a == b


def relu_mm(x: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    return torch.relu((x + bias) @ w)


def relu_mm_inputs(n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randn(n, 8).to(dtype), torch.randn(8).to(dtype), torch.randn(8, 5).to(dtype))


def matrix(n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randn(n, 8).to(dtype),)


def heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """What attention does with shapes: split heads, transpose, merge."""
    n, d = x.shape
    h = x.view(n, 2, d // 2).transpose(0, 1)
    return torch.softmax(h @ h.transpose(1, 2) * 0.5, -1) @ h, h.transpose(0, 1).reshape(n, d)


GRAPHS: dict[str, tuple[Callable[..., Any], Callable[[int, torch.dtype], tuple[Tensor, ...]]]] = {
    "relu_mm": (relu_mm, relu_mm_inputs),
    "softmax": (lambda x: torch.softmax(x, -1), matrix),
    "log_softmax": (lambda x: torch.log_softmax(x, 0), matrix),
    "column_sum": (lambda x: x.sum(0), matrix),
    "layer_norm": (lambda x: nn.functional.layer_norm(x, (8,)), matrix),
    "rms_norm": (lambda x: nn.functional.rms_norm(x, (8,)), matrix),
    "heads": (heads, matrix),
    "gelu": (lambda x: nn.functional.gelu(x, approximate="tanh"), matrix),
    "transposed": (lambda x: (x + 1).t(), matrix),
    "transposed_sum": (lambda x: x.t() + x.t() * 2, matrix),
    "statistics": (lambda x: (x.mean(), x.var(1), x.amax(0), x.std()), matrix),
    "pieces": (lambda x: (x[:, 2:5].clone(), x[1:] - x[:-1], x.chunk(2, 1)[1] * 2, x[-1] + 1),
               matrix),
    "sizes": (lambda x: (x * x.shape[0], x.shape[0] * 3, x.new_zeros(x.shape[0], 2)), matrix),
    "positions": (lambda x: torch.arange(x.shape[0])[:, None] * x, matrix),
    "mask": (lambda x: torch.where(x > 0, x, float("-inf")).masked_fill(x > 1, 0.0), matrix),
    "rotate": (lambda x: torch.cat((-x[:, 4:], x[:, :4]), -1) * x, matrix),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", GRAPHS)
def test_graph(name: str, dtype: torch.dtype, dynamic: bool, pipeline: OraclePipeline) -> None:
    fn, inputs = GRAPHS[name]
    run = compiled(fn, dynamic)
    with torch.no_grad():
        for n in (6, 9) if dynamic else (6,):
            args = inputs(n, dtype)
            check_close(run(*args), fn(*args))
    assert len(pipeline.lowered) == 1
    allowed = {"aten.t.default", "aten.permute.default", "aten.transpose.int", "aten.view.default",
               "aten.detach.default"}
    assert set(calls(pipeline.lowered[0])) <= allowed


class Cached(nn.Module):
    """One decoding step: norm, projections, rotation, cache update, attention on the cache."""

    def __init__(self, put: bool):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.put = put
        self.register_buffer("keys", torch.zeros(16, 2, 4))
        self.register_buffer("values", torch.zeros(16, 2, 4))

    def forward(self, x: Tensor, pos: Tensor, angle: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).view(-1, 2, 4) for f in (self.q, self.k, self.v))
        q, k = (self.rotate(t, angle) for t in (q, k))
        if self.put:
            self.keys[pos] = k
            self.values[pos] = v
        else:
            self.keys.index_copy_(0, pos, k)
            self.values.index_copy_(0, pos, v)
        scores = torch.einsum("qhd,khd->hqk", q, self.keys) / 2
        seen = torch.arange(16)[None] <= pos[:, None]
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        return torch.einsum("hqk,khd->qhd", weights, self.values).reshape(-1, 8)

    @staticmethod
    def rotate(t: Tensor, angle: Tensor) -> Tensor:
        a, b = t[..., :2], t[..., 2:]
        cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(t.dtype)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("put", [False, True], ids=["index_copy", "index_put"])
def test_cache_step(put: bool, dtype: torch.dtype, dynamic: bool,
                    pipeline: OraclePipeline) -> None:
    torch.manual_seed(0)
    model = Cached(put).to(dtype)
    twin = Cached(put).to(dtype)
    twin.load_state_dict(model.state_dict())
    run = compiled(model, dynamic)
    with torch.no_grad():
        for n, start in ((3, 0), (2, 3)) if dynamic else ((1, 0), (1, 1), (1, 2)):
            pos = torch.arange(start, start + n)
            x, angle = torch.randn(n, 8).to(dtype), torch.randn(n)
            check_close(run(x, pos, angle), twin(x, pos, angle))
            check_close(list(model.buffers()), list(twin.buffers()))
    (low,) = pipeline.lowered
    assert calls(low) == []
    assert [op.dst.role for op in low.body.ops if isinstance(op, Write)] == ["mutated"] * 2
    assert {p.role for p in low.params} >= {"input", "param", "mutated"}
    kinds = [type(op) for op in low.body.ops]
    assert max(n for n, k in enumerate(kinds) if k is Check) < kinds.index(Write)


def test_an_error_leaves_the_cache_alone(pipeline: OraclePipeline) -> None:
    model = Cached(put=True)
    with torch.no_grad(), pytest.raises(IndexError, match="out of bounds for dimension 0"):
        compiled(model)(torch.randn(1, 8), torch.tensor([16]), torch.randn(1))
    assert not model.keys.any()


@pytest.mark.parametrize(("fn", "alone"), [
    (lambda x: x + 1, True), (lambda x: (x + 1, (x * 2).sum(0)), True),
    (lambda x: x.add_(1), False), (lambda x: x.view(-1), False),
    (lambda x: (x + 1).view(-1), True), (lambda x: (y := x + 1, y.view(-1)), True)])
def test_without_the_wrapper_where_it_adds_nothing(
        fn: Callable[..., Any], alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, real = list[Any](), compat.unboxed
    monkeypatch.setattr(compat, "unboxed", lambda *given: found.append(given) or real(*given))
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    given, twin = x.clone(), x.clone()
    check_close(compiled(fn)(given), fn(twin))
    assert len(found) == alone and torch.equal(given, twin)


def test_the_wrapper_stays_for_gradients_and_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "unboxed", None)
    torch._dynamo.reset()
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)
    assert not compiled(lambda x: (x + 1).cos().detach())(x).requires_grad
    assert compiled(lambda x: (x + 1).cos())(x).requires_grad
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert compiled(lambda x, w: x @ w)(x, w).dtype is torch.bfloat16


def test_an_entry_can_refuse_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def quotient(e: Emit, x: Value, y: Value) -> Value:
        x, y = (e.expand(v, e.shape) for v in (x, y))
        e.check_nonzero(y)
        return e.map("sub", x, y)

    entry = aten.Entry(str(torch.ops.aten.gcd.default._schema), quotient)
    monkeypatch.setitem(aten.TABLE, "aten.gcd.default", entry)
    run, x = compiled(torch.gcd), torch.arange(6).view(2, 3)
    assert torch.equal(run(x, torch.tensor([1, 2, 3])), x - torch.tensor([1, 2, 3]))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(x, torch.tensor([1, 0, 3]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.norm(torch.relu(self.a(x))))
        return torch.log_softmax(self.b(torch.sigmoid(h) * nn.functional.silu(h)), -1).mean()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_training(dynamic: bool, pipeline: OraclePipeline) -> None:
    torch.manual_seed(1)
    model, run = Net(), Net()
    run.load_state_dict(model.state_dict())
    step = compiled(run, dynamic)
    for n in (5, 7) if dynamic else (5,):
        x, y = (torch.randn(n, 8) for _ in range(2))
        for net, loss in ((model, model(x) + 0), (run, step(x) + 0)):
            loss.backward()
            net.grads = [p.grad for p in net.parameters()]
        del y
        check_close(run.grads, model.grads)
    forward, backward = pipeline.lowered
    views = {"aten.t.default", "aten.permute.default", "aten.detach.default"}
    assert set(calls(forward)) <= views and set(calls(backward)) <= views
    assert "aten.native_layer_norm.default" in composites(forward)


def test_batch_norm_training_updates_its_statistics(pipeline: OraclePipeline) -> None:
    torch.manual_seed(2)
    model, twin = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    run = compiled(model)
    for _ in range(2):
        x = torch.randn(6, 4)
        for net, loss in ((model, run(x).square().sum()), (twin, twin(x).square().sum())):
            net.zero_grad()
            loss.backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)
        check_close(list(model.buffers()), list(twin.buffers()))


def test_results_share_memory_only_as_in_eager(pipeline: OraclePipeline) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return x.clone(), y, y.clone(), x.t(), x

    x = torch.zeros(2, 3)
    copy, y, z, view, same = compiled(fn)(x)
    copy += 1
    y += 1
    assert not x.any() and (z == 1).all()
    assert view.data_ptr() == same.data_ptr() == x.data_ptr()


def test_constants_are_parameters(pipeline: OraclePipeline) -> None:
    def fn(x: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0])

    check_close(compiled(fn)(torch.ones(2)), torch.tensor([2.0, 3.0]))
    assert [p.role for p in pipeline.lowered[0].params] == ["input", "const"]


def test_random_numbers_are_those_of_eager(pipeline: OraclePipeline) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.rand_like(x) * torch.rand_like(x) + nn.functional.dropout(x, 0.5)

    torch.manual_seed(0)
    found = compiled(fn)(torch.ones(64))
    torch.manual_seed(0)
    check_close(found, fn(torch.ones(64)))
    effects = [getattr(op, "impure", "") for op in pipeline.imported[0].body.ops]
    assert effects.count("rng") == 3


def test_origins_are_the_users_lines(pipeline: OraclePipeline) -> None:
    compiled(relu_mm)(*relu_mm_inputs(3, F32))
    for func in (*pipeline.imported, *pipeline.lowered):
        (origin,) = origins.of(func.body.last.operands()[0])
        assert origin.target == "aten.relu.default" and origin.code.startswith("return torch.relu")
        assert origin.line.startswith(__file__)


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_unsupported_runs_as_it_is(strict: bool, pipeline: OraclePipeline,
                                           caplog: pytest.LogCaptureFixture,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Unsupported("not today")

    monkeypatch.setattr(entry.rung, "compiled", refuse)
    run = torch.compile(relu_mm, backend=entry.rung, options={"strict": strict})
    args = relu_mm_inputs(3, F32)
    entry.rung.reset()
    if strict:
        with pytest.raises(Exception, match="not today"):
            run(*args)
        return
    with caplog.at_level(logging.WARNING, logger="rung"):
        check_close(run(*args), relu_mm(*args))
    assert [r.message for r in caplog.records if r.name == "rung"] == [
        "rung: a graph runs without rung: Unsupported: not today"]


def test_what_aotautograd_refuses_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)  # which the gradient of exp would read
        return y.sum()

    x = torch.ones(3, requires_grad=True)
    with caplog.at_level(logging.WARNING, logger="rung"):
        found = torch.compile(fn, backend="rung")(x)
    assert "AOTAutograd refuses it: one of the variables" in caplog.text
    torch.testing.assert_close(found, fn(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="AOTAutograd refuses it"):
        torch.compile(fn, backend="rung", options={"strict": True})(x)


def test_an_error_of_tracing_is_the_error_of_eager() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda g: g)
        return y

    with pytest.raises(RuntimeError, match=r"^cannot register a hook on a tensor that doesn't"):
        torch.compile(fn, backend="rung")(torch.ones(2))


@pytest.mark.parametrize(("options", "message"), [
    ({"speed": 9}, "no option 'speed'; it has target, precision, mappings, deterministic"),
    ({"target": "z80"}, "no target 'z80'; it has cpu"),
    ({"precision": "low"}, "no precision 'low'; it has default, eager"),
    ({"strict": 1}, "strict is a bool, not 1")])
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(relu_mm, backend=entry.rung, options=options)(*relu_mm_inputs(3, F32))


def test_torchs_modes_are_known() -> None:
    (listed,) = re.findall(r"mode \(str\): Can be either (.*)", torch.compile.__doc__ or "")
    assert set(re.findall(r'"([a-z-]+)"', listed)) == MODES.keys()


@pytest.mark.parametrize("mode", MODES)
def test_modes_run_and_say_once_that_they_change_nothing(
        mode: str, pipeline: OraclePipeline, caplog: pytest.LogCaptureFixture) -> None:
    entry.rung.reset()
    x, y, z = relu_mm_inputs(3, F32)
    with caplog.at_level(logging.WARNING, logger="rung"), torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            backend._warned.update(m.removeprefix("rung: ") for m in caplog.messages)
            run = torch.compile(relu_mm, backend=entry.rung, mode=mode)
            check_close(run(x, y, z), relu_mm(x, y, z))
    assert caplog.messages == [f"rung: mode {mode!r} does what 'default' does: {why}"
                               for why in (MODES[mode],) if why]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_it_was(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(backend, "import_graph", lambda *_, **__: seen.append(gc.isenabled()))
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RungError):
            entry.rung.compile_graph(fx.GraphModule(nn.Module(), fx.Graph()), (),
                                  Options(strict=True))
        assert seen == [False] and gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_an_unknown_mode_names_those_that_exist() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no mode 'fast'; it has default, reduce-overhead"):
        torch.compile(relu_mm, backend=entry.rung, mode="fast")(*relu_mm_inputs(3, F32))


def test_options_reach_the_pipeline(pipeline: OraclePipeline) -> None:
    compiled(relu_mm, precision="eager", target="cpu.base")(*relu_mm_inputs(3, F32))
    (options,) = pipeline.options
    assert (options.precision, options.target, options.strict) == ("eager", "cpu.base", True)
    assert not options.deterministic


def test_inductor_is_not_loaded() -> None:
    """AOTAutograd itself imports parts of it; the compiler must stay out."""
    code = """if True:
        import sys, torch
        from rung.entry import rung
        from rung.frontends.torch.aten import lower
        sys.path.insert(0, "tests")
        from frontends.capture import run_program
        rung.compiled = lambda imported, *_: lambda args: run_program(
            lower(imported.func), [*args, *imported.constants])
        w = torch.randn(4, 4, requires_grad=True)
        torch.compile(lambda x: torch.relu(x @ w), backend=rung)(torch.randn(4, 4)).sum().backward()
        heavy = ("compile_fx", "graph", "ir", "lowering", "scheduler", "decomposition")
        print([m for m in heavy if f"torch._inductor.{m}" in sys.modules])
    """
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
