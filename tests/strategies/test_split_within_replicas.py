"""Variables that the devices of a replica hold in parts: `sharding=`, model axes times ZeRO."""

import copy
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from benchmarks import model_axes
from benchmarks.split_models import transformer
from tests.drill_mark import first_of_each
from tests.strategies.eight_bits import eight_bit_adam

AXES = {"model": 2}
MAKE = {"mirrored": lambda **options: dj.MirroredStrategy(**options)} | {
    part: lambda part=part, **options: dj.ShardedStrategy(
        partition=part, min_split_bytes=0, **options
    )
    for part in model_axes.PARTITIONS
}


@pytest.fixture
def four_by_two():
    return dj.MirroredStrategy(model_axes=AXES)


@pytest.fixture(params=list(MAKE))
def each(request):
    return MAKE[request.param](model_axes=AXES)


@pytest.fixture
def compilations():
    """The names of the programs that XLA compiles."""
    names = []

    class Handler(logging.Handler):
        def emit(self, record):
            text = record.getMessage()
            if text.startswith("Finished XLA compilation of "):
                names.append(text.removeprefix("Finished XLA compilation of ").split(" ")[0])

    handler, logger = Handler(), logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    logger.propagate = False
    with jax.log_compiles():
        yield names
    logger.removeHandler(handler)
    logger.propagate = True


def made(strategy, value, **options):
    with strategy.scope():
        return dj.Variable(value, name="w", **options)


def parts(array):
    return {shard.data.shape for shard in array.addressable_shards}


# -- the program ----------------------------------------------------------------


@pytest.mark.parametrize("size", model_axes.SIZES, ids=str)
def test_the_program_is_the_one_written_by_hand(size):
    """Collectives by kind and axis, their bytes, state, temporary and donated memory."""
    strategy = dj.MirroredStrategy(model_axes={"model": size[1]})
    assert model_axes.variables(strategy).cost() == model_axes.by_hand(*size).cost()


@pytest.mark.parametrize("part", model_axes.PARTITIONS)
def test_zero_adds_only_collectives_over_the_replicas(part):
    cost = model_axes.variables(MAKE[part](model_axes=AXES)).cost()
    on_each = 4 * (16 * 64 // 2 * 2 + 64 // 2 + 16)  # a device's parameters
    split = on_each - 4 * 64 // 2  # all but the bias "b", whose only axis the model axis has
    kept = on_each - split + split // 4
    over = lambda kind, axis: tuple(cost.collectives.get((kind, axis), (0, 0)))
    assert over("all-reduce", "model")[1] == 4 * (8 * 16 + 3)  # activations, and three norms
    assert over("all-gather", "replica") == (3, split)
    assert {axis for _, axis in cost.collectives} == {"model", "replica"}
    if part == "optimizer":
        assert over("all-reduce", "replica") == (1, on_each + 4)
    else:
        assert over("reduce-scatter", "replica") == (3, split // 4)
        assert over("all-reduce", "replica")[1] <= 144
    assert cost.state_bytes == (kept if part == "parameters" else on_each) + 2 * kept + 4
    assert cost.donated_bytes == cost.state_bytes


@functools.cache
def transformer_by_hand():
    """A transformer, its losses on one device, and what the program written by hand costs."""
    task = transformer()
    return task, model_axes.on_one_device(3, 4, task=task), model_axes.by_hand(4, 2, task).cost()


@pytest.mark.drill
@pytest.mark.parametrize("form", ["mirrored", "parameters"])
def test_a_transformer_moves_and_holds_no_more_than_by_hand(form):
    """Heads and dense layers split as in the language model example; ZeRO-3 by hand is XLA's."""
    task, on_one_device, expected = transformer_by_hand()
    training = model_axes.variables(MAKE[form](model_axes=AXES), task=task)
    losses = [float(training.step(*task.batch(4))) for _ in range(3)]
    np.testing.assert_allclose(losses, on_one_device, rtol=1e-6)
    cost = training.cost()
    over = lambda cost, axis: sum(n[1] for key, n in cost.collectives.items() if key[1] == axis)
    assert over(cost, "model") == over(expected, "model")
    assert cost.donated_bytes == cost.state_bytes
    on_each = (expected.state_bytes - 4) // 3  # parameters, and two moments
    if form == "mirrored":
        assert over(cost, "replica") <= over(expected, "replica")
        assert cost.state_bytes == expected.state_bytes
        assert cost.temp_bytes <= expected.temp_bytes
    else:
        assert cost.collectives["all-gather", "replica"].result_bytes <= on_each
        assert cost.collectives["reduce-scatter", "replica"].result_bytes <= on_each // 4
        assert cost.state_bytes < expected.state_bytes / 3.9
        assert cost.temp_bytes <= expected.temp_bytes + on_each


OPTIMIZERS = {
    "adamw": model_axes.OPTIMIZER,
    "lamb": optax.lamb(1e-2),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "8 bit": eight_bit_adam(1e-2),
}


CURVES = [
    *(("parameters", name) for name in OPTIMIZERS),
    *(("mirrored", "adamw"), ("optimizer", "lamb"), ("gradients", "multi_steps")),
    *(("mirrored", "ema"), ("optimizer", "adafactor"), ("gradients", "8 bit")),
]


@functools.cache
def on_one_device(name="adamw"):
    """The losses of four steps."""
    return model_axes.on_one_device(4, 4, OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("each", "name"), first_of_each(lambda curve: curve[0], CURVES), indirect=["each"]
)
def test_the_curve_is_that_of_one_device(each, name):
    training = model_axes.variables(each, OPTIMIZERS[name])
    batch = model_axes.MLP.batch(4)
    losses = [float(training.step(*batch)) for _ in range(4)]
    expected = on_one_device(name)
    # Sums in another order may round a moment to the next of 255 numbers.
    np.testing.assert_allclose(losses, expected, atol=1e-4 if name == "8 bit" else 1e-6)


OPTIONS = {
    "packed": dj.CommunicationOptions(bytes_per_pack=2**20),
    "compressed": dj.CommunicationOptions(compress="bfloat16"),
    "two_levels": dj.CommunicationOptions(devices_per_host=2),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_reductions_that_cut_and_join_leave_the_model_axis_alone(name):
    strategy = dj.MirroredStrategy(model_axes=AXES, communication=OPTIONS[name])
    found = model_axes.variables(strategy).cost().collectives
    assert {key: c for key, c in found.items() if key[1] == "model"} == {
        ("all-reduce", "model"): (2, 4 * (8 * 16 + 3))
    }


def test_central_storage_splits_on_the_devices():
    """One copy in host memory; in a step each device of a replica has its part."""
    central = dj.CentralStorageStrategy(model_axes=AXES)
    training = model_axes.variables(central)
    batch = model_axes.MLP.batch(4)
    losses = [float(training.step(*batch)) for _ in range(4)]
    np.testing.assert_allclose(losses, on_one_device(), atol=1e-6)
    found = {v.name: v.host_bytes for v in central.describe().variables}
    assert found["up"] == found["up/mu"] == 4 * 16 * 64
    collectives = training.cost().collectives
    assert collectives["all-reduce", "model"] == (2, 4 * (8 * 16 + 3)), "as by hand"
    model = model_axes.modules(dj.CentralStorageStrategy(model_axes=AXES))
    losses = [float(model.step(*batch)) for _ in range(4)]
    np.testing.assert_allclose(losses, on_one_device(), atol=1e-6)


def test_bfloat16(each):
    """XLA on CPU aborts where it reduces bfloat16 over some axes only."""
    variable = made(each, jnp.ones((8, 8), jnp.bfloat16), sharding=P(None, "model"))

    def step(x):
        grad = jax.grad(lambda w: jnp.sum((x @ w) ** 2) / 2)(variable.value)
        optimizer.apply_gradients([(grad, variable)])

    optimizer = dj.optim.Optimizer(optax.sgd(1.0), "mean")
    optimizer.init([variable])
    each.run(step, args=(each.per_replica(jnp.full((4, 1, 8), 0.25, jnp.bfloat16)),))
    assert variable.dtype == jnp.bfloat16
    np.testing.assert_array_equal(variable.value, np.full((8, 8), 0.5))


def test_bfloat16_parameters_with_narrow_moments(each):
    """Parameters and Adam's moments in bfloat16: the numbers of one device, where each is whole."""

    def trained(strategy):
        w = made(strategy, jnp.linspace(-1, 1, 96).reshape(8, 12), sharding=P(None, "model"))
        narrow = made(strategy, w.value.astype(jnp.bfloat16), sharding=P(None, "model"))
        optimizer = dj.optim.Optimizer(optax.adam(0.05, mu_dtype=jnp.bfloat16), "mean")
        optimizer.init([w, narrow])

        def step(x):
            loss = lambda w, n: jnp.mean((jnp.tanh(x @ w) @ n.T.astype(jnp.float32) - 1) ** 2)
            value, grads = jax.value_and_grad(loss, (0, 1))(w.value, narrow.value)
            optimizer.apply_gradients(zip(grads, [w, narrow], strict=True))
            return dj.get_replica_context().all_reduce("mean", value)

        (x,) = strategy.distribute_dataset([np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)])
        losses = [float(strategy.run(step, (x,))) for _ in range(4)]
        return losses, optimizer.state[0].mu[1]

    losses, moment = trained(each)
    expected, _ = trained(dj.OneDeviceStrategy())
    np.testing.assert_allclose(losses, expected, rtol=2e-3)  # bfloat16 rounds by 4e-3
    assert moment.dtype == jnp.bfloat16
    assert moment.storage.addressable_shards[0].data.size <= 8 * 12 // 2


# -- where it lives ---------------------------------------------------------------


def test_each_device_holds_its_part(each):
    weights = made(each, np.arange(32.0).reshape(4, 8), sharding=P(None, "model"))
    is_split = each.extended.placement.layout((4, 8), jnp.float32).kind == "partitioned"
    assert parts(weights.value) == {(1, 4) if is_split else (4, 4)}
    np.testing.assert_array_equal(weights.value, np.arange(32.0).reshape(4, 8))


@pytest.mark.parametrize(
    "value", [np.ones((4, 8)), jnp.ones((4, 8)), lambda: jnp.ones((4, 8))], ids=["np", "jnp", "fn"]
)
@pytest.mark.parametrize("write", ["assign", "assign_add", "update", "step", "copy"])
def test_writes_keep_it_there(four_by_two, value, write, compilations):
    weights = made(four_by_two, value, sharding=P(None, "model"))
    new = np.full((4, 8), 2.0, np.float32)

    def step():
        weights.assign(weights.value + 1)

    if write == "copy":
        weights = copy.deepcopy(weights)
    for _ in range(3):
        if write == "assign":
            weights.assign(new)
        elif write == "assign_add":
            weights.assign_add(new)
        elif write == "update":
            four_by_two.extended.update(weights, lambda v: v.assign(new))
        elif write == "step":
            dj.jit(step)()
        assert weights.value.sharding == NamedSharding(four_by_two.mesh, P(None, "model"))


def test_slots_lie_like_their_variable(each):
    weights = made(each, np.ones((4, 8), np.float32), sharding=P(None, "model"))
    optimizer = dj.optim.Optimizer(optax.adam(0.1))
    optimizer.init([weights])
    moment = optimizer.state[0].mu[0]
    assert {s[1] for s in parts(moment.value)} == {4}
    assert "each split P(None, 'model')" in moment.describe().placement


def test_what_describe_says(four_by_two):
    made(four_by_two, np.ones((4, 8), np.float32), sharding=P(None, "model"))
    kept = made(four_by_two, np.ones((4, 8), np.float32), sharding=P(None, "model")).describe()
    assert kept.placement == "mirrored, each split P(None, 'model')"
    assert kept.bytes_per_device == 64
    sharded = made(MAKE["parameters"](model_axes=AXES), np.ones((4, 8)), sharding=P(None, "model"))
    assert sharded.describe().placement == "partitioned on axis 0, each split P(None, 'model')"
    bias = made(MAKE["parameters"](model_axes=AXES), np.ones(8), sharding=P("model"))
    why = "the model axes have all of its axes"
    assert bias.describe().placement == f"mirrored, each split P('model') ({why})"


def test_several_axes():
    strategy = dj.MirroredStrategy(model_axes={"x": 2, "y": 2, "one": 1})
    weights = made(strategy, np.ones((4, 8)), sharding=P(("x", "y"), "one"))
    assert weights.value.sharding == NamedSharding(strategy.mesh, P(("x", "y")))
    assert parts(weights.value) == {(1, 8)}


def test_made_in_a_step(each):
    kept = []

    def step():
        if not kept:
            kept.append(dj.Variable(jnp.ones((4, 8)), sharding=P(None, "model")))
        return kept[0].value.sum()

    each.run(step)
    assert {s[1] for s in parts(kept[0].value)} == {4}


def test_whole_is_whole(four_by_two):
    """P() pins what a step would otherwise split by propagation."""
    mean = dj.VariableAggregation.MEAN
    weights = made(four_by_two, jnp.ones((4, 8)), sharding=P(), aggregation=mean)

    def step():
        weights.assign(jax.lax.with_sharding_constraint(weights.value * 2, P(None, "model")))

    four_by_two.run(step)
    assert weights.value.sharding.is_fully_replicated


def test_what_a_step_splits_is_told_and_kept(four_by_two, compilations):
    weights = made(four_by_two, jnp.ones((4, 8)), aggregation=dj.VariableAggregation.MEAN)
    assert weights.describe().placement == "mirrored"

    def step():
        weights.assign(jax.lax.with_sharding_constraint(weights.value * 2, P(None, "model")))

    train = dj.jit(lambda: four_by_two.run(step))
    for _ in range(3):
        train()
    weights.assign(np.ones((4, 8)))
    train()
    assert compilations.count("jit(<lambda>)") == 2  # whole, then split
    assert weights.describe().placement == "mirrored, each split P(None, 'model')"


# -- arrays that come split ----------------------------------------------------------


def test_an_array_of_the_mesh_keeps_its_sharding(each):
    value = jax.device_put(np.ones((4, 8)), NamedSharding(each.mesh, P(None, "model")))
    assert "each split P(None, 'model')" in made(each, value).describe().placement


def test_an_array_of_another_mesh_is_adopted_by_axis_names(four_by_two):
    other = jax.make_mesh((2, 4), ("model", "data"))
    value = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(other, P("data", "model")))
    weights = made(four_by_two, value)
    assert weights.value.sharding == NamedSharding(four_by_two.mesh, P(None, "model"))


def test_an_array_split_over_other_axes_is_warned_of(four_by_two):
    other = jax.make_mesh((8,), ("tensor",))
    value = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(other, P(None, "tensor")))
    with pytest.warns(dj.errors.LocalityWarning, match="over the model axes 'model' of size 2"):
        weights = made(four_by_two, value)
    assert weights.value.sharding.is_fully_replicated


# -- anywhere ---------------------------------------------------------------------


def test_annotated_code_runs_on_any_strategy(strategy):
    with strategy.scope():
        weights = dj.Variable(np.ones((4, 6), np.float32), sharding=P(None, "model"))
        again = dj.Variable(np.ones((4, 6), np.float32))
    np.testing.assert_array_equal(weights.value, again.value)
    if not getattr(strategy.extended.topology, "model_axes", ()):
        assert dj.locality(weights) == dj.locality(again)


def test_without_a_strategy():
    weights = dj.Variable(np.ones((4, 6), np.float32), sharding=P("model"))
    np.testing.assert_array_equal(weights.value, np.ones((4, 6)))


# -- what is refused ----------------------------------------------------------------

REFUSED = {
    "an unknown axis": (P("tensor"), (4, 8), "an axis 'tensor'"),
    "an axis twice": (P("model", "model"), (4, 8), "'model' twice"),
    "too many entries": (P(None, None, "model"), (4, 8), "3 entries for a value with 2 axes"),
    "an odd size": (P("model"), (7, 8), "axis 0 of size 7 over 2 devices"),
    "a scalar": (P("model"), (), "1 entries for a value with 0 axes"),
    "the replica axis": (P("replica"), (4, 8), "the replica axis 'replica'"),
    "both axes": (P(None, ("model", "replica")), (4, 8), "the replica axis 'replica'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_specs_that_do_not_fit(each, case):
    spec, shape, got = REFUSED[case]
    with pytest.raises(ValueError, match="needs a sharding over the model axes that fits") as error:
        made(each, np.ones(shape), sharding=spec)
    text = str(error.value)
    assert got in text
    if shape:  # the spec that is named fits
        fitting = P("model") if case == "an axis twice" else P(None, "model")
        assert f"sharding=P({', '.join(map(repr, fitting))}) fits its shape" in text
        made(each, np.ones(shape), sharding=fitting)
    else:
        assert "sharding=P() keeps it whole" in text
    if case in ("the replica axis", "both axes"):
        assert "ShardedStrategy(partition='parameters')" in text


def test_a_sharding_of_another_mesh(four_by_two):
    other = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "model"))
    with pytest.raises(ValueError, match="a NamedSharding of another mesh"):
        made(four_by_two, np.ones((4, 8)), sharding=NamedSharding(other, P("model")))
    own = NamedSharding(four_by_two.mesh, P("model"))
    assert made(four_by_two, np.ones((4, 8)), sharding=own).value.sharding == own


def test_a_name_is_no_spec(strategy):
    with strategy.scope(), pytest.raises(TypeError, match="needs a PartitionSpec as sharding"):
        dj.Variable(np.ones((4, 8)), sharding="model")


def test_a_component_of_each_replica_is_whole(four_by_two):
    with pytest.raises(ValueError, match="needs no sharding, as a sync-on-read variable"):
        made(
            four_by_two,
            np.ones((4, 8)),
            sharding=P("model"),
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )


# -- proofs, and other tools -----------------------------------------------------------


def test_a_map_over_the_model_axis_keeps_proofs(four_by_two):
    def step(x):
        total = dj.get_replica_context().all_reduce("sum", x)
        own = jax.shard_map(
            lambda x: x * 2, in_specs=P("model"), out_specs=P("model"), axis_names={"model"}
        )
        return own(total)

    out = four_by_two.run(step, args=(four_by_two.per_replica(jnp.ones((4, 8))),))
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(out, np.full(8, 8.0))


def test_collectives_over_the_model_axis_keep_proofs(four_by_two):
    """Megatron's second layer by hand: each device's rows, and a sum over the devices."""
    rng = np.random.default_rng(0)
    down, hidden = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 4), (3, 8)))

    def step(hidden, down, x):
        own = lambda h, w: jax.lax.psum(h @ w, "model") * (jax.lax.axis_size("model") - 1)
        by_hand = jax.shard_map(
            own, in_specs=(P(None, "model"), P("model")), out_specs=P(), axis_names={"model"}
        )
        return by_hand(hidden, down), by_hand(hidden + x, down)

    ones = four_by_two.per_replica(jnp.arange(4.0))
    equal, differs = four_by_two.run(step, args=(hidden, down, ones))
    np.testing.assert_allclose(equal, hidden @ down, rtol=1e-5)
    assert isinstance(differs, dj.PerReplica)


def test_copies_that_differ_are_found(four_by_two):
    weights = made(four_by_two, np.ones((4, 8), np.float32), sharding=P(None, "model"))
    four_by_two.assert_mirrored(weights)
    sharding = weights.value.sharding
    own = [
        jax.device_put(np.full((4, 4), float(d.id == 5)), d) for d in four_by_two.mesh.devices.flat
    ]
    drifted = jax.make_array_from_single_device_arrays((4, 8), sharding, own)
    with pytest.raises(dj.errors.LocalityError, match="replica 2"):
        four_by_two.assert_mirrored(drifted)


def test_a_value_split_over_the_replicas_is_refused(four_by_two):
    value = jax.device_put(jnp.arange(4.0), NamedSharding(four_by_two.mesh, P("replica")))
    with pytest.raises(dj.errors.LocalityError):
        four_by_two.reduce("sum", value)


def test_explain_tells_the_axes(each):
    weights = made(each, np.ones((4, 8), np.float32), sharding=P("model"))
    optimizer = dj.optim.Optimizer(optax.sgd(0.1), "mean")
    optimizer.init([weights])

    def step(x):
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights.value)
        optimizer.apply_gradients([(grad, weights)])

    found = dj.explain(step, each.per_replica(jnp.ones((4, 3, 4))), strategy=each)
    assert {c.over for c in found.written} == {"replica"}
    assert {c.over for c in found.compiled} == {"replica", "model"}
    assert "over" in str(found)


LAYOUTS = {
    "4x2": lambda: dj.MirroredStrategy(model_axes={"model": 2}),
    "2x4": lambda: dj.MirroredStrategy(model_axes={"model": 4}),
    "8": lambda: dj.MirroredStrategy(),
    "1x8": lambda: dj.MirroredStrategy(model_axes={"model": 8}),
    "zero 3, 4x2": lambda: dj.ShardedStrategy(
        partition="parameters", model_axes={"model": 2}, min_split_bytes=0
    ),
    "virtual": lambda: dj.VirtualStrategy(2),
}


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", ["4x2", "zero 3, 4x2"])
def test_checkpoints_from_any_layout_to_any_other(checkpointer, before, after):
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    saved = made(LAYOUTS[before](), value, sharding=P(None, "model"))
    checkpointer.save(1, {"w": saved})
    restored = made(LAYOUTS[after](), np.zeros((8, 8), np.float32), sharding=P(None, "model"))
    where = dj.locality(restored)
    checkpointer.restore({"w": restored})
    np.testing.assert_array_equal(restored.value, value)
    assert dj.locality(restored) == where
    assert restored.value.sharding == restored.sharding
