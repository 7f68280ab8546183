"""Findings about combining replicas' values: the mistakes, and their texts."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence

from distjax.context.expectation import reason_in
from distjax.context.finding import Finding
from distjax.context.reporting import ALONE, EQUAL_BATCH
from distjax.errors import message
from distjax.jax_compat import JaxprEqn
from distjax.replica.facts import Fact, FactWalk, Times, Where, shape_of
from distjax.replica.unreducible import OF_EXAMPLES, UNREDUCIBLE
from distjax.user_lines import UNKNOWN, calling_line
from distjax.variables.variable import Variable

_WRITE = re.compile(r"distjax_write_(\d+)")
_COUNT = re.compile(r"replicas|devices|device_count|axis_size|world_size|\bR\b")
_REPLICA_CALL = re.compile(r"(ctx = .*?; )?(ctx|dj\.get_replica_context\(\))\.all_reduce\(")
_NAMES = {
    "averaged": "a mean over the replicas",
    "summed": "a sum over the replicas",
    "gathered": "all replicas' values, gathered",
    "times_R": "a sum over the replicas",
}


def find(
    walk: FactWalk,
    level: str,
    rule: str,
    sites: Sequence[Where],
    expected: str,
    *,
    got: str,
    why: str,
    fix: str,
) -> None:
    """Adds a finding, once per rule and line; the first site is the mistake itself."""
    fix = _REPLICA_CALL.sub("strategy.reduce(", fix) if walk.across else fix
    source = calling_line() if sites[0].source == UNKNOWN else sites[0].source
    if (rule, source) in walk.found:
        return
    why = f"{ALONE}{why}" if walk.is_alone else why
    made = [f", from a value made at {site.source}" for site in sites[1:]]
    text = message(expected, got=f"{got}, at {source}{''.join(made)}", why=why, fix=fix)
    reason = next((r for r in map(reason_in, (site.names for site in sites)) if r), None)
    walk.found[rule, source] = Finding(level, rule, text, source, reason)


def names_replicas(site: Where) -> bool:
    """Returns whether the user's line mentions the number of replicas, not merely R's value."""
    return bool(_COUNT.search(_line(site)))


def tells_replicas(walk: FactWalk, site: Where) -> bool:
    """Returns whether a factor of 1 is the number of replicas: by the line, or by what made it."""
    is_made = site.is_over_replicas or site.is_share or written_variable(walk, site) is not None
    return is_made or names_replicas(site)


def writes_replicas(walk: FactWalk, site: Where) -> bool:
    """Returns whether the user's line spells out R, like ``sum / (2 * n)`` where R is 2."""
    number = rf"(?<!\*\*)(?<!\*\* )(?<![\w.]){walk.num_replicas}(\.0?)?(?![\w.])"
    return bool(re.search(number, _line(site)))


def _line(site: Where) -> str:
    file, _, line = site.source.split(" (")[0].rpartition(":")
    return linecache.getline(file, int(line)).split("#")[0] if line.isdigit() else ""


def reduction_of(x: Fact) -> tuple[str, Where] | None:
    """Returns the reduction that made an equal value, and where."""
    times = x.find("times_R")
    if times is not None:
        return "times_R", times[2]
    if x.find("whole") is not None:
        return "summed", x.find("whole")
    return next(((n, x.find(n)) for n in ("averaged", "summed", "gathered") if x.find(n)), None)


# -- reductions ---------------------------------------------------------------


def find_unreducible(walk: FactWalk, site: Where, x: Fact) -> None:
    """Reports values whose sum or mean over the replicas is meaningless."""
    is_one_example = walk.leading == frozenset((1,))  # what is computed is that example's own
    for name, (rule, expected, got, why, fix) in UNREDUCIBLE.items():
        made = x.find(name)
        if made is not None and not (is_one_example and name in OF_EXAMPLES):
            expected = f"a reduction over the replicas needs {expected}"
            level = "note" if name == "chosen" else "warning"
            find(walk, level, rule, [site, made], expected, got=got, why=why, fix=fix)


def find_averaged_share(walk: FactWalk, site: Where, share: Where) -> None:
    """Reports a mean of what needs a sum over the replicas."""
    find(
        walk,
        "warning",
        "a share averaged",
        [site, share],
        "a loss divided by the global batch needs the sum over the replicas",
        got="its mean",
        why="each replica's share is divided by all replicas' count already: the mean is R times "
        "too small",
        fix="ctx.all_reduce('sum', share), dj.optim.Optimizer(tx, reduce_op='sum'); or "
        "dj.losses.average_loss(losses, op='mean')",
    )


def find_equal_batch(walk: FactWalk, sites: Sequence[Where]) -> None:
    """Reports gradients that are equal before any reduction."""
    find(
        walk,
        "note",
        EQUAL_BATCH,
        sites,
        "a reduction of gradients needs data that differ",
        got="gradients that are equal on every replica",
        why="every replica computes the same: R devices do the work of one",
        fix="for batch in strategy.distribute_dataset(batches): strategy.run(step, args=(batch,))",
    )


def find_averaged_twice(walk: FactWalk, sites: Sequence[Where]) -> None:
    """Reports a mean over the replicas of such a mean."""
    find(
        walk,
        "note",
        "averaged twice",
        sites,
        "a mean over the replicas needs values that differ",
        got="a mean of a mean",
        why="the second one changes nothing and costs a reduction",
        fix="the first mean as it is: x, in place of ctx.all_reduce('mean', x)",
    )


def find_divided_twice(walk: FactWalk, sites: Sequence[Where]) -> None:
    """Reports a mean over the replicas that is divided by their number."""
    find(
        walk,
        "note",
        "divided by the number of replicas twice",
        sites,
        "a mean over the replicas needs no further division",
        got="a division by the number of replicas",
        why="the mean is already divided by R: the step learns R times too slowly",
        fix="updates = -learning_rate * grads, of the mean gradient as it is",
    )


# -- sums of R equal parts, where they are used -------------------------------


def find_update_times_r(walk: FactWalk, eqn: JaxprEqn, a: Fact, b: Fact) -> None:
    """Remembers an update of state by a sum of R equal parts; `find_sums` reports it."""
    for own, other in ((a, b), (b, a)):
        if not other.find("base"):
            continue
        if own.number and own.number % walk.num_replicas == 0:
            walk.counts_replicas = True  # sums kept beside it may be read as quotients by it
        if own.find("times_R") and not own.find("base"):
            is_total = not (shape_of(eqn.outvars[0]) and own.find("gradient"))
            (walk.totals if is_total else walk.updates).append(own.find("times_R"))


def find_times_r(walk: FactWalk, times: Times, use: str) -> None:
    """Reports a sum of R means, or of R equal values."""
    kind, inner, site = times
    if kind == "mean":
        find(
            walk,
            "warning",
            "a sum of local means",
            [site, inner],
            "a mean over each replica's batch needs to be averaged over the replicas",
            got=f"its sum, {use}",
            why="the sum of R means is R times the mean: the step learns at R times the rate",
            fix="ctx.all_reduce('mean', grads), or sum gradients of dj.losses.average_loss",
        )
        return
    if kind == "derivative":
        find(
            walk,
            "warning",
            "the gradient of a sum averaged",
            [site, inner],
            "a mean over each replica's batch needs no sum over the replicas before its gradient",
            got=f"the mean of gradients of its sum, {use}",
            why="the derivative of all_reduce('sum', ...) is a sum as well: each gradient is R "
            "times its own part, and the step learns at R times the rate",
            fix="grads = ctx.all_reduce('mean', jax.grad(loss)(params)), of the local mean",
        )
        return
    find(
        walk,
        "warning",
        "summed twice",
        [site, inner],
        f"{_NAMES[kind]} needs no further sum over the replicas",
        got=f"its sum, {use}",
        why="it is equal on every replica, so its sum is R times the value",
        fix="the first result as it is: x, in place of ctx.all_reduce('sum', x); for a variable "
        "that takes it: aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA",
    )


def find_repeated_total(walk: FactWalk, eqn: JaxprEqn, amount: Fact) -> None:
    """Reports a total over the replicas that is added to each replica's component."""
    variable = written_variable(walk, walk.site(eqn))
    if variable is None or variable.aggregation.name != "SUM":
        return
    walk.counts_replicas |= amount.number == 1.0
    made = reduction_of(amount)
    if made is None or made[0] == "averaged":
        return
    find(
        walk,
        "warning",
        "a total counted by every replica",
        [walk.site(eqn), made[1]],
        f"variable {variable.name!r} needs each replica's own part",
        got=f"{_NAMES[made[0]]}, added",
        why="its value is the sum of the replicas' components: the total counts R times",
        fix="metric.update(losses), of this replica's values, before any reduction",
    )


def find_dropped_parts(walk: FactWalk, eqn: JaxprEqn, a: Fact, b: Fact) -> None:
    """Reports totals added to a variable of which only replica 0's component is read."""
    for own, amount in ((a, b), (b, a)):
        made = amount.find("mean") or amount.find("ratio") or amount.find("total_site")
        if made is None or not own.find("component"):
            continue
        variable = written_variable(walk, walk.site(eqn))
        if variable is not None and variable.aggregation.name == "ONLY_FIRST_REPLICA":
            find(
                walk,
                "note",
                "one replica's part alone",
                [walk.site(eqn), made],
                f"variable {variable.name!r} needs what every replica found",
                got="each replica's own value, with aggregation ONLY_FIRST_REPLICA",
                why="the other replicas' examples do not count",
                fix="aggregation=dj.VariableAggregation.SUM (or MEAN)",
            )


# -- randomness ---------------------------------------------------------------


def find_equal_randomness(walk: FactWalk, eqn: JaxprEqn, a: Fact, b: Fact) -> None:
    """Reports equal random numbers combined with each replica's own examples."""
    shape = shape_of(eqn.outvars[0])
    if not shape or shape[0] not in walk.leading or any(shape_of(v) != shape for v in eqn.invars):
        return
    for bits, data in ((a, b), (b, a)):
        made = bits.find("random")
        is_of_examples = data.differs and not data.find("grad")
        if made is not None and not bits.differs and is_of_examples:
            find(
                walk,
                "warning",
                "the same random numbers on every replica",
                [walk.site(eqn), made],
                "random numbers for examples that differ need a key per replica",
                got="numbers drawn from a key that is equal on every replica",
                why="every replica uses the same mask or noise: R batches share one",
                fix="key = dj.get_replica_context().fold_in(key)",
            )


# -- variables and optimizers -------------------------------------------------


def written_variable(walk: FactWalk, site: Where) -> Variable | None:
    """Returns the variable that an operation writes, or None."""
    if not walk.written:
        return None
    found = _WRITE.search(site.names)
    return walk.written.get(int(found[1])) if found else None


def find_dropped_updates(walk: FactWalk, site: Where, variable: Variable) -> None:
    """Reports an update of which only replica 0's is used."""
    find(
        walk,
        "warning",
        "updates of other replicas dropped",
        [site],
        f"trainable variable {variable.name!r} needs updates of all replicas",
        got="a value that differs, with aggregation ONLY_FIRST_REPLICA",
        why="R - 1 of R replicas compute an update that nobody uses",
        fix="aggregation=dj.VariableAggregation.MEAN; or reduce the value first",
    )


def find_old_value_summed(walk: FactWalk, site: Where, variable: Variable) -> None:
    """Reports a sum over the replicas of the value that the variable already has."""
    find(
        walk,
        "warning",
        "the old value summed",
        [site],
        f"variable {variable.name!r}, which sums over the replicas, needs each replica's own part",
        got="its old value, in what every replica writes",
        why="the sum over the replicas holds the old value R times",
        fix="v.assign_add(part), where parts are added up; or "
        "aggregation=dj.VariableAggregation.MEAN, where a new value is computed",
    )


def find_sums(walk: FactWalk) -> None:
    """Reports sums of R equal parts in state, unless a count beside it may make it a mean."""
    for times in walk.updates + ([] if walk.counts_replicas else walk.totals):
        find_times_r(walk, times, "which updates equal state")
    for variable, times in walk.sums:
        if not any(other is not variable for other, _, _ in walk.counts):
            find_times_r(walk, times, f"written to variable {variable.name!r}")
    if len(walk.counts) == 1 and walk.counts[0][1] == 1.0 and len(walk.written) == 1:
        variable, _, site = walk.counts[0]
        find(
            walk,
            "note",
            "an equal array summed",
            [site],
            f"variable {variable.name!r}, which sums over the replicas, needs parts that differ",
            got="the number 1 of every replica",
            why="it is added R times at each step",
            fix="aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA, to count steps",
        )


def find_unfit_gradients(walk: FactWalk, op: str, eqn: JaxprEqn, x: Fact) -> None:
    """Reports gradients that do not fit an optimizer with reduction `op`."""
    site = walk.site(eqn)
    walk.gradients_differ |= x.differs and x.find("grad") is not None
    find_unreducible(walk, site, x)
    made = reduction_of(x)
    if made is not None and op == "SUM":
        find_times_r(walk, (*made, site), "by an optimizer with reduce_op='sum'")
    elif x.find("mean") and x.differs and op == "SUM":
        times = ("mean", x.find("mean"), site)
        find_times_r(walk, times, "by an optimizer with reduce_op='sum'")
    elif x.find("mean") and x.find("repeated") and x.differs and op == "MEAN":
        times = ("derivative", x.find("repeated"), site)
        find_times_r(walk, times, "by an optimizer with reduce_op='mean'")
    elif x.find("share") and op == "MEAN":
        find_averaged_share(walk, site, x.find("share"))
    elif not x.differs and x.find("grad") and made is None:
        find_equal_batch(walk, [site, x.find("grad")])
