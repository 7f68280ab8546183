"""What each primitive does to the facts of its operands, as a table.

Tags; most hold the site where they originated:

- of values that differ: `mean` (the gradient of a mean over this replica's batch), `share` (sums to
  the mean over all replicas), `ratio` (a total over a local count), `grad` (part of the backward
  pass), `size` (computed of squares of gradients), `clipped` (a gradient, by such a size or by
  value), `component` (of a variable), `repeated` (beside `mean`: the derivative of a sum over the
  replicas, which is one too, so each part is R times as large);
- of equal values: `reduced` (how, and where), `whole` (a sum of shares), `times_R` (a sum of R
  equal parts), `gradient` (a sum or mean of gradients), `random` (bits from an equal key),
  `divisor` (the number that a constant was divided by), `over_R` (a constant over the number of
  replicas);
- of both: `total` (a sum over a batch: its size, its number of axes, and where), `base` (the
  argument or variable that it updates).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

from distjax._src.jax_compat import JaxprEqn
from distjax._src.lint import findings
from distjax._src.lint.facts import (
    DIFFERS,
    EQUAL,
    Fact,
    FactWalk,
    Site,
    shape_of,
    size_of,
    unknown,
)
from distjax._src.replica.analysis import names_axis
from distjax._src.replica.merge import reduction_of
from distjax._src.variables.state import variable_p
from distjax._src.variables.variable import Variable

#: Tags kept by a linear operation with one tagged operand; those of values that are reduced.
SCALES = ("mean", "share", "ratio", "repeated", "total")
REDUCED = ("reduced", "times_R", "gradient")
#: Tags that a division by the number of replicas removes.
UNTIL_DIVIDED = ("mean", "share", "repeated", "total", "reduced", "times_R", "whole")

# -- sums over the replicas, and their division by R ---------------------------


def sum_over_replicas(walk: FactWalk, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns the fact of the sum of `x` over the replicas."""
    site = walk.site(eqn)
    if walk.is_transposed(eqn):  # the derivative of a reduction, which the user did not write
        return _summed_in_derivative(walk, site, x)
    walk.combines = True
    variable = findings.written_variable(walk, site)
    if variable is not None:
        return _summed_by_variable(walk, variable, site, x)
    if x.number is not None:
        return Fact(number=x.number * walk.num_replicas)
    out, grad = _sum_of(walk, site, x), x.find("grad") or x.find("gradient")
    return out.having(gradient=grad) if grad else out


def _sum_of(walk: FactWalk, site: Site, x: Fact) -> Fact:
    out = EQUAL.having(reduced=("summed", site))
    if x.differs:
        walk.mixes |= not _is_gradient(walk, x)
        findings.find_unreducible(walk, site, x)
        if x.find("share"):
            return out.having(whole=x.find("share"))
        if x.find("mean"):
            out = out.having(times_R=("mean", x.find("mean"), site))
        return out._replace(tags=out.tags | x.only("repeated", "total").tags)
    if made := x.find("reduced"):
        return out.having(times_R=(*made, site))
    if grad := x.find("grad"):
        walk.equal_gradients.append((site, grad))
    return EQUAL


def _is_gradient(walk: FactWalk, x: Fact) -> bool:
    """Notes that gradients that differ are reduced; returns whether `x` is one."""
    is_gradient = x.find("grad") is not None
    walk.gradients_differ |= is_gradient and x.differs
    return is_gradient


def _summed_in_derivative(walk: FactWalk, site: Site, x: Fact) -> Fact:
    """Returns the fact of a cotangent summed over the replicas."""
    if x.number is not None:  # of a mean over the replicas, the sum makes 1 of 1/R again
        out = Fact(False, x.number * walk.num_replicas, x.without("over_R").tags)
        is_loss = x.number == 1.0 and not x.find("over_R")  # a factor may be meant for R
        return out.having(repeated=site) if is_loss else out
    if not x.differs and x.find("share"):  # R equal shares
        return x.only("grad").having(mean=x.find("share"))
    return Fact(False, None, x.only("grad", "mean", "share").tags)


def divide_by_replicas(walk: FactWalk, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns the fact of `x` divided by the number of replicas."""
    site, rest = walk.site(eqn), x.without(*UNTIL_DIVIDED)
    made, times, whole = x.find("reduced"), x.find("times_R"), x.find("whole")
    if x.differs or not (made or times):
        return rest
    averaged = rest.having(reduced=("averaged", site))
    if whole is not None:
        findings.find_averaged_share(walk, site, whole)
    elif times and x.find("repeated"):
        return averaged.having(times_R=("derivative", x.find("repeated"), site))
    elif times and findings.written_variable(walk, site) is not None:
        return x  # a variable's mean of R equal values
    elif (x.find("total") or (0,))[0] == walk.num_replicas:  # it may be a local batch of R examples
        return rest
    return averaged


def _summed_by_variable(walk: FactWalk, variable: Variable, site: Site, x: Fact) -> Fact:
    rule = variable.aggregation.name
    if rule == "ONLY_FIRST_REPLICA":
        return _as_written(x._replace(differs=False))
    if x.differs:
        findings.find_unreducible(walk, site, x)
    made, is_gradient = x.find("reduced"), _is_gradient(walk, x)
    if is_gradient and not (made or x.differs):
        walk.equal_gradients.append((site, x.find("grad")))
    if rule == "MEAN":
        if x.number is not None:
            return Fact(number=x.number * walk.num_replicas)  # until it is divided by R
        if x.differs and x.find("mean") and x.find("repeated"):
            findings.find_times_r(walk, ("derivative", x.find("repeated"), site), variable)
        share = x.find("share")
        return EQUAL.having(whole=share, reduced=("summed", site)) if share else _as_written(x)
    if x.differs and x.find("mean"):
        findings.find_times_r(walk, ("mean", x.find("mean"), site), variable)
    elif made is not None and not x.differs and x.find("gradient"):
        findings.find_times_r(walk, (*made, site), variable)
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
        return _of_gathered(walk, eqn, x)
    if op == "MEAN" and not x.differs:  # free, and the identity
        return x
    total = sum_over_replicas(walk, eqn, x)
    return divide_by_replicas(walk, eqn, total) if op == "MEAN" else total


# -- arithmetic ----------------------------------------------------------------


def is_close(a: float | None, b: float) -> bool:
    """Returns whether a number, if known, is `b` up to rounding."""
    return a is not None and math.isclose(a, b, rel_tol=1e-5)


def is_multiple(number: float | None, count: int) -> bool:
    """Returns whether a number is `count` times a whole number, as that of all microbatches is."""
    return number is not None and count <= number < 1e9 and number % count == 0


def squared(x: Fact) -> Fact:
    """Returns the fact of the square of `x`."""
    if not x.differs:
        return x.only("random")
    return DIFFERS.having(size=x.find("grad")) if x.find("grad") else x.only("size")


def of_parts(parts: Sequence[Fact]) -> Fact:
    """Returns the fact of an array assembled from others, ignoring plain constants among them."""
    told = [x for x in parts if x.number is None or x.find("grad")] or list(parts)
    names = [n for n in ("grad", *SCALES, *REDUCED) if all(x.find(n) for x in told)]
    return told[0].only(*names)._replace(differs=unknown(parts).differs)


def mul(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A product."""
    a, b = ins
    if a.number is not None and b.number is not None:
        product = Fact(False, a.number * b.number, a.tags | b.tags)
        is_over_r = any(is_close(x.number, 1 / walk.num_replicas) and not x.tags for x in ins)
        is_over_r = is_over_r and not walk.is_alone or findings.names_replicas(walk.site(eqn))
        return [_over_replicas(product) if is_over_r else product]
    if b.number is not None and not b.find("grad"):
        return [_scaled(walk, eqn, a, b.number)]
    if a.number is not None and not a.find("grad"):
        return [_scaled(walk, eqn, b, a.number)]
    if eqn.invars[0] is eqn.invars[1]:
        return [squared(a)]
    return [_product(walk, eqn, a, b)]


def _scaled(walk: FactWalk, eqn: JaxprEqn, x: Fact, factor: float) -> Fact:
    """Returns the fact of `x` times a number: it may be a mean of a sum, only if that is 1/R.

    Or if the line names the number of replicas; any other number is a weight or a rate.
    """
    count = walk.num_replicas
    is_tagged = any(x.find(name) for name in UNTIL_DIVIDED)
    is_named = is_tagged and findings.names_replicas(walk.site(eqn))
    if is_close(factor, 1 / count):
        is_rate = eqn.primitive.name == "mul" and x.find("whole")
        return x if is_rate and not is_named else divide_by_replicas(walk, eqn, x)
    if is_close(factor, count):
        return x.without("share", "total", *([] if x.find("times_R") else ["reduced"]))
    if is_named:
        return x.without(*UNTIL_DIVIDED)
    return x.without("base") if factor == 0 else x


def _over_replicas(x: Fact) -> Fact:
    """Returns the fact of a number that was divided by R, perhaps within a derivative."""
    return x._replace(tags=x.without(*SCALES).tags).having(over_R=True)


def _product(walk: FactWalk, eqn: JaxprEqn, a: Fact, b: Fact) -> Fact:
    """Returns the fact of a product, or of a quotient with numerator `a`."""
    is_transposed = walk.is_transposed(eqn)
    if a.differs and b.differs:
        for grad, size in ((a, b), (b, a)):
            if grad.find("grad") and size.find("size") and not is_transposed:
                return grad.only("grad", *SCALES).having(clipped=walk.site(eqn))
        tagged = [x for x in (a, b) if any(x.find(name) for name in SCALES)]
        if len(tagged) == 1 and is_transposed:
            return tagged[0].only("grad", *SCALES)
        return DIFFERS._replace(tags=(a if a.find("grad") else b).only("grad", "size").tags)
    findings.find_equal_randomness(walk, eqn, a, b)
    if a.differs or b.differs:
        own, other = (a, b) if a.differs else (b, a)
        own = own if is_transposed else own.without("total")
        return Fact(True, None, own.tags | other.only("grad", "gradient", *SCALES).tags)
    kept = (*REDUCED, "random", "grad", *SCALES)
    base = a if b.find("base") is None else b if a.find("base") is None else EQUAL
    return Fact(False, None, a.only(*kept).tags | b.only(*kept).tags | base.only("base").tags)


def div(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A quotient."""
    a, b = ins
    site = walk.site(eqn)
    if b.number is not None and b.number != 0:
        if a.number is None:
            return [_over_number(walk, eqn, a, b.number)]
        quotient = Fact(False, a.number / b.number, a.tags)
        is_over_r = is_close(b.number, walk.num_replicas) or findings.names_replicas(site)
        if is_over_r and not site.is_mean:
            quotient = _over_replicas(quotient)
        return [quotient.having(divisor=(b.number, site.is_mean))]
    is_transposed = walk.is_transposed(eqn)
    if a.number is not None and a.find("grad") is None:
        if is_transposed and b.find("total"):
            if b.differs:
                return [DIFFERS.having(ratio=site, grad=site)]
            if not (a.find("over_R") or is_close(a.number, walk.num_replicas)):
                return [EQUAL.having(share=site, grad=site)]
        return [b.only("size")]
    if a.find("total") and b.find("total") and not is_transposed:
        if b.differs and not shape_of(eqn.outvars[0]):
            return [DIFFERS.having(ratio=site)]
        if a.differs and not b.differs:
            return [DIFFERS.having(share=site)]
    return [_product(walk, eqn, a, b)]


def _over_number(walk: FactWalk, eqn: JaxprEqn, x: Fact, number: float) -> Fact:
    """Returns the fact of `x` divided by a number."""
    count, num_axes, summed = x.find("total") or (0, 0, None)
    site, is_transposed = walk.site(eqn), walk.is_transposed(eqn)
    grad = x.find("grad") or x.find("gradient")
    is_plain = num_axes == 1 and not walk.is_alone  # else the global batch is as large
    if count > 1 and is_plain and is_close(number, count * walk.num_replicas):
        if x.differs and not findings.writes_replicas(walk, site):
            return x.only("grad").having(share=site)
    is_local = count > 1 and is_close(number, count) and (is_plain or site.is_mean)
    if is_local and not is_transposed and (site.is_mean or number != walk.num_replicas):
        if x.differs and grad:
            return x.only("grad").having(mean=site)
        if grad and x.find("reduced") and not findings.names_replicas(site):
            return x.without(*UNTIL_DIVIDED).having(
                times_R=("mean", site, summed), reduced=x.find("reduced")
            )
    x = x if grad else x.without("total")  # no longer a count
    if site.is_mean and is_transposed:  # a mean within an example, as in a layer norm
        return x.only("grad", *SCALES)
    if is_multiple(number, walk.num_replicas) and not (is_transposed or walk.is_alone):
        is_plain = is_close(number, walk.num_replicas)  # else the mean of k microbatches, too
        return divide_by_replicas(walk, eqn, x) if is_plain else x.without(*UNTIL_DIVIDED)
    return _scaled(walk, eqn, x, 1 / number)


def add(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A sum or difference."""
    return [_sum(walk, eqn, ins)]


def _sum(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> Fact:
    a, b = ins
    if a.number is not None and b.number is not None:
        sign = -1 if eqn.primitive.name == "sub" else 1
        tags = a.without("divisor").tags | b.without("divisor").tags
        return Fact(False, a.number + sign * b.number, tags)
    if walk.is_transposed(eqn) and (a.find("grad") or b.find("grad")):
        return _sum_of_cotangents(a, b)
    findings.find_equal_randomness(walk, eqn, a, b)
    if a.differs and b.differs:
        return _sum_of_different(a, b)
    if a.differs or b.differs:
        own, other = (a, b) if a.differs else (b, a)
        if own.find("component"):
            findings.find_repeated_total(walk, eqn, other)
        dropped = [] if own.find("grad") else ["total"]
        kept = own.without("share" if other.number is not None else "", *dropped)
        base = EQUAL if own.find("component") else other.only("base")
        return Fact(True, None, kept.tags | base.tags)
    for own, other in ((a, b), (b, a)):
        is_update = other.find("base") and not own.find("base")
        if is_update and own.find("times_R") and own.find("gradient"):
            findings.find_times_r(walk, own.find("times_R"), None)
    kept = (*REDUCED, "random", "base", "grad", *SCALES)
    return Fact(False, None, a.only(*kept).tags | b.only(*kept).tags)


def _sum_of_cotangents(a: Fact, b: Fact) -> Fact:
    """Returns the fact of a sum over two paths from a value to the loss."""
    out = of_parts((a, b)).having(grad=a.find("grad") or b.find("grad"))
    mean = a.find("mean") or b.find("mean")
    is_mean = mean and not (a.find("share") or b.find("share"))
    return out.having(mean=mean) if is_mean else out  # the other path has some unknown factor


def _sum_of_different(a: Fact, b: Fact) -> Fact:
    out = a.only(*(n for n in (*SCALES, "clipped") if a.find(n) and b.find(n)))
    for name in ("grad", "size", "component", "base"):
        held = a.find(name) or b.find(name)
        out = out.having(**{name: held}) if held else out
    for x in (a, b):  # noise added to a sum of gradients
        out = out._replace(tags=out.tags | x.only("total").tags) if x.find("grad") else out
    return out


def bound(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """max, min, clamp."""
    tensors = [x for x in ins if x.number is None]
    if len(tensors) == 1:
        [x] = tensors
        if x.differs and x.find("grad") and not walk.is_transposed(eqn):
            return [x.having(clipped=walk.site(eqn))]
        return [x.without("mean", "share") if x.differs else x]
    return elementwise(walk, eqn, ins)


def contract(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A sum of products: dot_general, convolution."""
    a, b = ins[0], ins[1]
    if eqn.invars[0] is eqn.invars[1] and a.find("grad"):
        return [squared(a)]
    out = _product(walk, eqn, a.without("random"), b.without("random"))
    if not walk.is_transposed(eqn):
        return [out.only(*REDUCED) if not out.differs else DIFFERS]
    out = out.without("base", "clipped", "size")
    return [out if out.find("grad") else out.having(grad=walk.site(eqn))]


def select(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """An elementwise choice among cases."""
    which, cases = ins[0], ins[1:]
    for case in cases:
        findings.find_equal_randomness(walk, eqn, which, case)
    if which.number is not None:
        return [cases[min(int(which.number), len(cases) - 1)]]
    tensors = [c for c in cases if c.number is None or c.find("grad")] or list(cases)
    tags = frozenset.intersection(*(c.tags for c in tensors))
    for name in ("clipped", "size", "gradient"):
        tags |= next((c.only(name).tags for c in tensors if c.find(name)), frozenset())
    out = Fact(any(x.differs for x in ins), None, tags)
    if which.differs and len(tensors) < len(cases):  # a mask, as in dropout, updates nothing
        out = out.without("base")
    random = None if out.differs else which.find("random")
    return [out.having(random=random) if random else out]


def elementwise(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Other ops; keeps random bits of equal keys, and sizes of local gradients."""
    out = unknown(ins)
    name = "size" if out.differs else "random"
    held = next((x.find(name) for x in ins if x.find(name)), None)
    return [out.having(**{name: held}) if held else out] * len(eqn.outvars)


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


def _same(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Moves or converts elements; all facts are kept."""
    if len(eqn.outvars) > 1:  # one operand per output, as in an optimization barrier
        return list(ins) if len(eqn.outvars) == len(ins) else [unknown(ins)] * len(eqn.outvars)
    rest = unknown(ins[1:])
    return [ins[0]._replace(differs=ins[0].differs or rest.differs)]


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
    number, is_mean = x.find("divisor") or (None, False)
    shape, dims = shape_of(eqn.outvars[0]), eqn.params["broadcast_dimensions"]
    summed = [length for axis, length in enumerate(shape) if axis not in dims]
    is_plain = len(summed) == 1 and not walk.is_alone
    # The elements of one example may by chance be as many as a batch: there, trust only jnp.mean.
    is_weighted = is_mean and is_close(number, count)  # 0.5 * jnp.mean(losses)
    is_whole = walk.mixes and shape[0] not in walk.leading  # it may be rows of all replicas
    is_local = walk.may_be_batch(summed) and not is_whole
    is_plain_mean = is_plain and is_close(weight, 1.0)
    is_divided = x.find("over_R") or is_close(weight, 1 / walk.num_replicas) and not walk.is_alone
    if is_multiple(number, walk.num_replicas) and not is_weighted:  # by all microbatches
        is_divided = is_divided or not is_plain_mean
    is_mean_of_rows = is_weighted or is_plain_mean
    x = x.having(grad=seed)
    if is_local and is_mean_of_rows and not is_divided:
        is_repeated = repeated and is_weighted and is_close(weight, walk.num_replicas)
        return x.having(mean=seed, **({"repeated": repeated} if is_repeated else {}))
    if is_local and is_plain and is_close(x.number, 1.0) and count in walk.leading:
        return x.having(total=(count, 1, seed))
    is_share = is_plain and is_close(number, count * walk.num_replicas)
    is_share = is_share and not is_close(weight, 1.0)  # R times a share is a mean
    is_share = is_share and (not x.find("over_R") or is_close(weight * walk.num_replicas, 1.0))
    return x.having(share=seed) if is_share and not findings.writes_replicas(walk, seed) else x


def _reduce_sum(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    x, axes = ins[0], eqn.params["axes"]
    count = size_of(eqn.invars[0]) // max(1, size_of(eqn.outvars[0]))
    if x.number is not None:
        return [x._replace(number=x.number * count)]
    if not x.differs:
        return [x.only("grad", *SCALES, *REDUCED)]
    total = (count, len(axes), walk.site(eqn))
    if x.find("grad"):
        grad = x.only("grad", *SCALES)
        is_by_example = axes == (0,) and count in walk.leading and not walk.is_transposed(eqn)
        return [grad.having(total=total) if is_by_example else grad]
    summed = [shape_of(eqn.invars[0])[axis] for axis in axes]
    is_of_rows = 0 in axes or not shape_of(eqn.outvars[0])
    if x.find("size") or not is_of_rows or not walk.may_be_batch(summed):
        return [x.only("size")]
    return [DIFFERS.having(total=total)]


def _linear(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Selects or adds up elements of its first operand: gather, cumsum, pad, split."""
    kept = ins[0].only("grad", *SCALES, *REDUCED)
    return [kept._replace(differs=unknown(ins).differs)] * len(eqn.outvars)


def _put(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Writes, or adds, elements into an array."""
    is_slice = eqn.primitive.name == "dynamic_update_slice"
    parts = [ins[0], ins[1 if is_slice else 2]]
    return [of_parts(parts)._replace(differs=unknown(ins).differs)]


def _concatenate(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Puts operands beside each other: concatenate, stack."""
    [out] = elementwise(walk, eqn, ins)
    return [out._replace(tags=out.tags | of_parts(ins).tags)]


def _power(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    x = ins[0]
    power = eqn.params.get("y", 2)
    if x.number is not None:
        is_moderate = 1e-9 < abs(x.number) < 1e9 and abs(power) < 32  # avoids overflow
        return [Fact(number=x.number**power) if is_moderate else EQUAL]
    if power == 1:  # as optax computes Adam's first moments
        return _same(walk, eqn, ins)
    return [squared(x)] if power == 2 else elementwise(walk, eqn, ins)


# -- over the replicas --------------------------------------------------------


def _psum(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact] | None:
    if not names_axis(eqn, walk.axis_name):
        return [unknown([x]) for x in ins]
    if eqn.params.get("axis_index_groups") is not None:
        return [DIFFERS] * len(ins)
    return [sum_over_replicas(walk, eqn, x) for x in ins]


def _gathered(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    if not names_axis(eqn, walk.axis_name):
        return [unknown(ins)] * len(eqn.outvars)
    walk.mixes = True
    return [_of_gathered(walk, eqn, ins[0])] * len(eqn.outvars)


def _of_gathered(walk: FactWalk, eqn: JaxprEqn, x: Fact) -> Fact:
    out, grad = EQUAL.having(reduced=("gathered", walk.site(eqn))), x.find("grad")
    return out.having(gradient=grad) if grad else out


def _extreme(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    return [EQUAL if names_axis(eqn, walk.axis_name) else unknown(ins)] * len(eqn.outvars)


def _variable(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    variable = eqn.params["variable"]()
    if variable.policy.stacked:
        return [DIFFERS.having(component=variable.name)]
    return [EQUAL.having(base=f"variable {variable.name}")]


def _own(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    return [DIFFERS] * len(eqn.outvars)


def _scattered(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A reduce-scatter: replicas keep different rows of the sum, so a size of them is local."""
    if not names_axis(eqn, walk.axis_name):
        return [unknown(ins)]
    # As the transpose of a gather, it sums the cotangents of all replicas' means or shares.
    kept = ("grad", *SCALES) if walk.is_transposed(eqn) else ("grad",)
    return [ins[0].only(*kept)._replace(differs=True)]


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
    **_named(_power, "integer_pow square"),
    **_named(mul, "mul"),
    **_named(div, "div"),
    **_named(add, "add sub add_any"),
    **_named(bound, "max min clamp"),
    **_named(contract, "dot_general conv_general_dilated"),
    **_named(select, "select_n"),
    **_named(
        elementwise,
        "and or xor not erf_inv erf sign abs floor ceil round sin cos tanh exp exp2 log log1p "
        "expm1 sqrt rsqrt cbrt pow shift_left shift_right_logical shift_right_arithmetic "
        "bitcast_convert_type rem is_finite logistic log_softmax",
    ),
    **_named(_concatenate, "concatenate stack"),
    **_named(compare, "eq ne lt le gt ge"),
    **_named(bits, "random_bits threefry2x32 rng_bit_generator"),
    **_named(_psum, "psum psum_invariant"),
    **_named(_gathered, "all_gather all_gather_invariant"),
    **_named(_extreme, "pmax pmin"),
    **_named(_variable, variable_p.name),
    **_named(reduced, "jit"),
    **_named(_own, "axis_index ppermute all_to_all"),
    **_named(_scattered, "reduce_scatter"),
}
