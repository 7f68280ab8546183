"""ZeRO where R divides no axis: stored with zeros behind, which nobody else ever sees."""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import distjax as dj
from distjax._src.placement.topology import abstract_topology
from distjax._src.strategies.sharded import ShardedPlacement
from tests.drill_mark import all_drills_but
from tests.strategies.eight_bits import eight_bit_adam

RNG = np.random.default_rng(0)
W = RNG.normal(size=(13, 7)).astype(np.float32)
START = {"w": W, "b": W[0] * 0.1, "u": W[:7, :5]}
X = RNG.normal(size=(24, 13)).astype(np.float32)


def sharded(count=8, partition="parameters", **options):
    options = {"min_split_bytes": 0, **options}
    return dj.ShardedStrategy(jax.devices()[:count], partition=partition, **options)


class Training:
    """Variables with odd sizes, their optimizer, and what `steps` of it make of them."""

    def __init__(self, strategy, tx, **options):
        self.strategy = strategy
        with strategy.scope():
            self.params = {k: dj.Variable(v, name=k) for k, v in START.items()}
        self.optimizer = dj.optim.Optimizer(tx, "mean", **options)
        self.optimizer.init(self.params)
        (self.batch,) = strategy.distribute_dataset([X])

    def replica_step(self, x):
        def loss_fn(p):
            return jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) @ p["u"] - 1) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)({k: v.value for k, v in self.params.items()})
        self.optimizer.apply_gradients([(grads, self.params)])
        return dj.get_replica_context().all_reduce("mean", loss)

    def steps(self, num=3):
        losses = [float(self.strategy.run(self.replica_step, (self.batch,))) for _ in range(num)]
        return losses, {k: np.asarray(v.value) for k, v in self.params.items()}

    def variables(self):
        return [v for v in jax.tree.leaves(self.optimizer.state) if isinstance(v, dj.Variable)]


#: What looks at all of a leaf, or at its shape: norms, means of rows, random numbers, blocks.
OPTIMIZERS = {
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)),
    "lamb": lambda: optax.lamb(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    "noisy": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.01)),
    "every second": lambda: optax.MultiSteps(optax.adam(0.01), 2),
    "8 bit": eight_bit_adam,
}


@pytest.mark.parametrize("name", all_drills_but(["adafactor", "noisy", "8 bit"], OPTIMIZERS))
def test_optimizers_see_no_padding(name):
    losses, params = Training(dj.OneDeviceStrategy(), OPTIMIZERS[name]()).steps()
    others = (("optimizer", 2), ("gradients", 3)) if name == "clipped adam" else ()
    for partition, count in (("parameters", 8), *others):
        training = Training(sharded(count, partition), OPTIMIZERS[name]())
        got_losses, got = training.steps()
        np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
        for key, value in params.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
        for v in training.variables():
            if dj.locality(v).kind == "partitioned":
                axis = v.layout.axis
                assert v.storage.shape[axis] % count == 0
                behind = np.take(v.storage, range(v.shape[axis], v.storage.shape[axis]), axis)
                assert not behind.any(), "padding stays zero"


def test_accumulated_gradients_are_padded_too():
    whole = Training(dj.MirroredStrategy(jax.devices()[:8]), optax.adam(0.01), accumulate_steps=2)
    losses, params = whole.steps(4)
    split = Training(sharded(), optax.adam(0.01), accumulate_steps=2)
    got_losses, got = split.steps(4)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(got["w"], params["w"], rtol=1e-4, atol=1e-6)
    assert {dj.locality(v).kind for v in split.optimizer.accumulators[:3]} == {"partitioned"}


def test_what_a_step_sends():
    """Each shard once: as much as if R divided the axis, and nothing is gathered for a norm."""
    training = Training(sharded(), OPTIMIZERS["clipped adam"]())
    found = dj.explain(training.replica_step, training.batch, strategy=training.strategy)
    moved = sorted((c.kind, c.result_bytes) for c in found.compiled)
    padded = [4 * 13 * 8, 4 * 8, 4 * 8 * 5]
    gathered = sum(size for kind, size in moved if kind == "all-gather")
    assert gathered <= sum(padded)
    assert sum(size for kind, size in moved if kind == "reduce-scatter") == sum(padded) // 8
    assert {kind for kind, _ in moved} == {"all-gather", "reduce-scatter", "all-reduce"}


def test_values_are_logical():
    strategy = sharded()
    with strategy.scope():
        v = dj.Variable(W, name="v")
        made = dj.Variable(lambda: jax.random.normal(jax.random.key(0), (13, 7)), name="made")
    assert v.shape == v.value.shape == (13, 7)
    assert v.storage.shape == (13, 8), "7 needs less padding than 13"
    assert v.storage.addressable_shards[0].data.shape == (13, 1)
    np.testing.assert_array_equal(made.value, jax.random.normal(jax.random.key(0), (13, 7)))
    held = v.value
    v.assign(2 * W)
    v.assign_add(W)
    np.testing.assert_array_equal(held, W)
    np.testing.assert_allclose(v.value, 3 * W, rtol=1e-6)
    seen = strategy.run(lambda: (v.value.shape, jnp.sum(v.value**2)))
    np.testing.assert_allclose(seen[1], np.sum((3 * W) ** 2), rtol=1e-5)
    total = dj.jit(lambda: (jnp.linalg.norm(v.value), jnp.max(-jnp.abs(v.value) - 1)))()
    np.testing.assert_allclose(total[0], np.linalg.norm(3 * W), rtol=1e-5)
    assert total[1] < -1, "a zero would be greater"
    text = "partitioned on axis 1, 7 padded to 8"
    assert (v.describe().placement, v.describe().bytes_per_device) == (text, 4 * 13)


def test_eager_reductions_to_a_variable_are_whole():
    """No array outside of a program can be split where R does not divide it."""
    strategy = sharded()
    with strategy.scope():
        v = dj.Variable(W)
    grads = strategy.distribute_values_from_function(lambda ctx: W)
    reduced = strategy.extended.reduce_to("sum", grads, v)
    np.testing.assert_allclose(reduced, 8 * W, rtol=1e-6)
    np.testing.assert_array_equal(strategy.reduce("mean", v.value), W)


@pytest.mark.parametrize("first", ["zero 8", "mirrored"])
def test_checkpoints_go_from_any_r_to_any_other(first, tmp_path):
    makes = {
        "zero 8": sharded,
        "zero 3": lambda: sharded(3),
        "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
        "zero 1, 4 x 2": lambda: sharded(8, "optimizer", model_axes={"model": 2}),
    }
    state = Training(makes[first](), optax.adam(0.01))
    losses, expected = state.steps(2)
    mean = np.asarray(state.optimizer.state[0].mu["w"].value)
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"params": state.params, "optimizer": state.optimizer})
    for make in makes.values():
        again = Training(make(), optax.adam(0.01))
        with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore({"params": again.params, "optimizer": again.optimizer})
            arrays = {k: np.zeros_like(v) for k, v in START.items()}
            plain = checkpointer.restore({"params": arrays}, partial=True)["params"]
        for key, value in expected.items():
            np.testing.assert_array_equal(again.params[key].value, value)
            np.testing.assert_array_equal(plain[key], value)
        np.testing.assert_array_equal(again.optimizer.state[0].mu["w"].value, mean)
        assert again.steps(1)[0][0] < losses[-1]


def test_a_checkpoint_is_written_and_read_shard_by_shard(tmp_path, monkeypatch):
    """No array of a variable's whole size is made."""
    state = Training(sharded(), optax.adam(0.01))
    monkeypatch.setattr(type(state.params["w"]), "value", property(lambda self: 1 / 0))
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"params": state.params})
        checkpointer.restore({"params": state.params})
    assert state.params["w"].storage.addressable_shards[0].data.shape == (13, 1)


def test_files_hold_no_padding(tmp_path):
    """What else reads them, as orbax does alone, finds the values, and no zeros behind them."""
    state = Training(sharded(), optax.adam(0.01))
    state.steps(1)
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"params": state.params, "made by": {"a/b.c %": state.params["u"]}})
    with warnings.catch_warnings(), ocp.PyTreeCheckpointer() as reader:
        warnings.simplefilter("ignore")  # it is told no shardings
        found = reader.restore(tmp_path / "1" / "values")
    values = {f"params/{k}": v.value for k, v in state.params.items()}
    values["made by/a/b.c %"] = state.params["u"].value
    assert {k: x.shape for k, x in found.items()} == {k: x.shape for k, x in values.items()}
    for key, value in values.items():
        np.testing.assert_array_equal(found[key], value)


# -- on pods: what a device holds, without devices ---------------------------------------------

#: A small transformer; 3 layers are stacked.
SHAPES = {
    "embedding": (50257, 770),
    "projections": (3, 770, 2310),
    "up": (770, 3074),
    "bias": (3074,),
    "square": (770, 770),
    "kernels": (3, 3, 259, 517),
}


@pytest.mark.parametrize("count", [256, 1024])
@pytest.mark.parametrize("spec", [None, P(None, "model")])
def test_nothing_over_the_threshold_is_whole(count, spec):
    topology = dataclasses.replace(abstract_topology(count, "replica"), model_axes=(("model", 4),))
    placement = ShardedPlacement(topology, "parameters", None, 64 << 10)
    for name, shape in SHAPES.items():
        own = None if spec is None or len(shape) != 2 else spec
        layout = placement.layout(shape, jnp.float32, spec=own)
        if name == "bias":
            assert str(layout) == "mirrored (not over 64.0 KiB)"
            continue
        stored = layout.stored_shape(shape)
        assert stored[layout.axis] % count == 0
        assert math.prod(layout.local_form.local_shape(shape)) == math.prod(stored) // count
        parts = shape[layout.axis] / -(-shape[layout.axis] // count)
        assert parts > min(count, max(shape)) / 3, "little padding, where an axis is long enough"
        assert own is None or layout.axis == 0, "the model axis has the other"
        in_module = layout.unencoded(shape)
        free = shape if own is None else shape[:1]
        is_prime_to_it = all(math.gcd(n, count) == 1 for n in free)
        assert in_module.kind == ("mirrored" if is_prime_to_it else "partitioned")


# -- what stays whole --------------------------------------------------------------------------


def test_arrays_up_to_64_kib_stay_whole():
    strategy = dj.ShardedStrategy(partition="parameters")
    with strategy.scope():
        small, large = dj.Variable(jnp.zeros((128, 128))), dj.Variable(jnp.zeros((128, 129)))
        count = dj.Variable(0)
    optimizer = dj.optim.Optimizer(optax.adam(1.0))
    optimizer.init([small, large])
    (moment,) = (m for m in optimizer.state[0].mu if m.shape == small.shape)
    for v in (small, moment):
        assert v.describe().placement == "mirrored (not over 64.0 KiB)"
    assert large.describe().placement == "partitioned on axis 0"
    assert count.describe().placement == "mirrored"
    text = str(dj.explain(lambda: small.value.sum() + large.value.sum(), strategy=strategy))
    assert "mirrored (not over 64.0 KiB)" in text


def test_the_threshold_can_be_set():
    for options, kind in (
        ({"min_split_bytes": 0}, "partitioned"),
        ({"min_split_bytes": 63}, "partitioned"),
        ({"min_split_bytes": 64}, "mirrored"),
        ({"partitioner": dj.parts.FixedShards(8)}, "partitioned"),
        ({"partitioner": dj.parts.FixedShards(8), "min_split_bytes": 64}, "mirrored"),
    ):
        strategy = dj.ShardedStrategy(partition="parameters", **options)
        with strategy.scope():
            assert dj.locality(dj.Variable(jnp.zeros(16))).kind == kind, options


def test_a_slot_goes_with_its_variable():
    """An int8 moment of a split variable is split, a wide one of a small variable too."""
    strategy = dj.ShardedStrategy(partition="parameters")
    with strategy.scope():
        wide = dj.Variable(jnp.zeros((128, 136)))
        with strategy.extended.colocate_vars_with(wide):
            numbers = dj.Variable(jnp.zeros((128, 136), jnp.int8))
            scale = dj.Variable(jnp.zeros(128))
        narrow = dj.Variable(jnp.zeros((128, 136), jnp.bfloat16))
        with strategy.extended.colocate_vars_with(narrow):
            moment = dj.Variable(jnp.zeros((128, 136)))
    kinds = [dj.locality(v).kind for v in (wide, numbers, scale, narrow, moment)]
    assert kinds == ["partitioned", "partitioned", "mirrored", "mirrored", "partitioned"]


def test_a_threshold_that_is_no_size():
    with pytest.raises(ValueError, match="ShardedStrategy: min_split_bytes needs an int of 0 or"):
        dj.ShardedStrategy(min_split_bytes=-1)


def test_without_jit_and_in_checks():
    """What runs a step in another way pads and cuts, too."""
    expected, _ = Training(sharded(), optax.adam(0.01)).steps(2)
    training = Training(sharded(), optax.adam(0.01))
    dj.check(training.replica_step, training.batch, strategy=training.strategy)
    with jax.disable_jit():
        losses, _ = training.steps(2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
