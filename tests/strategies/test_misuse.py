"""Arguments of another kind than a method takes: what the errors say."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.compat import v1_13
from distjax.errors import LocalityError
from tests.replicas import ids


def refused(error, text, call):
    with pytest.raises(error) as caught:
        call()
    lines = str(caught.value).splitlines()
    parts = [line.split(":")[0].strip() for line in lines[1:]]
    assert (lines[0], parts) == (text, ["Got", "Why", "Fix"])


CALLS = {
    "run": lambda s, fn: s.run(fn),
    "merge_call": lambda s, fn: s.run(lambda: dj.get_replica_context().merge_call(fn)),
    "update": lambda s, fn: s.extended.update(None, fn),
    "update_non_slot": lambda s, fn: s.extended.update_non_slot((), fn),
    "run_steps_on_iterator": lambda s, fn: s.extended.run_steps_on_iterator(fn, iter([])),
    "distribute_values_from_function": lambda s, fn: s.distribute_values_from_function(fn),
    "distribute_datasets_from_function": lambda s, fn: s.distribute_datasets_from_function(fn),
    "jit": lambda s, fn: dj.jit(fn),
    "explain": lambda s, fn: dj.explain(fn),
}


@pytest.mark.parametrize("method", CALLS)
def test_what_is_no_function(pair, method):
    refused(TypeError, f"{method} needs a function.", lambda: CALLS[method](pair, 3))


@pytest.mark.parametrize("method", ["run", "merge_call", "distribute_datasets_from_function"])
def test_what_is_no_function_for_the_default_strategy(method):
    call = lambda: CALLS[method](dj.get_strategy(), 3)
    refused(TypeError, f"{method} needs a function.", call)


@pytest.mark.parametrize("wrong", [3, "mirrored", dj.MirroredStrategy, v1_13.OneDeviceStrategy()])
def test_what_is_no_strategy(pair, wrong):
    dj.set_strategy(pair)
    text = "set_strategy needs a distjax strategy, or None."
    refused(TypeError, text, lambda: dj.set_strategy(wrong))
    assert dj.get_strategy() is pair
    dj.set_strategy(None)


@pytest.mark.parametrize("dataset", [None, [np.ones(2)], "distributed"])
def test_steps_need_an_iterator(pair, dataset):
    """A dataset would begin anew in each call."""
    if dataset == "distributed":
        dataset = pair.distribute_dataset([np.ones(2)])
    run = lambda: pair.extended.run_steps_on_iterator(lambda context, x: None, dataset)
    refused(TypeError, "run_steps_on_iterator needs an iterator.", run)


def test_initial_loop_values_are_named(pair):
    iterator = iter([np.ones(2)])
    text = "run_steps_on_iterator: initial_loop_values needs a dict, or None."
    run = lambda: pair.extended.run_steps_on_iterator(lambda context, x: None, iterator, 1, [0.0])
    refused(TypeError, text, run)
    assert next(iterator) is not None  # nothing was taken


DIFFERS = "set_last_step_output gets PerReplica of shape () and dtype float32."


@pytest.mark.parametrize(
    ("initial", "output", "got"),
    [
        (0.0, lambda s, x: s.run(jnp.sum, args=(x,)), DIFFERS),
        ([0.0, 0.0], lambda s, x: s.run(jnp.sum, args=(x,)), DIFFERS),
        (0.0, lambda s, x: jnp.ones(3), "traced float32[]; set_last_step_output gets traced float"),
        (None, lambda s, x: 1.0, "NoneType (None); set_last_step_output gets traced float32[]"),
    ],
)
def test_an_initial_loop_value_has_the_form_of_the_output(pair, initial, output, got):
    def step(context, x):
        context.set_last_step_output("loss", output(pair, x))

    iterator = iter(pair.distribute_dataset([np.ones(2, np.float32)]))
    run = lambda: pair.extended.run_steps_on_iterator(step, iterator, 1, {"loss": initial})
    text = "run_steps_on_iterator: initial_loop_values['loss'] needs the form of the output."
    with pytest.raises(TypeError, match=f"^{re.escape(text)}") as e:
        run()
    assert got in str(e.value)
    assert ("set_last_step_output('loss', output, 'mean')" in str(e.value)) == (got is DIFFERS)


@pytest.mark.parametrize("output", ["text", {"a": object()}])
def test_an_output_of_steps_that_is_no_array(pair, output):
    def step(context, x):
        context.set_last_step_output("kind", output)

    text = "set_last_step_output('kind') needs arrays and numbers."
    run = lambda: pair.extended.run_steps_on_iterator(step, iter([np.ones(2)]))
    refused(TypeError, text, run)


@pytest.mark.parametrize("make", [dj.MirroredStrategy, lambda **o: dj.VirtualStrategy(2, **o)])
@pytest.mark.parametrize("name", [3, "", None])
def test_an_axis_name_that_is_no_string(make, name):
    refused(ValueError, "axis_name needs a string.", lambda: make(axis_name=name))


@pytest.mark.parametrize("axes", [["model"], {"model": "two"}, {"model": True}, {1: 2}, 2])
def test_model_axes_that_are_no_sizes(axes):
    text = "model_axes needs a dict from names to sizes of 1 or more."
    refused(ValueError, text, lambda: dj.MirroredStrategy(model_axes=axes))


def test_communication_that_is_no_options():
    text = "communication needs a dj.CommunicationOptions, or None."
    refused(TypeError, text, lambda: dj.MirroredStrategy(communication={"bytes_per_pack": 4}))


def test_a_partitioner_that_is_no_function():
    text = "ShardedStrategy: partitioner needs a function of shape and dtype, or None."
    refused(TypeError, text, lambda: dj.ShardedStrategy(partitioner=2))


@pytest.mark.parametrize("shards", [3, None, [2], [2, 1, 1], ["two", 1], [-1, 1]])
def test_what_a_partitioner_returns(shards):
    devices = jax.devices()[:2]
    options = dict(partition="parameters", partitioner=lambda shape, dtype: shards)
    strategy = dj.ShardedStrategy(devices, **options)
    text = "ShardedStrategy: partitioner needs to return a number of shards for each axis."
    with strategy.scope():
        refused(ValueError, text, lambda: dj.Variable(np.ones((4, 2))))


def test_explain_for_what_is_no_strategy():
    text = "explain needs a distjax strategy, or None."
    refused(TypeError, text, lambda: dj.explain(lambda: 1, strategy=3))


@pytest.mark.parametrize("numbers", ["x", (0, "y"), (True,)])
def test_donated_arguments_are_numbers(numbers):
    text = "jit: donate_argnums needs numbers of positional arguments."
    refused(ValueError, text, lambda: dj.jit(lambda x, y: x, donate_argnums=numbers))


@pytest.mark.parametrize("pairs", [None, 3])
def test_pairs_that_are_no_sequence(pair, pairs):
    text = "batch_reduce_to needs a sequence of (value, destinations) pairs."
    for strategy in (pair, dj.get_strategy()):
        refused(ValueError, text, lambda: strategy.extended.batch_reduce_to("sum", pairs))  # noqa: B023


def test_an_array_in_place_of_non_slot_devices(pair):
    text = "update_non_slot needs the tuple of devices that non_slot_devices returns."
    update = lambda: pair.extended.update_non_slot(jnp.ones(2), lambda: 1)
    refused(ValueError, text, update)
    with pair.scope(), pytest.raises(LocalityError, match="^`colocate_vars_with` must only be pa"):
        pair.extended.colocate_vars_with(jnp.ones(2)).__enter__()


def test_values_of_other_replicas_are_named_by_their_role(pair):
    alien, own = ids(dj.VirtualStrategy(3)), ids(pair)
    calls = {
        "value to reduce": lambda: pair.reduce("sum", alien),
        "mask": lambda: pair.reduce("sum", own, mask=alien),
        "value to gather": lambda: pair.gather(alien, axis=0),
    }
    for role, call in calls.items():
        with pytest.raises(LocalityError, match=f"^the {role} needs a PerReplica over 2 replicas"):
            call()


@pytest.mark.parametrize("number", [2**40, -(2**31) - 1, 2**70])
def test_a_value_of_a_replica_is_an_int_that_jax_holds(pair, number):
    refused(
        OverflowError,
        "distribute_values_from_function needs numbers that int32 holds.",
        lambda: pair.distribute_values_from_function(lambda ctx: number),
    )


def test_a_variable_of_other_replicas_is_no_value_of_these(pair):
    """Decision 24: its components are a value of each of the others."""
    modes = {"synchronization": dj.VariableSynchronization.ON_READ}
    with dj.MirroredStrategy(jax.devices()[:3]).scope():
        alien = dj.Variable(np.ones(2), aggregation=dj.VariableAggregation.SUM, **modes)
    for strategy in (pair, dj.get_strategy(), dj.CentralStorageStrategy(jax.devices()[:2])):
        count = strategy.num_replicas_in_sync
        calls = {
            "value to reduce": lambda s=strategy: s.reduce("sum", alien),
            "mask": lambda s=strategy: s.reduce("mean", np.ones(2), mask=alien),
            "value to gather": lambda s=strategy: s.gather(alien, axis=0),
        }
        for role, call in calls.items():
            text = f"^the {role} needs a PerReplica over {count} replicas"
            with pytest.raises(LocalityError, match=text):
                call()


@pytest.mark.parametrize("owner", ["default", "mirrored", "one_device"])
def test_a_variable_elsewhere_is_reduced_as_its_value(pair, owner):
    """Decision 6: a mean of what lies elsewhere is the value, and so is what is gathered."""
    owners = {
        "default": dj.get_strategy(),
        "mirrored": dj.MirroredStrategy(jax.devices()[:3]),
        "one_device": dj.OneDeviceStrategy(jax.devices()[5]),
    }
    with owners[owner].scope():
        v = dj.Variable(np.arange(2.0, dtype=np.float32))
    two_each = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2})
    for strategy in (pair, two_each, dj.CentralStorageStrategy(jax.devices()[:2])):
        for call in (
            lambda x, s=strategy: s.reduce("mean", x),
            lambda x, s=strategy: s.reduce("mean", {"x": x})["x"],
            lambda x, s=strategy: s.reduce("mean", x, axis=0),
            lambda x, s=strategy: s.reduce("mean", x, mask=np.array([True, False])),
            lambda x, s=strategy: s.extended.reduce_to("mean", x, None),
            lambda x, s=strategy: s.gather(x, axis=0),
        ):
            np.testing.assert_array_equal(call(v), call(v.value))


def test_pickle_of_a_strategy(strategy):
    with pytest.raises(TypeError) as caught:
        pickle.dumps({"strategy": strategy})
    assert str(caught.value) == (
        f"{strategy!r} needs to stay in its process.\n"
        "  Got: pickle of a strategy, or of what holds one.\n"
        "  Why: its devices, variables and compiled programs belong to this process.\n"
        f"  Fix: construct a {type(strategy).__name__} there, and take the state with "
        "dj.checkpoint.Checkpointer(directory): save(step, tree) here, restore(tree) there"
    )
