"""The mistakes that the lint reports, and their texts."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Collection, Sequence

from distjax._src.context import STATE, Finding, reason_in
from distjax._src.jax_compat import JaxprEqn
from distjax._src.lint.facts import (
    DERIVATIVE,
    MEAN,
    SHARE,
    Fact,
    FactWalk,
    Scale,
    Site,
    shape_of,
)
from distjax._src.user_lines import UNKNOWN, calling_line
from distjax._src.variables.variable import Variable
from distjax.errors import message

EQUAL_BATCH = "the same batch on every replica"
EQUAL_NUMBERS = "the same random numbers on every replica"
OWN_TRAINING = "each replica trains on its own"
PADDED = "padded examples counted"
FIRST_VALUE = "replica 0's initial value wins"
#: The rules for what runs for R replicas and for one do not show: `dj.check` tells of these, too.
UNSEEN = frozenset((EQUAL_BATCH, EQUAL_NUMBERS, OWN_TRAINING, PADDED, FIRST_VALUE, STATE))
#: Before the reason of a finding where R = 1.
ALONE = "one replica hides it; with more, "

_WRITE = re.compile(r"distjax_write_(\d+)")
_COUNT = re.compile(r"replicas|devices|device_count|axis_size|world_size|\bR\b")
_REPLICA_CALL = re.compile(r"(ctx = .*?; )?(ctx|dj\.get_replica_context\(\))\.all_reduce\(")
_NAMES = {
    "averaged": "a mean over the replicas",
    "summed": "a sum over the replicas",
    "gathered": "all replicas' values, gathered",
}
#: What reduces where no line of the user's does: the optimizer, or the variable that is written.
_OPTIMIZER = "an optimizer with reduce_op={!r}"


def find(
    walk: FactWalk, rule: str, sites: Sequence[Site], *, needs: str, got: str, why: str, fix: str
) -> None:
    """Adds a finding, once per rule and line; the first site is the mistake itself."""
    fix = _REPLICA_CALL.sub("strategy.reduce(", fix) if walk.across else fix
    source = calling_line() if sites[0].source == UNKNOWN else sites[0].source
    if (rule, source) in walk.found:
        return
    why = f"{ALONE}{why}" if walk.is_alone else why
    made = [f", from a value made at {site.source}" for site in sites[1:]]
    text = message(needs, got=f"{got}, at {source}{''.join(made)}", why=why, fix=fix)
    reason = next((r for r in map(reason_in, (site.names for site in sites)) if r), None)
    walk.found[rule, source] = Finding("warning", rule, text, source, reason)


def names_replicas(site: Site) -> bool:
    """Returns whether the user's line mentions the number of replicas, not merely R's value."""
    return bool(_COUNT.search(_line(site)))


def writes_replicas(walk: FactWalk, site: Site) -> bool:
    """Returns whether the user's line spells out R, like ``sum / (2 * n)`` where R is 2."""
    number = rf"(?<!\*\*)(?<!\*\* )(?<![\w.]){walk.num_replicas}(\.0?)?(?![\w.])"
    return bool(re.search(number, _line(site)))


def _line(site: Site) -> str:
    file, _, line = site.source.split(" (")[0].rpartition(":")
    return linecache.getline(file, int(line)).split("#")[0] if line.isdigit() else ""


# -- reductions ---------------------------------------------------------------

#: Values without a meaningful sum or mean, by the tag of their facts: the rule's name, what a
#: reduction needs, what came, why, and the fix.
UNREDUCIBLE = {
    "clipped": (
        "clipped before the reduction",
        "gradients as they are, to clip or normalize afterwards",
        "a reduction of clipped or normalized gradients (Adam's updates are)",
        "each replica clips by its own gradient, and the mean of clipped gradients is not the "
        "clipped mean",
        "grads = dj.get_replica_context().all_reduce('mean', grads), then clip or update; in an "
        "optax chain dj.optim.reduce_gradients() comes first, and dj.optim.Optimizer(chain) "
        "reduces before its chain",
    ),
    "ratio": (
        "averaged over local counts",
        "a sum, and the count to divide it by",
        "a reduction of quotients by a local count",
        "replicas that count fewer examples weigh as much as others",
        "ctx = dj.get_replica_context(); ctx.all_reduce('sum', total) / ctx.all_reduce('sum', "
        "count), where a mean that they are computed from is one over the replicas, too; for a "
        "loss dj.losses.average_loss(losses, mask)",
    ),
    "function": (
        "a function of local sums",
        "sums or means over the rows, to compute from afterwards what is not linear in them",
        "a reduction of a function of one replica's sums",
        "the mean of f(x) is not f of the mean: each replica computes it of its own rows",
        "x = dj.get_replica_context().all_reduce('mean', x) of the sums or means that it is "
        "computed from, and then the function; for batch statistics BatchNorm(axis_name='replica')",
    ),
    "extreme": (
        "a mean of extremes",
        "sums or means over the rows",
        "a mean or sum of each replica's own largest or smallest",
        "the mean of R maxima is not the maximum",
        "jax.lax.pmax(x, axis) or jax.lax.pmin(x, axis)",
    ),
    "norm": (
        "a function of local sums",
        "gradients as they are, to compute their size afterwards",
        "a reduction of a size of gradients",
        "the mean of the sizes of each replica's own gradients is not the size of their mean",
        "grads = dj.get_replica_context().all_reduce('mean', grads), then their norm",
    ),
}


def find_unreducible(walk: FactWalk, site: Site | None, x: Fact) -> None:
    """Reports values whose sum or mean over the replicas is meaningless.

    Args:
      walk: the walk.
      site: where it is reduced; None: where a variable is read whose components it is.
      x: the value.
    """
    if x.scale is None or x.scale.kind not in UNREDUCIBLE:
        return
    is_one_example = walk.leading == frozenset((1,))  # what is computed is that example's own
    if x.scale.kind != "clipped" and is_one_example:
        return
    rule, needs, got, why, fix = UNREDUCIBLE[x.scale.kind]
    needs = f"a reduction over the replicas needs {needs}"
    sites = [x.scale.made] if site is None else [site, x.scale.made]
    find(walk, rule, sites, needs=needs, got=got, why=why, fix=fix)


def find_returned(walk: FactWalk, x: Fact) -> None:
    """Reports a result that is R times what one replica computes."""
    if walk.sizes and x.reduced and x.is_kind(MEAN) and x.scale.power > 0 and not x.find("grad"):
        find_times_r(walk, x.scale, None, "which is returned")


def find_averaged_share(walk: FactWalk, site: Site, share: Site) -> None:
    """Reports a mean of what needs a sum over the replicas."""
    find(
        walk,
        "a share averaged",
        [site, share],
        needs="a loss divided by the global batch needs the sum over the replicas",
        got="its mean",
        why="each replica's share is divided by all replicas' count already: the mean is R times "
        "too small",
        fix="ctx.all_reduce('sum', share), before an optimizer or a variable takes it; in an optax "
        "chain dj.optim.reduce_gradients('sum')",
    )


def find_summed(
    walk: FactWalk, site: Site, x: Fact, by: Variable | str, *, only_gradients: bool = False
) -> None:
    """Reports a mean, or what has been reduced, that a variable or an optimizer sums."""
    scale = x.scale
    if scale is None or scale.kind in UNREDUCIBLE:
        return
    if x.differs and scale.kind in (MEAN, DERIVATIVE):
        find_times_r(walk, scale._replace(kind=MEAN, reduced=site), by)
    elif not x.differs and scale.reduced and (x.find("grad") or not only_gradients):
        kind = scale.kind if scale.kind in _NAMES else "summed"
        find_times_r(walk, Scale(kind, 1, scale.reduced, site), by)


def find_times_r(
    walk: FactWalk, scale: Scale, by: Variable | str | None, use: str = "which updates equal state"
) -> None:
    """Reports a sum of R means, or of R equal values.

    Args:
      walk: the walk.
      scale: the scale of the sum.
      by: the variable, or what else, that reduces; None: the user's line does.
      use: what becomes of it.
    """
    kind, inner, site = scale.kind, scale.made, scale.reduced
    assert site is not None
    fix = "ctx.all_reduce('mean', grads); in an optax chain dj.optim.reduce_gradients('mean')"
    if isinstance(by, Variable):
        use = f"written to variable {by.name!r}"
        fix = f"aggregation=dj.VariableAggregation.MEAN for {by.name!r}"
    elif by is not None:
        use, fix = f"by {by}", "dj.optim.Optimizer(tx, reduce_op='mean')"
    if kind == MEAN:
        find(
            walk,
            "a sum of local means",
            [site, inner],
            needs="a mean over each replica's batch needs to be averaged over the replicas",
            got=f"its sum, {use}",
            why="the sum of R means is R times the mean: the step learns at R times the rate",
            fix=fix,
        )
    elif kind == DERIVATIVE:
        find(
            walk,
            "the gradient of a sum averaged",
            [site, inner],
            needs="a mean over each replica's batch needs no sum over the replicas before its "
            "gradient",
            got=f"the mean of gradients of its sum, {use}",
            why="the derivative of all_reduce('sum', ...) is a sum as well: each gradient is R "
            "times its own part, and the step learns at R times the rate",
            fix="grads = ctx.all_reduce('mean', jax.grad(loss)(params)), of the local mean",
        )
    else:
        find(
            walk,
            "summed twice",
            [site, inner],
            needs=f"{_NAMES[kind]} needs no further sum over the replicas",
            got=f"its sum, {use}",
            why="it is equal on every replica, so its sum is R times the value",
            fix="the first result as it is: x, in place of ctx.all_reduce('sum', x)"
            if by is None
            else fix,
        )


def find_repeated_total(walk: FactWalk, eqn: JaxprEqn, amount: Fact) -> None:
    """Reports a total over the replicas that is added to each replica's component."""
    variable, scale = written_variable(walk, walk.site(eqn)), amount.scale
    if scale is None or scale.reduced is None or scale.kind == "averaged":
        return
    name = _NAMES[scale.kind if scale.kind in _NAMES else "summed"]
    if variable is not None and variable.aggregation.name == "SUM":
        find(
            walk,
            "a total counted by every replica",
            [walk.site(eqn), scale.reduced],
            needs=f"variable {variable.name!r} needs each replica's own part",
            got=f"{name}, added",
            why="its value is the sum of the replicas' components: the total counts R times",
            fix="metric.update(losses), of this replica's values, before any reduction",
        )


# -- equal batches and randomness -----------------------------------------------


def find_equal_batch(walk: FactWalk) -> None:
    """Reports gradients that are equal before any reduction, in a step that is given a batch."""
    if walk.gradients_differ or walk.is_alone:  # a batch from the host is that replica's own
        return
    for sites in walk.equal_gradients:
        find(
            walk,
            EQUAL_BATCH,
            sites,
            needs="a reduction of gradients needs data that differ",
            got="gradients that are equal on every replica",
            why="every replica computes the same: R devices do the work of one",
            fix="for batch in strategy.distribute_dataset(batches): strategy.run(step, "
            "args=(batch,))",
        )


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
                EQUAL_NUMBERS,
                [walk.site(eqn), made],
                needs="random numbers for examples that differ need a key per replica",
                got="numbers drawn from a key that is equal on every replica",
                why="every replica uses the same mask or noise: R batches share one",
                fix="key = dj.get_replica_context().fold_in(key)",
            )


# -- variables and optimizers -------------------------------------------------


def written_variable(walk: FactWalk, site: Site) -> Variable | None:
    """Returns the variable that an operation writes, or None."""
    if not walk.written:
        return None
    found = _WRITE.search(site.names)
    return walk.written.get(int(found[1])) if found else None


def find_local_training(walk: FactWalk, variable: Variable, grad: Site) -> None:
    """Reports gradients that are written to a component of each replica's own."""
    find(
        walk,
        OWN_TRAINING,
        [grad],
        needs=f"trainable variable {variable.name!r} needs gradients of all replicas",
        got="an update by gradients of one replica, with synchronization ON_READ",
        why="each component learns from its replica's examples alone",
        fix="synchronization=dj.VariableSynchronization.ON_WRITE; for training apart that "
        "is averaged later: with dj.expect(reason)",
    )


def find_unfit_gradients(walk: FactWalk, op: str, eqn: JaxprEqn, x: Fact) -> None:
    """Reports gradients that do not fit an optimizer with reduction `op`."""
    site, grad = walk.site(eqn), x.find("grad")
    walk.gradients_differ |= x.differs and grad is not None
    find_unreducible(walk, site, x)
    if op == "SUM":
        find_summed(walk, site, x, _OPTIMIZER.format("sum"))
    elif x.differs and x.is_kind(DERIVATIVE):
        find_times_r(walk, x.scale._replace(reduced=site), _OPTIMIZER.format("mean"))
    elif x.differs and x.is_kind(SHARE):
        find_averaged_share(walk, site, x.scale.made)
    if not x.differs and grad and not x.reduced:
        walk.equal_gradients.append((site, grad))


# -- state --------------------------------------------------------------------

STATE_WHY = "a missing all_reduce makes every replica train a model of its own"
STATE_FIX = (
    "grads = dj.get_replica_context().all_reduce('mean', grads) before the update, and before "
    "computing any flag that gates it"
)
_OWN_WHY = "each replica keeps what it computed from its own examples"
_OWN_FIX = (
    "x = dj.get_replica_context().all_reduce('mean', x) of the statistic, or of the loss that "
    "decides on the update, before it is used"
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


def state_why(differing: Sequence[str], of_gradients: bool = True) -> str:
    """Returns why state at these paths needs to come back equal."""
    return STATE_WHY if of_gradients and not _are_statistics(differing) else _OWN_WHY


def expected_state_fix(
    differing: Sequence[str], equal: Collection[str], of_gradients: bool = True
) -> str:
    """Returns the fix for state that may also differ on purpose, such as local batch statistics.

    It names the largest parts that hold nothing else: a reduction forgotten in the rest of the
    state is still found. Of an object whose parts have no names it can only name the object.

    Args:
      differing: the user's paths to the leaves that differ.
      equal: the paths to the other leaves of the arguments.
      of_gradients: whether they may differ because of gradients.
    """
    kept = {part for path in equal for part in _parts(path)}
    named = [path.partition(_NAMELESS)[0] for path in differing]
    parts = [next((p for p in _parts(path) if p not in kept), path) for path in named]
    first, *more = dict.fromkeys(parts)
    cure = STATE_FIX if of_gradients else _OWN_FIX
    cure = _STATISTICS_FIX if _are_statistics(differing) else cure
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
