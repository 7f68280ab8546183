"""The program of K steps is the `lax.scan` that one writes by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from distjax._src.replica.arguments import Static
from distjax.testing.hlo import count_collectives

NUM_STEPS, WIDTH, ROWS = 6, 64, 16


def loss_of(w, x):
    return jnp.mean((jnp.tanh(x @ w) - x) ** 2)


def ours(strategy):
    """Returns the compiled program that `run_steps_on_iterator` runs."""
    with strategy.scope():
        w = dj.Variable(np.zeros((WIDTH, WIDTH), np.float32))

    def apply(strategy, loss, grad):
        w.assign_sub(0.1 * strategy.reduce("mean", grad))
        return strategy.reduce("mean", loss)

    def replica_step(x):
        loss_and_grad = jax.value_and_grad(loss_of)(w.value, x)
        return dj.get_replica_context().merge_call(apply, args=loss_and_grad)

    def step(context, x):
        context.set_last_step_output("loss", strategy.run(replica_step, args=(x,)))

    count = strategy.num_replicas_in_sync
    data = [np.zeros((count * ROWS, WIDTH), np.float32)] * (2 * NUM_STEPS)
    iterator = iter(strategy.distribute_dataset(data))
    strategy.extended.run_steps_on_iterator(step, iterator, NUM_STEPS)
    program = strategy.extended.step_programs.get(step)
    steps = iterator.take(NUM_STEPS)
    return program.lower((Static(steps.layout), steps.arrays, None), {}).compile()


def by_hand(num_replicas):
    devices = np.array(jax.devices()[:num_replicas])
    mesh = Mesh(devices, ("replica",), axis_types=(AxisType.Auto,))

    def body(w, x):
        loss, grad = jax.value_and_grad(loss_of)(w, x)
        loss, grad = lax.pmean((loss, grad), "replica")
        return w - 0.1 * grad, loss

    def steps(w, xs):
        w, losses = lax.scan(body, w, xs[:, 0])
        return w, losses[-1]

    specs = {"in_specs": (P(), P(None, "replica")), "out_specs": (P(), P())}
    mapped = jax.shard_map(steps, mesh=mesh, check_vma=False, **specs)
    w = jax.device_put(jnp.zeros((WIDTH, WIDTH)), NamedSharding(mesh, P()))
    xs = np.zeros((NUM_STEPS, num_replicas, ROWS, WIDTH), np.float32)
    xs = jax.device_put(xs, NamedSharding(mesh, P(None, "replica")))
    return jax.jit(mapped, donate_argnums=0).lower(w, xs).compile()


def large_copies(program):
    """Copies of arrays with dimensions."""
    return re.findall(r"= \w+\[\d[^ ]* copy\(", program.as_text())


@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_the_loop_is_the_one_by_hand(num_replicas):
    found = ours(dj.MirroredStrategy(jax.devices()[:num_replicas]))
    expected = by_hand(num_replicas)
    collectives = count_collectives(expected.as_text()) if num_replicas > 1 else {}
    assert count_collectives(found.as_text()) == collectives
    assert found.as_text().count(" while(") == expected.as_text().count(" while(") == 1
    assert large_copies(found) == large_copies(expected) == []
    costs, costs_by_hand = found.cost_analysis(), expected.cost_analysis()
    assert costs["flops"] <= 1.01 * costs_by_hand["flops"]
    assert costs["bytes accessed"] <= 1.01 * costs_by_hand["bytes accessed"]
    memory, memory_by_hand = found.memory_analysis(), expected.memory_analysis()
    assert memory.alias_size_in_bytes == memory_by_hand.alias_size_in_bytes
    assert memory.temp_size_in_bytes <= 1.01 * memory_by_hand.temp_size_in_bytes
