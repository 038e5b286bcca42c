"""Table of attention, forward and backward, as composites of contractions and a softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

from rung.core.errors import Unsupported
from rung.core.expr import ZERO, Expr
from rung.core.op import Value
from rung.core.ops import Cast
from rung.core.types import F32, F64, dtype_of
from rung.frontends.torch.emit import Emit, axis_exprs
from rung.frontends.torch.reductions import contract
from rung.tensor.ir import shape_of


def per_query_head(e: Emit, x: Value, heads: Expr) -> Value:
    """Keys or values [b,h,t,d] once for each of `heads` query heads, neighbours sharing one."""
    batch, own, *rest = shape_of(x)
    if heads % own is not ZERO:
        raise Unsupported(f"{heads} query heads for {own} heads")
    axes = axis_exprs(4)
    return e.index(x, (batch, heads, *rest), (axes[0], axes[1] // (heads // own), *axes[2:]))


def per_own_head(e: Emit, x: Value, own: Expr) -> Value:
    """The sums of [b,h,t,d] over the query heads that share each of `own` keys or values."""
    batch, heads, *rest = shape_of(x)
    if heads is own:
        return x
    return e.reduce("add", e.reshape(x, (batch, own, heads // own, *rest)), (2,))


def factor(q: Value, scale: float | None, dropout: float) -> float:
    """What scores are multiplied by; 1 / sqrt(width of a head) by default."""
    width = shape_of(q)[-1].const_value
    if dropout or width is None:
        raise Unsupported("attention with dropout or a head of unknown size")
    return width ** -0.5 if scale is None else scale


def scores(e: Emit, q: Value, k: Value, scale: float, causal: bool, mask: Value | None) -> Value:
    """scale q k^T + mask, [b,h,i,j]; -inf where a key comes after its query."""
    found = e.map("mul", contract(e, "bhid,bhjd->bhij", q, k), scale)
    if causal:
        axes = axis_exprs(4)
        found = e.index(found, shape_of(found), axes, [axes[2] - axes[3]], -math.inf)
    if mask is not None:
        wide = e.expand(e.operand(mask, dtype_of(mask.type)), shape_of(found))
        found = e.map("add", found, wide)
    return found


def attention(e: Emit, q: Value, k: Value, v: Value, dropout: float, causal: bool,
              mask: Value | None, scale: float | None) -> tuple[Value, ...]:
    """softmax(scores) v and the log-sum-exp of the scores; 0 for a row all masked."""
    by = factor(q, scale, dropout)
    k, v = (per_query_head(e, x, shape_of(q)[1]) for x in (k, v))
    found = scores(e, q, k, by, causal, mask)
    shape = shape_of(found)
    top = e.reduce("max", found, (3,), keep=True)
    top = e.map("where", e.map("eq", top, -math.inf), e.value(0, dtype_of(top.type)), top)
    powers = e.map("exp", e.map("sub", found, e.expand(top, shape)))
    whole = e.reduce("add", powers, (3,), keep=True)
    whole = e.map("where", e.map("eq", whole, 0), e.value(1, dtype_of(top.type)), whole)
    weights = e.map("div", powers, e.expand(whole, shape))
    out = contract(e, "bhij,bhjd->bhid", weights, e.operand(v, dtype_of(v.type)))
    sums = e.reshape(e.map("add", e.map("log", whole), top), shape[:3])
    if e.result(1).dtype is F32 and dtype_of(sums.type) is F64:  # as torch 2.11 has it
        sums = e.op(Cast(sums, F32))
    return e.finish(out), e.finish(sums, 1)


def attention_backward(e: Emit, grad: Value, q: Value, k: Value, v: Value, out: Value, sums: Value,
                       dropout: float, causal: bool, mask: Value | None, scale: float | None
                       ) -> tuple[Value, ...]:
    """Gradients of q, k and v: with weights p = exp(scores - sums), those of the scores are
    p (grad v^T - sum(grad out)), as FlashAttention computes them (Dao et al. 2022, section 3.1)."""
    by = factor(q, scale, dropout)
    own, dtype = shape_of(k)[1], e.dtype
    q, g, out = (e.operand(x, dtype) for x in (q, grad, out))
    k, v = (e.operand(per_query_head(e, x, shape_of(q)[1]), dtype) for x in (k, v))
    found = scores(e, q, k, by, causal, mask)
    shape = shape_of(found)
    lifted = e.reshape(e.value(sums, dtype_of(found.type)), (*shape[:3], Expr.of(1)))
    p = e.map("exp", e.map("sub", found, e.expand(lifted, shape)))
    along = e.reduce("add", e.map("mul", g, out), (3,), keep=True)
    slope = e.map("sub", contract(e, "bhid,bhjd->bhij", g, v), e.expand(along, shape))
    slope = e.map("mul", e.map("mul", p, slope), by)
    of_k, of_v = (per_own_head(e, contract(e, "bhij,bhid->bhjd", a, b), own)
                  for a, b in ((slope, q), (p, g)))
    of_q = contract(e, "bhij,bhjd->bhid", slope, k)
    return tuple(e.finish(x, n) for n, x in enumerate((of_q, of_k, of_v)))


INPUTS = "Tensor query, Tensor key, Tensor value"
NAMED = "*, Tensor? attn_mask=None, float? scale=None"
ATTENTION: dict[str, Callable[..., tuple[Value, ...]]] = {
    f"aten::_scaled_dot_product_flash_attention_for_cpu({INPUTS}, float dropout_p=0., "
    f"bool is_causal=False, {NAMED}) -> (Tensor output, Tensor logsumexp)": attention,
    f"aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, {INPUTS}, "
    f"Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, {NAMED}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)": attention_backward,
}
