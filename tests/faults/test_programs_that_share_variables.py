"""Programs of two threads step the same variables in turn: no step is lost, none waits for ever."""

import threading

import jax
import jax.numpy as jnp
import pytest

import distjax as dj
from distjax._src.variables.storage import StoredArray
from tests.own_threads import in_threads

SUM = dj.VariableAggregation.SUM
NUM_STEPS = 40

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
}


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


def test_in_opposite_orders(owner, switch_often):
    """Each takes the arrays of both variables over from the other, the last one first."""
    with owner.scope():
        a, b = (dj.Variable(jnp.zeros(2), aggregation=SUM) for _ in range(2))

    def there():
        a.assign_add(jnp.ones(2))
        b.assign_add(jnp.ones(2))

    def back():
        b.assign_add(jnp.ones(2))
        a.assign_add(jnp.ones(2))

    seen = []

    def steps(fn):
        for _ in range(NUM_STEPS):
            owner.run(fn)
            seen.append((float(a.value[0]), float(b.value[1])))

    in_threads(lambda: steps(there), lambda: steps(back))
    total = 2 * NUM_STEPS * owner.num_replicas_in_sync
    assert a.value.tolist() == b.value.tolist() == [total] * 2
    assert max(max(pair) for pair in seen) <= total


def test_of_which_one_is_traced_as_the_other_steps(owner, monkeypatch):
    """The trace looks at the array of a variable, which the step donates as soon as it may."""
    with owner.scope():
        v = dj.Variable(jnp.zeros(2), aggregation=SUM)

    def step():
        v.assign_add(jnp.ones(2))

    for _ in range(2):
        owner.run(step)
    stepping = threading.Thread(target=owner.run, args=(step,))
    read = StoredArray.read

    def read_and_let_step(stored):
        array = read(stored)
        if stepping.ident is None:
            stepping.start()
            stepping.join(0.5)  # it waits for this thread, or else is done at once
        return array

    monkeypatch.setattr(StoredArray, "read", read_and_let_step)
    traced = owner.run(lambda: v.value.sum())
    stepping.join(60)
    replicas = owner.num_replicas_in_sync
    assert float(traced) in (4 * replicas, 6 * replicas) and v.value.tolist() == [3 * replicas] * 2


def test_of_which_each_has_a_variable_of_its_own(owner, switch_often):
    with owner.scope():
        shared, *own = (dj.Variable(jnp.zeros(2), aggregation=SUM) for _ in range(3))

    def make_step(variable):
        def step():
            shared.assign_add(jnp.ones(2))
            variable.assign_add(shared.value)

        return step

    def steps(fn):
        for _ in range(NUM_STEPS):
            owner.run(fn)

    in_threads(*(lambda v=v: steps(make_step(v)) for v in own))
    replicas = owner.num_replicas_in_sync
    total = 2 * NUM_STEPS * replicas
    assert shared.value.tolist() == [total] * 2
    # Each step has added what it saw: every multiple of R once, in one variable or the other.
    seen = sum(float(v.value[0]) for v in own)
    assert seen == replicas * sum(range(replicas, total + 1, replicas))
