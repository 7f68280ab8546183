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

from collections.abc import Callable, Sequence
from typing import TypeAlias

from distjax.jax_compat import JaxprEqn
from distjax.replica import cross_facts
from distjax.replica import fact_arithmetic as arithmetic
from distjax.replica import fact_reductions as reductions
from distjax.replica import reduction_findings as findings
from distjax.replica.analysis import names_axis
from distjax.replica.fact_arithmetic import REDUCED, SCALES, is_close
from distjax.replica.facts import DIFFERS, EQUAL, Fact, FactWalk, shape_of, size_of, unknown
from distjax.variables.state import variable_p

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
    is_divided = x.find("over_R") or arithmetic.may_average(walk, weight)
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
    if arithmetic.completes(parts):
        return [DIFFERS.having(completed=walk.site(eqn))]
    return [arithmetic.of_parts(parts)._replace(differs=unknown(ins).differs)]


def _concatenate(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Puts operands beside each other: concatenate, stack."""
    if arithmetic.completes(ins):
        return [DIFFERS.having(completed=walk.site(eqn))]
    [out] = arithmetic.elementwise(walk, eqn, ins)
    return [out._replace(tags=out.tags | arithmetic.of_parts(ins).tags)]


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
    return [arithmetic.squared(x)] if power == 2 else _curve(walk, eqn, ins)


# -- over the replicas --------------------------------------------------------


def _psum(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact] | None:
    if not names_axis(eqn, walk.axis_name):
        return [unknown([x]) for x in ins]
    if eqn.params.get("axis_index_groups") is not None:
        return [DIFFERS] * len(ins)
    walk.tells_means_apart |= any(x.find("mean_square") for x in ins)
    return [reductions.summed(walk, eqn, x) for x in ins]


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
    **_named(arithmetic.mul, "mul"),
    **_named(arithmetic.div, "div"),
    **_named(arithmetic.add, "add sub add_any"),
    **_named(arithmetic.bound, "max min clamp"),
    **_named(arithmetic.contract, "dot_general conv_general_dilated"),
    **_named(arithmetic.select, "select_n"),
    **_named(
        arithmetic.elementwise,
        "and or xor not erf_inv erf sign abs floor ceil round sin cos tanh "
        "shift_left shift_right_logical shift_right_arithmetic bitcast_convert_type rem "
        "is_finite logistic log_softmax",
    ),
    **_named(_concatenate, "concatenate stack"),
    **_named(arithmetic.compare, "eq ne lt le gt ge"),
    **_named(arithmetic.bits, "random_bits threefry2x32 rng_bit_generator"),
    **_named(_psum, "psum psum_invariant"),
    **_named(_gathered, "all_gather all_gather_invariant"),
    **_named(_extreme, "pmax pmin"),
    **_named(_rank, "axis_index"),
    **_named(_variable, variable_p.name),
    **_named(cross_facts.reduced, "jit"),
    **_named(_own, "ppermute all_to_all"),
    **_named(_scattered, "reduce_scatter"),
}
