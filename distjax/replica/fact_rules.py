"""What each primitive does to the facts of its operands: one table.

Tags, each with the site where it began:

- of values that differ: `total` (a sum over the batch, with its size), `mean` (a mean over this
  replica's batch, or its gradient), `share` (what sums to the mean over all replicas), `ratio` (a
  total over a local count), `curved` (a function of a local mean), `centered`, `squares`,
  `variance`, `grad` (of the backward pass), `grad_squares`, `norm` (of local gradients), `clipped`;
- of equal values: `averaged`, `summed`, `gathered` (which reduction made it), `times_R` (a sum of R
  equal parts), `random` (bits from an equal key);
- of both: `base` (the argument or variable that it is an update of).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from distjax.replica import reduction_findings as findings
from distjax.replica.facts import DIFFERS, EQUAL, Fact, FactWalk, size_of, unknown

#: What a linear operation of one tagged operand keeps.
_SCALES = ("mean", "share", "ratio")
_REDUCED = ("averaged", "summed", "gathered", "times_R")


def _close(a: float | None, b: float) -> bool:
    return a is not None and math.isclose(a, b, rel_tol=1e-5)


# -- one operand --------------------------------------------------------------


def _same(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    """Moves or converts elements: all that is known stays."""
    rest = unknown(ins[1:])
    return [ins[0]._replace(differs=ins[0].differs or rest.differs)] * len(eqn.outvars)


def _broadcast(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    x = ins[0]
    count = size_of(eqn.outvars[0]) // max(1, size_of(eqn.invars[0]))
    is_seed = x.number not in (None, 0.0) and count > 1
    if not is_seed or x.find("grad") or not walk.is_transposed(eqn):
        return [x]
    # The backward pass of a sum over `count` elements: what each of them weighs.
    weight, seed = x.number * count, walk.site(eqn)  # type: ignore[operator]
    divisor, is_mean = x.find("divisor") or (None, False)
    # Elements of one example may sum to a global batch by chance: of those, only jnp.mean counts.
    num_axes = len(eqn.outvars[0].aval.shape) - len(eqn.invars[0].aval.shape)
    if _close(weight, 1.0) and (num_axes == 1 or is_mean):
        return [x.having(mean=seed, grad=seed)]
    if _close(weight * walk.num_replicas, 1.0) and _close(divisor, count * walk.num_replicas):
        return [x.having(share=seed, grad=seed)]
    return [x.having(grad=seed)]


def _reduce_sum(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    x, axes = ins[0], eqn.params["axes"]
    count = size_of(eqn.invars[0]) // max(1, size_of(eqn.outvars[0]))
    if x.number is not None:
        return [x._replace(number=x.number * count)]
    if not x.differs:
        return [x.only(*_REDUCED)]
    if x.find("grad_squares"):
        return [x.only("grad_squares")]
    if x.find("grad"):
        return [x.only("grad", *_SCALES)]
    if 0 not in axes and eqn.outvars[0].aval.shape:
        return [x.only("squares")]
    total = DIFFERS.having(total=(count, len(axes)), total_site=walk.site(eqn))
    squares = x.find("squares")
    return [total.having(squares=squares) if squares else total]


def _linear(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    """Takes or adds up elements of its first operand: gather, cumsum, pad."""
    kept = ins[0].only("grad", *_SCALES, *_REDUCED)
    return [kept._replace(differs=unknown(ins).differs)] * len(eqn.outvars)


def _scatter_add(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    """Adds elements to others, which in a backward pass are zeros."""
    into, updates = ins[0], ins[2]
    tags = updates.tags if into.number is not None else into.tags & updates.tags
    return [Fact(unknown(ins).differs, None, tags).only("grad", *_SCALES, *_REDUCED)]


def _curve(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    """A function that is not linear."""
    x = ins[0]
    if not x.differs:
        return [x.only("random")]
    name = eqn.primitive.name
    if name == "sqrt" and x.find("grad_squares"):
        return [DIFFERS.having(norm=walk.site(eqn))]
    if name == "sqrt" and x.find("variance"):
        return [x.only("variance")]
    is_scalar = not eqn.outvars[0].aval.shape
    inner = x.find("mean") or x.find("ratio")
    if is_scalar and inner and not x.find("grad") and not walk.is_transposed(eqn):
        return [DIFFERS.having(curved=walk.site(eqn))]
    return [x.only("norm")]


def _square(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    x = ins[0]
    power = eqn.params.get("y", 2)
    if x.number is not None:
        return [Fact(number=x.number**power) if x.number or power > 0 else EQUAL]
    if power != 2:
        return _curve(walk, eqn, ins)
    return [_squared(x)]


def _squared(x: Fact) -> Fact:
    if not x.differs:
        return x.only("random")
    if x.find("grad"):
        return DIFFERS.having(grad_squares=x.find("grad"))
    if x.find("centered"):
        return DIFFERS.having(squares=x.find("centered"))
    return DIFFERS.having(mean_square=x.find("mean")) if x.find("mean") else DIFFERS


# -- two operands -------------------------------------------------------------


def _mul(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    a, b = ins
    if a.number is not None and b.number is not None:
        return [Fact(False, a.number * b.number, a.tags | b.tags)]
    if b.number is not None and not b.find("grad"):
        return [_scaled(walk, eqn, a, b.number)]
    if a.number is not None and not a.find("grad"):
        return [_scaled(walk, eqn, b, a.number)]
    if eqn.invars[0] is eqn.invars[1]:
        return [_squared(a)]
    return [_product(walk, eqn, a, b)]


def _scaled(walk: FactWalk, eqn: Any, x: Fact, factor: float) -> Fact:
    """Returns what is known of `x` times a number."""
    count = walk.num_replicas
    if _close(factor, 1 / count):
        return findings.divided(walk, eqn, x)
    if _close(factor, count):
        return x.without("mean", "share", "averaged", "total")
    return x.without("total", "base") if factor == 0 else x.without("total")


def _product(walk: FactWalk, eqn: Any, a: Fact, b: Fact) -> Fact:
    """Returns what is known of a product, or of a quotient of `a`."""
    if a.differs and b.differs:
        if a.find("grad") and b.find("norm") or b.find("grad") and a.find("norm"):
            grad = a if a.find("grad") else b
            return grad.only("grad", *_SCALES).having(clipped=walk.site(eqn))
        tagged = [x for x in (a, b) if any(x.find(name) for name in _SCALES)]
        if len(tagged) == 1 and walk.is_transposed(eqn):
            return tagged[0].only("grad", *_SCALES)
        grad = a.find("grad") or b.find("grad")
        return DIFFERS.having(grad=grad) if grad else _or_norm(a, b)
    findings.require_own_randomness(walk, eqn, a, b)
    if a.differs or b.differs:
        own, other = (a, b) if a.differs else (b, a)
        scales = other.only("grad", *_SCALES)
        return Fact(True, None, own.without("total").tags | scales.tags)
    kept = (*_REDUCED, "random", "grad", *_SCALES)
    base = a if b.find("base") is None else b if a.find("base") is None else EQUAL
    return Fact(False, None, a.only(*kept).tags | b.only(*kept).tags | base.only("base").tags)


def _or_norm(a: Fact, b: Fact) -> Fact:
    norm = a.find("norm") or b.find("norm")
    return DIFFERS.having(norm=norm) if norm else DIFFERS


def _div(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    a, b = ins
    if b.number is not None and b.number != 0:
        if a.number is not None:
            return [
                Fact(False, a.number / b.number, a.tags).having(
                    divisor=(b.number, walk.site(eqn).is_mean)
                )
            ]
        return [_over_number(walk, eqn, a, b.number)]
    if a.number is not None and a.find("grad") is None:
        return [_number_over(walk, eqn, a.number, b)]
    if a.find("total_site") and not walk.is_transposed(eqn):
        if b.find("total_site") and not eqn.outvars[0].aval.shape:
            walk.ratio_counts.add(eqn.invars[1])
            return [DIFFERS.having(ratio=walk.site(eqn))]
        if not b.differs and b.find("summed"):
            return [DIFFERS.having(share=walk.site(eqn))]
    return [_product(walk, eqn, a, b.only("norm", "random"))]


def _over_number(walk: FactWalk, eqn: Any, x: Fact, number: float) -> Fact:
    """Returns what is known of `x` over a number."""
    (count, num_axes), site = x.find("total") or (0, 0), walk.site(eqn)
    if x.find("squares") and count:
        return DIFFERS.having(variance=site)
    if count > 1 and _close(number, count) and (num_axes == 1 or site.is_mean):
        return DIFFERS.having(mean=site)
    if count > 1 and _close(number, count * walk.num_replicas):
        return DIFFERS.having(share=site)
    return _scaled(walk, eqn, x, 1 / number)


def _number_over(walk: FactWalk, eqn: Any, number: float, x: Fact) -> Fact:
    """Returns what is known of a number over `x`."""
    site = walk.site(eqn)
    if walk.is_transposed(eqn):
        if x.differs and eqn.invars[1] in walk.ratio_counts:
            return DIFFERS.having(ratio=site, grad=site)
        if x.find("summed") and _close(number, 1.0):
            return EQUAL.having(share=site, grad=site)
        if x.find("summed") and _close(number, walk.num_replicas):
            return EQUAL.having(mean=site, grad=site)
        return x.only("norm")
    if x.differs and x.find("mean") and not x.find("grad") and not eqn.outvars[0].aval.shape:
        return DIFFERS.having(curved=site)
    return x.only("norm")


def _add(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    a, b = ins
    if a.number is not None and b.number is not None and not (a.tags or b.tags):
        sign = -1 if eqn.primitive.name == "sub" else 1
        return [Fact(number=a.number + sign * b.number)]
    findings.require_own_randomness(walk, eqn, a, b)
    if a.differs and b.differs:
        return [_sum_of_different(walk, eqn, a, b)]
    if a.differs or b.differs:
        own, other = (a, b) if a.differs else (b, a)
        if own.find("component"):
            findings.require_own_part(walk, eqn, other)
        kept = own.without("variance", "curved", "total", "centered", "share")
        if other.number is None or own.find("share") is None:
            kept = Fact(True, None, kept.tags | own.only("share").tags)
        return [Fact(True, None, kept.tags | other.only("base").tags)]
    findings.require_counted_once(walk, eqn, a, b)
    kept = (*_REDUCED, "random", "base", "grad", *_SCALES)
    return [Fact(False, None, a.only(*kept).tags | b.only(*kept).tags)]


def _sum_of_different(walk: FactWalk, eqn: Any, a: Fact, b: Fact) -> Fact:
    if eqn.primitive.name == "sub" and not a.find("mean"):
        if b.find("mean") and eqn.outvars[0].aval.shape and not b.find("grad"):
            return DIFFERS.having(centered=walk.site(eqn))
    if eqn.primitive.name == "sub" and a.find("mean") and b.find("mean_square"):
        return DIFFERS.having(variance=walk.site(eqn))
    findings.require_every_part(walk, eqn, a, b)
    names = [
        n for n in (*_SCALES, "grad_squares", "clipped", "total_site") if a.find(n) and b.find(n)
    ]
    if not (a.find("grad") and b.find("grad")):
        names.extend(n for n in ("clipped",) if a.find(n) or b.find(n))
    out = a.only(*names)
    grad, component = a.find("grad") or b.find("grad"), a.find("component") or b.find("component")
    out = out.having(grad=grad) if grad else out
    out = out.having(component=component) if component else out
    base = a.find("base") or b.find("base")
    return out.having(base=base) if base else out


def _bound(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    """max, min, clamp."""
    tensors = [x for x in ins if x.number is None]
    if len(tensors) == 1 and tensors[0].find("grad") and not walk.is_transposed(eqn):
        x = tensors[0]
        return [x.having(clipped=walk.site(eqn)) if x.differs else x]
    if len(tensors) == 1:
        return [tensors[0].without("mean", "share") if tensors[0].differs else tensors[0]]
    if not any(x.differs for x in ins):
        return [EQUAL.having(random=r) if (r := _random(ins)) else EQUAL]
    return [_or_norm(ins[0], ins[-1])]


def _random(ins: Sequence[Fact]) -> Any:
    return next((x.find("random") for x in ins if x.find("random")), None)


def _contract(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    """A sum of products: dot_general, convolution."""
    a, b = ins[0], ins[1]
    if eqn.invars[0] is eqn.invars[1] and a.find("grad"):
        return [_squared(a)]
    out = _product(walk, eqn, a.without("random"), b.without("random"))
    out = out.without("base", "clipped", "norm", "total", "centered")
    if not walk.is_transposed(eqn):
        return [out.only(*_REDUCED) if not out.differs else DIFFERS]
    return [out if out.find("grad") else out.having(grad=walk.site(eqn))]


def _select(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    which, cases = ins[0], ins[1:]
    for case in cases:
        findings.require_own_randomness(walk, eqn, which, case)
    if which.number is not None:
        return [cases[min(int(which.number), len(cases) - 1)]]
    tensors = [c for c in cases if c.number is None] or list(cases)
    tags = frozenset.intersection(*(c.tags for c in tensors))
    for name in ("clipped", "norm"):
        tags |= next((c.only(name).tags for c in tensors if c.find(name)), frozenset())
    differs = any(x.differs for x in ins)
    out = Fact(differs, None, tags)
    if any(c.differs for c in cases) and which.differs:
        out = out.having(data=walk.site(eqn))
        if which.find("rank") and any(c.find("mean") or c.find("total") for c in cases):
            out = out.having(chosen=walk.site(eqn))
    random = _random([which]) if not differs else None
    return [out.having(random=random) if random else out]


def _elementwise(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    """Whatever else: bits of equal keys stay such, norms of local gradients too."""
    out = unknown(ins)
    if out.differs:
        kept = frozenset().union(*(x.only("norm", "rank").tags for x in ins))
        return [Fact(True, None, kept)] * len(eqn.outvars)
    random = _random(ins)
    return [out.having(random=random) if random else out] * len(eqn.outvars)


def _compare(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    a, b = ins
    if a.number is None or b.number is None:
        return _elementwise(walk, eqn, ins)
    return [Fact(number=float(getattr(operator, eqn.primitive.name)(a.number, b.number)))]


def _bits(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    out = unknown(ins)
    return [out if out.differs else out.having(random=walk.site(eqn))] * len(eqn.outvars)


# -- over the replicas --------------------------------------------------------


def _psum(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact] | None:
    axes = eqn.params.get("axes", ())
    if walk.axis_name not in axes:
        return [unknown([x]) for x in ins]
    if eqn.params.get("axis_index_groups") is not None:
        return [DIFFERS] * len(ins)
    return [findings.summed(walk, eqn, x) for x in ins]


def _equalised(tag: str | None) -> Any:
    def rule(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if walk.axis_name not in (axes if isinstance(axes, (tuple, list)) else (axes,)):
            return [unknown(ins)] * len(eqn.outvars)
        return [EQUAL.having(**{tag: walk.site(eqn)}) if tag else EQUAL] * len(eqn.outvars)

    return rule


def _rank(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    return [DIFFERS.having(rank=walk.site(eqn))]


def _own(walk: FactWalk, eqn: Any, ins: Sequence[Fact]) -> list[Fact]:
    return [DIFFERS] * len(eqn.outvars)


def _named(rule: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), rule)


#: By primitive: ``rule(walk, eqn, ins)``, which returns a fact for each output. Where a primitive
#: has none, a result is only known to differ if an operand does.
RULES: dict[str, Any] = {
    **_named(
        _same,
        "reshape transpose squeeze expand_dims convert_element_type copy copy_p neg rev slice "
        "dynamic_slice reduce_precision real stop_gradient optimization_barrier "
        "sharding_constraint layout_constraint device_put",
    ),
    **_named(_broadcast, "broadcast_in_dim"),
    **_named(_linear, "gather cumsum pad reduce_window_sum dynamic_update_slice"),
    **_named(_scatter_add, "scatter-add scatter_add"),
    **_named(_reduce_sum, "reduce_sum"),
    **_named(_curve, "exp exp2 log log1p expm1 sqrt rsqrt cbrt pow"),
    **_named(_square, "integer_pow square"),
    **_named(_mul, "mul"),
    **_named(_div, "div"),
    **_named(_add, "add sub add_any"),
    **_named(_bound, "max min clamp"),
    **_named(_contract, "dot_general conv_general_dilated"),
    **_named(_select, "select_n"),
    **_named(
        _elementwise,
        "and or xor not erf_inv erf sign abs floor ceil round sin cos tanh "
        "shift_left shift_right_logical shift_right_arithmetic bitcast_convert_type rem "
        "concatenate is_finite logistic log_softmax clamp_p",
    ),
    **_named(_compare, "eq ne lt le gt ge"),
    **_named(_bits, "random_bits threefry2x32 rng_bit_generator"),
    **_named(_psum, "psum psum_invariant"),
    **_named(_equalised("gathered"), "all_gather all_gather_invariant"),
    **_named(_equalised(None), "pmax pmin"),
    **_named(_rank, "axis_index"),
    **_named(_own, "ppermute all_to_all reduce_scatter psum_scatter"),
}
