"""Structural keys: names mean nothing, everything else does."""

from __future__ import annotations

import random
import re

import pytest
from dumps import ALL, COLSUM, LAYER, PADDED, RELU_MM, RELU_MM_MAP, SOFTMAX, parse, random_kernel

from rung.core import origins
from rung.core.key import canonical, magnitude, structural_key

MAPPED = RELU_MM + "\n" + RELU_MM_MAP


def key(text: str) -> str:
    return structural_key(parse(text))


def about(rows: int, name: str = "f", fn: str = "exp") -> str:
    return magnitude(parse(f"kernel {name}(x: f32[{rows},8]) -> y: f32[{rows},8]\n"
                           f"  axes i {rows}, j 8\n  y[i,j] = {fn}(x[i,j])"), 16)


def test_magnitudes_are_of_bits_and_whole_vectors() -> None:
    assert about(1040) == about(1072) == about(1072, "another")
    assert len({about(1040), about(1041), about(2080), about(1040, fn="neg"), about(8),
                about(9)}) == 6


def rename(text: str, names: dict[str, str]) -> str:
    """All words at once."""
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: names.get(m[0], m[0]), text)


RENAMED = [
    (RELU_MM, "relu_mm x bias w y a mm i k j"),
    (MAPPED, "relu_mm x bias w y a mm i k j"),
    (SOFTMAX, "softmax x y m e s i j"),
    (PADDED, "padded x ids y z t u i j s0 s7"),
    (COLSUM, "colsum x y r q buf jb c0 c i c1 t k s0"),
    (LAYER, "layer x w cache t v g n h f p q c g1 d k l i j s0"),
    ("kernel f(x: f32[9]) -> y: f32[4,5]\n  axes i 4, j 5\n  y[i,j] = x[i+j] + x[4*j//5+i]",
     "f x y i j"),
    ("kernel f(x: f32[s0*s1]) -> y: f32[s0,s1]\n  y[i,j] = x[i*s1+j]", "f x y i j s0 s1"),
]


def shuffled(names: list[str], rng: random.Random) -> dict[str, str]:
    sizes = [n for n in names if re.fullmatch(r"s\d", n)]
    rest = [n for n in names if n not in sizes]
    fresh = rng.sample([f"{c}{n}" for c in "abcxyw" for n in ("", 1, 2, "_3")], len(rest))
    return dict(zip(rest, fresh, strict=True)) | dict(
        zip(sizes, rng.sample([f"s{n}" for n in range(9)], len(sizes)), strict=True))


@pytest.mark.parametrize(("text", "names"), RENAMED)
def test_names_mean_nothing(text: str, names: str) -> None:
    rng = random.Random(0)
    for _ in range(20):
        assert key(rename(text, shuffled(names.split(), rng))) == key(text)


def test_a_number_of_any_sign_is_no_size() -> None:
    text = """program f(x: f32[4], s0: index)
  y = call aten.mul.Tensor(x, size(s0)) : f32[4]
  return y"""
    keys = [key(text.replace("s0", name)) for name in ("s0", "s5", "z0", "z3")]
    assert keys[0] == keys[1] != keys[2] == keys[3]


@pytest.mark.parametrize("text", ALL, ids=lambda text: text.split("(")[0])
def test_the_canonical_text_is_a_program(text: str) -> None:
    made = canonical(parse(text))
    assert str(parse(str(made))) == str(made)
    assert str(canonical(made)) == str(made)


def test_text_keeps_the_key() -> None:
    for seed in range(100):
        func = parse(random_kernel(seed))
        assert key(str(func)) == structural_key(func)


def test_random_kernels_have_different_keys() -> None:
    texts = {random_kernel(seed) for seed in range(200)}
    assert len({key(t) for t in texts}) == len({str(canonical(parse(t))) for t in texts})


def test_origins_mean_nothing() -> None:
    func = parse(SOFTMAX)
    origins.record(func.body.ops[1].result, [origins.Origin("a", "b", "c:1")])
    assert structural_key(func) == key(SOFTMAX)


K = "kernel f(x: f32[4,4]) -> y: f32[4]\n  y[i] = {}"
CONSTANTS = ["1.0", "-1.0", "0.0", "-0.0", "f32(1)", "f32(true)", "f32((1))", "f32((true))", "inf",
             "-inf", "nan", "f32(f64(1.0))", "f32(i8(1))", "1.0000001"]


def test_constants_are_told_apart() -> None:
    assert len({key(K.format(c)) for c in CONSTANTS}) == len(CONSTANTS)


LOADS = ["x[i,0]", "x[0,i]", "x[i,i]", "x[3-i,0]", "x[i,0 | i-1]", "x[i,0 | i-2]",
         "x[i,0 | i-1 else 1.0]", "x[i,0 | i-1 else -0.0]", "x[i,0 | i-1 else nan]",
         "x[i,0 | i-1, 2-i]", "x[i,i//2]", "x[i,i%2]"]


def test_loads_are_told_apart() -> None:
    assert len({key(K.format(load)) for load in LOADS}) == len(LOADS)


CHANGES = [
    (RELU_MM, "f32[504,512], bias", "f32[504,512] mutated, bias"),
    (RELU_MM, "relu(mm)", "abs(mm)"),
    (RELU_MM, "contract add", "contract max"),
    (SOFTMAX, "e / s", "exp(m) / s"),
    (RELU_MM, "512", "256"),
    (RELU_MM, "f32", "f64"),
    (SOFTMAX, "fold max", "fold min"),
    (SOFTMAX, "fold add e", "fold mul e"),
    (PADDED, "round_bf16", "bf16"),
    (MAPPED, "seq 256", "seq 128"),
    (MAPPED, "simd 16", "simd 8"),
    (MAPPED, "cpu.avx512", "cpu.avx2"),
    (MAPPED, "carry mm in y", ""),
    (MAPPED, "panel(i 14)", "panel(i 7)"),
    (MAPPED, "in l2", "in l1"),
    (COLSUM, "q<4", "q<2"),
    (COLSUM, " at core", ""),
    (COLSUM, " cap 64", ""),
    (COLSUM, "l1 f32", "l1 f64"),
    (COLSUM, "barrier l1", "barrier l2"),
    (COLSUM, "fill 0.0", "fill -0.0"),
    (LAYER, "aten.mm.default", "aten.bmm.default"),
    (LAYER, "correction=0.0", "correction=0"),
    (LAYER, "keepdim=true", "keepdim=1"),
    (LAYER, "size(2*s0)", "size(s0)"),
    (LAYER, "param", "const"),
    (LAYER, "full 1 [4] i64 : i64[4]", "full 1 [4] i32 : i32[4]"),
    (LAYER, "full 1 ", "full true "),
    (LAYER, "return h, v, g", "return v, h, g"),
]


@pytest.mark.parametrize(("text", "old", "new"), CHANGES)
def test_everything_else_means_something(text: str, old: str, new: str) -> None:
    assert key(text.replace(old, new)) != key(text)


def test_a_mapping_and_extra_words_are_part_of_the_key() -> None:
    func = parse(SOFTMAX)
    keys = [structural_key(func), structural_key(func, "a"), structural_key(func, "b"),
            structural_key(func, "a", "b"), structural_key(func, "ab"), key(RELU_MM), key(MAPPED)]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[0-9a-f]{64}", k) for k in keys)
