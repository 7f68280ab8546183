"""The law of the cut: closures one at a time are the steps of one device, or of replicas.

Steps are drawn: reads, writes, merges with and without results, in any order, over variables at
one to three servers, whole or in shards. Their numbers are whole and small, so that every way to
compute them gives the same bits: what differs is wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

import distjax as dj

NUM_VARIABLES = 3
WRITES = ("assign", "assign_add", "assign_sub")

small = st.integers(0, 9)
actions = st.one_of(
    st.tuples(st.just("compute"), small, small),
    st.tuples(st.just("read"), small, small),
    st.tuples(st.sampled_from(WRITES), small, small),
    st.tuples(st.just("ask"), small, small),
    st.tuples(st.just("update"), small, small),
    st.tuples(st.just("jit"), small, small),
)


def mixed(a, b):
    """Returns whole numbers again, below 31."""
    return jnp.mod(a * 3 + jnp.roll(b, 1) + 1, 31)


def make_step(program, variables, optimizer):
    """Returns a replica function that does what was drawn."""

    def step(x):
        context = dj.get_replica_context()
        values = [x]
        for action, i, j in program:
            v, a, b = variables[i % NUM_VARIABLES], values[j % len(values)], values[-1]

            def ask(strategy, a, v=v):
                return mixed(v.value, strategy.reduce("sum", a)), each(lambda a: a + 1, a)

            def update(strategy, a, then, v=v):
                total = strategy.reduce("sum", a)
                v.assign(mixed(v.value - then, total))
                return jnp.sum(total)

            if action == "compute":
                values.append(mixed(a, b))
            elif action == "read":
                values.append(mixed(v.value, a))
            elif action in WRITES:
                values.append(mixed(getattr(v, action)(jnp.mod(a, 7)), b))
            elif action == "ask":
                values += context.merge_call(ask, args=(a,))
            elif action == "update":
                values.append(context.merge_call(update, args=(a, v.value)) + b)
            else:
                values.append(_asked_in_jit(context, v, a))
        if optimizer is not None:
            optimizer.apply_gradients([(jnp.mod(values[-1], 5), v) for v in variables])
        values.append(context.all_reduce("sum", values[-1]))
        return {"values": values[-4:], "variables": [v.value for v in variables]}

    return step


def each(fn, value):
    """Returns what a function makes of a value, or of those of the replicas."""
    return value.map(fn) if dj.is_per_replica(value) else fn(value)


def _asked_in_jit(context, v, a):
    ask = lambda s, a: mixed(s.reduce("sum", a), v.value)
    return jax.jit(lambda a: context.merge_call(ask, args=(a + 1,)) * 2)(a)


def run(strategy, program, optimizes):
    """Returns what three steps gave, and the variables at the end."""
    with strategy.scope():
        variables = [
            dj.Variable(jnp.arange(4.0) + i, name=f"v{i}", aggregation=dj.VariableAggregation.SUM)
            for i in range(NUM_VARIABLES)
        ]
        optimizer = dj.optim.Optimizer(optax.sgd(1.0, momentum=0.5)) if optimizes else None
        if optimizer is not None:
            optimizer.init(variables)
    step = make_step(program, variables, optimizer)
    rows = np.arange(strategy.num_replicas_in_sync, dtype=np.float32)[:, None] + np.arange(4)
    outs = [strategy.run(step, args=(strategy.per_replica(rows * k),)) for k in range(3)]
    is_varying = jax.tree.map(dj.is_per_replica, outs, is_leaf=dj.is_per_replica)
    return (
        is_varying,
        jax.tree.map(np.asarray, jax.tree.leaves(outs)),
        [np.asarray(v) for v in variables],
    )


#: What is drawn.
DRAWN = {
    "program": st.lists(actions, min_size=1, max_size=6),
    "replicas": st.integers(1, 3),
    "servers": st.integers(1, 3),
    "shards": st.integers(1, 3),
    "cut": st.sampled_from(["arguments", "least_bytes"]),
    "optimizes": st.booleans(),
}


def check_one_step(program, replicas, servers, shards, cut, optimizes):
    """Fails if closures one at a time are not the steps of one device, or of replicas."""
    partitioner = dj.parts.FixedShards(shards)
    workers = [jax.devices()[i : i + replicas] for i in (0, replicas)]
    strategy = dj.ParameterServerStrategy(workers, servers, partitioner=partitioner, cut=cut)
    found = run(strategy, program, optimizes)
    together = dj.MirroredStrategy(workers[0]) if replicas > 1 else dj.OneDeviceStrategy()
    expected = run(together, program, optimizes)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@settings(max_examples=8, deadline=None)
@given(**DRAWN)
def test_one_closure_at_a_time_is_one_step(program, replicas, servers, shards, cut, optimizes):
    check_one_step(program, replicas, servers, shards, cut, optimizes)
