"""NNX modules whose arrays the devices of a replica hold in parts."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from benchmarks import model_axes
from tests.strategies.test_split_within_replicas import MAKE, OPTIMIZERS, compilations, parts

__all__ = ["compilations"]

AXES = {"model": 2}
SPLIT = {"kernel": P(None, "model")}


@pytest.fixture
def four_by_two():
    return dj.MirroredStrategy(model_axes=AXES)


@pytest.fixture(params=list(MAKE))
def each(request):
    return MAKE[request.param](model_axes=AXES)


def linear():
    return nnx.Linear(4, 8, rngs=nnx.Rngs(0))


def named(*names):
    make = nnx.with_partitioning(nnx.initializers.ones_init(), names)
    return lambda: nnx.Linear(4, 8, kernel_init=make, rngs=nnx.Rngs(0))


def placed(strategy, module, **options):
    with strategy.scope():
        return dj.flax.place(module, **options)


# -- the program ------------------------------------------------------------------

FORMS = {
    "logical axes": {},
    "by path": {"by_path": True},
    "by path, optimizer first": {"by_path": True, "optimizer_first": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_program_written_by_hand(four_by_two, form):
    cost = model_axes.modules(four_by_two, **FORMS[form]).cost()
    expected = model_axes.by_hand(4, 2).cost()
    assert cost.collectives == expected.collectives
    assert cost.temp_bytes == expected.temp_bytes
    assert cost.state_bytes == expected.state_bytes + model_axes.COUNTER_BYTES
    assert cost.donated_bytes == cost.state_bytes


def test_arrays_as_arguments_give_it_too(four_by_two):
    """As an Equinox model after `filter_shard`, or a linen TrainState, passes them."""
    assert model_axes.arguments(four_by_two).cost() == model_axes.by_hand(4, 2).cost()


@pytest.mark.parametrize(
    ("each", "name"),
    [*zip(MAKE, ["adamw", "multi_steps", "adamw", "multi_steps"], strict=True)],
    indirect=["each"],
)
def test_the_curve_is_that_of_one_device(each, name, compilations):
    training = model_axes.modules(each, OPTIMIZERS[name])
    losses = [float(training.step(*model_axes.MLP.batch(4))) for _ in range(4)]
    expected = model_axes.on_one_device(4, 4, OPTIMIZERS[name])
    np.testing.assert_allclose(losses, expected, atol=1e-6)
    assert compilations.count("jit(call)") <= 2  # one ahead of time, one for the calls


def test_scanned_layers(each):
    """A stack whose layers are gathered one by one, each with its part of the columns."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    make = nnx.vmap(lambda rngs: Block(rngs))
    rules = {r"up\.kernel": P(None, None, "model"), r"down\.kernel": P(None, "model")}

    def run(model, x):
        return jnp.mean(dj.flax.scan_layers(lambda layer, x: layer(x), model, x) ** 2)

    def step(model, optimizer, x):
        loss, grads = dj.flax.value_and_grad(run)(model, x)
        dj.flax.apply_gradients(optimizer, model, grads)
        return dj.get_replica_context().all_reduce("mean", loss)

    x = np.random.default_rng(0).normal(size=(4, 4, 8)).astype(np.float32)
    losses = {}
    for strategy in (each, None):
        model = make(nnx.Rngs(0).split(4))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        if strategy is None:
            train = functools.partial(step, model, optimizer, x.reshape(16, 8))
        else:
            placed(strategy, (model, optimizer), rules=rules)
            run_step = dj.jit(lambda m, o, x: each.run(step, args=(m, o, x)))
            train = functools.partial(run_step, model, optimizer, strategy.per_replica(x))
        losses[strategy is None] = [float(train()) for _ in range(3)]
    np.testing.assert_allclose(losses[False], losses[True], atol=1e-6)


# -- what says it -------------------------------------------------------------------


def test_metadata_name_model_axes(each):
    with each.scope():
        model = dj.flax.create(named(None, "model"))
    assert {s[1] for s in parts(model.kernel[...])} == {4}


def test_logical_rules_outlive_their_block(four_by_two):
    with nnx.use_eager_sharding(False):
        model = named("embed", "mlp")()
    with nnx.logical_axis_rules([("mlp", "model"), ("embed", None)]):
        placed(four_by_two, model)
    assert parts(model.kernel[...]) == {(4, 4)}
    out = four_by_two.run(lambda model: model(jnp.ones((1, 4))).sum(), args=(model,))
    np.testing.assert_allclose(out, 32.0)


def test_optimizer_state_follows(each):
    model = placed(each, linear(), rules=SPLIT)
    optimizer = placed(each, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param))
    assert {s[1] for s in parts(optimizer.opt_state[0].mu["kernel"][...])} == {4}


def test_the_first_rule_that_finds_a_path_counts(four_by_two):
    model = placed(four_by_two, linear(), rules={"k.rnel": P("model"), "kernel|bias": P("model")})
    with pytest.raises(ValueError, match="finds none"):
        placed(four_by_two, linear(), rules={"kernel": P("model"), "kernel$": P(None, "model")})
    assert parts(model.kernel[...]) == {(2, 8)}
    assert parts(model.bias[...]) == {(4,)}


def test_arrays_that_came_split_stay_split(each):
    model = linear()
    other = jax.make_mesh((4, 2), ("data", "model"))
    value = jax.device_put(model.kernel[...], NamedSharding(other, P("data", "model")))
    model.kernel.set_raw_value(value)
    placed(each, model)
    optimizer = placed(each, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param))
    for array in (model.kernel[...], optimizer.opt_state[0].mu["kernel"][...]):
        assert {s[1] for s in parts(array)} == {4}


def test_modules_go_to_other_strategies(four_by_two):
    """What is split is the module's: it comes back where there are model axes again."""
    model = placed(four_by_two, linear(), rules=SPLIT)
    placed(dj.MirroredStrategy(), model)
    assert parts(model.kernel[...]) == {(4, 8)}
    placed(dj.MirroredStrategy(model_axes={"model": 4}), model)
    assert parts(model.kernel[...]) == {(4, 2)}
    placed(MAKE["parameters"](model_axes=AXES), model)
    assert parts(model.kernel[...]) == {(1, 4)}


def test_annotated_code_runs_on_any_strategy(strategy):
    with strategy.scope():
        model = dj.flax.create(linear, rules=SPLIT)
        np.testing.assert_allclose(model.kernel[...], linear().kernel[...])


def test_no_array_is_moved_again(four_by_two, monkeypatch):
    """Also of a module that says nothing and is split by its step."""
    moved = []
    model = placed(four_by_two, linear())

    def step(model):
        model.kernel[...] = jax.lax.with_sharding_constraint(model.kernel[...], P(None, "model"))

    monkeypatch.setattr(
        "distjax._src.flax.plans.transfer", lambda value, place: moved.append(value) or value
    )
    for _ in range(3):
        four_by_two.run(step, args=(model,))
    assert not moved
    assert parts(model.kernel[...]) == {(4, 4)}
    assert "each split P(None, 'model')" in str(four_by_two.describe())


def test_modules_that_only_pass_a_jit_are_described(each):
    model = linear()
    train = dj.jit(lambda model: each.run(lambda model: model(jnp.ones((1, 4))), args=(model,)))
    train(model)
    assert "Linear.kernel" in {v.name for v in each.describe().variables}


# -- what is refused ------------------------------------------------------------------


def test_a_rule_that_finds_nothing(four_by_two):
    with pytest.raises(ValueError, match="'kernl' finds none") as error:
        placed(four_by_two, linear(), rules={"kernl": P("model")})
    assert "Got: variables bias, kernel" in str(error.value)


def test_a_rule_that_does_not_fit(four_by_two):
    model = nnx.Linear(7, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="axis 0 of size 7 over 2 devices") as error:
        placed(four_by_two, model, rules={"bias": P("model"), "kernel": P("model")})
    assert "kernel, by the rule 'kernel', needs a sharding" in str(error.value)
    assert "Fix: rules={'kernel': P(None, 'model')} fits its shape; " in str(error.value)
    assert "rules={'kernel': P()} keeps it whole on each device" in str(error.value)
    placed(four_by_two, model)
    assert parts(model.bias[...]) == {(8,)}  # nothing was written


def test_a_rule_that_is_no_spec(four_by_two):
    with pytest.raises(TypeError, match="needs a PartitionSpec") as error:
        placed(four_by_two, linear(), rules={"kernel": "model"})
    assert "Fix: rules={'kernel': P(None, 'model')}, with from" in str(error.value)


def test_metadata_that_name_another_axis(four_by_two):
    with four_by_two.scope(), pytest.raises(ValueError, match="an axis 'mlp'") as error:
        dj.flax.create(named(None, "mlp"))
    assert "logical_axis_rules" in str(error.value)


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        ((None, "model"), "rules={'layer.kernel': P()} keeps it whole on each device"),  # 3 columns
        (("model", "replica"), "rules={'layer.kernel': P('model')} fits"),  # what of it can stay
    ],
)
def test_metadata_that_do_not_fit_name_the_variable(four_by_two, names, fix):
    kernel_init = nnx.with_partitioning(nnx.initializers.ones_init(), names)
    sizes = (3, 3) if names[0] is None else (4, 8)
    make = lambda: nnx.Linear(*sizes, kernel_init=kernel_init, rngs=nnx.Rngs(0))
    with four_by_two.scope(), pytest.raises(ValueError, match=r"^Param layer\.kernel") as error:
        dj.flax.create(lambda: {"layer": make()})
    assert fix in str(error.value)
    assert ("logical_axis_rules" in str(error.value)) == ("replica" in names)


@pytest.mark.parametrize("use", ["place", "run"])
def test_the_fix_of_metadata_that_do_not_fit_works(four_by_two, use):
    kernel_init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "model"))
    with nnx.use_eager_sharding(False):
        model = nnx.Linear(4, 3, kernel_init=kernel_init, rngs=nnx.Rngs(0))
    step = lambda model: model(jnp.ones((1, 4)))
    with pytest.raises(ValueError, match=r"^Param kernel needs a sharding") as error:
        placed(four_by_two, model) if use == "place" else four_by_two.run(step, args=(model,))
    fix = re.search(r"rules=(\{.*?\}) fits its shape", str(error.value))[1]
    placed(four_by_two, model, rules=eval(fix))
    assert parts(model.kernel[...]) == {(2, 3)}
    np.testing.assert_allclose(four_by_two.run(step, args=(model,)), [[4, 4, 4]])


def test_an_array_split_over_other_axes_is_warned_of(four_by_two):
    model = linear()
    other = jax.make_mesh((8,), ("tensor",))
    model.kernel.set_raw_value(
        jax.device_put(model.kernel[...], NamedSharding(other, P(None, "tensor")))
    )
    with pytest.warns(dj.errors.LocalityWarning, match="kernel needs a sharding over the model"):
        placed(four_by_two, model)
    assert parts(model.kernel[...]) == {(4, 8)}
