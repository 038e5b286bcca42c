"""Kernels that differ in numbers only: one C function, which takes these, and the same results."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from kernels import differences, kernels_of

from rung.core import trace
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.kernel.alike import SEVERAL, alike
from rung.kernel.ir import VOCABULARY
from rung.pipeline import VOCABULARIES
from rung.targets.base import target
from rung.targets.cpu.sized import marked, sized, skeleton
from rung.tile.mapping import parse_mapping

WIDTHS = (160, 224, 288, 352, 416, 403)


def shifted(*xs: torch.Tensor) -> list[torch.Tensor]:
    """Rows of several widths, most of which differ in numbers only; the last is ragged."""
    return [x - x.amax(1, keepdim=True) for x in xs]


def rows(widths: Sequence[int] = WIDTHS) -> list[torch.Tensor]:
    return [torch.randn(64, n, generator=torch.Generator().manual_seed(n)) for n in widths]


def source_of(fn: Callable[..., object], args: Sequence[torch.Tensor]) -> str:
    torch._dynamo.reset()
    with trace.listen() as events:
        got = torch.compile(fn, backend="rung", options={"strict": True}, dynamic=False)(*args)
    torch.testing.assert_close(got, fn(*args))
    (history,) = [e.data["history"] for e in events if e.kind == "compiled"]
    assert isinstance(history.source, str)
    return history.source


def test_kernels_that_differ_in_numbers_are_one_function() -> None:
    source = source_of(shifted, rows())
    calls = re.findall(r"^extern void (run_\w+)\(.*\{ (run_\w+_sized)\((.*)\); \}$", source, re.M)
    assert SEVERAL <= len(calls) < len(WIDTHS)  # those that the machine maps alike
    assert len({function for _, function, _ in calls}) == 1
    assert len({args for *_, args in calls}) == len(calls)
    assert len(re.findall(r"^void run_", source, re.M)) == 1 + len(WIDTHS) - len(calls)


def test_few_kernels_stay_apart() -> None:
    assert "_sized" not in source_of(shifted, rows(WIDTHS[:SEVERAL - 1]))


def test_each_kernel_gives_what_it_means() -> None:
    made = kernels_of(shifted, rows())
    assert SEVERAL <= sum(m.lowered.attr("like") is not None for m in made) < len(WIDTHS)
    for one in made:
        assert differences(one, {}) == []


KERNEL = """kernel-ir {name}(x: f32[{n}]) -> y: f32[{n}]
  for i in 0..{n}
    y[i] = x[i] {op} 2.0
"""


def kernels(*texts: tuple[str, int, str]) -> list[Func]:
    text = "\n".join(KERNEL.format(name=name, n=n, op=op) for name, n, op in texts)
    return list(parse_module(text, VOCABULARIES, parse_mapping))


def test_kernels_are_alike_that_have_the_same_ops_and_are_able() -> None:
    given = kernels(*((f"k{n}", n, "+") for n in (8, 16, 24, 32)), ("other", 40, "*"))
    names = [str(k.attr("like")) for k in alike(given, lambda _: True)]
    assert names == ["k8"] * 4 + ["None"]
    assert alike(given, lambda k: k.name != "k16") == tuple(given)


def test_a_kernel_with_what_it_is_like_parses_to_itself() -> None:
    given = kernels(*((f"k{n}", n, "+") for n in (8, 16, 24, 32)))
    texts = [str(k) for k in alike(given, lambda _: True)]
    assert "  like k8" in texts[1]
    again = parse_module("\n".join(texts), {"kernel-ir": VOCABULARY}, parse_mapping)
    assert [str(k) for k in again] == texts


def test_only_what_differs_is_an_argument() -> None:
    first, second = kernels(("a", 8, "+"), ("b", 16, "+"))
    texts = [f"void run_{k.name}(const float *x, float *y) {{\n"
             f"  y[{marked(n)}] = x[{marked('7')}*(i/{n})+{marked(n)}];\n}}"
             for k, n in ((first, "8"), (second, "8"))]
    assert skeleton(texts[0]) == skeleton(texts[1])
    texts[1] = texts[1].replace(marked("8"), marked("16"))
    made = sized(list(zip((first, second), texts, strict=True)), {"a", "b", "a_sized"})
    assert made == """void run_a_sized_(const float *x, float *y, const long c0_) {
  y[c0_] = x[7*(i/8)+c0_];
}
extern void run_a(const float *x, float *y) { run_a_sized_(x, y, 8); }
extern void run_b(const float *x, float *y) { run_a_sized_(x, y, 16); }"""


@pytest.mark.parametrize("name", ["cpu.avx2", "toy"])
def test_numbers_that_divide_are_part_of_a_skeleton(name: str) -> None:
    """On the toy, which has no such functions, nothing is marked."""
    assert target(name).shares == name.startswith("cpu")
    assert skeleton(f"void run_a(float *x) {{ x[i/8+{marked('4')}]; }}") != skeleton(
        f"void run_b(float *x) {{ x[i/16+{marked('4')}]; }}")
