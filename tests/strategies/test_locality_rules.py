"""The locality rules of TF 1.12 and 1.13, one test per rule, on every kind of placement.

Each asks three things: the context in which code runs, where inputs and outputs live (by
their sharding), and the error that says that the rule is broken.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import distjax as dj
from distjax.errors import ContextError, LocalityError, MergeError, TraceLeakError
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


# -- contexts and creation -------------------------------------------------------


@pytest.mark.api_row("scope: default -> cross-replica context", "variable_created_in_scope")
def test_scope_enters_cross_replica_context(d):
    """`with d.scope()`: default single-replica context -> cross-replica context for d."""
    assert context_of(d) == "default" and dj.get_replica_context() is not None
    with d.scope() as entered:
        assert entered is d and context_of(d) == "cross-replica"
        assert d.extended.variable_created_in_scope(dj.Variable(1.0))
    assert context_of(d) == "default"

    def enter():
        with d.scope():
            pass

    with refused(ContextError, "scope() needs cross-replica context."):
        d.run(enter)


@pytest.mark.api_row("a new variable: V(v)", "parameter_devices")
def test_variables_are_created_by_the_strategys_policy(d):
    """`v = get_variable(...)`: in replica and cross-replica context, with locality V(v)."""
    made = {}

    def create():
        name = context_of(d)
        if name not in made:
            made[name] = dj.Variable(jnp.zeros(SHAPE), name=name)

    with d.scope():
        create()
    d.run(create)
    assert set(made) == {"cross-replica", "replica"}
    for variable in made.values():
        assert dj.locality(variable).kind == KINDS[type(d)]
        assert dj.locality(variable) == dj.locality(made["replica"])
        assert dj.locality(variable).sharding == variable.storage.sharding
        assert variable.storage.sharding.device_set == set(d.extended.parameter_devices)
    with d.scope(), refused(TraceLeakError, "variable 'leaks' needs to be created outside of"):
        jax.jit(lambda: dj.Variable(1.0, name="leaks").value)()


@pytest.mark.api_row(
    "colocate_vars_with(v): variables of V(v)",
    "colocate_vars_with",
    "value with the locality of a variable (V(v))",
)
def test_colocate_vars_with_a_variable(d, v):
    """Variables made inside have locality V(v), in replica and cross-replica context."""
    made = {}

    def create():
        with d.extended.colocate_vars_with(v):
            if context_of(d) not in made:
                made[context_of(d)] = dj.Variable(jnp.zeros(SHAPE))

    with d.scope():
        create()
    d.run(create)
    assert set(made) == {"cross-replica", "replica"}
    for slot in made.values():
        assert dj.locality(slot) == dj.locality(v)
        assert slot.storage.sharding == v.storage.sharding
    with refused(ContextError, "colocate_vars_with. Need to be inside the scope of"):
        create()
    outside = dj.Variable(1.0)
    with d.scope(), refused(LocalityError, "`colocate_vars_with` must only be passed a variable"):
        with d.extended.colocate_vars_with(outside):
            pass


@pytest.mark.api_row("colocate_vars_with(v): variables of V(v)")
def test_colocated_variables_may_be_split_over_the_devices_of_theirs():
    """ZeRO-1: slots are where their variable is, a shard on each of its devices."""
    d = dj.ShardedStrategy(localities.DEVICES, partition="optimizer", min_split_bytes=0)
    with d.scope():
        v, other = dj.Variable(jnp.zeros(SHAPE)), dj.Variable(jnp.zeros(SHAPE))
        with d.extended.colocate_vars_with(v):
            slot = dj.Variable(jnp.zeros(SHAPE))
            with d.scope():  # entered again, it changes nothing
                nested = dj.Variable(jnp.zeros(SHAPE))
    assert dj.locality(v).kind == dj.locality(other).kind == "mirrored"
    assert dj.locality(slot).kind == dj.locality(nested).kind == "partitioned"
    assert slot.storage.sharding == placed(d, PartitionSpec("replica"))


@pytest.mark.api_row(
    "colocate_vars_with(non_slot_devices): variables of N",
    "colocate_vars_with",
    "non_slot_devices",
    "value on the non-slot devices (N)",
)
def test_colocate_vars_with_the_non_slot_devices(d, v):
    """Variables made inside have locality N, in replica and cross-replica context."""
    made = {}
    devices = d.extended.non_slot_devices([v])

    def create():
        with d.extended.colocate_vars_with(devices):
            if context_of(d) not in made:
                made[context_of(d)] = dj.Variable(0)

    with d.scope():
        create()
    d.run(create)
    assert set(made) == {"cross-replica", "replica"}
    assert set(devices) <= set(d.extended.parameter_devices)
    for step in made.values():
        assert step.storage.sharding.device_set == set(devices)
        assert dj.locality(step) == dj.locality(made["replica"])
    with d.scope(), refused(LocalityError, "`colocate_vars_with` must only be passed a variable"):
        with d.extended.colocate_vars_with(jax.devices()[7:]):
            pass


# -- T and M ---------------------------------------------------------------------


@pytest.mark.api_row("an iterator over a dataset: T")
def test_datasets_give_values_of_locality_t(d):
    """`d.distribute_dataset(dataset)`: in cross-replica context, an iterator with locality T."""
    batch = np.arange(8, dtype=np.float32).reshape(4, 2)
    with d.scope():
        assert context_of(d) == "cross-replica"
        iterator = iter(d.distribute_dataset([batch, batch]))
        element = next(iterator)
    assert_t(d, element)
    assert local(d, element) == [batch[:2].tolist(), batch[2:].tolist()]
    with refused(ContextError, "distribute_dataset needs cross-replica context."):
        d.run(lambda: d.distribute_dataset([batch]))
    with refused(ContextError, "next(iterator) should be called from outside of replica_fn"):
        d.run(lambda: next(iterator))


@pytest.mark.api_row(
    "call for each replica: T, M, variables in",
    "call_for_each_replica",
    "per-replica value (T)",
    "mirrored value (M)",
)
def test_call_for_each_replica(d, v, t, how):
    """From cross-replica to replica context and, by merge_call, back; takes T, M and variables."""
    m = d.extended.broadcast_to(np.float32(2))
    seen = []

    def merge_fn(strategy, x, y):
        seen.append(context_of(strategy))
        return x, y

    def fn(t, m, w):
        seen.append(context_of(d))
        assert t.shape == SHAPE and m.shape == () and w is v
        context = dj.get_replica_context()
        back = context.merge_call(merge_fn, args=(t, m))
        seen.append(context_of(d))
        return back, w.value * m, w

    def call(t, m):
        assert context_of(d) == "cross-replica"
        return d.extended.call_for_each_replica(fn, args=(t, m, v))

    with d.scope():
        (back_t, back_m), product, same = how(call)(t, m)
    assert set(seen) == {"replica", "cross-replica"}
    assert_t(d, back_t)
    assert_m(d, back_m)
    assert_m(d, product)
    assert same is v
    with refused(ContextError, "run needs cross-replica context."):
        d.run(lambda: d.extended.call_for_each_replica(lambda: 1))
    other = per_replica(dj.VirtualStrategy(3), [1.0, 2.0, 3.0])

    def takes(t):
        return t

    with refused(LocalityError, "argument t of test_call_for_each_replica.<locals>.takes needs a"):
        d.extended.call_for_each_replica(takes, args=(other,))


@pytest.mark.api_row("T is not used across replicas", "per-replica value (T)")
def test_t_is_not_used_across_replicas(d, t):
    """A per-replica value says nothing in cross-replica context before it is aggregated."""
    with d.scope():
        assert_t(d, t)
        with refused(TypeError, "an operator needs one value, not one value per replica."):
            t + 1
        assert_m(d, d.reduce("sum", t) + 1)


@pytest.mark.api_row("all_reduce: T -> M", "all_reduce", "mirrored value (M)")
def test_all_reduce_turns_t_into_m(d, t, how):
    """`ReplicaContext.all_reduce`: in replica context, T in, M out."""
    kept = []

    def fn(t):
        kept.append(dj.get_replica_context())
        assert context_of(d) == "replica"
        return t, kept[-1].all_reduce("sum", t)

    same, total = how(lambda t: d.run(fn, args=(t,)))(t)
    assert_t(d, same)
    assert_m(d, total)
    np.testing.assert_array_equal(total, np.ones(SHAPE))
    with d.scope(), refused(MergeError, "all_reduce needs replica context. Need to be inside"):
        kept[0].all_reduce("sum", 1.0)


@pytest.mark.api_row("broadcast(t): M", "broadcast_to", "mirrored value (M)")
def test_broadcast_to_all_workers(d, t, how):
    """`d.broadcast_to(t)`: in cross-replica context, a value with locality M."""
    host = np.ones(SHAPE, np.float32)

    def call():
        assert context_of(d) == "cross-replica"
        return d.extended.broadcast_to(host)

    with d.scope():
        assert dj.locality(host).kind == "unplaced"
        assert_m(d, how(call)())
    with refused(LocalityError, "broadcast_to needs one value."):
        d.extended.broadcast_to(t)
    with refused(ContextError, "broadcast_to needs cross-replica context."):
        d.run(call_in_replica, args=(d.extended.broadcast_to, host))


@pytest.mark.api_row(
    "broadcast(t, v): V(v)", "broadcast_to", "value with the locality of a variable (V(v))"
)
def test_broadcast_to_a_variable(d, v):
    """`d.broadcast_to(t, v)`: in cross-replica context, a value with locality V(v)."""
    host = np.ones(SHAPE, np.float32)
    with d.scope():
        assert_v(v, d.extended.broadcast_to(host, v))
    with refused(ValueError, "broadcast_to: destinations can not be empty and needs a variable"):
        d.extended.broadcast_to(host, "")
    with refused(ContextError, "broadcast_to needs cross-replica context."):
        d.run(call_in_replica, args=(d.extended.broadcast_to, host, v))
