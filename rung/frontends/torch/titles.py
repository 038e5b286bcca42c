"""Names of kernels: the functions that the user called, in their order.

    F.linear(F.rms_norm(x, (64,)), w)      ->    rms_norm_linear      # pow, mean, .., t, mm in ATen
    its gradient                           ->    rms_norm_linear_backward

Arithmetic beside other functions is named where the name stays short, what only moves elements
where a kernel does nothing else, and views never.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from rung.core.expr import is_size
from rung.core.origins import Origin
from rung.frontends.torch.aten import target_of
from rung.frontends.torch.pointwise import POINTWISE
from rung.frontends.torch.views import MOVES, VIEWS

WORDS, LENGTH = 4, 40  # of a name, the ending apart
MINOR = 2  # words that a name may have before it leaves arithmetic out
ALIASES = {
    "matmul": "mm", "truediv": "div", "iadd": "add", "isub": "sub", "imul": "mul",
    "itruediv": "div", "getitem": "", "setitem": "", "scaled_dot_product_attention": "attention",
    "scaled_dot_product_flash_attention_for_cpu": "attention"}
"""Short words for functions; none where the operator says more."""

COPIES = ("_to_copy", "alias", "clone", "convert_element_type", "copy", "detach", "fill",
          "lift_fresh_copy")
AFFIXES = re.compile(r"^(?:_|native_)+|(?:_forward|_data|_)+$")
VIEW, MOVE, ARITHMETIC, FUNCTION = range(4)
RANKS = {target_of(schema): rank for rank, table in (
    (VIEW, VIEWS), (MOVE, MOVES), (ARITHMETIC, POINTWISE)) for schema in table}


def title(origins: Iterable[Origin]) -> str:
    """The name of a kernel that computes these nodes; "" where they tell nothing."""
    ranks: dict[str, int] = {}
    ending = ""
    for o in origins:
        word, gradient = _word(o.function, o.target)
        ranks[word] = max(ranks.get(word, VIEW), _rank(o.target))
        ending = "_backward" if gradient or (o.backward and o.function) else ending
    best = max(ranks.values(), default=VIEW)
    words = [w for w, rank in ranks.items() if w and rank >= min(best, ARITHMETIC)]
    if len(words) > MINOR and best == FUNCTION:
        words = [w for w in words if ranks[w] == FUNCTION]
    while len(words) > WORDS or (len(words) > 1 and len("_".join(words)) > LENGTH):
        del words[0]  # what comes last tells what is made
    name = "_".join(words)[:LENGTH].rstrip("_")
    return f"{name}{ending}" if best and len(name) > 1 and not is_size(name) else ""


@cache
def _word(function: str, target: str) -> tuple[str, bool]:
    """The word for what the user called, and whether the operator itself is a gradient."""
    operator = AFFIXES.sub("", _operator(target))
    name = ALIASES.get(function, function) or ALIASES.get(operator, operator)
    word = re.sub(r"\W+", "_", AFFIXES.sub("", name.removesuffix("_backward"))).lower()
    return "" if word[:1].isdigit() else word, operator.endswith("_backward")


@cache
def _rank(target: str) -> int:
    return VIEW if _operator(target) in COPIES else RANKS.get(target, FUNCTION)


def _operator(target: str) -> str:
    """`relu` of aten.relu.default."""
    return target.split(".")[1] if target.count(".") == 2 else target
