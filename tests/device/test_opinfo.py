"""A fixed sample of PyTorch's operator database on a GPU: each entry does as eager does."""

from __future__ import annotations

from hashlib import sha256

import pytest
from opdb.programs import entries, items
from opdb.trial import run

PLACE = "cuda"
DTYPES = ("float32", "bfloat16", "int64")
COUNT, SAMPLES = 190, 4  # entries, and programs of each type
OTHER = {
    "__rmod__": "an integer modulo 0 is any number on a GPU",
    "torch.ops.aten._flash_attention_forward": "one of its results is the state of a generator",
    "_softmax_backward_data": "eager rounds the products that it sums; ours is the exact result "
                              "rounded once, and one unit in the last place from eager's"}
"""Entries that do otherwise than eager, and why."""
SAMPLE = sorted(sorted(entries(), key=lambda name: sha256(name.encode()).digest())[:COUNT])


@pytest.mark.parametrize("name", SAMPLE)
def test_an_entry_does_as_eager_does(name: str) -> None:
    """Values as near to float64's as eager's, types, shapes, strides, shared memory, or the same
    exception."""
    if name in OTHER:
        pytest.skip(OTHER[name])
    wanted = [x for x in items(name, PLACE) if x.dtype in DTYPES and x.way == "forward"]
    if not wanted:
        pytest.skip("it has none of these types")
    found = {str(x): run(x, SAMPLES) for x in wanted}
    assert {k: t.failed for k, t in found.items() if t.failed} == {}
    assert any(t.passed or t.torchs for t in found.values())
