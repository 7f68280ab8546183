"""The effect of arithmetic on facts: products, quotients, sums, bounds, selects.

The tags are listed in `fact_rules`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from distjax.jax_compat import JaxprEqn
from distjax.replica import fact_reductions as reductions
from distjax.replica import reduction_findings as findings
from distjax.replica.facts import DIFFERS, EQUAL, Fact, FactWalk, shape_of, unknown

#: Tags kept by a linear operation with one tagged operand.
SCALES = ("mean", "share", "ratio", "added", "repeated")
REDUCED = ("averaged", "summed", "gathered", "times_R", "gradient")


def is_close(a: float | None, b: float) -> bool:
    """Returns whether a number, if known, is `b` up to rounding."""
    return a is not None and math.isclose(a, b, rel_tol=1e-5)


def squared(x: Fact) -> Fact:
    """Returns the fact of the square of `x`."""
    if not x.differs:
        return x.only("random")
    if x.find("grad"):
        return DIFFERS.having(grad_squares=x.find("grad"))
    if x.find("centered"):
        return DIFFERS.having(squares=x.find("centered"))
    return DIFFERS.having(mean_square=x.find("mean")) if x.find("mean") else DIFFERS


def of_parts(parts: Sequence[Fact]) -> Fact:
    """Returns the fact of an array assembled from others, ignoring plain constants among them."""
    told = [x for x in parts if x.number is None or x.find("grad")] or list(parts)
    names = [n for n in ("grad", *SCALES, *REDUCED) if all(x.find(n) for x in told)]
    return told[0].only(*names)._replace(differs=unknown(parts).differs)


def completes(parts: Sequence[Fact]) -> bool:
    """Returns whether a replica puts its own rows among those gathered from all replicas."""
    is_gathered = [bool(x.find("gathered")) for x in parts]
    return any(is_gathered) and any(
        x.differs and not g for x, g in zip(parts, is_gathered, strict=True)
    )


def mul(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A product."""
    a, b = ins
    if a.number is not None and b.number is not None:
        product = Fact(False, a.number * b.number, a.tags | b.tags)
        site = walk.site(eqn)
        is_over_r = any(is_close(x.number, 1 / walk.num_replicas) and not x.tags for x in ins)
        if walk.is_alone:  # times 1 is no sign, except where average_loss multiplies by R
            is_over_r = site.is_share and not shape_of(eqn.outvars[0])
        is_over_r = is_over_r or findings.names_replicas(site)
        return [_over_replicas(product) if is_over_r else product]
    if b.number is not None and not b.find("grad"):
        return [_scaled(walk, eqn, a, b.number)]
    if a.number is not None and not a.find("grad"):
        return [_scaled(walk, eqn, b, a.number)]
    if eqn.invars[0] is eqn.invars[1]:
        return [squared(a)]
    return [_product(walk, eqn, a, b)]


def may_average(walk: FactWalk, factor: float, *, is_product: bool = False) -> bool:
    """Returns whether a factor may be 1/(k R): a mean over the replicas and k microbatches.

    Args:
      walk: knows R.
      factor: the factor.
      is_product: whether the code multiplies by it, as by a learning rate: 0.1 is not 1/(5 * 2).
    """
    if not 1e-9 < factor < 1e9:  # nor NaN
        return False
    parts = 1 / (factor * walk.num_replicas)
    count = round(parts)
    is_power_of_two = count & (count - 1) == 0
    return (
        count >= 1 + walk.is_alone
        and is_close(parts, count)
        and (is_power_of_two or not is_product)
    )


def _scaled(
    walk: FactWalk, eqn: JaxprEqn, x: Fact, factor: float, *, is_product: bool = True
) -> Fact:
    """Returns the fact of `x` times a number."""
    count = walk.num_replicas
    x = x.without("count", "old")
    if walk.is_alone and is_close(factor, 1.0):
        site = walk.site(eqn)
        if site.is_share:  # for a mean it returns R times the share; weights are an array of ones
            return x if shape_of(eqn.outvars[0]) else x.without("share")
        if not findings.tells_replicas(walk, site):  # R, or any other 1
            return x if is_product else x.without(*reductions.UNTIL_DIVIDED)
    if is_close(factor, 1 / count):
        is_rate = is_product and x.find("whole") and not findings.names_replicas(walk.site(eqn))
        return x if is_rate else reductions.divided(walk, eqn, x)
    if is_close(factor, count):
        return x.without("share", "averaged", "total", "added")
    is_tagged = x.find("times_R") or x.find("mean")
    if may_average(walk, factor, is_product=is_product) or (
        is_tagged and findings.names_replicas(walk.site(eqn))
    ):
        return x.without("mean", "share", "averaged", "total", "times_R", "added")
    return x.without("total", "base") if factor == 0 else x.without("total")


def _over_replicas(x: Fact) -> Fact:
    """Returns the fact of a number that was divided by R, perhaps within a derivative."""
    return x._replace(tags=x.without(*SCALES).tags).having(over_R=True)


def _product(walk: FactWalk, eqn: JaxprEqn, a: Fact, b: Fact) -> Fact:
    """Returns the fact of a product, or of a quotient with numerator `a`."""
    if a.differs and b.differs:
        if a.find("mean") and b.find("logarithm") or b.find("mean") and a.find("logarithm"):
            return DIFFERS.having(curved=walk.site(eqn))  # an entropy, of local frequencies
        if a.find("grad") and b.find("norm") or b.find("grad") and a.find("norm"):
            grad = a if a.find("grad") else b
            return grad.only("grad", *SCALES).having(clipped=walk.site(eqn))
        tagged = [x for x in (a, b) if any(x.find(name) for name in SCALES)]
        if len(tagged) == 1 and walk.is_transposed(eqn):
            return tagged[0].only("grad", *SCALES)
        grad = a.find("grad") or b.find("grad")
        return DIFFERS.having(grad=grad) if grad else _or_norm(a, b)
    findings.find_equal_randomness(walk, eqn, a, b)
    if a.differs or b.differs:
        own, other = (a, b) if a.differs else (b, a)
        scales = other.only("grad", *SCALES)
        return Fact(True, None, own.without("total", "old").tags | scales.tags)
    kept = (*REDUCED, "random", "grad", *SCALES)
    base = a if b.find("base") is None else b if a.find("base") is None else EQUAL
    return Fact(False, None, a.only(*kept).tags | b.only(*kept).tags | base.only("base").tags)


def _or_norm(a: Fact, b: Fact) -> Fact:
    norm = a.find("norm") or b.find("norm")
    return DIFFERS.having(norm=norm) if norm else DIFFERS


def div(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A quotient."""
    a, b = ins
    if b.number is not None and b.number != 0:
        if a.number is not None:
            site = walk.site(eqn)
            quotient = Fact(False, a.number / b.number, a.tags)
            if is_close(b.number, walk.num_replicas) and not site.is_mean:
                quotient = _over_replicas(quotient)
            return [quotient.having(divisor=(b.number, site.is_mean, site.is_share))]
        return [_over_number(walk, eqn, a, b.number)]
    if a.number is not None and a.find("grad") is None:
        return [_number_over(walk, eqn, a, b)]
    if a.find("total_site") and not walk.is_transposed(eqn):
        if b.find("total_site") and not shape_of(eqn.outvars[0]):
            walk.ratio_counts.add(eqn.invars[1])
            return [DIFFERS.having(ratio=walk.site(eqn))]
        if not b.differs and b.find("count"):
            return [DIFFERS.having(share=walk.site(eqn))]
    # A quotient of norms weights one loss by another's gradient; only a gradient is clipped by it.
    is_weight = a.differs and not a.find("grad")
    return [_product(walk, eqn, a, b.only("random") if is_weight else b.only("norm", "random"))]


def _over_number(walk: FactWalk, eqn: JaxprEqn, x: Fact, number: float) -> Fact:
    """Returns the fact of `x` divided by a number."""
    (count, num_axes), site = x.find("total") or (0, 0), walk.site(eqn)
    if x.find("squares") and count:
        return DIFFERS.having(variance=site)
    is_plain_mean = num_axes == 1 and not walk.is_alone  # else the global batch is as large
    if count > 1 and is_close(number, count) and (is_plain_mean or site.is_mean):
        return x.only("grad").having(mean=site)
    is_local = is_close(x.find("added"), number) and number != walk.num_replicas
    is_local = is_local and not walk.is_alone
    if is_local and not (walk.is_transposed(eqn) or findings.names_replicas(site)):
        if x.differs:
            return x.only("grad").having(mean=site)
        if x.find("summed"):  # the same, divided later
            return EQUAL.having(times_R=("mean", site, x.find("summed")))
    is_share = count > 1 and is_close(number, count * walk.num_replicas)
    is_share = is_share and (site.is_share or not walk.is_alone)
    if is_share and not findings.writes_replicas(walk, site):
        return DIFFERS.having(share=site)
    if site.is_mean and walk.is_transposed(eqn):  # a mean within an example, as in a layer norm
        return x.only("grad", *SCALES)
    return _scaled(walk, eqn, x, 1 / number, is_product=False)


def _number_over(walk: FactWalk, eqn: JaxprEqn, number: Fact, x: Fact) -> Fact:
    """Returns the fact of a number divided by `x`."""
    site = walk.site(eqn)
    if walk.is_transposed(eqn):
        if x.differs and eqn.invars[1] in walk.ratio_counts:
            return DIFFERS.having(ratio=site, grad=site)
        if x.find("count") and is_close(number.number, 1.0) and not number.find("over_R"):
            return EQUAL.having(share=site, grad=site)
        return x.only("norm")
    if x.differs and x.find("mean") and not x.find("grad") and not shape_of(eqn.outvars[0]):
        return DIFFERS.having(curved=site)
    return x.only("norm")


def add(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A sum or difference."""
    [out] = _sum(walk, eqn, ins)
    a, b = ins
    is_negative = eqn.primitive.name == "sub"
    old = a if _is_part(b) else b if _is_part(a) and not is_negative else EQUAL
    tags = frozenset(pair for pair in out.tags if pair[0] != "old") | old.only("old").tags
    return [out._replace(tags=tags)]


def _is_part(x: Fact) -> bool:
    """Returns whether a value is known to be added to state, and is not computed from state."""
    made = x.number is not None or any(map(x.find, ("grad", "total_site", *SCALES, *REDUCED)))
    return made and not x.find("base")


def _sum(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    a, b = ins
    if a.number is not None and b.number is not None:
        sign = -1 if eqn.primitive.name == "sub" else 1
        tags = a.without("divisor").tags | b.without("divisor").tags
        return [Fact(False, a.number + sign * b.number, tags)]
    if walk.is_transposed(eqn) and (a.find("grad") or b.find("grad")):
        return [_sum_of_cotangents(a, b)]
    findings.find_equal_randomness(walk, eqn, a, b)
    if a.differs and b.differs:
        return [_sum_of_different(walk, eqn, a, b)]
    if a.differs or b.differs:
        own, other = (a, b) if a.differs else (b, a)
        if a is other and a.find("summed") and eqn.primitive.name == "sub":
            return [DIFFERS.having(others=walk.site(eqn))]
        if own.find("component"):
            findings.find_repeated_total(walk, eqn, other)
        kept = own.without("variance", "curved", "centered", "share")
        kept = kept if own.find("grad") else kept.without("total")
        if other.number is None or own.find("share") is None:
            kept = Fact(True, None, kept.tags | own.only("share").tags)
        base = EQUAL if own.find("component") else other.only("base")
        return [Fact(True, None, kept.tags | base.tags)]
    findings.find_update_times_r(walk, eqn, a, b)
    kept = (*REDUCED, "random", "base", "grad", *SCALES)
    return [Fact(False, None, a.only(*kept).tags | b.only(*kept).tags)]


def _sum_of_cotangents(a: Fact, b: Fact) -> Fact:
    """Returns the fact of a sum over two paths from a value to the loss."""
    out = of_parts((a, b)).having(grad=a.find("grad") or b.find("grad"))
    mean = a.find("mean") or b.find("mean")
    is_mean = mean and not (a.find("share") or b.find("share"))
    return out.having(mean=mean) if is_mean else out  # the other path has some unknown factor


def _sum_of_different(walk: FactWalk, eqn: JaxprEqn, a: Fact, b: Fact) -> Fact:
    if eqn.primitive.name == "sub" and not a.find("mean"):
        if b.find("mean") and shape_of(eqn.outvars[0]) and not b.find("grad"):
            return DIFFERS.having(centered=walk.site(eqn))
    if eqn.primitive.name == "sub" and a.find("mean") and b.find("mean_square"):
        return DIFFERS.having(variance=walk.site(eqn))
    if a.find("others") or b.find("others"):
        return DIFFERS.having(completed=walk.site(eqn))
    findings.find_dropped_parts(walk, eqn, a, b)
    names = [
        n for n in (*SCALES, "grad_squares", "clipped", "total_site") if a.find(n) and b.find(n)
    ]
    if not (a.find("grad") and b.find("grad")):
        names.extend(n for n in ("clipped",) if a.find(n) or b.find(n))
    out = a.only(*names)
    for x in (a, b):
        if x.find("grad") and x.find("total"):  # noise added to a sum of clipped gradients
            out = out._replace(tags=out.tags | x.only("total", "total_site").tags)
    grad, component = a.find("grad") or b.find("grad"), a.find("component") or b.find("component")
    out = out.having(grad=grad) if grad else out
    out = out.having(component=component) if component else out
    base = a.find("base") or b.find("base")
    return out.having(base=base) if base else out


def bound(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
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


def contract(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A sum of products: dot_general, convolution."""
    a, b = ins[0], ins[1]
    if eqn.invars[0] is eqn.invars[1] and a.find("grad"):
        return [squared(a)]
    out = _product(walk, eqn, a.without("random"), b.without("random"))
    out = out.without("base", "clipped", "norm", "total", "centered")
    if not walk.is_transposed(eqn):
        return [out.only(*REDUCED) if not out.differs else DIFFERS]
    return [out if out.find("grad") else out.having(grad=walk.site(eqn))]


def select(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """An elementwise choice among cases."""
    which, cases = ins[0], ins[1:]
    for case in cases:
        findings.find_equal_randomness(walk, eqn, which, case)
    if which.number is not None:
        return [cases[min(int(which.number), len(cases) - 1)]]
    tensors = [c for c in cases if c.number is None or c.find("grad")] or list(cases)
    tags = frozenset.intersection(*(c.without("only_first").tags for c in tensors))
    for name in ("clipped", "norm"):
        tags |= next((c.only(name).tags for c in tensors if c.find(name)), frozenset())
    differs = any(x.differs for x in ins)
    out = Fact(differs, None, tags)
    if completes(cases):
        out = out.having(completed=walk.site(eqn))
    if which.differs and len(tensors) < len(cases):  # a mask, as in dropout, updates nothing
        out = out.without("base", "old")
    if any(c.differs for c in cases) and which.differs:
        out = out.having(data=walk.site(eqn))
        if which.find("rank") and any(c.find("mean") or c.find("total") for c in cases):
            out = out.having(chosen=walk.site(eqn))
    numbers = [case.number for case in cases if case.number is not None]
    if which.find("rank") and len(numbers) == len(cases) and 0.0 in numbers:
        out = out.having(only_first=sum(numbers))
    random = _random([which]) if not differs else None
    return [out.having(random=random) if random else out]


def elementwise(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Other ops; keeps random bits of equal keys, and norms of local gradients."""
    out = unknown(ins)
    if out.differs:
        kept = frozenset().union(*(x.only("norm", "rank").tags for x in ins))
        return [Fact(True, None, kept)] * len(eqn.outvars)
    random = _random(ins)
    return [out.having(random=random) if random else out] * len(eqn.outvars)


def compare(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A comparison."""
    a, b = ins
    if a.number is None or b.number is None:
        return elementwise(walk, eqn, ins)
    return [Fact(number=float(getattr(operator, eqn.primitive.name)(a.number, b.number)))]


def bits(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Random bits drawn with a key."""
    out = unknown(ins)
    return [out if out.differs else out.having(random=walk.site(eqn))] * len(eqn.outvars)
