"""What becomes one kernel and what does not, and that every step keeps the meaning."""

from __future__ import annotations

import models
import numpy as np
import pytest
from programs import Prog, check, draw, price, size

from rung.core import trace
from rung.core.key import magnitude
from rung.core.op import Func, Value
from rung.core.parse import parse_module
from rung.core.types import I64
from rung.core.verify import verify
from rung.loop import fuse as fuse_module
from rung.loop import ir as loop
from rung.loop.canonical import canonical
from rung.loop.emit import Copier, Declined
from rung.loop.fuse import fuse
from rung.loop.graph import Graph
from rung.loop.splice import Piece, splice
from rung.pipeline import VOCABULARIES
from rung.program.ir import Call, Module
from rung.tensor.to_loop import to_loop


def fused(program: Func) -> Module:
    return canonical(fuse(to_loop(program), price, price))


def kernels(program: Func) -> list[str]:
    return [k.name for k in fused(program).kernels]


ONE = [models.relu_mm(), models.softmax(), models.colsum(), models.floor_add(), models.rms_norm(),
       models.layer_norm(), models.swiglu(), models.attend(), models.attend(32, 2048, 64),
       models.norm_linear(1, 4096, 4096), models.norm_linear(4, 4096, 4096),
       models.relu_mm(512, 4096, 4096), models.linear_bf16()]


@pytest.mark.parametrize("blocks", [1, 6])
def test_equal_kernels_are_fused_once(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prog()
    xs = [p.param(f"x{n}", 8, 16) for n in range(blocks)]
    program = p.done(*[p.map("relu", p.map("add", x, 1.0)) for x in xs])
    spliced: list[str] = []
    real = fuse_module.splice
    monkeypatch.setattr(fuse_module, "splice", lambda a, b, *how: (
        spliced.append(a.func.name), real(a, b, *how))[1])
    before = to_loop(program)
    after = fuse(before, price, price)
    assert len(before.kernels) == 2 and len(spliced) == 1 and len(after.kernels) == 1
    assert len(after.main.body.ops) == blocks + 1
    check(before, after, draw(program))


def test_what_does_not_change_is_not_copied() -> None:
    """An op of a kernel that fusion leaves as it was is the same op of the fused kernel."""
    p = Prog()
    x, y = p.param("x", 8, 16), p.param("y", 8, 16)
    program = p.done(p.map("mul", p.map("exp", x), y))
    before = to_loop(program)
    (after,) = fuse(before, price, price).kernels
    old = {op for k in before.kernels for op in k.body.ops}
    assert [op for op in after.body.ops if op in old]
    assert len(after.body.ops) == len(set(after.body.ops)) == 5


def test_a_kept_result_that_is_read_elsewhere_costs_no_splice(
        monkeypatch: pytest.MonkeyPatch) -> None:
    module = parse_module("""\
kernel exp(x: f32[8,8]) -> y: f32[8,8]
  y[i,j] = exp(x[i,j])
kernel neg(x: f32[8,8]) -> y: f32[8,4]
  y[i,j] = neg(x[i,j+4])""", {"kernel": loop.VOCABULARY})
    first, second = module
    x, made, result = (Value(n, v.type) for n, v in zip(
        "xmr", (*first.params, *first.outs, *second.outs), strict=True))
    pieces = Piece(first, (x,), (made,)), Piece(second, (made,), (result,))
    monkeypatch.setattr(Copier, "op", lambda *_: pytest.fail("it began to copy"))
    with pytest.raises(Declined, match="m is not read at its own indices"):
        splice(*pieces, frozenset([made]))


@pytest.mark.parametrize("program", ONE, ids=lambda p: p.name)
def test_one_kernel(program: Func) -> None:
    assert len(fused(program).kernels) == 1


def test_the_text_of_relu_mm() -> None:
    assert str(fused(models.relu_mm(504, 512, 512)).kernels[0]) == """\
kernel mm_relu(x0: f32[504,512], x1: f32[512], x2: f32[512,512]) -> y: f32[504,512]
  add = x0[i,k] + x1[k] : f32 over i,k
  mm = contract add mul add, x2[k,j] over k 512 : f32 over i,j acc f32
  y[i,j] = relu(mm)"""


def test_the_text_of_softmax() -> None:
    assert str(fused(models.softmax(512, 2048)).kernels[0]) == """\
kernel max_exp_sum(x0: f32[512,2048]) -> y: f32[512,2048]
  max = fold max x0[i,j] over j 2048 : f32 over i acc f32
  exp = exp(x0[i,j] - max) : f32 over i,j
  sum = fold add exp over j 2048 : f32 over i acc f32
  y[i,j] = exp / sum"""


def test_a_norm_is_not_recomputed_for_every_column_of_a_large_product() -> None:
    assert kernels(models.norm_linear(512, 4096, 4096)) == ["sum_rsqrt", "mm"]


def test_a_costly_prologue_stays_apart_where_it_would_be_repeated() -> None:
    assert kernels(models.exp_mm(512, 4096, 4096)) == ["exp", "mm"]
    assert kernels(models.exp_mm(1, 4096, 4096)) == ["exp_mm"]


def test_two_products_are_two_kernels_with_their_epilogues() -> None:
    assert kernels(models.mlp(512, 512, 2048)) == ["mm_relu", "mm"]


def test_rotation_goes_into_the_write_of_the_cache() -> None:
    assert kernels(models.rotate()) == ["copy", "mul_neg_ge_where_scatter"]


def test_a_transformer_layer() -> None:
    assert len(fused(models.transformer(1)).kernels) == 9
    assert len(fused(models.transformer(2)).kernels) == 9  # the second layer's are the first's


def test_a_product_that_is_softmaxed_is_not_attention() -> None:
    p = Prog()
    x, w = p.param("x", 64, 64), p.param("w", 64, 64)
    names = kernels(p.done(p.softmax(p.einsum("ik,kj->ij", x, w))))
    assert names == ["mm", "max_exp_sum"]


def test_a_value_that_is_read_later_becomes_a_second_output() -> None:
    p = Prog()
    x, y, w = p.param("x", 64, 256), p.param("y", 64, 256), p.param("w", 256)
    h = p.map("add", x, y)
    module = fused(p.done(h, p.rms_norm(h, w)))
    assert [len(k.outs) for k in module.kernels] == [2]


def chain(length: int) -> Func:
    """Squares, each read by the next one and by a sum of its own."""
    p = Prog()
    x = p.param("x", 8, 16)
    sums = []
    for _ in range(length):
        x = p.map("mul", x, x)
        sums.append(p.reduce("add", x, 1))
    return p.done(x, *sums)


def test_places_order_what_was_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    walked: list[int] = []
    real_keep, real_between, real = Graph.keep, Graph.between, Graph.ordered

    def ordered(graph: Graph) -> object:
        for n, node in graph.nodes.items():
            for v in graph.inputs(node):
                assert v not in graph.maker or graph.place[graph.maker[v]] < graph.place[n]
        return real(graph)

    def between(graph: Graph, n: int, c: int) -> set[int]:
        found = real_between(graph, n, c)
        walked.append(len(found))
        return found

    monkeypatch.setattr(Graph, "keep", lambda g, n, c: (kept.append(n), real_keep(g, n, c)))
    monkeypatch.setattr(Graph, "between", between)
    monkeypatch.setattr(Graph, "ordered", ordered)
    for program in (chain(40), *ONE):
        fused(program)
    assert kept and max(walked) < 20


def test_two_steps_make_no_cycle_that_each_alone_would_not() -> None:
    """Each of x and y may be kept by one sum; after both steps each kernel would need the other."""
    p = Prog()
    x, y = p.map("exp", p.param("a", 128, 256)), p.map("exp", p.param("b", 64, 256))
    left = p.map("add", p.slice(x, 0, 0, 64), y)
    right = p.map("mul", x, p.index(y, [128, 256], lambda i, j: [i % 64, j]))
    func = p.done(left, right, x, y)
    module = fused(func)
    assert sorted(len(k.outs) for k in module.kernels) == [1, 1, 2]
    check(to_loop(func), module, draw(func))


@pytest.mark.parametrize("effect, outputs", [("", 2), ("ordered", 1)])
def test_nothing_is_kept_across_effects_in_order(effect: str, outputs: int) -> None:
    p = Prog()
    x = p.map("exp", p.param("a", 64, 256))
    seen, drawn = (p.b.one(Call("aten.rand", given, (x.type,), effect))
                   for given in ((("", x),), ()))
    module = fused(p.done(p.map("add", x, drawn), seen))
    assert max(len(k.outs) for k in module.kernels) == outputs


@pytest.mark.parametrize("shape, names", [((2, 3), ["cumsum"]),
                                          ((4, 2, 3), ["cumsum", "copy"])])
def test_a_scan_runs_once_for_all_that_read_it(shape: tuple[int, ...], names: list[str]) -> None:
    """Inside of the kernel of its copies it would run again for each of them."""
    p = Prog()
    s = p.scan("add", p.map("neg", p.param("x", 2, 3)), 0)
    func = p.done(p.expand(s, [*map(size, shape)]))
    assert kernels(func) == names
    check(to_loop(func), fused(func), draw(func))


def test_nothing_is_fused_around_a_write() -> None:
    p = Prog()
    x = p.param("x", 8, role="mutated")
    y = p.map("exp", x)
    p.write(x, p.map("neg", x))
    func = p.done(p.map("add", y, 1.0))
    check(to_loop(func), fused(func), draw(func))


def test_declined_fusions_say_why() -> None:
    with trace.listen() as events:
        fused(models.mlp(64, 64, 64))
    reasons = {e.detail for e in events if e.kind == "declined"}
    assert reasons & {"a contraction's result is folded again", "a contraction would be repeated"}


def _data_dependent() -> Func:
    p = Prog("data_dependent")
    x, n = p.param("x", 16, 8), p.param("n", 4, dtype=I64)
    return p.done(p.map("exp", p.gather(p.map("neg", x), 0, p.map("add", n, 1))))


def _masked() -> Func:
    p = Prog("masked")
    x = p.param("x", 6, 8)
    y = p.index(p.map("exp", x), [6, 12], lambda i, j: [i, j - 2],
                lambda i, j: [j - 2, 9 - j], -1.0)
    return p.done(p.reduce("add", y, 1))


def _windows() -> Func:
    """A sum over windows: one value read at three shifts."""
    p = Prog("windows")
    e = p.map("exp", p.param("x", 20))
    parts = [p.slice(e, 0, n, n + 18) for n in range(3)]
    return p.done(p.map("add", p.map("add", parts[0], parts[1]), parts[2]))


def _below() -> Func:
    """A triangle of a softmax, whose sums are those of whole rows."""
    p = Prog("below")
    y = p.softmax(p.param("x", 8, 8))
    return p.done(p.index(y, [8, 8], lambda i, j: [i, j], lambda i, j: [i - j]))


def _beside() -> Func:
    """Diagonals of a softmax: each element is one of another row."""
    p = Prog("beside")
    y = p.softmax(p.param("x", 8, 8))
    return p.done(p.index(y, [8, 8], lambda i, j: [i - j, j], lambda i, j: [i - j]))


def _first_columns() -> Func:
    p = Prog("first_columns")
    return p.done(p.map("exp", p.slice(p.softmax(p.param("x", 4, 8)), 1, 0, 5)))


def _scans() -> Func:
    """What reads a scan at its own place shares its loop; backwards, in part or along another
    axis it is read from memory."""
    p = Prog("scans")
    x = p.param("x", 8, 8)
    s = p.scan("add", p.map("neg", x), 1)
    down = p.index(s, [8, 8], lambda i, j: [i, j], lambda i, j: [i - j])
    back = p.index(s, [8, 8], lambda i, j: [i, 7 - j])
    return p.done(p.map("mul", s, 2.0), p.map("exp", down), p.map("exp", back),
                  p.scan("max", p.map("exp", s), 0), p.map("exp", p.slice(s, 1, 0, 5)),
                  p.map("div", s, p.reduce("max", s, 1, keep=True)))


SAME = [*ONE[:8], models.mlp(), models.rotate(), models.transformer(2), models.momentum(),
        models.transformer(1, m=3), _data_dependent(), _masked(), _windows(),
        _below(), _beside(), _first_columns(), _scans()]


@pytest.mark.parametrize("program", SAME, ids=lambda p: p.name)
def test_fusion_keeps_the_meaning(program: Func) -> None:
    before, inputs = to_loop(program), draw(program, ints=15)
    after = fuse(before, price, price)
    for kernel in canonical(after).kernels:
        verify(kernel, loop.VOCABULARY, loop.verify_kernel)
    check(before, after, inputs, exact=False)
    check(after, canonical(after), inputs, exact=False)


SYMBOLIC = [models.relu_mm("s0"), models.softmax("s0", "s1"), models.attend(t="s0"),
            models.layer_norm("s0"), models.floor_add("s0")]


@pytest.mark.parametrize("program", SYMBOLIC, ids=lambda p: p.name)
def test_symbolic_sizes(program: Func) -> None:
    module = fused(program)
    assert len(module.kernels) == 1
    for n in (1, 7):
        inputs = draw(program, {"s0": n, "s1": n + 4}, ints=n)
        check(to_loop(program), module, inputs, exact=False)


def test_a_step_around_a_fold_is_taken_only_if_it_pays_as_mapped() -> None:
    """The bound of one kernel is always below that of two; what a schedule makes of it may not be.
    Steps without a fold are not weighed again."""
    p = Prog()
    x = p.param("x", 64, 64)
    total = p.reduce("add", p.map("exp", x), 1)
    program = to_loop(p.done(p.map("relu", p.map("neg", total))))

    def settled(kernel: Func) -> float | None:
        return 3.0 if len(loop.folds(kernel)) and len(kernel.body.ops) > 3 else 1.0

    assert len(fuse(program, price, price).kernels) == 1
    with trace.listen() as events:
        after = fuse(program, price, settled)
    assert [len(loop.folds(k)) for k in after.kernels].count(1) == 1 < len(after.kernels)
    assert any("as mapped" in e.detail for e in events if e.kind == "declined")
    assert len(fuse(program, price, lambda k: None).kernels) == 1  # nothing is known of any
    check(program, after, draw(p.done(p.map("relu", p.map("neg", total)))))


def test_steps_between_kernels_of_the_same_magnitudes_are_settled_once() -> None:
    p = Prog()
    sizes = (1040, 1072, 1104, 1136, 2080)
    ends = [p.reduce("add", p.map("exp", p.param(f"x{n}", 64, n)), 1) for n in sizes]
    program, asked = to_loop(p.done(*ends)), list[Func]()

    def settled(kernel: Func) -> float:
        asked.append(kernel)
        return price(kernel)

    apart = fuse(program, price, settled)
    every = len(set(asked))
    asked.clear()
    after = fuse(program, price, settled, like=lambda kernel: magnitude(kernel, 16))
    assert 5 * len(set(asked)) == 2 * every  # of the lengths of 11 bits the first, and the last
    assert [str(k) for k in after.kernels] == [str(k) for k in apart.kernels]


PICKED = """program target(x: f32[4,9] input, n: i64[4] input)
  t = kernel a(x) : f32[4,9]
  y, z = kernel b(t, n) : f32[4], f32[4,3]
  return y, z
kernel a(x: f32[4,9]) -> t: f32[4,9]
  m = fold max x[i,j] over j 9 : f32 over i acc f32
  s = fold add exp(x[i,j] - m) over j 9 : f32 over i acc f32
  t[i,j] = x[i,j] - m - log(s)
kernel b(t: f32[4,9], n: i64[4]) -> y: f32[4], z: f32[4,3]
  s = fold add t[i,j] over j 9 : f32 over i acc f32
  y[i] = t[i,n[i]] / s
  z[i,k] = t[i,k+5]
"""


def test_one_element_of_a_row_that_is_folded_is_read_where_the_data_say() -> None:
    """A cross-entropy takes the logit of the target from the row of the softmax."""
    program, *parts = parse_module(PICKED, VOCABULARIES)
    before = Module((program,), tuple(parts))
    assert len(fuse(before, price, price).kernels) == 2
    after = fuse(before, price, price, rows=True)
    assert len(after.kernels) == 1
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(4, 9)).astype(np.float32), np.array([0, 8, 3, 5])]
    check(before, after, inputs, exact=False)
