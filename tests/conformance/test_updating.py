"""Laws of extended.update, update_non_slot and steps on an iterator."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.replicas import here, local, num_copies, num_local_copies

ON_READ, SUM = dj.VariableSynchronization.ON_READ, dj.VariableAggregation.SUM


def make(strategy, initial=1.0, **options):
    with strategy.scope():
        return dj.Variable(initial, **options)


def test_r237_the_function_gets_the_variable_and_its_arguments(strategy):
    v = make(strategy)
    captured, seen = object(), []

    def fn(*args, **kwargs):
        seen.append((args, kwargs))

    strategy.extended.update(v, fn, (captured, 3), {"k": "text"})
    assert seen == [((v, captured, 3), {"k": "text"})]
    assert seen[0][0][0] is v and seen[0][0][1] is captured


@pytest.mark.api_row("update")
def test_update_writes(strategy, how):
    v = make(strategy, np.arange(24.0))
    step = how(lambda g: strategy.extended.update(v, lambda v, g: v.assign_sub(g), (g,)))
    expected = np.arange(24) - 0.5
    np.testing.assert_array_equal(step(np.full(24, 0.5, np.float32)), expected)
    np.testing.assert_array_equal(v.value, expected)
    assert local(strategy, v) == [expected.tolist()] * num_copies(strategy, v)


@pytest.mark.api_row("update (group=False)")
def test_r239_group_false_gives_an_element_per_copy(strategy, how):
    """Decision 14: R for mirrored variables, one where there is one copy."""
    small, large = make(strategy), make(strategy, np.zeros(24))
    fn = lambda v: {"new": v.assign(np.full(v.shape, 5.0)), "name": "n"}
    step = how(lambda: [strategy.extended.update(v, fn, group=False) for v in (small, large)])
    for v, out in zip((small, large), step(), strict=True):
        copies = len(here(strategy, [None] * num_copies(strategy, v), how))
        assert type(out["new"]) is list and out["name"] == ["n"] * copies
        np.testing.assert_array_equal(out["new"], np.full((copies, *v.shape), 5.0))


def test_group_false_where_nothing_is_returned(strategy):
    """As in TF: `ops.extend(update(..., group=False))` has an element per copy."""
    v = make(strategy)
    none = [None] * num_local_copies(strategy, v)
    assert strategy.extended.update(v, lambda v: None, group=False) == none
    pair = strategy.extended.update(v, lambda v: (None, {"a": None}), group=False)
    assert pair == (none, {"a": none})


def test_update_non_slot_group_false_gives_an_element_per_copy(strategy):
    """Decision 14: as many as a variable there has."""
    devices = strategy.extended.non_slot_devices([])
    with strategy.scope(), strategy.extended.colocate_vars_with(devices):
        count = dj.Variable(0, name="count")
    step = lambda: strategy.extended.update_non_slot(devices, lambda: "n", group=False)
    assert step() == ["n"] * len(count.local_results())


@pytest.mark.api_row("experimental_run_steps_on_iterator")
def test_variables_are_carried_and_traced_once(strategy):
    traces = []
    with strategy.scope():
        total = dj.Variable(0, name="total")

    def step(context, inputs):
        traces.append(1)
        value = strategy.reduce("sum", strategy.run(jnp.sum, args=(inputs,)))
        total.assign_add(value)
        context.set_last_step_output("total", total.value)

    count = strategy.num_replicas_in_sync
    data = [np.ones(count * 2, np.int32) * i for i in range(6)]
    iterator = iter(strategy.distribute_dataset(data))
    first = strategy.extended.run_steps_on_iterator(step, iterator, 3)
    # Every replica of a strategy that wraps sums its part; one replica sums all.
    assert int(first.last_step_outputs["total"]) == (0 + 1 + 2) * count * 2
    seen = len(traces)
    strategy.extended.run_steps_on_iterator(step, iterator, 3)
    assert int(total.value) == sum(range(6)) * count * 2
    assert len(traces) == seen  # the second call compiles nothing


def test_an_update_of_components_reads_other_variables(strategy, how):
    """It sees them whole, however the strategy keeps them; in a loop, too."""
    with strategy.scope():
        w = dj.Variable(np.arange(24, dtype=np.float32), name="w")
        total = dj.Variable(0.0, synchronization=ON_READ, aggregation=SUM, name="total")

    def fn(total):
        add = lambda carry, _: (carry + w.value.sum(), None)
        return total.assign(dj.lax.scan(add, w.value.sum(), None, length=2)[0])

    how(lambda: strategy.extended.update(total, fn))()
    assert local(strategy, total) == [3 * 276.0] * num_copies(strategy, total)
