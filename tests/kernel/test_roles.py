"""Roles on NumPy: tokens make every order of turns right, and what lacks one is found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from mapped import VOCABULARIES, Anyhow, Late

from rung.core.errors import LaunchError
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.verify import verify
from rung.kernel import ir as kir
from rung.kernel.barriers import insert_barriers
from rung.kernel.moves import Engine

COPY = """\
kernel-ir copy(x: f32[5,48]) -> y: f32[5,48]
  unroll r<4
  a = alloc : scratchpad f32[2,4]
  ring k slots 2 of a
  b = alloc : scratchpad f32[2,4]
  ring o slots 2 of b
  roles
    role load
      for i in 0..5
        for j in 0..12
          await k free step 12*i+j
          transfer a at [j%2,0] from x at [i,4*j] box [4] valid [4] by dma group k
          signal k full step 12*i+j
    role math
      for i in 0..5
        for j in 0..12
          await k full step 12*i+j
          await o free step 12*i+j
          b[j%2,r] = a[j%2,r]
          signal k free step 12*i+j
          signal o full step 12*i+j
    role store
      for i in 0..5
        for j in 0..12
          await o full step 12*i+j
          transfer y at [i,4*j] from b at [j%2,0] box [4] valid [4] by dma
          signal o free step 12*i+j
"""


def func(text: str) -> Func:
    (made,) = parse_module(text, VOCABULARIES)
    return made


def right(text: str, engine: type[Engine]) -> bool:
    x, y = np.arange(240, dtype="f").reshape(5, 48), np.full((5, 48), np.nan, "f")
    kir.run_kernel_ir(func(text), {"x": x, "y": y}, engine)
    return bool((x == y).all())


@pytest.mark.parametrize("engine", [Engine, Late, Anyhow])
def test_any_turns_give_the_answer(engine: type[Engine]) -> None:
    verify(func(COPY), kir.VOCABULARY, kir.verify_kernel_ir)
    assert right(COPY, engine)


def test_text_is_read_back() -> None:
    assert str(func(COPY)).strip() == COPY.strip()


class Math(Engine):
    """`math` runs ahead of what sends its tiles off."""

    def turn(self, ready: Sequence[str]) -> str:
        return min(ready, key=["math", "load", "store"].index)


@pytest.mark.parametrize(("token", "engine"), [
    ("k free", Engine), ("k full", Late), ("o free", Math), ("o full", Late)])
def test_a_role_that_does_not_wait_spoils_the_answer(token: str, engine: type[Engine]) -> None:
    bad = "\n".join(x for x in COPY.splitlines() if f"await {token}" not in x)
    assert not right(bad, engine)


@pytest.mark.parametrize("token", ["k free", "k full", "o free", "o full"])
def test_a_token_that_nobody_gives_is_a_deadlock(token: str) -> None:
    bad = "\n".join(x for x in COPY.splitlines() if f"signal {token}" not in x)
    with pytest.raises(LaunchError, match=f"deadlock: .*awaits {token}"):
        right(bad, Engine)


def test_a_step_that_is_skipped_is_found() -> None:
    bad = COPY.replace("await k full step 12*i+j", "await k full step 13*i+j")
    with pytest.raises(LaunchError, match="await k full for step 13, not 12"):
        right(bad, Engine)


def test_a_ring_of_too_many_slots_is_found() -> None:
    bad = COPY.replace("ring k slots 2 of a", "ring k slots 3 of a").replace(
        "a = alloc : scratchpad f32[2,4]", "a = alloc : scratchpad f32[3,4]")
    assert not right(bad, Engine)  # the accesses still know of two


THREADS = """\
kernel-ir f(x: f32[8,32]) -> y: f32[8,32]
  a = alloc : shared f32[2,32]
  ring k slots 2 of a
  roles
    role load
      for i in 0..8
        await k free step i
        transfer a at [i%2,0] from x at [i,0] box [32] valid [32] by cp.async group k
        signal k full step i
    role math
      for it in 0..32 at thread
        b = alloc : shared f32[32]
        for i in 0..8
          await k full step i
          b[it] = a[i%2,it]
          signal k free step i
          y[i,31-it] = b[31-it]
"""


def test_barriers_are_for_arrays_that_no_ring_holds() -> None:
    text = str(insert_barriers(func(THREADS), ("shared",)))
    load, math = text.split("role math")
    assert "barrier" not in load
    assert math.count("barrier shared") == 2  # b is written, read, and written again
