"""Random torch programs as text: views, arithmetic, reductions, contractions, mutation, all types.

    v0 = a.permute(1, 0)
    v1 = torch.where(v0 > 0.25, v0, b)
    v1.add_(c)
    return v0, v1

A statement is drawn from a table and run in eager at once; what eager refuses, or what leaves the
range of the program's family, is drawn again. In the family `exact` all floats are quarters up to
64, so that no operation rounds, whatever its order, and results are compared bit for bit; `smooth`
programs have no steps and no large slopes, so that a rounding stays one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

import torch
from torch.nn import functional as F

from rung.frontends.torch.faults import overlaps

Tensor = torch.Tensor
SCOPE: dict[str, Any] = {"torch": torch, "F": F, "inf": inf, "nan": nan}
FLOATS = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16,
          torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
LARGEST = {"exact": 64.0, "smooth": 100.0}
ELEMENTS = 4096  # of one value

BOTH = """
{a} + {b} | {a} - {b} | {a} * {b} | {a} + {k} | {k} - {a} | {a} * {k} | -{a} | {a}.abs()
torch.maximum({a}, {b}) | torch.minimum({a}, {b}) | torch.relu({a}) | {a}.clamp({k}, {l})
{a}.sum({d}) | {a}.sum({d}, keepdim=True) | {a}.sum() | {a}.amax({d}) | {a}.amin({d}, keepdim=True)
{a} @ {b} | torch.mm({a}, {b}) | torch.einsum('ij,kj->ik', {a}, {b}) | {a}.mT @ {b}
torch.einsum('ij,ik->jk', {a}, {b}) | torch.bmm({a}, {b}) | torch.addmm({a}, {b}, {c})
{a}.permute({s}) | {a}.permute({s}) | {a}.reshape(-1) | {a}.reshape({f}) | {a}.reshape({f})
{a}.unsqueeze({d}) | {a}.squeeze() | {a}[{n}:] | {a}[..., ::2] | {a}[..., :-1] | {a}.flip({d})
torch.roll({a}, {n}, {d}) | torch.cat([{a}, {b}], {d}) | torch.stack([{a}, {a}, {b}], {d})
F.pad({a}, ({n}, {m}), value={k}) | F.pad({a}, ({n}, -1)) | {a}.expand({n}, *{shape}) | {a}.clone()
{a}.unfold({d}, 2, 1) | {a}.diagonal() | {a}.tril() | {a}.triu({n}) | {a}.mT | {a}.contiguous()
{a}.narrow({d}, 0, {n}) | {a}.select({d}, 0) | {a}.repeat_interleave(2, {d}) | {a}.to({float})
torch.where({a} > {b}, {a}, {b}) | torch.where({i} > {n}, {a}, {b}) | {a}.masked_fill({i} == 0, {k})
{a}.index_select({d}, {index}) | {a}[{index}] | F.embedding({index}, {a}) | {a}.expand_as({b})
{a}.add_({b}) | {a}.mul_({k}) | {a}.copy_({b}) | {a}.relu_() | {a}.fill_({k}) | {a}.neg_()
{a}.select({d}, 0).copy_({b}) | {a}[{n}:].add_({k}) | {a}.mT.mul_({b}) | {a}.reshape(-1)[:2].zero_()
{a}.index_copy_({d}, {index}, {b}) | {a}.view({f}).sub_({k}) | {a}.index_add({d}, {index}, {b})
{a}.index_fill_({d}, {index}, {k}) | {a}.index_put_(({index},), {b}.sum()) | {a}.sub_({a}.flip({d}))
{a}.copy_({a}.flip({d})) | {a}.copy_({a}.flip({d}) * {k}) | {a}.copy_({a}.roll(1, {d}) + {b})
"""
TABLES = {"exact": BOTH + """
{a} > {b} | {a} >= {k} | {a} == {b} | {a} != {b} | {i} & {j} | {i} ^ {j}
torch.bitwise_or({i}, {j}) | torch.logical_or({i}, {j}) | ({i} + 0) << {n} | ({i} + 0) >> {n}
torch.bitwise_not({i}) | {a}.floor() | {a}.ceil() | {a}.round() | {a}.trunc() | torch.sign({a})
torch.where({a} == {b}, {a}, {c}) | torch.where({a} <= {k}, {k}, {b}) | {a}.argmax({d})
{a}.argmin({d}, keepdim=True) | {a}.any({d}) | {a}.all({d}) | {a}.cumsum({d}) | {a}.prod({d})
{a} // {q} | {a} % {q} | torch.div({i}, {q}, rounding_mode='trunc') | {a} / {p}
{i} + {j} | {i} * {j} | {i} - {j} | {i}.sum({d}) | {i}.amax({d}) | {i}.float() | {a}.to({integer})
{a}.bool() | torch.isnan({a}) | {a}.sort({d})[0] | torch.fmod({a}, {q}) | torch.isfinite({a})
{i}.abs() | -{i} | {i}.to({integer}) | torch.arange({n}) | {a}.count_nonzero({d}) | {i}.to({float})
{i}.to({integer}) | {i} // {q} | {i} % {q} | {i}.clamp({n}, {q}) | torch.logical_not({a})
""", "smooth": BOTH + """
torch.tanh({a}) | torch.sigmoid({a}) | torch.exp(-{a}.abs()) | torch.sin({a}) | torch.cos({a})
F.gelu({a}) | F.gelu({a}, approximate='tanh') | F.silu({a}) | F.softplus({a}) | F.elu({a})
F.softmax({a}, {d}) | F.softmax({a}, {d}) | F.log_softmax({a}, {d}) | torch.logsumexp({a}, {d})
{a} / (1 + {b} * {b}) | torch.sqrt({a} * {a} + 1) | torch.rsqrt({a}.abs() + 1) | torch.erf({a})
{a}.mean({d}) | {a}.mean() | {a}.var({d}) | F.layer_norm({a}, ({last},), eps=0.1)
torch.log1p({a}.abs()) | torch.atan({a}) | {a}.pow(2) / 8 | torch.lerp({a}, {b}, 0.25)
torch.addcmul({a}, {b}, {c}) | F.leaky_relu({a}, 0.1) | F.hardswish({a}) | torch.tanh({a} @ {b})
F.scaled_dot_product_attention({a}, {a}, {a}) | F.rms_norm({a}, ({last},), eps=0.1)
F.softmax({a} @ {b}, -1) @ {c} | {a} - {a}.amax({d}, keepdim=True) | {a} / {a}.abs().sum()
torch.tanh({a}) * torch.sigmoid({b}) | F.linear({a}, {b}) / 8 | torch.reciprocal({a}.abs() + 1)
"""}
STATEMENTS = {family: [x for line in table.strip().splitlines() for x in line.split(" | ") if x]
              for family, table in TABLES.items()}
UPDATES = [x for x in STATEMENTS["smooth"] if "_(" in x]


@dataclass(frozen=True)
class Line:
    """`name = text`, where `reads` are the values in `text`; without a name if it only mutates."""

    name: str
    text: str
    reads: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.text}" if self.name else self.text


@dataclass(frozen=True, eq=False)
class Program:
    """A function of tensors, with the arguments of one call."""

    inputs: dict[str, Tensor]
    lines: tuple[Line, ...]
    returns: tuple[str, ...]
    exact: bool = False
    options: tuple[tuple[str, str], ...] = ()

    @property
    def source(self) -> str:
        """The text of `def program(...)`."""
        body = [*map(str, self.lines), f"return {', '.join(self.returns)},"]
        return f"def program({', '.join(self.inputs)}):\n" + "".join(f"    {x}\n" for x in body)

    def function(self) -> Callable[..., Any]:
        scope = dict(SCOPE)
        exec(compile(self.source, "<rung fuzz>", "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]

    def arguments(self) -> list[Tensor]:
        """Fresh copies of the arguments, strides kept."""
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
                for x in self.inputs.values()]


def draw(seed: int, most: int = 12) -> Program:
    """The program of a seed."""
    return _Draw(random.Random(seed), seed).program(most)


class _Draw:
    def __init__(self, rng: random.Random, seed: int):
        self.rng, self.generator = rng, torch.Generator().manual_seed(seed)
        self.family = rng.choice(("exact", "exact", "smooth"))
        self.values: dict[str, Tensor] = {}
        self.lines: list[Line] = []
        self.given: set[str] = set()  # inputs, and what is computed from them

    def program(self, most: int) -> Program:
        rng = self.rng
        shapes = self.shapes()
        main = rng.choice(FLOATS)
        kinds = [main, main, rng.choice((main, *FLOATS)), rng.choice(INTEGERS)]
        for name, dtype in zip("abcd", kinds, strict=True):
            self.values[name] = self.tensor(rng.choice(shapes), dtype)
        self.values["e"] = torch.randint(0, 3, (rng.randint(1, 3),), generator=self.generator)
        given = {name: x.clone(memory_format=torch.preserve_format)
                 for name, x in self.values.items()}
        self.given = set(given)
        for _ in range(4 * most):
            if len(self.lines) < most:
                self.statement()
        made = [x.name for x in self.lines if x.name] or ["a"]
        returns = (made[-1], *rng.sample(made, min(len(made), 2)))
        options = (("precision", rng.choice(("default", "eager"))),)
        return tidy(Program(given, tuple(self.lines), tuple(dict.fromkeys(returns)),
                            self.family == "exact", options))

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes that fit each other: of a few sizes, some broadcast, some transposed."""
        i, j, k = (self.rng.choice(SIZES) for _ in range(3))
        return [(i, j), (j, k), (i, k), (j,), (i, 1), (2, i, j), (2, j, k), (i, j), (j, i), ()]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=self.generator).bool()
        low = 0 if dtype is torch.uint8 else -9
        whole = torch.randint(low, 10, shape, generator=self.generator)
        if not dtype.is_floating_point:
            return whole.to(dtype)
        if self.family == "exact":
            return (whole.float() / 4).to(dtype)
        return torch.randn(shape, generator=self.generator).to(dtype)

    def statement(self) -> None:
        """Append one, unless eager or the family refuses it."""
        before = {x: x.clone() for x in self.values.values()}
        try:
            text, reads = self.filled(*self.pattern())
            read = [self.values[name] for name in reads]
            if mutates(text) and reads[0] not in self.given:
                return  # tracing by symbols writes to constants at once
            if mutates(text) and (overlaps(read[0]) or any(shared(read[0], x) for x in read[1:])):
                return  # eager's answer depends on the order of its loops, or AOTAutograd errs
            made = eval(text, SCOPE, self.values)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return
        name = f"v{len(self.lines)}"
        if all(map(self.keeps, (*self.values.values(), made))):
            self.lines.append(Line(name, text, reads))
            self.values[name] = made
            self.given |= {name} if self.given.intersection(reads) else set()
            return
        for x, old in before.items():
            if not torch.equal(x, old):
                x.copy_(old)

    def keeps(self, x: Tensor) -> bool:
        """Whether a value is small enough, and if floating within the range of the family."""
        if x.numel() > ELEMENTS or x.is_complex():
            return False
        if not x.is_floating_point() or not x.numel():
            return True
        held = x.double()
        inside = bool((held.abs() <= LARGEST[self.family]).all())
        return inside and (self.family == "smooth" or torch.equal(held * 4, (held * 4).round()))

    def pattern(self) -> tuple[str, Sequence[str]]:
        """One of the table; after an update often another update, of the same value."""
        again = [x.reads[0] for x in self.lines[-1:] if mutates(x.text)]
        if self.rng.random() < (0.6 if again else 0.1):
            return self.rng.choice(UPDATES), again
        return self.rng.choice(STATEMENTS[self.family]), ()

    def filled(self, pattern: str, first: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """A statement's text, where `{a}` is of `first` if there is one, and what it reads."""
        rng, reads = self.rng, list[str]()
        floats = [n for n, x in self.values.items() if x.is_floating_point()]
        others = [n for n, x in self.values.items() if not x.is_floating_point() and n != "e"]
        # recent values are read more often, so that programs are deep
        recent = {"abc": floats + floats[-3:], "ij": others + others[-3:]}
        table: dict[str, Any] = {}
        for names, pool in recent.items():
            for x in names:
                if f"{{{x}}}" in pattern:
                    table[x] = rng.choice(first if first and x == "a" else pool)
                    reads.append(table[x])
        table |= self.numbers(self.values[reads[0]] if reads else torch.zeros(()))
        if "{index}" in pattern:
            table["index"] = rng.choice(self.indices())
            reads.append(table["index"])
        return pattern.format(**table), tuple(dict.fromkeys(reads))

    def numbers(self, x: Tensor) -> dict[str, Any]:
        """What a pattern may hold beside values: a dimension of `x`, sizes, numbers, types."""
        rng, rank = self.rng, x.dim()
        k, more = sorted(rng.sample((-2, -0.5, 0, 0.25, 1, 1.5, 2), 2))
        return {"k": k, "l": more, "n": rng.randint(0, 3), "m": rng.randint(0, 2),
                "q": rng.choice((2, 3, 5)), "p": rng.choice((1, 2, 4)),
                "d": rng.randrange(-rank, rank) if rank else 0,
                "s": ", ".join(map(str, rng.sample(range(rank), rank))),
                "f": rng.choice(_factors(x.numel())), "shape": tuple(x.shape),
                "last": x.shape[-1] if rank else 1,
                "float": rng.choice(FLOATS), "integer": rng.choice(INTEGERS)}

    def indices(self) -> list[str]:
        """Values that can be indices."""
        return [n for n, x in self.values.items() if x.dtype is torch.int64 and x.dim() == 1
                and x.numel() and int(x.min()) >= 0]


def _factors(n: int) -> list[tuple[int, ...]]:
    """Shapes of `n` elements."""
    pairs = [(k, n // k) for k in (1, 2, 3, 4, 7, 8) if n % k == 0]
    return [(n,), *pairs, *((2, a // 2, b) for a, b in pairs if a % 2 == 0)]


# --- cutting a program down

def tidy(program: Program) -> Program:
    """Without lines that nothing reads and that change nothing, and inputs that nothing reads."""
    needed, kept = set(program.returns), list[Line]()
    for line in reversed(program.lines):
        if line.name in needed or mutates(line.text):
            needed.update(line.reads)
            kept.append(line)
    inputs = {n: x for n, x in program.inputs.items() if n in needed}
    return replace(program, lines=tuple(reversed(kept)), inputs=inputs)


def shared(a: Tensor, b: Tensor) -> bool:
    """Whether two values may lie in the same memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def mutates(text: str) -> bool:
    """Whether a statement changes a value in place: a method whose name ends in `_`."""
    return re.search(r"\w_\(", text) is not None


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one result, or with one line less: left out, or its value given."""
    if len(program.returns) > 1:
        yield from (tidy(replace(program, returns=(x,))) for x in program.returns)
    values = traced(program)
    for n in reversed(range(len(program.lines))):
        line = program.lines[n]
        rest = replace(program, lines=program.lines[:n] + program.lines[n + 1:])
        if any(line.name in x.reads for x in rest.lines) or line.name in program.returns:
            given = {**program.inputs, line.name: values[line.name]}
            rest = replace(rest, inputs=given)
        yield tidy(rest)


def traced(program: Program) -> dict[str, Tensor]:
    """The value of every line, when it was computed."""
    scope = dict(zip(program.inputs, program.arguments(), strict=True))
    found: dict[str, Tensor] = {}
    for line in program.lines:
        scope[line.name] = eval(line.text, SCOPE, scope)
        found[line.name] = scope[line.name].clone()
    return found


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A program that still `fails`, and does not with any one line less."""
    found = next((p for p in smaller(program) if len(p.source) < len(program.source)
                  and p.lines and fails(p)), None)
    return shrunk(found, fails) if found else program


# --- saving one

TEMPLATE = '''\
"""{title}

Runs alone (exit code 1 if it fails) and under pytest.
"""
import torch
from torch import inf, nan
from torch.nn import functional as F


{source}

def inputs():
    return [{inputs}]


def test_program():
    given, again = inputs(), inputs()
    compiled = torch.compile(program, backend="rung", options={options})
    with torch.no_grad():
        want, got = [*program(*given), *given], [*compiled(*again), *again]
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, equal_nan=True, rtol={bound}, atol={bound})


if __name__ == "__main__":
    test_program()
'''


def saved(program: Program, title: str, bound: float) -> str:
    """The text of a file that runs `program` alone."""
    made = "".join(f"\n        {_literal(x)}," for x in program.inputs.values())
    return TEMPLATE.format(title=title, source=program.source, inputs=made, bound=bound,
                           options={"strict": True, **dict(program.options)})


def _literal(x: Tensor) -> str:
    dense = x.contiguous()
    text = f"torch.tensor({dense.tolist()}, dtype={x.dtype})"
    if not x.numel():
        return f"torch.zeros({tuple(x.shape)}, dtype={x.dtype})"
    if x.stride() == dense.stride():
        return text
    return f"torch.empty_strided({tuple(x.shape)}, {x.stride()}, dtype={x.dtype}).copy_({text})"
