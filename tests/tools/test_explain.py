"""What `rung explain` says, and the figures behind it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kernels import lower
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry

from rung import cli
from rung.core import trace
from rung.core.errors import RungError
from rung.program.ir import Module
from rung.targets.base import target
from rung.tools import costs
from rung.tools.bisect import bisect
from rung.tools.capture import Capture, capture
from rung.tools.explain import SECTIONS, explain, size
from rung.tools.flops import bytes_after, bytes_before, contractions, flops, peak
from rung.tools.given import Given, UserError, from_expression
from rung.tools.show import Request

BASE = Request(target="cpu.base")


def captured(expression: str, train: bool = False) -> Capture:
    return capture(from_expression(expression), train)


def counted(expression: str) -> int:
    (graph,) = captured(expression).graphs
    assert graph.imported
    stages = lower(graph.imported.func, target("cpu.base"))
    return flops(stages.modules["tensor"], graph.hints).total


@pytest.mark.parametrize(("expression", "total"), [
    ("torch.randn(16, 8) @ torch.randn(8, 4)", 1024),
    ("nn.Linear(8, 4)(torch.randn(16, 8))", 1024),
    ("torch.randn(3, 16, 8) @ torch.randn(3, 8, 4)", 3 * 1024),
    ("torch.randn(16) + 1", 0),
    ("F.scaled_dot_product_attention(*(torch.randn(1, 2, 8, 4) for _ in range(3)))",
     2 * 2 * (8 * 8 * 4) * 2),
])
def test_flops(expression: str, total: int) -> None:
    assert counted(expression) == total


def test_calls_are_counted_by_torchs_formulas() -> None:
    found = captured("F.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3))")
    func = found.graphs[0].imported.func  # type: ignore[union-attr]
    assert flops(Module((func,)), {}).total == 2 * 4 * 6 * 6 * 3 * 3 * 3


def test_calls_without_a_formula_are_named() -> None:
    found = captured("torch.sort(torch.randn(8))[0]")
    func = found.graphs[0].imported.func  # type: ignore[union-attr]
    assert flops(Module((func,)), {}).uncounted == ("aten.sort.default",)


def test_a_formula_of_torchs_that_fails_costs_its_count_alone(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> int:
        raise AssertionError("sdpa_flop: query, key and value have as many heads")
    packet = torch.ops.aten._scaled_dot_product_flash_attention
    monkeypatch.setitem(flop_registry, packet, fails)
    q, k = torch.randn(1, 8, 16, 4), torch.randn(1, 2, 16, 4)
    module = Grouped()
    text = explain(Given("grouped", module, (q, k)), BASE, SECTIONS)
    assert "0 FLOPs in contractions, not counting aten._scaled_dot_product_flash" in text


class Grouped(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)


def write_to_a_column(c: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    c[:, p] = v
    return c * 2


def test_a_function_that_dynamo_leaves_to_eager_says_why(
        capsys: pytest.CaptureFixture[str]) -> None:
    given = Given("write", write_to_a_column, (torch.randn(4, 8), torch.tensor(3), torch.ones(4)))
    text = explain(given, BASE, SECTIONS)
    line = f"{__file__}:{write_to_a_column.__code__.co_firstlineno + 1}"
    why = f"{line}: DataDependentOutputException: aten._local_scalar_dense.default"
    assert "graphs: none" in text and why in text
    with pytest.raises(UserError, match=f"no graph was captured: {re.escape(why)}"):
        bisect(given, BASE)


def test_bytes_before_and_after_fusion() -> None:
    (graph,) = captured("torch.floor(torch.randn(1024, 1024)) + 1").graphs
    assert graph.imported
    machine = target("cpu.base")
    stages = lower(graph.imported.func, machine)
    assert bytes_before(graph.imported.func, {}) == 16 << 20
    assert bytes_after(stages.modules["loop"], machine.machine, {}) == 8 << 20


def test_the_report_of_a_pointwise_chain() -> None:
    text = explain(from_expression("torch.floor(torch.randn(1024, 1024)) + 1"), BASE)
    assert "16 MiB moved as ATen calls, 8 MiB after fusion" in text
    assert "kernel floor_add" in text
    assert "aten.add.Tensor" in text and "aten.floor.default" in text
    assert "at least" in text and "bound by" in text
    assert "graph breaks: 0" in text


def test_the_report_of_a_matmul() -> None:
    text = explain(from_expression("torch.randn(16, 8) @ torch.randn(8, 4)"), BASE)
    assert "1,024 FLOPs" in text


def test_alternatives_are_priced() -> None:
    text = explain(from_expression("torch.randn(17, 9) @ torch.randn(9, 23)"), BASE)
    assert "instead: " in text and " us (compute" in text


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Prices, and so what is chosen, are as on a machine with two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_graph_level_and_kernel_level_fusion_are_told_apart(
        golden: Callable[[Path, str], None], two_threads: None) -> None:
    told = []
    for expression in ("torch.softmax(torch.randn(512, 2048), -1)", "torch.randn(9, 5).floor() + 1",
                       "torch.relu((torch.randn(504, 512) + torch.randn(512)) "
                       "@ torch.randn(512, 512))"):
        text = explain(from_expression(expression), Request(target="cpu.avx512"), ["kernels"])
        told += [x for x in text.splitlines() if re.match("  kernel |    (graph|kernel) level", x)]
    golden(Path(__file__).parent.parent / "goldens" / "explain.levels.txt", "\n".join(told) + "\n")


def test_levels_follow_from_the_kernel_itself() -> None:
    found = captured("torch.softmax(torch.randn(512, 2048), -1)")
    assert found.graphs[0].imported
    stages = lower(found.graphs[0].imported.func, target("cpu.avx512"))
    (kernel,) = stages.modules["kernel"].kernels
    text = explain(from_expression("torch.softmax(torch.randn(512, 2048), -1)"),
                   Request(target="cpu.avx512"), ["kernels"])
    (arrays,) = re.findall(r"(\d+) values? in memory between", text)
    assert int(arrays) == str(kernel).count(" = alloc ") > 0


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    print("here")
    return y * 2


def test_breaks_have_a_line_and_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(Given("broken", broken, (torch.randn(4),)), BASE)
    assert "graphs: 2 inference; graph breaks: 1" in text
    line = broken.__code__.co_firstlineno + 2
    assert f"{__file__}:{line}: " in text
    assert f"graph break at {__file__}:{line}" in capsys.readouterr().err


def test_calls_that_stay_say_why() -> None:
    text = explain(from_expression("torch.sort(torch.randn(8))[0] + 1"), BASE)
    assert "call aten.sort.default x1: no entry  <rung -c>:1" in text


def test_lines_of_the_user() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        return y + x

    text = explain(Given("function", function, (torch.randn(8),)), BASE)
    first = function.__code__.co_firstlineno
    assert f"{__file__}:{first + 1} y = torch.exp(x)" in " ".join(text.split())
    assert f"{__file__}:{first + 2} return y + x" in " ".join(text.split())


def test_symbolic_sizes_are_told_with_their_hints() -> None:
    x = torch.randn(24, 8)
    torch._dynamo.mark_dynamic(x, 0)
    text = explain(Given("dynamic", lambda x: torch.exp(x) + 1, (x,)), BASE)
    assert "= 24" in text
    assert "1.5 KiB after fusion" in text


def test_all_sections_have_names_in_the_help() -> None:
    assert sorted(cli.SECTIONS) == sorted(SECTIONS)
    with pytest.raises(RungError, match="no section is called 'loops'; there are dynamo, guards"):
        explain(from_expression("torch.randn(3) + 1"), BASE, ["loops"])


def test_what_dynamo_made() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone().view(-1)
        y.add_(1)
        return torch.relu(y)

    text = explain(Given("function", function, (torch.randn(3, 4),)), BASE,
                   ["dynamo", "guards", "bytecode", "functional"])
    graph, guards, code, forms = (text.index(f"Dynamo's {x} 1 of 1: function")
                                  for x in ("graph", "guards", "bytecode", "functional form"))
    assert "y.add_(1)" in text[graph:guards]
    assert "check_tensor(L['x']" in text[guards:code] and "size=[3, 4]" in text[guards:code]
    assert "__compiled_fn" in text[code:forms] and "RETURN_VALUE" in text[code:forms]
    kept, copied = text[forms:].split("without mutations and views")
    assert "add_" not in kept and "aten.view.default" in kept
    assert "aten.view_copy.default" in copied and "aten.view.default" not in copied


def test_what_autograd_made() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.rot90(x.exp(), 2) * y.round().detach()

    text = explain(Given("function", function, (torch.randn(3, 4), torch.randn(4))),
                   Request(target="cpu.base", train=True), ["aten", "decompositions", "saved"])
    forward, backward = text.split("graph 2 of 2: backward")
    assert "torch.ops.aten.exp.default" in forward and "tangents_1" in backward
    assert "aten.rot90.default -> " in forward
    assert "saved for backward: " in forward and ": float32[3,4]\n" in forward
    assert "gradients of 1 of 2 inputs; None for input 1" in backward


def test_the_host_plan_and_the_passes() -> None:
    text = explain(from_expression("torch.floor(torch.randn(8)) + 1"), BASE, ["plan", "passes"])
    assert "step 0: launch floor_add(x0)" not in text  # the graph's own names
    assert "host plan" in text and ": launch floor_add(" in text and "workspace 0 B" in text
    assert "loop.fuse" in text and "fired: fuse 1" in text


def test_recompiles_have_a_reason() -> None:
    given = Given("dynamic", lambda x: torch.exp(x) + 1, (torch.randn(24, 8),),
                  ((torch.randn(24, 8),), (torch.randn(7, 8),), (torch.randn(9, 8),)))
    text = explain(given, BASE)
    assert "graphs: 2 inference; graph breaks: 0; recompiles: 1" in text
    assert "recompiled because 0/0: tensor 'x' size mismatch at index 0. expected 24, actual 7" \
        in text


def test_breaks_calls_and_refused_fusions_are_ranked_by_their_cost() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x @ x, -1).sum(0)
        print("here")
        return y.sort()[0]

    text = explain(Given("function", function, (torch.randn(64, 64),)), BASE, ["costs"])
    head, *rows = text[text.index("what was not done"):].splitlines()
    assert "modelled" in head
    costs = [float(row.split()[0]) for row in rows]
    assert costs == sorted(costs, reverse=True) and len(costs) >= 3
    (broken,) = (row for row in rows if "graph break: " in row)
    assert f" {size(2 * 64 * 4)} " in broken and __file__ in broken
    (refused,) = (row for row in rows if "refused fusion" in row)
    assert f" {size(2 * 64 * 64 * 4)} " in refused
    assert any("call aten.sort.default x1" in row for row in rows)


class Sorts(nn.Module):
    """A layer with a call that stays and a fusion that is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.silu(self.up(self.norm(x))).sort()[0].cumsum(0))
        return y


def figures(layers: int) -> dict[str, float]:
    """What equal layers compute and move, and what was not done in them costs."""
    given = Given("layers", nn.Sequential(*(Sorts() for _ in range(layers))), (torch.randn(8, 32),))
    (graph,) = capture(given).graphs
    assert graph.imported
    where = target("cpu.base")
    with trace.listen() as events:
        modules = lower(graph.imported.func, where).modules
    assert len(modules["program"].programs) == min(layers, 2)
    rows = [*costs.of_calls(modules["loop"], events, where.machine, {}),
            *costs.of_fusions(modules["program"], events, where.machine, {})]
    found = {"flops": flops(modules["tensor"], {}).total,
             "before": bytes_before(graph.imported.func, {}),
             "after": bytes_after(modules["loop"], where.machine, {})}
    for kind in ("call", "refused"):
        of_kind = [r for r in rows if r.what.startswith(kind)]
        found[f"{kind}, bytes"] = sum(r.bytes for r in of_kind)
        found[f"{kind}, us"] = sum(r.seconds for r in of_kind) * 1e6
    return found


def test_figures_of_layers_are_those_of_one_times_their_number() -> None:
    one = figures(1)
    assert all(one.values())
    for layers in (2, 4):
        assert figures(layers) == pytest.approx({k: layers * v for k, v in one.items()})


def test_a_graph_takes_at_least_what_its_kernels_take() -> None:
    text = explain(from_expression("torch.randn(8, 8).sort()[0].exp().sort()[0].exp()"), BASE)
    (whole,) = re.findall(r"at least (\S+) us in 2 kernel calls", text)
    (each,) = re.findall(r"at least (\S+) us, bound", text)
    assert float(whole) == pytest.approx(2 * float(each), rel=0.1)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.project = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.project(self.table(ids))
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


def test_the_estimate_of_a_model_names_its_assumptions() -> None:
    ids = torch.randint(0, 50, (2, 5))
    text = explain(Given("attends", Attends(), (ids,)), BASE)
    held = 8 * 8 + 8
    assert f"model: {held + 50 * 8} parameters, 400 of them only looked up; 10 tokens" in text
    assert f"{2 * held * 10:,} FLOPs forward" in text and f"{6 * held * 10:,} in a train" in text
    attention = 2 * 2 * (2 * 5 * 5 * 8)
    assert f"attention {attention / (attention + 2 * 10 * 64):.1%}" in text
    assert "assumes: a token is" in text


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x).relu().mean((2, 3)))


def test_a_model_of_images_is_told_by_its_convolutions() -> None:
    text = explain(Given("pictures", Pictures(), (torch.randn(2, 3, 10, 10),)), BASE)
    convolution, matmul = 2 * (2 * 8 * 8) * 8 * 27, 2 * 2 * 8 * 5
    told = text[text.index("model: "):]
    assert "tokens" not in told and "Kaplan" not in told and "attention" not in told
    assert f"{convolution + matmul:,} FLOPs for 2 images of 3x10x10: convolutions " \
        f"{convolution / (convolution + matmul):.1%}, matmuls" in told


def moved(fn: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[int, int, int]:
    """Bytes before and after fusion, and the most that a call holds."""
    (graph,) = capture(Given("fn", fn, args)).graphs
    assert graph.imported
    machine = target("cpu.base")
    modules = lower(graph.imported.func, machine).modules
    return (bytes_before(graph.imported.func, {}),
            bytes_after(modules["loop"], machine.machine, {}), peak(modules["kernel"], {}))


@pytest.mark.parametrize("look_up", [
    F.embedding, lambda at, x: x[at], lambda at, x: x.index_select(0, at),
    lambda at, x: x.gather(0, at[:, None].expand(-1, 512))])
def test_what_is_looked_up_counts_and_not_the_table(look_up: Callable[..., torch.Tensor]) -> None:
    rows = 4 * 512 * 4
    before, after, held = moved(lambda at, x: look_up(at, x).floor(), torch.arange(4),
                                torch.randn(8000, 512))
    assert 4 * rows <= before <= 4 * rows + 4 * 512 * 8 + 64
    assert 2 * rows <= after <= 2 * rows + 4 * 512 * 8 + 64
    assert rows <= held <= 4 * rows


def test_views_are_no_copies() -> None:
    x, size = torch.randn(2, 64, 32), 2 * 64 * 32 * 4

    def views(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).reshape(2, 4, 8, 64).unbind(1)[0].exp()
    assert moved(views, x)[0] == 2 * size // 4

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._unsafe_view(x.sort()[0], [4, 32, 32])
    assert moved(product, x, x)[:2] == (2 * size + 2 * size, 2 * size + 2 * size)
    row = torch.randn(32)
    assert moved(lambda x, r: x * r.expand(2, 64, 32), x, row)[0] == 2 * size + 32 * 4


def test_the_peak_has_what_library_calls_give() -> None:
    x = torch.randn(64, 32)
    size = 64 * 32 * 4
    held = moved(lambda x: x.exp().sort()[0].t().cumsum(0).sort()[0].sum(), x)[2]
    assert held >= size + 3 * size  # an argument of `sort`, its values, and its places in int64


def test_contractions_know_parameters_behind_views_and_casts() -> None:
    model = nn.Linear(8, 4)
    (graph,) = capture(Given("f", lambda x: x @ model.weight.double().t(),
                             (torch.randn(3, 8, dtype=torch.double),))).graphs
    assert graph.imported
    found = contractions(graph.imported.func, {})
    assert not found.convolutions
    assert (found.weights, found.attention) == (2 * 3 * 8 * 4, 0)


def test_training_of_a_module() -> None:
    found = capture(Given("linear", nn.Linear(8, 4), (torch.randn(2, 8),)), train=True)
    assert [g.kind for g in found.graphs] == ["forward", "backward"]


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"),
                                         (8 << 20, "8 MiB"), (3 << 30, "3 GiB")])
def test_sizes(n: int, text: str) -> None:
    assert size(n) == text


def test_splits_are_priced(two_threads: None) -> None:
    text = explain(from_expression("torch.randn(1 << 22).sum()"), BASE, ["splits"])
    lines = [x.strip() for x in text.splitlines() if "parts" in x]
    assert sum(x.startswith("sum: priced, ") for x in lines) == 3
    assert [x for x in lines if x.startswith("sum: done, ")]


def test_what_is_against_cuda_graphs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    relu, gpu = from_expression("torch.relu(torch.randn(8))"), Request(target="cuda.sm90")
    assert '  CUDA graphs: from the third call on, with mode="reduce' in explain(relu, gpu)
    assert "CUDA graphs" not in explain(relu, BASE)
    monkeypatch.setattr("rung.tools.explain.obstacles", lambda _: iter(["a", "b", "a"]))
    assert "  CUDA graphs: declined, a (and 1 more)" in explain(relu, gpu)
