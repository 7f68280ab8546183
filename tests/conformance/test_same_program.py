"""Strategies whose program is that of a mirrored one: the laws run over the mirrored row only.

ZeRO 1 splits what is colocated with a variable, ZeRO 2 also what is reduced to one, and with one
replica nothing is split. What they do split is asked in `strategies/test_zero.py`.
"""

import jax.numpy as jnp
import pytest

import distjax as dj
from tests.conftest import SAME_PROGRAM, STRATEGIES

SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
FIRST = dj.VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = dj.VariableSynchronization.ON_READ


def writes_and_reads(strategy, x):
    """Aggregated and local writes, reads of all of them."""
    with strategy.scope():
        kept = [dj.Variable(jnp.ones(24), aggregation=a) for a in (SUM, MEAN, FIRST)]
        local = [
            dj.Variable(jnp.ones(24), synchronization=ON_READ, aggregation=a) for a in (SUM, MEAN)
        ]

    def step(x):
        for v in (*kept, *local):
            v.assign_add(x + v.value)
        return [v.value for v in (*kept, *local)]

    return strategy.jit(step).lower(x)


def reductions(strategy, x):
    """Sums, means and gathers of values that differ and that do not."""

    def step(x):
        ctx = dj.get_replica_context()
        i = ctx.replica_id_in_sync_group
        equal = ctx.all_reduce("mean", x * i)
        return ctx.all_reduce("sum", (x + i, equal)), ctx.all_gather(x * i, 0)

    return strategy.jit(step).lower(x)


def merged(strategy, x):
    """A merge that reduces nothing to a variable."""
    with strategy.scope():
        v = dj.Variable(jnp.ones(24))

    def merge_fn(strategy, g):
        total = strategy.reduce("sum", g)
        return strategy.extended.update(v, lambda v, g: v.assign_sub(0.1 * g), args=(total,))

    def step(x):
        ctx = dj.get_replica_context()
        return ctx.merge_call(merge_fn, args=(x * ctx.replica_id_in_sync_group,)) + v.value

    return strategy.jit(step).lower(x)


def across(strategy, x):
    """Cross-replica code around a run."""

    def outer(x):
        each = strategy.run(lambda x: x * dj.get_replica_context().replica_id_in_sync_group, (x,))
        return strategy.reduce("mean", each, axis=0), strategy.gather(each, axis=0)

    return dj.jit(outer).lower(x)


@pytest.mark.parametrize("step", [writes_and_reads, reductions, merged, across])
@pytest.mark.parametrize("row", SAME_PROGRAM)
def test_the_program_is_that_of_the_mirrored_strategy(row, step):
    x = jnp.arange(24.0)
    text = step(STRATEGIES[row](), x).as_text()
    assert text == step(STRATEGIES[SAME_PROGRAM[row]](), x).as_text()


def test_programs_that_differ_are_told_apart():
    """Else the test above could not fail."""
    x = jnp.arange(24.0)
    text = writes_and_reads(STRATEGIES["parameters2"](), x).as_text()
    assert text != writes_and_reads(STRATEGIES["mirrored2"](), x).as_text()
