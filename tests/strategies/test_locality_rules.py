"""The locality rules of seeds 001 and 002, one test per rule, on every kind of placement.

Each asks three things: the context in which code runs, where inputs and outputs live (by
their sharding), and the error that says that the rule is broken.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from replicas import local, per_replica

import distjax as dj
from distjax.compat import v1_12
from distjax.errors import ContextError, LocalityError, MergeError, TraceLeakError

DEVICES = jax.devices()[2:4]  # not the first ones: nothing gets there by itself
SHAPE = (4, 2)  # split in halves by ShardedStrategy

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(DEVICES),
    "virtual": lambda: dj.VirtualStrategy(2, DEVICES[0]),
    "sharded": lambda: dj.ShardedStrategy(DEVICES, partition="parameters"),
    "central": lambda: dj.CentralStorageStrategy(DEVICES),
}
#: The locality of a variable of SHAPE, by its strategy's policy.
KINDS = {
    dj.MirroredStrategy: "mirrored",
    dj.VirtualStrategy: "mirrored",
    dj.ShardedStrategy: "partitioned",
    dj.CentralStorageStrategy: "host",
}


@pytest.fixture(params=STRATEGIES)
def d(request):
    """The strategy `d` of the seeds, of two replicas."""
    return STRATEGIES[request.param]()


@pytest.fixture
def v(d):
    with d.scope():
        return dj.Variable(jnp.ones(SHAPE), name="v")


@pytest.fixture
def t(d):
    """A value of locality T: zeros on replica 0, ones on replica 1."""
    return per_replica(d, [np.zeros(SHAPE, np.float32), np.ones(SHAPE, np.float32)])


def context_of(strategy):
    """Returns the name of the context in force, which has to be one of `strategy`."""
    if not dj.has_strategy():
        return "default"
    assert dj.get_strategy() is strategy
    assert dj.in_cross_replica_context() is (dj.get_replica_context() is None)
    return "cross-replica" if dj.in_cross_replica_context() else "replica"


@contextlib.contextmanager
def refused(error, first_line):
    """The block raises `error`, and its first line starts with `first_line`."""
    with pytest.raises(error) as caught:
        yield
    first = str(caught.value).splitlines()[0]
    assert first.startswith(first_line), first


def placed(d, spec):
    """Returns the sharding `spec` over the replicas; on one device it is all there."""
    if d.mesh is None:
        return SingleDeviceSharding(DEVICES[0])
    return NamedSharding(d.mesh, spec)


def assert_t(d, x):
    """A value of its own on each replica: a PerReplica, split over the workers."""
    assert isinstance(x, dj.PerReplica)
    assert x.stacked.sharding == placed(d, PartitionSpec("replica"))
    assert dj.locality(x).kind == "per_replica"


def assert_m(d, x):
    """One value, with a copy on each worker: a plain array."""
    assert isinstance(x, jax.Array)
    assert x.sharding == placed(d, PartitionSpec()) and x.committed


def assert_v(v, x):
    """A value laid out as the value of `v` is where `v` is read and updated."""
    assert isinstance(x, jax.Array)
    assert x.sharding == v.value.sharding and x.committed


# -- contexts and creation -------------------------------------------------------


@pytest.mark.seed("scope: default -> cross-replica context", "variable_created_in_scope")
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


@pytest.mark.seed("a new variable: V(v)", "parameter_devices")
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


@pytest.mark.seed(
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


@pytest.mark.seed(
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


@pytest.mark.seed("an iterator over a dataset: T")
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


@pytest.mark.seed(
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


@pytest.mark.seed("T is not used across replicas", "per-replica value (T)")
def test_t_is_not_used_across_replicas(d, t):
    """A per-replica value says nothing in cross-replica context before it is aggregated."""
    with d.scope():
        assert_t(d, t)
        with refused(TypeError, "an operator needs one value, not one value per replica."):
            t + 1
        assert_m(d, d.reduce("sum", t) + 1)


@pytest.mark.seed("all_reduce: T -> M", "all_reduce", "mirrored value (M)")
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


@pytest.mark.seed("broadcast(t): M", "broadcast_to", "mirrored value (M)")
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


@pytest.mark.seed(
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


def call_in_replica(method, *args):
    """Calls a cross-replica method where it is not allowed."""
    assert dj.get_replica_context() is not None
    return method(*args)


# -- reductions ------------------------------------------------------------------


@pytest.mark.seed("reduce(m, t): T -> M", "reduce_to")
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


@pytest.mark.seed(
    "reduce(m, t, v): T -> V(v)", "reduce_to", "value with the locality of a variable (V(v))"
)
def test_reduce_to_a_variable(d, v, t):
    """`d.reduce_to(m, t, v)`: in cross-replica context, T in, V(v) out."""
    with d.scope():
        assert_t(d, t)
        out = d.extended.reduce_to("sum", t, v)
    assert_v(v, out)
    np.testing.assert_array_equal(out, np.ones(SHAPE))
    with refused(ValueError, "reduce_to: destinations can not be empty and needs a variable"):
        d.extended.reduce_to("sum", t, ())
    with refused(LocalityError, "reduce(SUM) needs a value per replica, not mirrored variable 'v'"):
        d.extended.reduce_to("sum", v, v)
    with refused(ContextError, "reduce_to needs cross-replica context."):
        d.run(lambda t: call_in_replica(d.extended.reduce_to, "sum", t, v), args=(t,))


@pytest.mark.seed("batch_reduce(m, [(t, v)]): as reduce", "batch_reduce_to")
def test_batch_reduce_to(d, v, t):
    """`d.batch_reduce_to(m, [(t, v)])`: what reduce_to gives for each pair, in their order."""
    with d.scope():
        to_v, to_all = d.extended.batch_reduce_to(dj.ReduceOp.SUM, [(t, v), (t, None)])
        assert_v(v, to_v)
        assert_m(d, to_all)
        np.testing.assert_array_equal(to_v, d.extended.reduce_to("sum", t, v))
    with refused(ValueError, "batch_reduce_to needs a sequence of (value, destinations) pairs."):
        d.extended.batch_reduce_to("sum", [t])
    with refused(ContextError, "batch_reduce_to needs cross-replica context."):
        d.run(call_in_replica, args=(d.extended.batch_reduce_to, "sum", ()))


# -- updates ---------------------------------------------------------------------


@pytest.mark.seed("update(v, fn): V(v) -> V(v)", "update")
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
    copies = d.extended.update(v, lambda w: w.value, group=False)
    assert len(copies) == len(v.local_results()) == (2 if KINDS[type(d)] == "mirrored" else 1)
    with refused(LocalityError, "update of variable 'v' by test_update_of_a_variable"):
        d.extended.update(v, fn, args=(t,))
    with refused(ContextError, "update needs cross-replica context."):
        d.run(call_in_replica, args=(d.extended.update, v, lambda w: w.value))


@pytest.mark.seed(
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
    assert (int(count), float(power)) == (3, 0.25)
    for out, variable in ((count, step), (power, beta)):
        assert_v(variable, out)
        assert out.sharding.device_set == set(devices)
    with refused(ValueError, "update_non_slot needs the tuple of devices that non_slot_devices"):
        d.extended.update_non_slot(jax.devices()[7:], fn, args=(3, 0.5))
    with refused(ContextError, "update_non_slot needs cross-replica context."):
        d.run(lambda: call_in_replica(d.extended.update_non_slot, devices, fn, (3, 0.5)))


# -- reading ---------------------------------------------------------------------


@pytest.mark.seed("read_var(v): aggregated", "read_var")
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


@pytest.mark.seed("fetch(t): any locality -> host", "fetch")
def test_fetch(d, v, t):
    """Seed 002, `d.fetch(t)`: a copy of a value of any locality, on the host."""
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


@pytest.mark.seed("unwrap and value_container are inverse", "value_container")
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
