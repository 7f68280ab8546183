"""ZeRO for NNX: split parameters, gradients and moments give what plain NNX gives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import CheckError, LocalityError, TraceLeakError, UnsupportedError
from distjax.testing import hlo
from tests.flax.image_loop import values

#: In one worker, which makes two steps of plain NNX once.
pytestmark = pytest.mark.xdist_group("flax split parameters")

STRATEGIES = {
    "one_device": lambda: dj.OneDeviceStrategy(),
    "virtual2": lambda: dj.VirtualStrategy(2),
    "mirrored2": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    **{
        partition: lambda partition=partition: dj.ShardedStrategy(
            partition=partition, min_split_bytes=0
        )
        for partition in ("optimizer", "gradients", "parameters")
    },
    "central": lambda: dj.CentralStorageStrategy(jax.devices()[:2]),
}
CLIPPED_ADAM = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))


class Block(nnx.Module):
    """A residual layer that counts its calls."""

    def __init__(self, width, rngs):
        self.inner = nnx.Linear(width, width, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x + 0.1 * nnx.relu(self.inner(x))


class Stack(nnx.Module):
    """Equal layers, scanned, and one at the end."""

    def __init__(self, depth, width, rngs):
        make = nnx.vmap(lambda rngs: Block(width, rngs))
        self.blocks = make(rngs.split(depth))
        self.out = nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(dj.flax.scan_layers(lambda block, x: block(x), self.blocks, x))


def build(depth=3, width=16, tx=CLIPPED_ADAM):
    model = Stack(depth, width, nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def step(model, optimizer, x):
    loss_fn = lambda model: jnp.mean(model(x) ** 2)
    loss, grads = dj.flax.value_and_grad(loss_fn)(model)
    dj.flax.apply_gradients(optimizer, model, grads)
    return dj.get_replica_context().all_reduce("mean", loss)


def plain_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def batch(width, size=16):
    return np.random.default_rng(0).normal(size=(size, width)).astype(np.float32)


@pytest.fixture(scope="module")
def plain():
    """Losses and state of two steps of plain NNX, with a clipped norm."""
    state = build(2)
    jitted = nnx.jit(plain_step)
    return [float(jitted(*state, batch(16))) for _ in range(2)], values(state)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_two_steps_are_those_of_plain_nnx(plain, name):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model, optimizer = state = dj.flax.create(lambda: build(2))
    (part,) = strategy.distribute_dataset([batch(16)])
    losses = [float(strategy.run(step, args=(*state, part))) for _ in range(2)]
    np.testing.assert_allclose(losses, plain[0], rtol=1e-5)
    for ours, theirs in zip(values(state), plain[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert np.asarray(model.blocks.calls[...]).tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:a mean over the replicas:distjax.errors.ReductionWarning")
@pytest.mark.parametrize(
    ("name", "op"),
    [("virtual2", "sum"), ("mirrored2", "mean"), ("gradients", "mean"), ("gradients", "sum")],
)
def test_gradients_that_are_reduced_already_are_not_reduced_again(name, op):
    """Unless they are split: then each replica gets its rows of R equal sums."""
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model, optimizer = dj.flax.create(lambda: build(2, tx=optax.sgd(0.1)))
        (part,) = strategy.distribute_dataset([batch(16)])
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)

    def reducing(model, optimizer, x):
        grads = dj.get_replica_context().all_reduce("mean", nnx.grad(loss_fn)(model, x))
        dj.flax.apply_gradients(optimizer, model, grads, op)
        return grads

    explained = dj.explain(reducing, model, optimizer, part, strategy=strategy)
    num_gradients = len(jax.tree.leaves(before))
    num_written = [c.kind for c in explained.written].count("all-reduce")
    assert num_written == (0 if name == "virtual2" else num_gradients)
    grads = strategy.run(reducing, args=(model, optimizer, part))
    factor = strategy.num_replicas_in_sync if op == "sum" else 1
    after, gradients = jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(grads)
    for old, gradient, new in zip(jax.tree.leaves(before), gradients, after, strict=True):
        np.testing.assert_allclose(new, old - 0.1 * factor * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("depth", [3, 8], ids=["split_in_a_layer", "split_along_the_layers"])
def test_layers_and_gradients_are_gathered_and_scattered_once(depth):
    strategy = STRATEGIES["parameters"]()
    with strategy.scope():
        state = dj.flax.create(lambda: build(depth))
        (part,) = strategy.distribute_dataset([batch(16)])
        lowered = dj.jit(lambda *args: strategy.run(step, args=args)).lower(*state, part)
    counts = hlo.count_collectives(lowered.compile().as_text())
    # Kernel and bias of a block, in the forward and the backward loop, and of the last layer.
    assert counts["all-gather"].num_ops <= 6
    assert counts["reduce-scatter"].num_ops == 4
    assert counts["all-reduce"].num_ops <= 2  # the loss and the norm
    # Shards of whole layers become parts of every layer, and their gradients go back.
    assert counts.get("all-to-all", hlo.CollectiveCount(0, 0)).num_ops == (4 if depth == 8 else 0)


def test_one_step_needs_less_than_half_of_the_parameters_on_a_device():
    strategy = STRATEGIES["parameters"]()
    make = lambda: build(depth=12, width=128, tx=optax.sgd(0.1))
    with strategy.scope():
        model, optimizer = dj.flax.create(make)
        (part,) = strategy.distribute_dataset([batch(128)])
        program = dj.jit(lambda *args: strategy.run(step, args=args), donate_argnums=(0, 1))
        analysis = program.lower(model, optimizer, part).compile().memory_analysis()
    whole = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert analysis.argument_size_in_bytes + analysis.temp_size_in_bytes < whole / 2


def test_reading_split_parameters_gathers_them():
    strategy = STRATEGIES["parameters"]()
    with strategy.scope():
        model = dj.flax.create(lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0)))

    def scaled(model):
        model.kernel[...] *= 2
        return model.kernel[...].shape

    before = np.asarray(model.kernel[...])
    assert strategy.run(scaled, args=(model,)) == (16, 8)
    np.testing.assert_array_equal(model.kernel[...], 2 * before)
    assert model.kernel[...].sharding.shard_shape((16, 8)) == (2, 8)


def test_gradients_of_nnx_are_reduced_too():
    strategy = STRATEGIES["parameters"]()

    def local_step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        dj.flax.apply_gradients(optimizer, model, grads)

    make = lambda: build(2)
    with strategy.scope():
        model, optimizer = dj.flax.create(make)
    (part,) = strategy.distribute_dataset([batch(16)])
    strategy.run(local_step, args=(model, optimizer, part))
    expected = make()
    nnx.jit(plain_step)(*expected, batch(16))
    np.testing.assert_allclose(model.out.kernel[...], expected[0].out.kernel[...], atol=1e-5)


def test_gradients_are_applied_in_cross_replica_context(pair):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    (part,) = pair.distribute_dataset([np.arange(4.0, dtype=np.float32).reshape(4, 1)])
    before = np.asarray(model.bias[...])

    @dj.jit
    def whole_step(model, optimizer, x):
        grads = pair.run(
            lambda m, x: nnx.grad(lambda m: (m.bias[...] * x.sum()).sum())(m), args=(model, x)
        )
        dj.flax.apply_gradients(optimizer, model, grads, "sum")

    with pair.scope():
        whole_step(model, optimizer, part)
    np.testing.assert_allclose(model.bias[...], before - 6)


def test_a_module_that_is_no_stack():
    layers = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="scan_layers needs variables of Linear with one leading"):
        dj.flax.scan_layers(lambda layer, x: x, layers, jnp.ones(3))


class Sowing(Block):
    """Makes a variable in its call."""

    def __call__(self, x):
        self.sow(nnx.Intermediate, "input", x)
        return super().__call__(x)


class Setting(Block):
    """Sets an attribute in its call."""

    def __call__(self, x):
        self.input = x
        return super().__call__(x)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(
    ("layer", "error", "text"),
    [
        (Sowing, UnsupportedError, "^scan_layers needs a function that keeps the variables and"),
        (Setting, TraceLeakError, r"^Setting\.input needs to be a variable to hold an array"),
    ],
)
def test_what_a_scanned_layer_adds_is_refused_not_lost(layer, error, text):
    layers = nnx.vmap(lambda rngs: layer(3, rngs))(nnx.Rngs(0).split(2))
    with pytest.raises(error, match=text):
        dj.flax.scan_layers(lambda layer, x: layer(x), layers, jnp.ones(3))


def test_layers_with_a_value_per_replica_are_scanned_in_a_step(pair):
    layers = nnx.vmap(lambda rngs: Block(3, rngs))(nnx.Rngs(0).split(2))
    dj.flax.set_rule(layers, "per_replica", lambda path, v: path[-1] == "calls")
    scan = lambda: dj.flax.scan_layers(lambda layer, x: layer(x), layers, jnp.ones(3))
    pair.run(scan)
    with pytest.raises(LocalityError, match="^scan_layers needs one value of each variable of Bl"):
        scan()
    pair.run(scan)
    assert layers.calls.get_raw_value().stacked.tolist() == [[2, 2], [2, 2]]


# -- what may be done with a shard of a gradient -----------------------------------


def reduced(grads):
    return dj.get_replica_context().all_reduce("mean", grads)


def averaged(grads):
    return jax.lax.pmean(grads, "replica")


def clipped(grads):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)


def as_they_are(grads):
    return grads


def halved(grads):
    return jax.tree.map(lambda g: 0.5 * g, grads)


def clipped_by_the_whole_norm(grads):
    """As in a ZeRO by hand: the squares of all shards add up."""
    squares = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    norm = jnp.sqrt(dj.get_replica_context().all_reduce("sum", squares))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)


def check_step(change, **options):
    strategy = dj.ShardedStrategy(jax.devices()[:4], partition="parameters", min_split_bytes=0)
    with strategy.scope():
        model = dj.flax.create(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    def step(model, optimizer, x):
        _, grads = dj.flax.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        dj.flax.apply_gradients(optimizer, model, change(grads))

    x = strategy.per_replica(np.random.default_rng(0).normal(size=(4, 4, 8)).astype(np.float32))
    dj.check(step, model, optimizer, x, strategy=strategy, **options)


@pytest.mark.parametrize("change", [reduced, averaged, clipped])
def test_what_must_not_be_done_with_shards_is_found(change):
    with pytest.raises(CheckError, match="error: numbers that depend on the number of replicas"):
        check_step(change)


def test_a_clip_by_the_norm_of_a_shard_breaks_a_rule():
    with pytest.raises(CheckError, match="warning: clipped before the reduction"):
        check_step(clipped, rules_only=True)


WHOLE_NORM = pytest.param(
    clipped_by_the_whole_norm,
    marks=pytest.mark.xfail(strict=True, reason="one replica's shard is not the whole"),
)


@pytest.mark.parametrize("change", [as_they_are, halved, WHOLE_NORM])
def test_what_may_be_done_with_shards_is_silent(change):
    check_step(change)


@pytest.mark.parametrize("change", [as_they_are, halved, clipped_by_the_whole_norm])
def test_what_may_be_done_with_shards_breaks_no_rule(change):
    check_step(change, rules_only=True)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_gradient_that_is_broadcast_is_reduced_first(pair, shape):
    """As optax broadcasts it; every replica subtracts the mean."""
    model = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.zeros((2, 3))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)

    def step(model, optimizer):
        number = dj.get_replica_context().replica_id_in_sync_group
        grads = nnx.State({"kernel": nnx.Param(jnp.full(shape, number, jnp.float32))})
        dj.flax.apply_gradients(optimizer, model, grads)

    pair.run(step, args=(model, optimizer))
    copies = [np.asarray(shard.data) for shard in model.kernel[...].addressable_shards]
    np.testing.assert_array_equal(copies, np.full((len(copies), 2, 3), -0.5))
