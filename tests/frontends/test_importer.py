"""Graphs to programs: types, sizes, roles, effects, names, and what is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from frontends.capture import check, traced
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, ModularIndexing, PythonMod

from rung.core.errors import Unsupported
from rung.core.expr import is_size
from rung.core.op import RESERVED, Effect
from rung.core.parse import parse_module
from rung.frontends.torch import activations
from rung.frontends.torch.aten import lower
from rung.frontends.torch.importer import import_graph
from rung.frontends.torch.types import to_expr, type_of
from rung.program import ir as program

aten = torch.ops.aten


def text(fn: Any, *args: Any, mode: str = "fake") -> str:
    func = traced(fn, args, mode).func
    if "complex" not in str(func) and "float8" not in str(func):
        check(func)
    return str(func)


def test_a_call_prints_as_the_node_reads() -> None:
    shown = text(lambda x: aten.add.Tensor(x, x, alpha=2), torch.ones(2, 3))
    assert shown.splitlines() == [
        "program main(arg0_1: f32[2,3] input)",
        "  add = call aten.add.Tensor(arg0_1, arg0_1, alpha=2) : f32[2,3]",
        "  return add"]


@pytest.mark.parametrize(("fn", "line"), [
    (lambda x: x.to(torch.float16), "_to_copy.default(arg0_1, dtype=f16) : f16[2,3]"),
    (lambda x: aten.full([2], float("-inf"), dtype=torch.bool, device="cpu", pin_memory=False),
     'full.default([2], -inf, dtype=bool, device="device:cpu", pin_memory=false) : bool[2]'),
    (lambda x: x.clone(memory_format=torch.contiguous_format),
     '(arg0_1, memory_format="memory_format:torch.contiguous_format") as copy : f32[2,3]'),
    (lambda x: aten.index.Tensor(x, [None, torch.tensor([0])]),
     "index.Tensor(arg0_1, [None, lift_fresh_copy]) : f32[2,1]"),
    (lambda x: x.t(), "t.default(arg0_1) as view : f32[3,2] strides [1,3]"),
    (lambda x: x.to(torch.complex64), 'dtype="dtype:torch.complex64") : complex64[2,3]'),
    (lambda x: x[:, 1:2], "f32[2,1] strides [3,1]"), (lambda x: x[:0], "f32[0,3]\n"),
    (lambda x: aten.native_dropout(x, 0.5, True)[0], "true) effect rng : f32[2,3], bool[2,3]"),
    (lambda x: torch.ops.aten.split.Tensor(x, 2, 1)[1],
     "split, split1 = call aten.split.Tensor(arg0_1, 2, 1) as view : f32[2,2] strides [3,1], "
     "f32[2,1]"
     )])
def test_arguments_and_results(fn: Any, line: str) -> None:
    assert line in text(fn, torch.ones(2, 3))


def test_layouts() -> None:
    ones = torch.ones
    assert str(type_of(ones(2, 1, 3)[:, :, ::2])) == "f32[2,1,2] strides [3,3,2]"
    assert str(type_of(ones(4, 3)[:1])) == "f32[1,3]"
    assert str(type_of(torch.empty_strided((1, 3), (7, 1)))) == "f32[1,3]"
    assert str(type_of(ones(()).expand(2))) == "f32[2] strides [0]"
    assert [str(type_of(x)) for x in (3, 1.5, True)] == ["index", "f64", "bool"]
    assert str(type_of(ones(2, 3).to_sparse())) == "sparse_f32[2,3]"
    for odd in (ones(2, 2).to_sparse_csr(), None):
        with pytest.raises(Unsupported):
            type_of(odd)


def test_sizes_of_sympy() -> None:
    a, b = sympy.symbols("s0 s1", positive=True, integer=True)
    for e, shown in ((a * b + 3 * a - 2, "s0*s1+3*s0-2"), (FloorDiv(a, 4), "s0//4"),
                     (Mod(a, 3), "s0%3"), (PythonMod(a, b), "s0%s1"), (a ** 2, "s0*s0"),
                     (CleanDiv(a * 3, b), "(3*s0)//s1"), (ModularIndexing(a, 2, 5), "(s0//2)%5"),
                     (sympy.Max(1, a), "s0"), (sympy.Integer(-4), "-4")):
        assert str(to_expr(e)) == shown.replace("(s0//2)%5", str(to_expr(FloorDiv(a, 2)) % 5))
    for odd in (sympy.Max(a, b), a / b, sympy.sqrt(a)):
        with pytest.raises(Unsupported, match="size"):
            to_expr(odd)


def test_sizes_become_expressions() -> None:
    shown = text(lambda x: x.new_zeros(x.shape[0] * 3 + 1, x.shape[1] // 2), torch.ones(8, 6),
                 mode="symbolic")
    assert "aten.sym_size" not in shown and "[size(3*s" in shown


def test_results_leave_with_all_their_strides() -> None:
    last = torch.ones(1, 4, 3, 5).to(memory_format=torch.channels_last)
    for fn, x, line in (
            (lambda x: x + 1, last, "return add as f32[1,4,3,5] strides [60,1,20,4]"),
            (lambda x: (x + 1, x.sum()), torch.ones(5, 1).t(), "return add, sum_1"),
            (lambda x: (x.sum(), x.unsqueeze(0)), torch.empty_strided((1, 3), (7, 1)),
             "return sum_1, unsqueeze as f32[], f32[1,1,3] strides [7,7,1]")):
        assert line in text(fn, x)


def test_constants_become_parameters() -> None:
    constant = torch.arange(3.0)
    imported = traced(lambda x: x + constant + constant, [torch.ones(3)])
    assert [(p.name, p.role) for p in imported.func.params] == [
        ("arg0_1", "input"), ("tensor_constant0", "const")]
    assert imported.constants[0] is constant


def test_reserved_words_are_no_names() -> None:
    shown = text(lambda x, i: (aten.index.Tensor(x, [i]) + 1, aten.full([1], 2)),
                 torch.ones(3), torch.tensor([0]))
    assert "index1 = call aten.index.Tensor" in shown and "full1 = call aten.full" in shown


def test_effects() -> None:
    def fn(x: Tensor) -> Tensor:
        torch._assert_async(x.sum() > 0)
        return torch.bernoulli(x)

    ops = traced(fn, [torch.ones(2)]).func.body.ops
    found = {op.target: op.effect for op in ops if hasattr(op, "target")}
    assert found["aten._assert_async.default"] is Effect.RAISES
    assert found["aten.bernoulli.default"] is Effect.RNG
    assert found["aten.sum.default"] is Effect.PURE


def graph(*vals: Any) -> tuple[fx.Graph, list[fx.Node]]:
    g = fx.Graph()
    nodes = [g.placeholder(f"p{n}") for n in range(len(vals))]
    for node, val in zip(nodes, vals, strict=True):
        node.meta["val"] = val
    return g, nodes


def test_a_write_back_is_a_write() -> None:
    g, (cache, new) = graph(torch.ones(3), torch.ones(3))
    g.call_function(aten.copy_.default, (cache, new)).meta["val"] = torch.ones(3)
    g.output((new, None))
    imported = import_graph(fx.GraphModule({}, g), static=[0, 1])
    check(imported.func)
    assert str(imported.func).splitlines() == [
        "program main(p0: f32[3] mutated, p1: f32[3] param)", "  write p0 <- p1", "  return p1"]
    assert imported.results == (imported.func.params[1], None)


def test_other_mutations_are_effects() -> None:
    g, (x,) = graph(torch.ones(3))
    made = g.call_function(aten.add.Tensor, (x, 1))
    made.meta["val"] = torch.ones(3)
    g.call_function(aten.mul_.Tensor, (made, 2)).meta["val"] = torch.ones(3)
    g.output((made,))
    shown = str(import_graph(fx.GraphModule({}, g)).func)
    assert "aten.mul_.Tensor(add_tensor, 2) effect mutates" in shown


@pytest.mark.parametrize(("vals", "reason"), [
    ((torch.ones(2), torch.ones(2, device="meta")), "tensors on cpu and meta"),
    ((torch.ones(2), torch.ones(2).to_sparse()), "an argument of layout torch.sparse_coo"),
    ((torch.ones(2), torch.ones(2, 2).to_sparse_csr()), "a value of Tensor"),
    ((torch.ones(2), None), "a value of NoneType")])
def test_refused_inputs(vals: tuple[Any, ...], reason: str) -> None:
    g, (x, _) = graph(*vals)
    g.output((x,))
    with pytest.raises(Unsupported, match=reason):
        import_graph(fx.GraphModule({}, g))


def test_symbols_of_any_name_are_told_apart() -> None:
    """Torch numbers its symbols: some are words here, and one may be a number that we gave."""
    names = [f"{letter}{n}" for letter in "sui" for n in range(70)] + ["u10000", "f32", "view"]
    env = ShapeEnv()
    g, nodes = graph(*(env.create_symintnode(sympy.Symbol(name, positive=True, integer=True),
                                             hint=5) for name in names))
    g.output(tuple(nodes))
    func = import_graph(fx.GraphModule({}, g)).func
    check(func)
    found = [p.name for p in func.params]
    assert len({*found}) == len(names) and RESERVED.isdisjoint(found) and all(map(is_size, found))


def test_refused_results() -> None:
    g, () = graph()
    made = g.call_function(aten.full.default, ([2], 1.0), {"device": torch.device("meta")})
    made.meta["val"] = torch.ones(2, device="meta")
    g.output((made,))
    with pytest.raises(Unsupported, match="tensors on meta"):
        import_graph(fx.GraphModule({}, g))


def test_refused_operands() -> None:
    g, (x,) = graph(torch.ones(2))
    made = g.call_function(aten.add.Tensor, (x, {}))
    made.meta["val"] = torch.ones(2)
    g.output((made,))
    with pytest.raises(Unsupported, match="an argument of immutable_dict"):
        import_graph(fx.GraphModule({}, g))


def test_a_size_that_torch_states_wrongly_is_refused() -> None:
    """Torch 2.11 traces the gradient of index_fill so, whatever the indices are."""
    g, (at,) = graph(torch.tensor([0, 2, 2, 1]))
    unique = g.call_function(aten._unique.default, (at, False))
    unique.meta["val"] = torch.ones(1).long(), torch.ones(0).long()
    g.output((g.call_function(operator.getitem, (unique, 0)),))
    with pytest.raises(Unsupported, match="_unique"):
        import_graph(fx.GraphModule({}, g))


def test_sizes_that_depend_on_data_are_read_off_the_result() -> None:
    assert "u0 = call aten.sym_size.int(index1, 0) : index" in text(
        lambda x: x[x > 0], torch.ones(3))


# ---- devices

def on_a_gpu(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    """The program of a function of tensors of a GPU, which nothing here has."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(shape, device="cuda") for shape in shapes]
        found = import_graph(make_fx(lambda *x: list(fn(*x)), tracing_mode="fake")(*given))
    assert str(found.home) == "cuda:0"
    assert str(parse_module(str(found.func), {"program": program.VOCABULARY})[0]) == str(found.func)
    return str(found.func)


def test_tensors_elsewhere_say_so_and_stay_with_torch() -> None:
    text = on_a_gpu(lambda x: (x.cpu() + 1, x * 2), (2, 3))
    assert "_to_copy = call aten._to_copy.default(arg0_1" in text and ": f32[2,3] on cpu" in text
    lowered = str(lower(parse_module(text, {"program": program.VOCABULARY})[0]))
    assert "call aten.add.Tensor(_to_copy, 1) : f32[2,3] on cpu" in lowered
    assert "aten.mul" not in lowered


def test_scalars_of_the_host_are_brought_to_where_the_program_runs() -> None:
    text = on_a_gpu(lambda x: (x + x.sum().cpu(), x.masked_fill(x > 0, x.max().cpu())), (2, 3))
    assert text.count('call aten._to_copy.default(_to_copy, device="device:cuda:0") : f32[]\n') == 1
    assert text.count('device="device:cuda:0") : f32[]\n') == 2


def test_one_accelerator_at_a_time() -> None:
    with FakeTensorMode(), pytest.raises(Unsupported, match="tensors on cuda:0 and meta"):
        x, y = torch.empty(2, device="cuda"), torch.empty(2, device="meta")
        import_graph(make_fx(lambda x, y: [x + 1, y + 1], tracing_mode="fake")(x, y))


def test_integers_are_divided_by_zero_without_an_error_on_gpus_alone() -> None:
    x = torch.ones(3, dtype=torch.long)
    func = import_graph(make_fx(lambda x, y: [x // y])(x, x)).func
    assert "check" in str(lower(func)) and "check" not in str(lower(func, gpu=True))


def test_float32_is_added_in_float32_on_gpus_alone_and_doubles_in_double() -> None:
    x = torch.ones(4, 20000)
    func = import_graph(make_fx(lambda x: [x.sum(1), x.var(1), x.cumsum(1)])(x)).func
    assert "f64" in str(lower(func)) and "f64" not in str(lower(func, gpu=True))
    wide = import_graph(make_fx(lambda x: [x.double().sum(1).float()])(x)).func
    assert "acc f64" in str(lower(wide, gpu=True))


def test_gelu_of_infinity_on_a_gpu_is_not_that_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "is_nan_at_infinity", lambda _: True)
    func = import_graph(make_fx(lambda x: [torch.nn.functional.gelu(x)])(torch.ones(4))).func
    assert "inf" in str(lower(func)) and "inf" not in str(lower(func, gpu=True))
