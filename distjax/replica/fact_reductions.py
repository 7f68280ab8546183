"""The effect on facts of sums over the replicas, and of their division by R.

The tags are listed in `fact_rules`.
"""

from __future__ import annotations

from distjax.jax_compat import JaxprEqn
from distjax.replica import reduction_findings as findings
from distjax.replica.facts import EQUAL, Fact, FactWalk, Where
from distjax.variables.variable import Variable


def summed(walk: FactWalk, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns the fact of the sum of `x` over the replicas."""
    if walk.is_transposed(eqn):  # the derivative of a reduction, which the user did not write
        return _summed_in_derivative(walk, walk.site(eqn), x)
    site, walk.combines = walk.site(eqn), True
    variable = findings.written_variable(walk, site)
    if variable is not None:
        return _summed_by_variable(walk, variable, site, x)
    if x.number is not None:
        return Fact(number=x.number * walk.num_replicas)
    out, grad = _summed_over_replicas(walk, site, x), x.find("grad") or x.find("gradient")
    return out.having(gradient=grad) if grad else out


def _summed_over_replicas(walk: FactWalk, site: Where, x: Fact) -> Fact:
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


def divided(walk: FactWalk, eqn: JaxprEqn, x: Fact) -> Fact:
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
