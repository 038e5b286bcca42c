"""Random programs through all middle passes, under random prices: every legal choice is right."""

from __future__ import annotations

import random

import numpy as np
import pytest
from programs import Prog, draw, results

from rung.core.expr import Expr
from rung.core.op import Func, Value
from rung.core.types import I64
from rung.core.verify import verify
from rung.loop import ir as loop
from rung.loop.canonical import canonical
from rung.loop.fuse import fuse
from rung.loop.normalize import merge_axes
from rung.loop.siblings import join_siblings
from rung.loop.simplify import simplify as simplify_kernel
from rung.program.ir import Module
from rung.program.reinplace import reinplace
from rung.program.views import views
from rung.tensor.ir import shape_of
from rung.tensor.simplify import simplify
from rung.tensor.to_loop import to_loop


def random_program(rng: random.Random, steps: int = 12) -> Func:
    """Values stay small integers or bounded, so that sums differ by rounding only."""
    p = Prog("random")
    pool = [p.param("a", 4, 6), p.param("b", 6), p.param("c", 4, 1, 6), p.param("d", 6, 4)]
    cache, at = p.param("cache", 8, 6, role="mutated"), p.param("at", 4, dtype=I64)
    state = p.param("state", 4, 6, role="mutated")
    pool += [state]
    for _ in range(steps):
        new = _step(p, rng, pool, at)
        if new is not None:
            pool.append(new)
    rows = [v for v in pool if tuple(map(str, shape_of(v))) == ("4", "6")]
    out = rng.sample(pool, 3)
    new = p.scatter(cache, 0, at, rng.choice(rows))
    out += rng.choice([[], [p.map("neg", new)], [new]])
    p.write(cache, new)
    if rng.random() < 0.7:
        p.write(state, rng.choice(rows[1:] or rows))
    return p.done(*out)


def _step(p: Prog, rng: random.Random, pool: list[Value], at: Value) -> Value | None:
    x = rng.choice(pool)
    shape = [int(n.const_value or 0) for n in shape_of(x)]
    rank = len(shape)
    match rng.randrange(11):
        case 0 | 1:
            return p.map(rng.choice(["neg", "relu", "tanh", "sigmoid"]), x)
        case 2 | 3:
            other = [v for v in pool if _fits(shape_of(v), shape_of(x))]
            y = p.map(rng.choice(["add", "mul", "max"]), x, rng.choice(other))
            return p.map("tanh", y)
        case 4 if rank:
            return p.reduce(rng.choice(["add", "max"]), x, rng.randrange(rank),
                            keep=rng.random() < 0.6)
        case 5 if rank > 1:
            return p.permute(x, *rng.sample(range(rank), rank))
        case 6:
            n = int(np.prod(shape))
            sizes = [s for s in ((n,), (2, n // 2), (n // 3, 3), (1, n)) if np.prod(s) == n]
            return p.view(x, *rng.choice(sizes))
        case 7 if rank:
            dim = rng.randrange(rank)
            parts = [x, p.map("neg", x), x][: rng.randint(2, 3)]
            return p.concat(dim, *parts)
        case 8 if rank:
            dim = rng.randrange(rank)
            if shape[dim] < 2:
                return None
            a = rng.randrange(shape[dim] - 1)
            return p.slice(x, dim, a, rng.randint(a + 1, shape[dim]))
        case 9 if rank == 2:
            other = [v for v in pool if len(shape_of(v)) == 2 and shape_of(v)[0] is shape_of(x)[1]]
            return p.map("tanh", p.einsum("ik,kj->ij", x, rng.choice(other))) if other else None
        case 10 if rank:
            dim, n = 0, shape[0]
            if n >= 8:
                return p.gather(x, dim, at)
            return p.index(x, [n + 3, *shape[1:]], lambda i, *r: [i - 1, *r],
                           lambda i, *r: [i - 1, Expr.of(n) - i], 0.5)
    return None


def _fits(small: tuple[Expr, ...], big: tuple[Expr, ...]) -> bool:
    tail = big[len(big) - len(small):]
    return len(small) <= len(big) and all(a is b or a.is_const(1) for a, b in
                                          zip(small, tail, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_random_program(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng)
    inputs = draw(program, seed=seed, ints=8)
    want = results(Module((program,)), inputs)
    tidy = simplify(program)
    _same(want, results(Module((tidy,)), inputs))
    prices: dict[Func, float] = {}
    module = to_loop(tidy)
    _same(want, results(module, inputs))
    even = rng.random() < 0.5  # every fusion pays

    def price(kernel: Func) -> float:
        return 1.0 if even else prices.setdefault(kernel, rng.random())

    module = fuse(module, price)
    _same(want, results(module, inputs))
    module = join_siblings(module, price, price)
    _same(want, results(module, inputs))
    module = Module(module.programs, tuple(map(simplify_kernel, module.kernels)))
    module = views(reinplace(module))
    _same(want, results(module, inputs))
    module = canonical(Module(module.programs, tuple(map(merge_axes, module.kernels))))
    for kernel in module.kernels:
        verify(kernel, loop.VOCABULARY, loop.verify_kernel)
    _same(want, results(module, inputs))


def _same(want: list[np.ndarray], got: list[np.ndarray]) -> None:
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
