"""The mistakes that the lint reports, and their texts."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Collection, Sequence

from distjax._src.context.expectation import reason_in
from distjax._src.context.reporting import Finding
from distjax._src.jax_compat import JaxprEqn
from distjax._src.lint.facts import (
    EQUAL_BATCH,
    LOCAL_VARIANCES,
    Fact,
    FactWalk,
    Times,
    Where,
    shape_of,
)
from distjax._src.user_lines import UNKNOWN, calling_line
from distjax._src.variables.variable import Variable
from distjax.errors import message

STATE_WHY = "a missing all_reduce makes every replica train a model of its own"
#: Before the reason of a finding where R = 1.
ALONE = "one replica hides it; with more, "
STATE_FIX = (
    "grads = dj.get_replica_context().all_reduce('mean', grads) before the update, and before "
    "computing any flag that gates it"
)
#: Flax's name for the collection of a batch norm's moving averages: state, but not parameters.
_STATISTICS = "batch_stats"
_STATISTICS_FIX = (
    "nn.BatchNorm(..., axis_name=strategy.axis_name), for the statistics of all replicas' examples"
)
#: The steps of a path such as s.a['b'][0].
_STEP = re.compile(r"^\w+|\.\w+|\['[^']*'\]|\[\w+\]")
#: What a path has below a node whose class gives its parts no names: the user cannot write it.
_NAMELESS = "[<flat index "

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


# -- state --------------------------------------------------------------------


def state_why(differing: Sequence[str]) -> str:
    """Returns why state at these paths needs to come back equal."""
    if _are_statistics(differing):
        return "each replica keeps the statistics of its own examples"
    return STATE_WHY


def expected_state_fix(differing: Sequence[str], equal: Collection[str]) -> str:
    """Returns the fix for state that may also differ on purpose, such as local batch statistics.

    It names the largest parts that hold nothing else: a reduction forgotten in the rest of the
    state is still found. Of an object whose parts have no names it can only name the object.

    Args:
      differing: the user's paths to the leaves that differ.
      equal: the paths to the other leaves of the arguments.
    """
    kept = {part for path in equal for part in _parts(path)}
    named = [path.partition(_NAMELESS)[0] for path in differing]
    parts = [next((p for p in _parts(path) if p not in kept), path) for path in named]
    first, *more = dict.fromkeys(parts)
    cure = _STATISTICS_FIX if _are_statistics(differing) else STATE_FIX
    fix = f"{cure}; or, where it is meant: dj.expect(reason, differs={first})"
    if not more:
        return fix
    rest = f" and {len(more) - 3} more parts" if len(more) > 3 else ""
    return f"{fix}, and the same for {', '.join(more[:3])}{rest}"


def _are_statistics(differing: Sequence[str]) -> bool:
    """Returns whether only batch statistics differ: the parameters were reduced."""
    return all(_STATISTICS in path for path in differing)


def _parts(path: str) -> list[str]:
    """Returns [s, s.a, s.a['b']] for the path s.a['b']."""
    parts = [*itertools.accumulate(_STEP.findall(path))]
    return parts if parts and parts[-1] == path else [path]


# -- values without a meaningful sum or mean, by the tag of their facts ---------

_MEAN_FIX = "grads = dj.get_replica_context().all_reduce('mean', grads)"

#: Tags of functions of several examples; of a single one, they are a measurement of it.
OF_EXAMPLES = frozenset(("ratio", "curved", "variance"))

#: By tag: the rule's name, what a reduction needs, what came, why, and the fix.
UNREDUCIBLE = {
    "scattered": (
        "shards reduced again",
        "the same elements on every replica",
        "a second reduction of shards (each replica holds another, already reduced),",
        "rows of different replicas are mixed",
        "dj.flax.apply_gradients(optimizer, model, grads) of the gradients as they are: it "
        "reduces what is not reduced yet",
    ),
    "chosen": (
        "one replica's part alone",
        "what every replica found",
        "a reduction that keeps one replica's value and drops the others,",
        "the other replicas' examples do not count",
        "ctx.all_reduce('sum', total) / ctx.all_reduce('sum', count), of every replica's own",
    ),
    "clipped": (
        "clipped before the reduction",
        "gradients as they are, to clip or normalize afterwards",
        "a reduction of clipped or normalized gradients (Adam's updates are)",
        "each replica clips by its own gradient, and the mean of clipped gradients is not the "
        "clipped mean",
        f"{_MEAN_FIX}, then clip or update; in an optax chain dj.optim.reduce_gradients() comes "
        "first",
    ),
    "norm": (
        "the norm of local gradients",
        "values that add up",
        "a reduction of norms of local gradients",
        "the mean of the replicas' norms is larger than the norm of the mean gradient",
        f"{_MEAN_FIX}; norm = optax.global_norm(grads)",
    ),
    "ratio": (
        "averaged over local counts",
        "a sum, and the count to divide it by",
        "a reduction of quotients by a local count",
        "replicas that count fewer examples weigh as much as others",
        "ctx = dj.get_replica_context(); ctx.all_reduce('sum', total) / ctx.all_reduce('sum', "
        "count); for a loss dj.losses.average_loss(losses, mask)",
    ),
    "curved": (
        "a function of local means averaged",
        "the mean itself",
        "a reduction of a function (exp, log, sqrt, a quotient) of local means",
        "the mean of the replicas' perplexities is not the perplexity of the mean loss",
        "loss = ctx.all_reduce('mean', loss); perplexity = jnp.exp(loss)",
    ),
    "variance": (
        LOCAL_VARIANCES,
        "moments about zero",
        "a reduction of variances about local means",
        "the spread between the replicas' means is lost",
        "mean, square = ctx.all_reduce('mean', (jnp.mean(x, 0), jnp.mean(x**2, 0))); "
        "variance = square - mean**2",
    ),
}
