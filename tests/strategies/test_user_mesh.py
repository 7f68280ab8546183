"""Under a mesh that the user has set, as JAX's guides do, strategies go on with their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import distjax as dj
from tests.replicas import ids

DEVICES = jax.devices()
MEAN, SUM = dj.VariableAggregation.MEAN, dj.VariableAggregation.SUM
ON_READ = dj.VariableSynchronization.ON_READ

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(DEVICES[:2]),
    "mirrored, the mesh's devices": lambda: dj.MirroredStrategy(DEVICES[:4]),
    "mirrored, model axis": lambda: dj.MirroredStrategy(DEVICES[:4], model_axes={"model": 2}),
    "virtual": lambda: dj.VirtualStrategy(2),
    "one device": lambda: dj.OneDeviceStrategy(DEVICES[1]),
    "central": lambda: dj.CentralStorageStrategy(DEVICES[:2]),
    "sharded": lambda: dj.ShardedStrategy(DEVICES[:2], partition="parameters", min_split_bytes=0),
    "default": dj.get_strategy,
}


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    """A mesh of four devices, which is set."""
    axis_types = (request.param,) * 2
    mesh = Mesh(np.array(DEVICES[:4]).reshape(2, 2), ("x", "y"), axis_types=axis_types)
    with jax.set_mesh(mesh):
        yield mesh
        assert jax.sharding.get_mesh() == mesh


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES)
def each(request, mesh):
    return request.param()


def variable(strategy, value=0.0, **options):
    with strategy.scope():
        return dj.Variable(value, **options)


def is_near(value, expected):
    np.testing.assert_allclose(np.asarray(value), expected)


def test_variables(each):
    v = variable(each, jnp.zeros(4), aggregation=MEAN)
    for write in (v.assign, v.assign_add):
        write(jnp.ones(4))
    is_near(v.value, [2.0] * 4)
    v.assign_sub(np.ones(4, np.float32))
    is_near(v.local_results()[0], [1.0] * 4)
    made = variable(each, lambda: jnp.ones(4) * 3)
    is_near(made.value, [3.0] * 4)
    key = variable(each, jax.random.key(1))
    is_near(jax.random.key_data(key.value), [0, 1])


def test_a_variable_with_components(each):
    v = variable(each, jnp.zeros(4), synchronization=ON_READ, aggregation=SUM)
    each.run(lambda x: v.assign_add(x), args=(jnp.ones(4),))
    is_near(v.value, [each.num_replicas_in_sync] * 4)
    each.extended.update(v, lambda v, x: v.assign_add(x), args=(jnp.ones(4),))
    is_near(v.local_results()[-1], [2.0] * 4)


def test_run(each):
    v = variable(each, jnp.zeros(4), aggregation=MEAN)

    def step(x):
        v.assign_add(x)
        y = jnp.ones(4) * 2 + x
        context = dj.get_replica_context()
        return context.merge_call(lambda s, y: s.reduce("mean", y), args=(y,)), y

    for _ in range(2):
        merged, y = each.run(step, args=(jnp.ones(4),))
        is_near(merged, [3.0] * 4)
        is_near(each.local_results(y)[-1], [3.0] * 4)
    is_near(v.value, [2.0] * 4)


def test_reductions(each):
    n = each.num_replicas_in_sync
    x = each.distribute_values_from_function(
        lambda context: np.full(2, context.replica_id_in_sync_group, np.float32)
    )
    is_near(each.reduce("sum", x), [n * (n - 1) / 2] * 2)
    is_near(each.reduce("mean", x, axis=0), (n - 1) / 2)
    is_near(each.reduce("mean", x, axis=0, mask=jnp.ones(2, bool)), (n - 1) / 2)
    is_near(each.gather(x, 0), np.repeat(np.arange(n), 2))
    is_near(each.extended.reduce_to("mean", x, None), [(n - 1) / 2] * 2)
    is_near(each.local_results(x)[-1], [n - 1] * 2)
    if each.mesh is not None:
        is_near(each.extended.broadcast_to(jnp.ones(2)), [1.0] * 2)


def test_dj_jit(each):
    v = variable(each, jnp.zeros(4), aggregation=MEAN)

    @dj.jit
    def step(x):
        y = each.run(lambda x: (v.assign_add(x), x * 2)[1], args=(x,))
        return each.reduce("mean", y) + v.value + jnp.ones(4)

    for number in (1, 2):
        is_near(step(jnp.ones(4)), [3.0 + number] * 4)
    assert step.lower(jnp.ones(4)).compile() is not None
    with each.scope():
        is_near(step(jnp.ones(4)), [6.0] * 4)


def test_update(each):
    v = variable(each, jnp.zeros(4), aggregation=MEAN)
    add = lambda v, x: v.assign_add(v.value + x * 2)
    each.extended.update(v, add, args=(jnp.ones(4),))
    (first, *_) = each.extended.update(v, add, args=(jnp.ones(4),), group=False)
    is_near(first, [6.0] * 4)
    devices = each.extended.non_slot_devices([v])
    is_near(each.extended.update_non_slot(devices, lambda x: x * 2, args=(jnp.ones(4),)), 2.0)


def test_metrics(each):
    if each.extended.is_default:  # code under it may name the mesh, so JAX's own rules apply
        return
    with each.scope():
        mean, accuracy = dj.metrics.Mean(), dj.metrics.Accuracy()

    def step(x):
        mean.update(x)
        accuracy.update(jnp.eye(3), jnp.array([0, 1, 0]))

    each.run(step, args=(jnp.array([1.0, 2.0, 6.0]),))
    is_near(mean.result(), 3.0)
    is_near(accuracy.result(), np.float32(2) / np.float32(3))
    is_near(dj.jit(mean.result)(), 3.0)
    mean.reset()
    is_near(mean.result(), 0.0)


def test_a_batch_and_an_optimizer(each):
    v = variable(each, jnp.zeros(4), aggregation=MEAN)
    with each.scope():
        optimizer = dj.optim.Optimizer(optax.sgd(1.0), reduce_op="mean")
        optimizer.init([v])
    (batch,) = each.distribute_dataset([np.ones((8, 4), np.float32)])
    is_near(each.reduce("mean", batch, axis=0), [1.0] * 4)
    each.run(lambda x: optimizer.apply_gradients([(-x[0], v)]), args=(batch,))
    is_near(v.value, [1.0] * 4)


def test_steps(each):
    def step(context, x):
        loss = each.run(lambda x: dj.get_replica_context().all_reduce("mean", x), args=(x,))
        context.set_last_step_output("loss", loss)

    elements = iter([jnp.full(2, i, jnp.float32) for i in range(3)])
    context = each.extended.run_steps_on_iterator(step, elements, 3)
    is_near(context.last_step_outputs["loss"], [2.0] * 2)


def test_with_and_without_a_mesh_in_turn():
    """Before 0.12 JAX tells a mesh that was taken away from none: one more trace, once."""
    strategy, traces = dj.VirtualStrategy(2), []
    step = lambda x: traces.append(1) or x * 2
    mesh = Mesh(np.array(DEVICES[:4]), ("x",), axis_types=(AxisType.Auto,))
    for _ in range(3):
        is_near(strategy.run(step, args=(np.ones(2),)), [2.0] * 2)
        with jax.set_mesh(mesh):
            is_near(strategy.run(step, args=(np.ones(2),)), [2.0] * 2)
    assert len(traces) <= 2


def test_model_axes_are_named_in_constraints(mesh):
    strategy = dj.MirroredStrategy(DEVICES[:4], model_axes={"model": 2})

    def step(x):
        y = jnp.outer(x, x)
        return jax.lax.with_sharding_constraint(y, PartitionSpec("model", None))

    out = strategy.run(step, args=(jnp.arange(4.0),))
    is_near(out, np.outer(np.arange(4), np.arange(4)))


def test_code_under_the_default_strategy_names_the_mesh(mesh):
    """`dj.jit` is `jax.jit` there."""
    v = dj.Variable(jnp.ones(4))

    @dj.jit
    def step(x):
        x = jax.sharding.reshard(x, PartitionSpec("x")) if is_explicit else constrained(x)
        v.assign_add(jnp.ones(4))
        return x * 2

    constrained = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("x"))
    is_explicit = AxisType.Explicit in mesh.axis_types
    y = step(jnp.arange(4.0))
    is_near(y, [0, 2, 4, 6])
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("x")), 1)
    is_near(v.value + jnp.ones(4), [3.0] * 4)


def test_an_error_of_the_users_comes_out_as_it_is(mesh):
    def step(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine"):
        dj.jit(step)(jnp.ones(4))


def test_a_strategys_own_mesh():
    strategy = dj.MirroredStrategy(DEVICES[:2])
    with jax.set_mesh(strategy.mesh):
        out = strategy.run(
            lambda x: dj.get_replica_context().all_reduce("sum", x), (ids(strategy),)
        )
    is_near(out, 1.0)
