"""What each primitive does to the facts of its operands, as a table.

Tags; most hold the site where they originated:

- `scale`: what the value is to that of one replica, see `facts.Scale`;
- `grad` (part of a backward pass; of an equal value: a sum or mean of gradients), `component` (of a
  variable), `base` (the argument or variable that it updates), `random` (bits from an equal key);
- `permuted` (of ranks, and other equal values in an order of their own: along which axis, from the
  last);
- of numbers: `divisor` (the number that a constant was divided by), `over_R` (a constant over the
  number of replicas), `repeated` (the derivative of a sum over the replicas, which is one, too).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

from distjax._src.jax_compat import JaxprEqn
from distjax._src.lint import findings
from distjax._src.lint.facts import (
    DERIVATIVE,
    DIFFERS,
    EQUAL,
    LINEAR,
    MEAN,
    PART,
    SHARE,
    TOTAL,
    Fact,
    FactWalk,
    Scale,
    Site,
    common_scale,
    shape_of,
    size_of,
    unknown,
)
from distjax._src.lint.findings import UNREDUCIBLE
from distjax._src.replica.analysis import names_axis
from distjax._src.replica.merge import reduction_of
from distjax._src.variables.state import variable_p
from distjax._src.variables.variable import Variable

#: Tags kept by what is linear.
KEPT = ("grad", "scale")
#: Scales that no linear operation changes.
NOT_LINEAR = frozenset((*UNREDUCIBLE, "size"))
#: What squares of gradients add up to, of each row or of all; the rows' own may be averaged.
SIZE, NORM = "size", "norm"

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
    scale = None
    if x.differs:
        walk.mixes |= not _is_gradient(walk, x)
        findings.find_unreducible(walk, site, x)
        scale = Scale("summed", 0, site, site)
        if x.scale is not None and x.scale.kind in LINEAR:
            scale = x.scale._replace(reduced=site)
    elif x.reduced is not None:
        scale = _once_more(x.scale, site)
    elif x.find("grad"):
        walk.equal_gradients.append((site, x.find("grad")))
    return EQUAL.having(scale=scale, grad=scale and x.find("grad"))


def _once_more(scale: Scale, site: Site) -> Scale:
    """Returns the scale of R times what has been reduced."""
    assert scale.reduced is not None
    kind = "summed" if scale.kind in LINEAR else scale.kind
    return Scale(kind, scale.power + 1, scale.reduced, site)


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
    scale = x.scale if x.is_kind(MEAN, SHARE) else None
    if not x.differs and scale is not None and scale.kind == SHARE:  # R equal shares
        scale = Scale(MEAN, 1, scale.made)
    return EQUAL.having(grad=x.find("grad"), scale=scale)


def divide_by_replicas(walk: FactWalk, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns the fact of `x` divided by the number of replicas."""
    site, rest, scale = walk.site(eqn), _of_unknown_size(x), x.scale
    if x.differs or scale is None or scale.reduced is None:
        return rest
    averaged = rest.having(scale=Scale("averaged", 0, site, site))
    if scale.kind == SHARE:
        findings.find_averaged_share(walk, site, scale.made)
    elif scale.kind == DERIVATIVE and scale.power == 2:
        return rest.having(scale=scale._replace(power=1, reduced=site))
    elif scale.power > 0 and findings.written_variable(walk, site) is not None:
        return x  # a variable's mean of R equal values
    elif scale.rows[0] == walk.num_replicas:  # it may be a local batch of R examples
        return rest
    return averaged


def _summed_by_variable(walk: FactWalk, variable: Variable, site: Site, x: Fact) -> Fact:
    """Returns the fact of a variable's new value, where its write uses a `psum`.

    So do SUM, MEAN and ONLY_FIRST_REPLICA, which adds zeros to the first replica's value.
    """
    rule = variable.aggregation.name
    if rule == "ONLY_FIRST_REPLICA":
        return _as_written(x._replace(differs=False))
    if x.differs:
        findings.find_unreducible(walk, site, x)
    is_gradient = _is_gradient(walk, x)
    if is_gradient and not (x.reduced or x.differs):
        walk.equal_gradients.append((site, x.find("grad")))
    if rule == "MEAN":
        if x.number is not None:
            return Fact(number=x.number * walk.num_replicas)  # until it is divided by R
        if x.differs and x.is_kind(DERIVATIVE):
            findings.find_times_r(walk, x.scale._replace(reduced=site), variable)
        return x._replace(differs=False) if x.is_kind(SHARE) and x.differs else _as_written(x)
    findings.find_summed(walk, site, x, variable, only_gradients=True)
    return EQUAL


def _as_written(x: Fact) -> Fact:
    """Returns the fact of what a variable takes of R equal values: one of them.

    Of a new value computed from the old one, the sum was seen where it was added.
    """
    is_too_large = x.reduced is not None and x.scale.power > 0
    return EQUAL if x.differs or x.find("base") or not is_too_large else x.only(*KEPT)


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


def of_sums(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> Scale | None:
    """Returns the scale of what is computed, not linearly, from sums over one replica's rows.

    None: other values that differ have a part in it, such as rows, what they pick of a gathered
    table, or gradients (their signs may be meant), or it is not computed so.
    """
    own = [None if x.reduced else x.scale for x in ins if x.differs]
    is_known = own and walk.sizes and None not in own
    if not is_known or any(x.find("grad") for x in ins):
        return None
    made = next((s for s in own if s and s.kind in NOT_LINEAR), None)
    return made or Scale("function", 0, walk.site(eqn))


def squared(walk: FactWalk, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns the fact of the square of `x`."""
    if not x.differs:
        return x.only("random")
    if x.find("grad"):
        is_of_rows = not walk.sizes or any(n in walk.sizes for n in shape_of(eqn.outvars[0])[:1])
        return DIFFERS.having(scale=Scale(SIZE if is_of_rows else NORM, 0, x.find("grad")))
    return DIFFERS.having(scale=of_sums(walk, eqn, [x]))


def elements_of(x: Fact) -> Fact:
    """Returns the fact of a sum of elements of `x`, where gradients may be clipped one by one."""
    return x.only("grad", *([] if x.is_kind("clipped") else ["scale"]))


def of_parts(parts: Sequence[Fact]) -> Fact:
    """Returns the fact of an array assembled from others, ignoring plain constants among them."""
    told = [x for x in parts if x.number is None or x.find("grad")] or list(parts)
    grad = told[0].find("grad") if all(x.find("grad") for x in told) else None
    return unknown(parts).having(grad=grad, scale=common_scale(told))


def mul(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A product."""
    a, b = ins
    if a.number is not None and b.number is not None:
        product = Fact(False, a.number * b.number, a.tags | b.tags)
        is_over_r = any(is_close(x.number, 1 / walk.num_replicas) and not x.tags for x in ins)
        is_over_r = is_over_r and not walk.is_alone or findings.names_replicas(walk.site(eqn))
        return [_over_replicas(product) if is_over_r else product]
    for own, other in ((b, a), (a, b)):
        if own.number is not None and not own.find("grad"):
            return [_scaled(walk, eqn, other, own.number)]
    if eqn.invars[0] is eqn.invars[1]:
        return [squared(walk, eqn, a)]
    return [_product(walk, eqn, a, b)]


def _scaled(walk: FactWalk, eqn: JaxprEqn, x: Fact, factor: float) -> Fact:
    """Returns the fact of `x` times a number: it may be a mean of a sum, only if that is 1/R.

    Or if the line names the number of replicas; any other number is a weight or a rate.
    """
    count, scale = walk.num_replicas, x.scale
    if scale is not None and scale.kind in NOT_LINEAR:
        return x
    is_named = scale is not None and findings.names_replicas(walk.site(eqn))
    if is_close(factor, 1 / count):
        is_rate = eqn.primitive.name == "mul" and x.reduced and x.is_kind(SHARE)
        return x if is_rate and not is_named else divide_by_replicas(walk, eqn, x)
    if is_close(factor, count):
        return x if x.is_kind(MEAN, DERIVATIVE) or _is_r_times(x) else _of_unknown_size(x)
    if is_named:
        return _of_unknown_size(x)
    return x.without("base") if factor == 0 else x


def _of_unknown_size(x: Fact) -> Fact:
    """Returns the fact of `x` times what may be a power of R: of a sum that is still one."""
    if x.is_kind(*NOT_LINEAR):
        return x._replace(number=None)
    if x.scale is None or not x.differs or x.find("grad"):
        return x.without("scale")
    return x.having(scale=Scale(PART, 0, x.scale.made))._replace(number=None)


def _is_r_times(x: Fact) -> bool:
    """Returns whether an equal value has been reduced to R times what one replica has."""
    return x.reduced is not None and x.scale is not None and x.scale.power > 0


def _over_replicas(x: Fact) -> Fact:
    """Returns the fact of a number that was divided by R, perhaps within a derivative."""
    return x._replace(tags=x.without("scale").tags).having(over_R=True)


def _product(walk: FactWalk, eqn: JaxprEqn, a: Fact, b: Fact) -> Fact:
    """Returns the fact of a product, or of a quotient with numerator `a`."""
    is_transposed = walk.is_transposed(eqn)
    if a.differs and b.differs:
        for grad, size in ((a, b), (b, a)):
            if grad.find("grad") and size.is_kind(SIZE, NORM) and not is_transposed:
                return grad.having(scale=Scale("clipped", 0, walk.site(eqn))).only(*KEPT)
        tagged = [x for x in (a, b) if x.find("grad") and x.scale] if is_transposed else ()
        if len(tagged) == 1:
            [out] = tagged
            if walk.sizes and out.is_kind(PART):
                out = out.having(scale=Scale("function", 0, out.scale.made))
            return out.only(*KEPT)
        grad = a if a.find("grad") else b
        scale = grad.scale if grad.is_kind(SIZE, NORM) else of_sums(walk, eqn, [a, b])
        return grad.only("grad").having(scale=scale)
    findings.find_equal_randomness(walk, eqn, a, b)
    if a.differs or b.differs:
        own, other = (a, b) if a.differs else (b, a)
        if own.is_kind(TOTAL) and not is_transposed:  # no longer a count
            own = own.having(scale=own.scale._replace(kind=PART))
        is_seed = other.find("grad") and not other.reduced
        scale = own.scale or (other.scale if is_seed else None)
        if is_transposed and is_seed and own.scale and not own.find("grad"):
            # What one replica's sums weigh: linear in them, unless other values come in.
            scale = own.scale if own.is_kind(*NOT_LINEAR) else Scale(PART, 0, own.scale.made)
        grad = own.find("grad") or (other.find("grad") if is_seed else None)
        return own.having(scale=scale, grad=grad)._replace(number=None)
    base = a if b.find("base") is None else b if a.find("base") is None else EQUAL
    return Fact(False, None, _either(a, b).tags | base.only("base").tags)


def _either(a: Fact, b: Fact) -> Fact:
    """Returns the fact of what is computed from two equal values, linear in each."""
    scales = sorted((x.scale for x in (a, b) if x.scale), key=lambda s: -abs(s.power))
    names = ("grad", "random")
    kept = {name: a.find(name) or b.find(name) for name in names}
    return EQUAL.having(scale=scales[0] if scales else None, **kept)


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
        if is_transposed and b.is_kind(TOTAL):
            if b.differs:
                return [DIFFERS.having(scale=Scale("ratio", 0, site), grad=site)]
            if not (a.find("over_R") or is_close(a.number, walk.num_replicas)):
                return [EQUAL.having(scale=Scale(SHARE, 0, site), grad=site)]
        return [unknown(ins).having(scale=_size_of([b]) or of_sums(walk, eqn, [b]))]
    if a.is_kind(TOTAL, PART) and b.is_kind(TOTAL) and not is_transposed:
        if b.differs and (walk.sizes or a.is_kind(TOTAL) and not shape_of(eqn.outvars[0])):
            return [DIFFERS.having(scale=Scale("ratio", 0, site))]
        if a.differs and a.is_kind(TOTAL) and not b.differs:
            return [DIFFERS.having(scale=Scale(SHARE, 0, site))]
    if b.differs and not a.differs and not is_transposed:
        return [DIFFERS.having(scale=_size_of([b]) or of_sums(walk, eqn, [b]))]
    return [_product(walk, eqn, a, b)]


def _size_of(ins: Sequence[Fact]) -> Scale | None:
    """Returns the scale of a value that is computed of the size of a gradient."""
    return next((x.scale for x in ins if x.differs and x.is_kind(SIZE, NORM)), None)


def _over_number(walk: FactWalk, eqn: JaxprEqn, x: Fact, number: float) -> Fact:
    """Returns the fact of `x` divided by a number."""
    scale, grad = x.scale, x.find("grad")
    count, num_axes = scale.rows if scale is not None and scale.kind == TOTAL else (0, 0)
    site, is_transposed = walk.site(eqn), walk.is_transposed(eqn)
    is_plain = num_axes == 1 and not walk.is_alone  # else the global batch is as large
    if count > 1 and is_plain and is_close(number, count * walk.num_replicas):
        if x.differs and not findings.writes_replicas(walk, site):
            return x.only("grad").having(scale=Scale(SHARE, 0, site))
    is_local = count > 1 and is_close(number, count) and (is_plain or site.is_mean)
    if is_local and not is_transposed and (site.is_mean or number != walk.num_replicas):
        if x.differs and (grad or walk.sizes):
            return x.only("grad").having(scale=Scale(MEAN, 1, site))
        is_sum = x.reduced is not None and (grad or count in walk.sizes)
        if is_sum and not findings.names_replicas(site):
            return x.having(scale=Scale(MEAN, 1, site, x.reduced))._replace(number=None)
    if scale is not None and scale.kind == TOTAL and not grad:  # no longer a count
        x = x.having(scale=scale._replace(kind="summed" if scale.reduced else PART))
    if site.is_mean and is_transposed:  # a mean within an example, as in a layer norm
        return x.only(*KEPT)
    if is_multiple(number, walk.num_replicas) and not (is_transposed or walk.is_alone):
        is_plain = is_close(number, walk.num_replicas)  # else the mean of k microbatches, too
        if not (is_plain or x.scale and x.scale.kind in (*NOT_LINEAR, PART)):
            return _of_unknown_size(x)
        return divide_by_replicas(walk, eqn, x) if is_plain else x
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
        return _sum_of_cotangents(walk, eqn, a, b)
    findings.find_equal_randomness(walk, eqn, a, b)
    if a.differs and b.differs:
        return _sum_of_different(walk, eqn, a, b)
    if a.differs or b.differs:
        own, other = (a, b) if a.differs else (b, a)
        if own.find("component"):
            findings.find_repeated_total(walk, eqn, other)
        if own.is_kind(TOTAL) and not own.find("grad"):
            own = own.having(scale=own.scale._replace(kind=PART))
        if other.number is not None and own.is_kind(SHARE):
            own = own.without("scale")
        base = EQUAL if own.find("component") else other.only("base")
        return Fact(True, None, own.tags | base.tags)
    for own, other in ((a, b), (b, a)):
        is_update = other.find("base") and not own.find("base")
        is_known = own.find("grad") or (walk.sizes and own.is_kind(MEAN))
        if is_update and _is_r_times(own) and is_known:
            findings.find_times_r(walk, own.scale, None)
    out = _either(a, b)
    return out._replace(tags=out.tags | a.only("base").tags | b.only("base").tags)


def _sum_of_cotangents(walk: FactWalk, eqn: JaxprEqn, a: Fact, b: Fact) -> Fact:
    """Returns the fact of a sum over two paths from a value to the loss."""
    out = of_parts((a, b)).having(grad=a.find("grad") or b.find("grad"))
    broken = next((x.scale for x in (a, b) if x.differs and x.is_kind(*NOT_LINEAR)), None)
    mean = next((x.scale for x in (a, b) if x.is_kind(MEAN, DERIVATIVE)), None)
    is_mean = mean and not (a.is_kind(SHARE) or b.is_kind(SHARE))
    # Else the other path has some unknown factor.
    return out.having(scale=broken or mean) if broken or is_mean else out


def _sum_of_different(walk: FactWalk, eqn: JaxprEqn, a: Fact, b: Fact) -> Fact:
    broken = next((x.scale for x in (a, b) if x.is_kind(*NOT_LINEAR)), None)
    scale = common_scale((a, b)) or _size_of((a, b))
    if scale is None and broken is not None and a.scale and b.scale:
        scale = broken
    for x, y in ((a, b), (b, a)):  # noise added to a sum of gradients, or a part to a component
        if scale is None and (x.find("grad") and x.is_kind(TOTAL) or y.find("component")):
            scale = x.scale
    out = DIFFERS.having(scale=scale)
    for name in ("grad", "component", "base"):
        out = out.having(**{name: a.find(name) or b.find(name)})
    return out


def bound(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """max, min, clamp."""
    tensors = [x for x in ins if x.number is None]
    if len(tensors) == 1:
        [x] = tensors
        if x.differs and x.find("grad") and not walk.is_transposed(eqn):
            return [x.having(scale=Scale("clipped", 0, walk.site(eqn)))]
        if x.differs and x.is_kind(MEAN, SHARE, PART):
            x = x.having(scale=of_sums(walk, eqn, [x]))
        return [x._replace(number=None)]
    return elementwise(walk, eqn, ins)


def contract(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """A sum of products: dot_general, convolution."""
    a, b = ins[0], ins[1]
    if eqn.invars[0] is eqn.invars[1] and a.find("grad"):
        return [squared(walk, eqn, a)]
    if not walk.is_transposed(eqn):
        out = unknown(ins)
        if not out.differs:
            return [_either(a, b).only(*KEPT)]
        if a.differs and b.differs and not (a.scale or b.scale) and _sums_rows(walk, eqn):
            rows = shape_of(eqn.invars[0])[eqn.params["dimension_numbers"][0][0][0]]
            return [out.having(scale=Scale(TOTAL, 0, walk.site(eqn), rows=(rows, 1)))]
        return [out.having(scale=_linear_scale(a, b))]
    weight = _weight(walk, eqn, ins)
    out = weight or _product(walk, eqn, a.without("random"), b.without("random"))
    out = out.without("base", *(["scale"] if out.is_kind("clipped", SIZE, NORM) else []))
    return [out if out.find("grad") else out.having(grad=walk.site(eqn))]


def _linear_scale(a: Fact, b: Fact) -> Scale | None:
    """Returns the scale of the product of a value that differs and one that does not."""
    own, other = (a, b) if a.differs else (b, a)
    scale = None if other.differs or own.find("grad") else own.scale
    return scale._replace(kind=PART) if scale and scale.kind == TOTAL else scale


def _sums_rows(walk: FactWalk, eqn: JaxprEqn) -> bool:
    """Returns whether a product contracts both operands over the rows, and over nothing else."""
    if eqn.primitive.name != "dot_general":
        return False
    axes, _ = eqn.params["dimension_numbers"]
    shapes = list(map(shape_of, eqn.invars))
    is_rows = any(map(walk.are_rows, shapes, axes)) and len(axes[0]) == 1
    rest = [n for shape, own in zip(shapes, axes, strict=True) for n in _without(shape, own)]
    return is_rows and walk.sizes.isdisjoint(rest)


def _without(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    return [length for axis, length in enumerate(shape) if axis not in axes]


def _weight(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> Fact | None:
    """Returns the fact of a gradient whose first cotangent is computed of one replica's sums.

    It is the gradient of something that is not linear in them. None: it is not, as far as is known.
    """
    if not walk.sizes or any(x.find("grad") for x in ins):
        return None
    made = next((x.scale for x in ins if x.differs and x.scale and not x.reduced), None)
    if made is None or made.kind in (SIZE, NORM):
        return None
    scale = made if made.kind in NOT_LINEAR else Scale("function", 0, made.made)
    return DIFFERS.having(grad=walk.site(eqn), scale=scale)


def select(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """An elementwise choice among cases."""
    which, cases = ins[0], ins[1:]
    for case in cases:
        findings.find_equal_randomness(walk, eqn, which, case)
    if which.number is not None:
        return [cases[min(int(which.number), len(cases) - 1)]]
    tensors = [c for c in cases if c.number is None or c.find("grad")] or list(cases)
    tags = frozenset.intersection(*(c.tags for c in tensors))
    out = Fact(any(x.differs for x in ins), None, tags)
    clipped = next((c.scale for c in tensors if c.is_kind("clipped", SIZE, NORM)), None)
    summed = next((c for c in tensors if c.reduced and c.find("grad")), None)
    if clipped is not None:
        out = out.having(scale=clipped)
    elif which.differs and which.scale and not (out.scale and out.is_kind(*NOT_LINEAR)):
        out = out.having(scale=of_sums(walk, eqn, [which, *(c for c in tensors if c.differs)]))
    if summed is not None:
        out = out.having(grad=summed.find("grad"))
    if which.differs and len(tensors) < len(cases):  # a mask, as in dropout, updates nothing
        out = out.without("base")
    random = None if out.differs else which.find("random")
    return [out.having(random=random) if random else out]


def elementwise(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Other ops; keeps random bits of equal keys, and what was computed of sums."""
    out, arrays = unknown(ins), [x for x in ins if x.number is None]
    if out.differs:
        out = out.having(scale=_size_of(ins) or of_sums(walk, eqn, ins))
        out = out.having(permuted=arrays[0].find("permuted") if len(arrays) == 1 else None)
    else:
        out = out.having(random=next((x.find("random") for x in ins if x.find("random")), None))
    return [out] * len(eqn.outvars)


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
    if x.find("grad") or not walk.is_transposed(eqn) or count == 1:
        return [x]
    if x.number not in (None, 0.0):
        return [_seed(walk, eqn, x, count)]
    return [_weight(walk, eqn, ins) or x]


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
    x = x.having(grad=seed)
    if is_local and (is_weighted or is_plain_mean) and not is_divided:
        if repeated and is_weighted and is_close(weight, walk.num_replicas):
            return x.having(scale=Scale(DERIVATIVE, 2, repeated))
        return x.having(scale=Scale(MEAN, 1, seed))
    if is_local and is_plain and is_close(x.number, 1.0) and count in walk.leading:
        return x.having(scale=Scale(TOTAL, 0, seed, rows=(count, 1)))
    is_share = is_plain and is_close(number, count * walk.num_replicas)
    is_share = is_share and not is_close(weight, 1.0)  # R times a share is a mean
    is_share = is_share and (not x.find("over_R") or is_close(weight * walk.num_replicas, 1.0))
    is_share = is_share and not findings.writes_replicas(walk, seed)
    return x.having(scale=Scale(SHARE, 0, seed)) if is_share else x


def _reduce_sum(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    x, axes = ins[0], eqn.params["axes"]
    count = size_of(eqn.invars[0]) // max(1, size_of(eqn.outvars[0]))
    if x.number is not None:
        return [x._replace(number=x.number * count)]
    if not x.differs:
        return [x.only(*KEPT)]
    total = Scale(TOTAL, 0, walk.site(eqn), rows=(count, len(axes)))
    if x.find("grad"):
        is_by_example = axes == (0,) and count in walk.leading and not walk.is_transposed(eqn)
        return [elements_of(x).having(scale=total if is_by_example else elements_of(x).scale)]
    if len(shape_of(eqn.invars[0])) + (x.find("permuted") or 0) in axes:
        return [DIFFERS]  # as many on each replica
    if x.scale is not None and (walk.sizes or x.is_kind(SIZE, NORM)):  # its rows have been summed
        return [DIFFERS.having(scale=_linear_scale(x, EQUAL))]
    summed = [shape_of(eqn.invars[0])[axis] for axis in axes]
    is_of_rows = 0 in axes or not shape_of(eqn.outvars[0])
    return [DIFFERS.having(scale=total) if is_of_rows and walk.may_be_batch(summed) else DIFFERS]


def _reduce_extreme(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    x = ins[0]
    if x.scale is None and x.differs and walk.are_rows(shape_of(eqn.invars[0]), eqn.params["axes"]):
        return [DIFFERS.having(scale=Scale("extreme", 0, walk.site(eqn)))]
    return elementwise(walk, eqn, ins)


def _linear(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Selects or adds up elements of its first operand: gather, cumsum, pad, split."""
    kept = elements_of(ins[0])
    return [kept._replace(differs=unknown(ins).differs)] * len(eqn.outvars)


def _sort(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Sorts operands by the first of them: argsort puts the numbers of elements in their order."""
    if not unknown(ins).differs:
        return [EQUAL] * len(ins)
    axis = eqn.params["dimension"] - len(shape_of(eqn.invars[0]))
    return [DIFFERS if x.differs else DIFFERS.having(permuted=axis) for x in ins]


def _put(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Writes, or adds, elements into an array."""
    is_slice = eqn.primitive.name == "dynamic_update_slice"
    parts = [ins[0], ins[1 if is_slice else 2]]
    return [of_parts(parts)._replace(differs=unknown(ins).differs)]


def _concatenate(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Puts operands beside each other: concatenate, stack."""
    [out] = elementwise(walk, eqn, ins)
    parts = of_parts(ins)
    return [out.having(grad=parts.find("grad"), scale=parts.scale or out.scale)]


def _power(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    x = ins[0]
    power = eqn.params.get("y", 2)
    if x.number is not None:
        is_moderate = 1e-9 < abs(x.number) < 1e9 and abs(power) < 32  # avoids overflow
        return [Fact(number=x.number**power) if is_moderate else EQUAL]
    if power == 1:  # as optax computes Adam's first moments
        return _same(walk, eqn, ins)
    return [squared(walk, eqn, x)] if power == 2 else elementwise(walk, eqn, ins)


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
    site = walk.site(eqn)
    return EQUAL.having(scale=Scale("gathered", 0, site, site), grad=x.find("grad"))


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
    kept = KEPT if walk.is_transposed(eqn) else ("grad",)
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
    **_named(_sort, "sort"),
    **_named(_put, "dynamic_update_slice scatter scatter-add"),
    **_named(_reduce_sum, "reduce_sum"),
    **_named(_reduce_extreme, "reduce_max reduce_min"),
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
