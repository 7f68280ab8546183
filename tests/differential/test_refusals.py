"""Programs that compiled strategies and the reference refuse alike."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import AggregationError, ContextError, LocalityError, MergeError
from tests.differential.cases import MEAN, ON_READ, SUM, context, rid, rows, variable
from tests.differential.outcomes import compiled_strategies


def write_without_aggregation(strategy):
    v = variable(strategy, 1.0)
    strategy.run(lambda: v.assign(rid()))


def python_number_into_a_sum(strategy):
    v = variable(strategy, 1.0, aggregation=SUM)
    strategy.run(lambda: v.assign(1.0))


def addition_across_to_a_sum(strategy):
    variable(strategy, 1.0, synchronization=ON_READ, aggregation=SUM).assign_add(1.0)


def read_across_without_aggregation(strategy):
    _ = variable(strategy, 1.0, synchronization=ON_READ).value


def per_replica_assigned(strategy):
    variable(strategy, 1.0).assign(rows(strategy, lambda r: r))


def update_with_a_per_replica(strategy):
    v, x = variable(strategy, 1.0), rows(strategy, lambda r: r)
    strategy.extended.update(v, lambda v, x: v.assign(x), args=(x,))


def mean_of_ints(strategy):
    variable(strategy, 1, aggregation=MEAN)


def float_into_an_int(strategy):
    variable(strategy, 1).assign(1.5)


def sum_of_a_host_value(strategy):
    strategy.reduce("sum", np.float32(1))


def merge_in_a_merge(strategy):
    def fn():
        ctx = context()
        ctx.merge_call(lambda strategy: ctx.merge_call(lambda strategy: 1))

    strategy.run(fn)


def meeting_under_an_own_predicate(strategy):
    def fn():
        meet = lambda: context().all_reduce("sum", jnp.float32(1))
        return dj.lax.cond(rid() > 0, meet, lambda: jnp.float32(0))

    strategy.run(fn)


def reduction_in_a_replica(strategy):
    strategy.run(lambda: strategy.reduce("sum", rid()))


REFUSALS = {
    write_without_aggregation: AggregationError,
    python_number_into_a_sum: ValueError,
    addition_across_to_a_sum: AggregationError,
    read_across_without_aggregation: AggregationError,
    per_replica_assigned: LocalityError,
    update_with_a_per_replica: LocalityError,
    mean_of_ints: ValueError,
    float_into_an_int: TypeError,
    sum_of_a_host_value: ValueError,
    merge_in_a_merge: MergeError,
    meeting_under_an_own_predicate: MergeError,
    reduction_in_a_replica: ContextError,
}


@pytest.mark.parametrize("program", list(REFUSALS), ids=lambda fn: fn.__name__)
def test_all_refuse(program):
    for strategy in (dj.testing.ReferenceStrategy(2), *compiled_strategies(2).values()):
        with pytest.raises(REFUSALS[program]):
            program(strategy)
        assert not dj.has_strategy()


def test_an_update_of_components_sees_those_of_other_variables():
    modes = {"synchronization": ON_READ, "aggregation": SUM}
    for strategy in (dj.testing.ReferenceStrategy(2), *compiled_strategies(2).values()):
        v, other = variable(strategy, 1.0, **modes), variable(strategy, 2.0, **modes)
        strategy.run(lambda other=other: other.assign_add(rid().astype(jnp.float32)))
        strategy.extended.update(v, lambda v, other=other: v.assign_add(other.value))
        assert [float(x) for x in v.local_results()] == [3, 4]


def test_an_update_of_components_writes_a_mirrored_variable_what_is_equal_on_all(pair):
    v = variable(pair, 1.0, synchronization=ON_READ, aggregation=SUM)
    w = variable(pair, 3.0, name="w")
    pair.extended.update(v, lambda v: w.assign(4.0))
    assert float(w.value) == 4
    with pytest.raises(LocalityError, match="^variable 'w' needs a value that is equal on every"):
        pair.extended.update(v, lambda v: w.assign(v.value))
    assert float(w.value) == 4


def test_a_compiled_update_of_components_reads_mirrored_variables(pair):
    v = variable(pair, 1.0, synchronization=ON_READ, aggregation=SUM)
    w = variable(pair, jnp.float32(3), name="w")
    pair.extended.update(v, lambda v: v.assign_add(w.value))
    assert float(v.value) == 8
