"""The locality rules of TF 1.12 and 1.13, continued: reductions, updates, reading.

As in `test_locality_rules.py`: the context, where inputs and outputs live, and the error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import distjax as dj
from distjax.compat import v1_12
from distjax.errors import ContextError, LocalityError
from tests.replicas import local, per_replica
from tests.strategies import localities
from tests.strategies.localities import (
    KINDS,
    SHAPE,
    assert_m,
    assert_t,
    assert_v,
    call_in_replica,
    context_of,
    placed,
    refused,
)

d, v, t = localities.d, localities.v, localities.t  # fixtures


# -- reductions ------------------------------------------------------------------


@pytest.mark.api_row("reduce(m, t): T -> M", "reduce_to")
def test_reduce_to_of_t_is_m(d, t, how):
    """`d.reduce_to(m, t, t)`: in cross-replica context, T in, M out."""

    def call(t):
        assert context_of(d) == "cross-replica"
        return d.extended.reduce_to("mean", t, t)

    with d.scope():
        assert_t(d, t)
        out = how(call)(t)
    assert_m(d, out)
    np.testing.assert_array_equal(out, np.full(SHAPE, 0.5))
    with refused(ValueError, "A non-DistributedValues value ndarray of shape (2,)"):
        d.extended.reduce_to("sum", np.ones(2), None)
    with refused(ContextError, "reduce_to needs cross-replica context."):
        d.run(lambda t: call_in_replica(d.extended.reduce_to, "sum", t, t), args=(t,))


@pytest.mark.api_row(
    "reduce(m, t, v): T -> V(v)", "reduce_to", "value with the locality of a variable (V(v))"
)
def test_reduce_to_a_variable(d, v, t):
    """`d.reduce_to(m, t, v)`: in cross-replica context, T in, V(v) out."""
    with d.scope():
        assert_t(d, t)
        out = d.extended.reduce_to("sum", t, v)
    assert_v(v, out)
    np.testing.assert_array_equal(out, np.ones(SHAPE))
    elsewhere = dj.OneDeviceStrategy(jax.devices()[6])
    with elsewhere.scope():
        w = dj.Variable(jnp.ones(SHAPE))
    assert d.extended.reduce_to("sum", t, w).devices() == {jax.devices()[6]}
    with refused(ValueError, "reduce_to: destinations can not be empty and needs a variable"):
        d.extended.reduce_to("sum", t, ())
    with refused(LocalityError, "reduce(SUM) needs a value per replica, not mirrored variable 'v'"):
        d.extended.reduce_to("sum", v, v)
    with refused(ContextError, "reduce_to needs cross-replica context."):
        d.run(lambda t: call_in_replica(d.extended.reduce_to, "sum", t, v), args=(t,))


@pytest.mark.api_row("batch_reduce(m, [(t, v)]): as reduce", "batch_reduce_to")
def test_batch_reduce_to(d, v, t):
    """`d.batch_reduce_to(m, [(t, v)])`: what reduce_to gives for each pair, in their order."""
    with d.scope():
        pairs = [(t, v), (t, None), (t, jax.devices()[6])]
        to_v, to_all, to_one = d.extended.batch_reduce_to(dj.ReduceOp.SUM, pairs)
        assert_v(v, to_v)
        assert to_one.devices() == {jax.devices()[6]}
        assert_m(d, to_all)
        np.testing.assert_array_equal(to_v, d.extended.reduce_to("sum", t, v))
    with refused(ValueError, "batch_reduce_to needs a sequence of (value, destinations) pairs."):
        d.extended.batch_reduce_to("sum", [t])
    with refused(ContextError, "batch_reduce_to needs cross-replica context."):
        d.run(call_in_replica, args=(d.extended.batch_reduce_to, "sum", ()))


# -- updates ---------------------------------------------------------------------


@pytest.mark.api_row("update(v, fn): V(v) -> V(v)", "update")
def test_update_of_a_variable(d, v, t):
    """`d.update(v, fn, ...)`: in cross-replica context, V(v) in, V(v) out."""
    seen = []

    def fn(w, g):
        seen.append(context_of(d))
        assert w is v
        return w.assign_sub(g)

    with d.scope():
        g = d.extended.reduce_to("sum", t, v)
        assert_v(v, g)
        out = d.extended.update(v, fn, args=(g,))
    assert set(seen) == {"cross-replica"}
    assert_v(v, out)
    np.testing.assert_array_equal(v.value, np.zeros(SHAPE))
    assert dj.locality(v).kind == KINDS[type(d)]
    assert d.extended.update(v, lambda w: context_of(d)) == "cross-replica"  # with no scope too
    copies = d.extended.update(v, lambda w: w.value, group=False)
    assert len(copies) == len(v.local_results()) == (2 if KINDS[type(d)] == "mirrored" else 1)
    with refused(LocalityError, "update of variable 'v' by test_update_of_a_variable"):
        d.extended.update(v, fn, args=(t,))
    with refused(ContextError, "update needs cross-replica context."):
        d.run(call_in_replica, args=(d.extended.update, v, lambda w: w.value))


@pytest.mark.api_row(
    "update_non_slot(devices, fn): N -> N", "update_non_slot", "value on the non-slot devices (N)"
)
def test_update_non_slot(d, v):
    """`d.update_non_slot(d.non_slot_devices(), fn)`: like update, with locality N."""
    devices = d.extended.non_slot_devices([v])
    with d.scope(), d.extended.colocate_vars_with(devices):
        step, beta = dj.Variable(0), dj.Variable(0.5)
    seen = []

    def fn(count, by):
        seen.append(context_of(d))
        return step.assign_add(count), beta.assign(beta.value * by)

    with d.scope():
        count, power = d.extended.update_non_slot(devices, fn, args=(3,), kwargs={"by": 0.5})
    assert seen == ["cross-replica"]
    assert d.extended.update_non_slot(devices, lambda: context_of(d)) == "cross-replica"
    assert (int(count), float(power)) == (3, 0.25)
    for out, variable in ((count, step), (power, beta)):
        assert_v(variable, out)
        assert out.sharding.device_set == set(devices)
    with refused(ValueError, "update_non_slot needs the tuple of devices that non_slot_devices"):
        d.extended.update_non_slot(jax.devices()[7:], fn, args=(3, 0.5))
    with refused(ContextError, "update_non_slot needs cross-replica context."):
        d.run(lambda: call_in_replica(d.extended.update_non_slot, devices, fn, (3, 0.5)))


# -- reading ---------------------------------------------------------------------


@pytest.mark.api_row("read_var(v): aggregated", "read_var")
def test_read_var(d, v):
    """`d.read_var(v)`: one value, aggregated over the replicas for a replica-local variable."""
    with d.scope():
        total = dj.Variable(
            np.zeros(SHAPE, np.float32),
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )

    def fn():
        assert context_of(d) == "replica"
        total.assign_add(jnp.ones(SHAPE) * dj.get_replica_context().replica_id_in_sync_group)
        return d.extended.read_var(total)

    own = d.run(fn)
    assert_t(d, own)
    np.testing.assert_array_equal(local(d, own)[1], np.ones(SHAPE))
    with d.scope():
        assert context_of(d) == "cross-replica"
        assert total.storage.sharding == placed(d, PartitionSpec("replica"))
        assert_m(d, d.extended.read_var(total))
        np.testing.assert_array_equal(d.extended.read_var(total), np.ones(SHAPE))
        assert_v(v, d.extended.read_var(v))
    with refused(TypeError, "read_var needs a distjax.Variable."):
        d.extended.read_var(1.0)


@pytest.mark.api_row("fetch(t): any locality -> host", "fetch")
def test_fetch(d, v, t):
    """`d.fetch(t)` of TF 1.12: a copy of a value of any locality, on the host."""
    distribution = v1_12.DistributionStrategy(d)
    m = d.extended.broadcast_to(np.ones(SHAPE, np.float32))
    with distribution.scope():
        fetched = [distribution.fetch(x) for x in (m, v, d.extended.reduce_to("sum", t, v))]
        parts = distribution.fetch(t)
    for x in (*fetched, *parts):
        assert isinstance(x, np.ndarray)
        assert dj.locality(x).kind == "unplaced"
    np.testing.assert_array_equal(parts, [np.zeros(SHAPE), np.ones(SHAPE)])
    np.testing.assert_array_equal(fetched, [np.ones(SHAPE)] * 3)
    with refused(ContextError, "fetch needs cross-replica context."):
        d.run(lambda t: distribution.fetch(t), args=(t,))


@pytest.mark.api_row("unwrap and value_container are inverse", "value_container")
def test_unwrap(d, v, t):
    """`d.unwrap(value)`: what each replica, or each copy of a variable, holds on its device."""
    with d.scope():
        m = d.extended.broadcast_to(np.ones(SHAPE, np.float32))
        for value in (t, m):
            parts = d.local_results(value)
            on = [part.devices() for part in parts]
            assert on == [{device} for device in (*d.extended.worker_devices * 2,)[:2]]
        components = v1_12.DistributionStrategy(d).unwrap(v)
        assert all(d.extended.value_container(part) is v for part in components)
        assert d.extended.value_container(m) is m
    other = per_replica(dj.VirtualStrategy(3), [1.0, 2.0, 3.0])
    with refused(LocalityError, "local_results needs a PerReplica over 2 replicas"):
        d.local_results(other)
