"""What a call does grows with the number of leaves and variables, and no faster.

Counted in calls of Python functions, ours and JAX's, since time is nothing to assert.
"""

import gc
import sys

import jax
import jax.numpy as jnp
import pytest

import distjax as dj

MEAN = dj.VariableAggregation.MEAN

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
}


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


def make_variables(owner, count):
    with owner.scope():
        return [
            dj.Variable(jnp.full(4, i), dtype=jnp.float32, aggregation=MEAN) for i in range(count)
        ]


def num_calls(work):
    """Returns how many Python functions ``work()`` calls, directly or not."""
    found = 0

    def profile(frame, event, _):
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    gc.disable()  # finalizers of what other tests left are calls, too
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def call_with_leaves(owner, count):
    """A call of a function of `count` arrays that are where they are needed."""
    arrays = owner.run(lambda: [jnp.full(4, i, jnp.float32) for i in range(count)])

    def step(arrays):
        return jax.tree.map(lambda x: x + 1, arrays)

    return lambda: owner.run(step, args=(arrays,))


def call_with_variables(owner, count):
    """A call of a function that writes `count` variables."""
    variables = make_variables(owner, count)

    def step():
        for v in variables:
            v.assign_add(jnp.ones(4))

    return lambda: owner.run(step)


CALLS = {"leaves": call_with_leaves, "variables": call_with_variables}


@pytest.mark.parametrize("what", CALLS)
def test_a_first_call_grows_linearly(owner, what):
    CALLS[what](owner, 10)()  # what JAX traces once, for any number
    counts = [num_calls(CALLS[what](owner, count)) for count in (10, 20, 40)]
    per_leaf = [(counts[1] - counts[0]) / 10, (counts[2] - counts[1]) / 20]
    assert per_leaf[1] <= 1.1 * per_leaf[0]


@pytest.mark.parametrize("what", CALLS)
def test_a_later_call_calls_as_much_for_few_as_for_many(owner, what):
    def fewest(count):
        call = CALLS[what](owner, count)
        call(), call()
        return min(num_calls(call) for _ in range(3))  # now and then a call awaits earlier ones

    assert fewest(40) <= fewest(2)


def places(variables):
    """Returns where in memory the first copies of the values are; hands none of them out."""
    return [v.storage.addressable_shards[0].data.unsafe_buffer_pointer() for v in variables]


def test_a_step_after_reads_copies_what_is_held(owner):
    variables = make_variables(owner, 50)

    def step():
        for v in variables:
            v.assign_add(jnp.ones(4))

    owner.run(step)
    before = places(variables)
    held = [v.value for v in variables[:5]]
    owner.run(step)
    after = places(variables)
    assert set(after[5:]) == set(before[5:])  # all were read: their memory is used again
    assert set(after[:5]).isdisjoint(before)
    assert [x.tolist() for x in held] == [[i + 1] * 4 for i in range(5)]
    assert [v.value.tolist() for v in variables] == [[i + 2] * 4 for i in range(50)]
