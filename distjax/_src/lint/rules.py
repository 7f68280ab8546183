"""What each primitive does to the facts of its operands, as a table.

Tags; most hold the site where they originated:

- of values that differ: `total` (a sum over the batch: its size and number of axes) and
  `total_site`, `mean` (a mean over this replica's batch, or its gradient), `mean_square` (its
  square), `share` (sums to the mean over all replicas), `ratio` (a total over a local count),
  `curved` (a function of a local mean), `centered`, `squares`, `variance`, `grad` (part of the
  backward pass), `grad_squares`, `norm` (of local gradients), `clipped`, `rank` (the replica's
  index), `component` (of the variable of that name), `data` (selected by a predicate that differs),
  `chosen` (selected by rank), `only_first` (this number on one replica, and 0 on the others),
  `scattered` (a replica's shard of a sum), `others` (a sum over the replicas less this one's part),
  `completed` (computed from the global batch: this replica's rows among those that others
  computed), `logarithm` (of a local mean);
- of equal values: `averaged`, `summed`, `gathered` (the reduction that made it), `count` (a sum
  over all examples), `whole` (a sum of shares), `times_R` (a sum of R equal parts), `gradient` (a
  sum or mean of gradients), `random` (bits from an equal key), `divisor` (the number that a
  constant was divided by), `over_R` (a constant over the number of replicas);
- of both: `added` (a sum over this number of a replica's examples, or its gradient), `base` (the
  argument or variable that it updates), `old` (the value of the variable of that serial number,
  which sums; parts may have been added to it), `repeated` (beside `mean`: the derivative of a sum
  over the replicas, which is one too, so each part is R times as large).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from distjax._src.jax_compat import JaxprEqn
from distjax._src.lint import findings
from distjax._src.lint.facts import (
    DIFFERS,
    EQUAL,
    Fact,
    FactWalk,
    Where,
    shape_of,
    size_of,
    unknown,
)
from distjax._src.replica.analysis import names_axis
from distjax._src.replica.merge import reduction_of
from distjax._src.variables.state import variable_p
from distjax._src.variables.variable import Variable

# -- sums over the replicas, and their division by R ---------------------------


def sum_over_replicas(walk: FactWalk, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns the fact of the sum of `x` over the replicas."""
    if walk.is_transposed(eqn):  # the derivative of a reduction, which the user did not write
        return _summed_in_derivative(walk, walk.site(eqn), x)
    site, walk.combines = walk.site(eqn), True
    variable = findings.written_variable(walk, site)
    if variable is not None:
        return _summed_by_variable(walk, variable, site, x)
    if x.number is not None:
        return Fact(number=x.number * walk.num_replicas)
    out, grad = _sum_of(walk, site, x), x.find("grad") or x.find("gradient")
    return out.having(gradient=grad) if grad else out


def _sum_of(walk: FactWalk, site: Where, x: Fact) -> Fact:
    if x.differs:
        walk.gradients_differ |= x.find("grad") is not None
        findings.find_unreducible(walk, site, x)
        if x.find("share"):
            return EQUAL.having(whole=x.find("share"))
        if x.find("mean"):
            out = EQUAL.having(times_R=("mean", x.find("mean"), site))
            return out.having(repeated=x.find("repeated")) if x.find("repeated") else out
        count, num_axes = x.find("total") or (0, 0)
        added = x.find("added") or (count if num_axes == 1 and count in walk.leading else None)
        out = EQUAL.having(summed=site)
        out = out.having(count=site) if x.find("total_site") else out
        return out.having(added=added) if added else out
    made = findings.reduction_of(x)
    if made is not None:
        return EQUAL.having(times_R=(made[0], made[1], site))
    if grad := x.find("grad"):
        findings.find_equal_batch(walk, [site, grad])
    return EQUAL


#: Tags that a division by the number of replicas removes.
UNTIL_DIVIDED = (
    *("mean", "share", "total", "added", "summed", "count", "times_R", "whole", "repeated"),
)


def _summed_in_derivative(walk: FactWalk, site: Where, x: Fact) -> Fact:
    """Returns the fact of a cotangent summed over the replicas."""
    if x.number is not None:
        out = Fact(False, x.number * walk.num_replicas, x.tags)
        is_loss = x.number == 1.0 and not x.find("over_R")  # a factor may be meant for R
        return out.having(repeated=site) if is_loss else out
    if not x.differs and x.find("share"):  # R equal shares
        return x.only("grad").having(mean=x.find("share"))
    return Fact(False, None, x.only("grad", "mean", "share").tags)


def divide_by_replicas(walk: FactWalk, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns the fact of `x` divided by the number of replicas."""
    site, rest = walk.site(eqn), x.without(*UNTIL_DIVIDED)
    if x.differs:
        return rest
    times, whole = x.find("times_R"), x.find("whole")
    if whole is not None:
        findings.find_averaged_share(walk, site, whole)
        return rest.having(averaged=site)
    if times is not None:
        kind, inner, reduction = times
        if x.find("repeated"):
            return rest.having(times_R=("derivative", x.find("repeated"), site))
        if findings.written_variable(walk, site) is not None:
            return x  # a variable's mean of R equal values
        if kind == "averaged" and not walk.is_transposed(eqn):
            findings.find_averaged_twice(walk, [reduction, inner])
        return rest.having(averaged=site)
    if x.find("summed"):  # unless the division may be by a local batch of R examples
        return rest if x.find("added") == walk.num_replicas else rest.having(averaged=site)
    averaged = x.find("averaged")
    if averaged is not None and findings.names_replicas(site):
        findings.find_divided_twice(walk, [site, averaged])
    return rest


def _summed_by_variable(walk: FactWalk, variable: Variable, site: Where, x: Fact) -> Fact:
    rule = variable.aggregation.name
    if rule == "ONLY_FIRST_REPLICA":
        if x.find("data") and x.find("grad") and variable.trainable:
            findings.find_dropped_updates(walk, site, variable)
        number = x.find("only_first")
        return _as_written(x._replace(differs=False)) if number is None else Fact(number=number)
    if x.differs:
        findings.find_unreducible(walk, site, x)
    made, grad = findings.reduction_of(x), x.find("grad")
    walk.gradients_differ |= x.differs and grad is not None
    if made is None and not x.differs and grad is not None:
        findings.find_equal_batch(walk, [site, grad])
    if rule == "MEAN":
        if x.number is not None:
            return Fact(number=x.number * walk.num_replicas)  # until it is divided by R
        if x.differs and x.find("mean") and x.find("repeated"):
            walk.sums.append((variable, ("derivative", x.find("repeated"), site)))
        return EQUAL.having(whole=x.find("share")) if x.find("share") else _as_written(x)
    if x.find("old") == variable.serial_number:
        findings.find_old_value_summed(walk, site, variable)
    elif x.differs and x.find("mean"):
        walk.sums.append((variable, ("mean", x.find("mean"), site)))
    elif made is not None and not x.differs:
        walk.sums.append((variable, (*made, site)))
    elif not x.differs and x.number is not None:
        walk.counts.append((variable, x.number, site))
        walk.counts_replicas |= x.number == 1.0
    return EQUAL


def _as_written(x: Fact) -> Fact:
    """Returns the fact of what a variable takes of R equal values: one of them.

    Of a new value computed from the old one, the sum was seen where it was added.
    """
    return EQUAL if x.differs or x.find("base") else x.only("times_R", "gradient")


def reduced(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """The rule for reductions in cross-replica code; None for any other call."""
    op = reduction_of(eqn)
    if op is None:
        return None
    walk.across = True
    outs = [follow(walk, op, eqn, x) for x in ins]
    walk.across = False
    return outs


def follow(walk: FactWalk, op: str, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns the fact of `x` reduced over the replicas in cross-replica code."""
    if op not in ("SUM", "MEAN", "GATHER"):  # also reduces over elements
        return EQUAL
    if op == "GATHER":
        return EQUAL.having(gathered=walk.site(eqn))
    if op == "MEAN" and not x.differs:  # free, and the identity
        return x
    total = sum_over_replicas(walk, eqn, x)
    return divide_by_replicas(walk, eqn, total) if op == "MEAN" else total


# -- arithmetic ----------------------------------------------------------------

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
            return x if is_product else x.without(*UNTIL_DIVIDED)
    if is_close(factor, 1 / count):
        is_rate = is_product and x.find("whole") and not findings.names_replicas(walk.site(eqn))
        return x if is_rate else divide_by_replicas(walk, eqn, x)
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


# -- by primitive --------------------------------------------------------------

#: Returns the facts of an equation's results from those of its operands; None: no rule applies.
Rule: TypeAlias = Callable[[FactWalk, JaxprEqn, Sequence[Fact]], Sequence[Fact] | None]


# -- one operand --------------------------------------------------------------


def _same(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Moves or converts elements; all facts are kept."""
    if len(eqn.outvars) > 1:  # one operand per output, as in an optimization barrier
        return list(ins) if len(eqn.outvars) == len(ins) else [unknown(ins)] * len(eqn.outvars)
    rest = unknown(ins[1:])
    kept = ins[0].without("old") if rest.differs else ins[0]
    return [kept._replace(differs=ins[0].differs or rest.differs)] * len(eqn.outvars)


def _broadcast(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    x = ins[0]
    if x.find("random") and eqn.params["broadcast_dimensions"][:1] != (0,):
        return [x.without("random")]  # the same number for every example
    count = size_of(eqn.outvars[0]) // max(1, size_of(eqn.invars[0]))
    is_seed = x.number not in (None, 0.0) and count > 1
    if not is_seed or x.find("grad") or not walk.is_transposed(eqn):
        return [x]
    return [_seed(walk, eqn, x, count)]


def _seed(walk: FactWalk, eqn: JaxprEqn, x: Fact, count: int) -> Fact:
    """Returns the fact of the first cotangent of a sum over `count` elements: their weight."""
    weight, seed = x.number * count, walk.site(eqn)  # type: ignore[operator]
    repeated, x = x.find("repeated"), x._replace(tags=x.without("repeated").tags)
    divisor, is_mean, is_average_loss = x.find("divisor") or (None, False, False)
    shape, dims = shape_of(eqn.outvars[0]), eqn.params["broadcast_dimensions"]
    summed = [length for axis, length in enumerate(shape) if axis not in dims]
    # The elements of one example may by chance be as many as a batch: there, trust only jnp.mean.
    is_weighted = is_mean and is_close(divisor, count)  # 0.5 * jnp.mean(losses)
    is_whole = shape in walk.completed and shape[0] not in walk.leading
    is_local = walk.may_be_batch(summed) and not is_whole
    is_divided = x.find("over_R") or may_average(walk, weight)
    is_plain_mean = is_close(weight, 1.0) and len(summed) == 1 and not walk.is_alone
    is_mean_of_rows = is_plain_mean or is_weighted
    if is_local and is_mean_of_rows and not is_divided:
        x = x.having(mean=seed, grad=seed)
        is_repeated = repeated and is_weighted and is_close(weight, walk.num_replicas)
        return x.having(repeated=repeated) if is_repeated else x
    is_sum = is_close(x.number, 1.0) and len(summed) == 1 and not walk.is_alone
    if is_local and is_sum and count in walk.leading:
        return x.having(added=count, grad=seed)
    is_share = is_close(weight * walk.num_replicas, 1.0)
    is_share = is_share and is_close(divisor, count * walk.num_replicas)
    is_share = is_share and (is_average_loss and not x.find("over_R") or not walk.is_alone)
    if is_share and not findings.writes_replicas(walk, seed):
        return x.having(share=seed, grad=seed)
    return x.having(grad=seed)


def _reduce_sum(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    x, axes = ins[0], eqn.params["axes"]
    count = size_of(eqn.invars[0]) // max(1, size_of(eqn.outvars[0]))
    if x.number is not None:
        return [x._replace(number=x.number * count)]
    if not x.differs:
        return [x.only("grad", *SCALES, *REDUCED)]
    if x.find("completed") and not walk.is_transposed(eqn):
        walk.completed.add(shape_of(eqn.invars[0]))
    if x.find("grad_squares"):
        return [x.only("grad_squares")]
    if x.find("grad"):
        grad = x.only("grad", *SCALES)
        if axes != (0,) or count not in walk.leading or walk.is_transposed(eqn):
            return [grad]
        return [grad.having(total=(count, 1), total_site=walk.site(eqn))]  # each example's own
    if 0 not in axes and shape_of(eqn.outvars[0]):
        return [x.only("squares", "curved")]
    summed = [shape_of(eqn.invars[0])[axis] for axis in axes]
    if x.find("curved") or not walk.may_be_batch(summed):
        return [x.only("curved")]
    total = DIFFERS.having(total=(count, len(axes)), total_site=walk.site(eqn))
    squares = x.find("squares")
    return [total.having(squares=squares) if squares else total]


def _linear(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Selects or adds up elements of its first operand: gather, cumsum, pad, split."""
    kept = ins[0].only("grad", *SCALES, *REDUCED)
    return [kept._replace(differs=unknown(ins).differs)] * len(eqn.outvars)


def _put(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Writes, or adds, elements into an array."""
    is_slice = eqn.primitive.name == "dynamic_update_slice"
    parts = [ins[0], ins[1 if is_slice else 2]]
    if completes(parts):
        return [DIFFERS.having(completed=walk.site(eqn))]
    return [of_parts(parts)._replace(differs=unknown(ins).differs)]


def _concatenate(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Puts operands beside each other: concatenate, stack."""
    if completes(ins):
        return [DIFFERS.having(completed=walk.site(eqn))]
    [out] = elementwise(walk, eqn, ins)
    return [out._replace(tags=out.tags | of_parts(ins).tags)]


def _curve(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A nonlinear function."""
    x = ins[0]
    if not x.differs:
        return [x.only("random")]
    name = eqn.primitive.name
    if name == "sqrt" and x.find("grad_squares"):
        return [DIFFERS.having(norm=walk.site(eqn))]
    if name == "sqrt" and x.find("variance"):
        return [x.only("variance")]
    is_scalar = not shape_of(eqn.outvars[0])
    inner = x.find("mean") or x.find("ratio")
    if inner and not x.find("grad") and not walk.is_transposed(eqn):
        if is_scalar:
            return [DIFFERS.having(curved=walk.site(eqn))]
        return [DIFFERS.having(logarithm=inner) if name == "log" else x.only("norm")]
    return [x.only("norm", "curved")]


def _square(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    x = ins[0]
    power = eqn.params.get("y", 2)
    if x.number is not None:
        is_moderate = 1e-9 < abs(x.number) < 1e9 and abs(power) < 32  # avoids overflow
        return [Fact(number=x.number**power) if is_moderate else EQUAL]
    if power == 1:  # as optax computes Adam's first moments
        return _same(walk, eqn, ins)
    return [squared(x)] if power == 2 else _curve(walk, eqn, ins)


# -- over the replicas --------------------------------------------------------


def _psum(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact] | None:
    if not names_axis(eqn, walk.axis_name):
        return [unknown([x]) for x in ins]
    if eqn.params.get("axis_index_groups") is not None:
        return [DIFFERS] * len(ins)
    walk.tells_means_apart |= any(x.find("mean_square") for x in ins)
    return [sum_over_replicas(walk, eqn, x) for x in ins]


def _gathered(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    if not names_axis(eqn, walk.axis_name):
        return [unknown(ins)] * len(eqn.outvars)
    walk.tells_means_apart |= any(x.find("mean") and not x.find("grad") for x in ins)
    return [EQUAL.having(gathered=walk.site(eqn))] * len(eqn.outvars)


def _extreme(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    return [EQUAL if names_axis(eqn, walk.axis_name) else unknown(ins)] * len(eqn.outvars)


def _rank(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    return [DIFFERS.having(rank=walk.site(eqn))]


def _variable(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    variable = eqn.params["variable"]()
    if variable.policy.stacked:
        return [DIFFERS.having(component=variable.name)]
    out = EQUAL.having(base=f"variable {variable.name}")
    is_sum = variable.aggregation.name == "SUM"
    return [out.having(old=variable.serial_number) if is_sum else out]


def _own(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    return [DIFFERS] * len(eqn.outvars)


def _scattered(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A reduce-scatter: replicas keep different rows of the sum, so a norm of them is local."""
    if not names_axis(eqn, walk.axis_name):
        return [unknown(ins)]
    # As the transpose of a gather, it sums the cotangents of all replicas' means or shares.
    kept = ("grad", *SCALES) if walk.is_transposed(eqn) else ("grad",)
    return [ins[0].only(*kept)._replace(differs=True).having(scattered=walk.site(eqn))]


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


#: ``rule(walk, eqn, ins)`` by primitive, returning a fact for each output. Without a rule, a result
#: is only known to differ if any operand does.
RULES: dict[str, Rule] = {
    **_named(
        _same,
        "reshape transpose squeeze expand_dims convert_element_type copy neg rev slice "
        "dynamic_slice reduce_precision real stop_gradient optimization_barrier "
        "sharding_constraint layout_constraint device_put",
    ),
    **_named(_broadcast, "broadcast_in_dim"),
    **_named(_linear, "gather cumsum pad reduce_window_sum split unstack"),
    **_named(_put, "dynamic_update_slice scatter scatter-add"),
    **_named(_reduce_sum, "reduce_sum"),
    **_named(_curve, "exp exp2 log log1p expm1 sqrt rsqrt cbrt pow"),
    **_named(_square, "integer_pow square"),
    **_named(mul, "mul"),
    **_named(div, "div"),
    **_named(add, "add sub add_any"),
    **_named(bound, "max min clamp"),
    **_named(contract, "dot_general conv_general_dilated"),
    **_named(select, "select_n"),
    **_named(
        elementwise,
        "and or xor not erf_inv erf sign abs floor ceil round sin cos tanh "
        "shift_left shift_right_logical shift_right_arithmetic bitcast_convert_type rem "
        "is_finite logistic log_softmax",
    ),
    **_named(_concatenate, "concatenate stack"),
    **_named(compare, "eq ne lt le gt ge"),
    **_named(bits, "random_bits threefry2x32 rng_bit_generator"),
    **_named(_psum, "psum psum_invariant"),
    **_named(_gathered, "all_gather all_gather_invariant"),
    **_named(_extreme, "pmax pmin"),
    **_named(_rank, "axis_index"),
    **_named(_variable, variable_p.name),
    **_named(reduced, "jit"),
    **_named(_own, "ppermute all_to_all"),
    **_named(_scattered, "reduce_scatter"),
}
