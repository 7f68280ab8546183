"""A layout of the user's own class works wherever a mirrored one does, with the same values."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax.parts import one_device_topology
from tests.drill_mark import all_drills_but
from tests.replicas import ids
from tests.strategies.own_layouts import LAYOUTS, OwnStrategy, four_devices

#: In one worker, which makes the values of mirrored strategies once.
pytestmark = pytest.mark.xdist_group("strategies own layouts")

W = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
B = np.arange(3, dtype=np.float32)
X = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
AGG = dj.VariableAggregation


def variable(strategy, value=W, **options):
    with strategy.scope():
        return dj.Variable(value, **options)


def creation(strategy):
    """From arrays, functions, another variable, and inside of traced functions."""
    first = variable(strategy)
    made = []

    def in_replica():
        if not made:
            made.append(dj.Variable(lambda: jnp.asarray(W) * 2))
        return made[0].value

    def in_cross_replica():
        if len(made) < 2:
            made.append(dj.Variable(jnp.asarray(W) * 3))
        return made[1].value

    results = strategy.run(in_replica)
    with strategy.scope():
        results = results, dj.jit(in_cross_replica)()
        of_function, of_variable = dj.Variable(lambda: jnp.ones((4, 6))), dj.Variable(first)
    copied = copy.deepcopy(first)
    first.assign(W * 0)
    return results, [v.value for v in (*made, of_function, of_variable, copied, first)]


def writes(strategy):
    """By each aggregation and method in a replica, then across replicas; seen and after."""
    found, methods = [], ("assign", "assign_add", "assign_sub")
    for aggregation in (AGG.SUM, AGG.MEAN, AGG.ONLY_FIRST_REPLICA):
        v = variable(strategy, aggregation=aggregation)
        held = v.value

        def step(r, v=v):
            write = lambda method: (getattr(v, method)(jnp.full(W.shape, r + 1)), v.value)
            return v.value, [write(method) for method in methods]

        found += [strategy.run(step, args=(ids(strategy),)), v.value, held]
        found += [(getattr(v, method)(W), v.value) for method in methods]
    return found


def truth_values_and_integers(strategy):
    flags = variable(strategy, np.zeros((4, 6), bool), aggregation=AGG.SUM)
    numbers = variable(strategy, np.zeros((4, 6), np.int32), aggregation=AGG.SUM)

    def step(r):
        flags.assign(jnp.broadcast_to(jnp.arange(6) == r, (4, 6)))
        numbers.assign_add(jnp.full((4, 6), 2 * r.astype(jnp.int32)))

    strategy.run(step, args=(ids(strategy),))
    return flags.value, numbers.value


def updates(strategy):
    v = variable(strategy)
    add = lambda v, x: v.assign_add(x)
    results = [strategy.extended.update(v, add, args=(W,))]
    results.append(strategy.extended.update(v, add, args=(W,), group=False)[0])
    results.append(dj.jit(lambda: strategy.extended.update(v, add, args=(W,)))())
    with pytest.raises(ZeroDivisionError):
        strategy.extended.update(v, lambda v: (v.assign(W), 1 / 0))
    return results, v.local_results()[0], strategy.extended.read_var(v)


def reductions(strategy):
    extended, v = strategy.extended, variable(strategy)
    local = strategy.run(lambda r: (r + 1) * v.value, args=(ids(strategy),))
    results = [extended.reduce_to(op, local, v) for op in ("sum", "mean")]
    results += extended.batch_reduce_to("sum", [(local, v), (ids(strategy), None)])
    results.append(dj.jit(lambda x: extended.reduce_to("mean", x, v))(local))
    return [*results, strategy.reduce("mean", v), strategy.gather(v, 0)]


def merge_calls(strategy):
    v = variable(strategy)

    def merge(strategy, g):
        g = strategy.extended.reduce_to("mean", g, v)
        strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(g,))
        return v.value

    def step(r):
        seen = dj.get_replica_context().merge_call(merge, args=(r * v.value,))
        return seen, v.value

    def loop(r):
        dj.lax.fori_loop(0, 3, lambda i, x: (step(r), x)[1], 0)
        return v.value

    both = dj.jit(lambda r: (strategy.run(step, args=(r,)), strategy.run(loop, args=(r,))))
    with strategy.scope():
        return both(ids(strategy)), v.value


def train(strategy, **options):
    """Three steps of Adam, from gradients of a loss of its own on each replica."""
    w, b = variable(strategy), variable(strategy, B)
    optimizer = dj.optim.Optimizer(optax.adam(0.1), reduce_op="mean", **options)
    with strategy.scope():
        optimizer.init([w, b])

    def step(x):
        loss = lambda w, b: jnp.mean((x @ w) ** 2) + jnp.sum((b - 1) ** 2)
        grads = jax.grad(loss, argnums=(0, 1))(w.value, b.value)
        optimizer.apply_gradients(zip(grads, [w, b], strict=True))

    (batch,) = strategy.distribute_dataset([X])
    for _ in range(4):
        strategy.run(step, args=(batch,))
    return w.value, b.value


def checkpoints(strategy, tmp_path):
    v, other = variable(strategy, name="v"), variable(strategy, W * 0, name="v")
    v.assign_add(W)
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"v": v})
        v.assign(W * 0)
        checkpointer.restore({"v": other})
    strategy.run(lambda: other.value)
    return v.value, other.value


class Model(nnx.Module):
    """Matrices, vectors, statistics, and equal layers to be scanned."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
        self.layers = make(rngs.split(2))
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 6, rngs=rngs)

    def __call__(self, x):
        apply = lambda layer, x: jnp.tanh(layer(x))
        return self.out(self.norm(dj.flax.scan_layers(apply, self.layers, x)))


def modules(strategy, value_and_grad, apply):
    with strategy.scope():
        model = dj.flax.create(lambda: Model(nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)

    def step(model, optimizer, x):
        loss, grads = value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        apply(optimizer, model, grads)
        return dj.get_replica_context().all_reduce("mean", loss)

    (batch,) = strategy.distribute_dataset([X])
    losses = [strategy.run(step, args=(model, optimizer, batch)) for _ in range(2)]
    with strategy.scope():
        losses.append(dj.jit(lambda m: m.out.kernel[...] * 2)(model))
    model.eval()
    return losses, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model))), model(X)


def plain_gradients(strategy):
    reduced = lambda grads: dj.get_replica_context().all_reduce("mean", grads)
    return modules(strategy, nnx.value_and_grad, lambda o, m, g: o.update(m, reduced(g)))


def split_gradients(strategy):
    return modules(strategy, dj.flax.value_and_grad, dj.flax.apply_gradients)


def scaled_gradients(strategy):
    scale = dj.flax.LossScale(8.0)
    return modules(strategy, dj.flax.value_and_grad, scale.apply_gradients)


SCENARIOS = {
    "creation": creation,
    "writes": writes,
    "dtypes": truth_values_and_integers,
    "updates": updates,
    "reductions": reductions,
    "merge_calls": merge_calls,
    "optimizer": train,
    "accumulation": functools.partial(train, accumulate_steps=2),
    "split_gradients": split_gradients,
    "plain_gradients": plain_gradients,
    "scaled_gradients": scaled_gradients,
}
FEW = {"plain_gradients": {"flipped", "stacked_blocks"}, "scaled_gradients": {"blocks"}}
CASES = [(x, name) for name in SCENARIOS for x in LAYOUTS if x in FEW.get(name, LAYOUTS)]
TOPOLOGIES = {
    "mesh": four_devices,
    "one_device": lambda: one_device_topology(jax.devices()[0], 4, dj.REPLICA_AXIS),
}
MIRRORED = {
    "mesh": lambda: dj.MirroredStrategy(jax.devices()[:4]),
    "one_device": lambda: dj.VirtualStrategy(4),
}


def play(name, strategy):
    """Returns the values of a scenario, a PerReplica as the list of its values."""
    values = SCENARIOS[name](strategy)
    is_leaf = lambda x: isinstance(x, dj.PerReplica)
    leaf = lambda x: list(map(np.asarray, strategy.local_results(x))) if is_leaf(x) else x
    return jax.tree.map(np.asarray, jax.tree.map(leaf, values, is_leaf=is_leaf))


@functools.cache
def expected(name, on):
    strategy = MIRRORED[on]()
    return play(name, strategy)


def assert_equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


@pytest.mark.parametrize(("layout", "name"), all_drills_but(CASES[::2], CASES))
def test_values_are_those_of_a_mirrored_strategy(layout, name):
    strategy = OwnStrategy(four_devices(), LAYOUTS[layout])
    assert_equal(play(name, strategy), expected(name, "mesh"))


@pytest.mark.parametrize("name", ["writes", "optimizer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_where_replicas_share_a_device(layout, name):
    strategy = OwnStrategy(TOPOLOGIES["one_device"](), LAYOUTS[layout])
    assert_equal(play(name, strategy), expected(name, "one_device"))


@pytest.mark.parametrize("name", ["reductions", "optimizer", "accumulation", "split_gradients"])
@pytest.mark.parametrize("layout", ["blocks", "stacked_blocks"])
def test_values_where_gradients_arrive_whole(layout, name):
    strategy = OwnStrategy(four_devices(), LAYOUTS[layout], reduces_alike=False)
    assert_equal(play(name, strategy), expected(name, "mesh"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_restored(layout, tmp_path):
    strategy = OwnStrategy(four_devices(), LAYOUTS[layout])
    zero, restored = checkpoints(strategy, tmp_path)
    np.testing.assert_array_equal(zero, 0 * W)
    np.testing.assert_array_equal(restored, 2 * W)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_stored_is_what_the_layout_says(layout):
    """After each kind of write: by an eager one, a program of a strategy, an update."""
    strategy = OwnStrategy(four_devices(), LAYOUTS[layout])
    own = LAYOUTS[layout](strategy.extended.topology)
    v = variable(strategy, aggregation=AGG.MEAN)

    def check():
        assert v.storage.sharding == own.sharding
        np.testing.assert_array_equal(v.storage, own.to_stored(jnp.asarray(v.value)))

    check()
    v.assign_add(W)
    check()
    strategy.run(lambda r: v.assign_add(jnp.full(W.shape, r)), args=(ids(strategy),))
    check()
    dj.jit(lambda: strategy.extended.update(v, lambda v: v.assign_add(W)))()
    check()
    (described,) = strategy.describe().variables
    assert described.placement == str(own)
    assert dj.locality(v).kind == own.kind
    assert len(v.local_results()) == own.num_copies


@pytest.mark.parametrize("layout", ["blocks", "stacked_blocks"])
def test_shards_are_gathered_and_scattered(layout):
    """ZeRO-3 by shards of one's own: one all-gather of what is read, one reduce-scatter."""
    strategy = OwnStrategy(four_devices(), LAYOUTS[layout])
    v = variable(strategy, aggregation=AGG.SUM)

    def add(r):
        v.assign_add(r * v.value)

    step = dj.jit(lambda r: strategy.run(add, args=(r,)))
    counts = dj.explain(step, ids(strategy)).written_counts
    assert {name: c.num_ops for name, c in counts.items()} == {"all-gather": 1, "reduce-scatter": 1}


@pytest.mark.parametrize(("layout", "kind"), [("flipped", (4, 6)), ("blocks", (2, 3))])
def test_a_module_stores_its_arrays_as_they_are(layout, kind):
    strategy = OwnStrategy(four_devices(), LAYOUTS[layout])
    with strategy.scope():
        module = dj.flax.create(lambda: nnx.Linear(4, 6, rngs=nnx.Rngs(0)))
    kernel = module.kernel[...]
    np.testing.assert_array_equal(kernel, nnx.Linear(4, 6, rngs=nnx.Rngs(0)).kernel[...])
    assert kernel.addressable_shards[0].data.shape == kind
