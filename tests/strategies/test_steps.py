"""run_steps_on_iterator: K steps in one compiled loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import TraceLeakError


def batches(stop, size):
    return [np.arange(i, i + size, dtype=np.int32) for i in range(0, stop, size)]


def half_sums(strategy, iterations, stop=12):
    """The measured case: each replica sums its half of range(stop).batch(4)."""

    def step(context, inputs):
        def replica(x):
            total = jnp.sum(x)
            context.set_last_step_output("mean", total, reduce_op="mean")
            context.set_non_tensor_output("kind", "halves")
            return total

        raw = strategy.run(replica, args=(inputs,))
        context.set_last_step_output("raw", raw)
        context.set_last_step_output("sum", raw, reduce_op=dj.ReduceOp.SUM)
        context.set_non_tensor_output("where", "cross")

    iterator = iter(strategy.distribute_dataset(batches(stop, 4)))
    return strategy.extended.run_steps_on_iterator(step, iterator, iterations)


@pytest.mark.api_row(
    "experimental_run_steps_on_iterator",
    "set_last_step_output",
    "set_non_tensor_output",
    "last_step_outputs",
    "non_tensor_outputs",
    "run_op",
)
@pytest.mark.parametrize(("iterations", "raw"), [(3, (17, 21)), (np.int64(1), (1, 5))])
def test_r325_outputs_of_the_last_step(pair, iterations, raw):
    context = half_sums(pair, iterations)
    outputs = context.last_step_outputs
    assert [int(v) for v in pair.local_results(outputs["raw"])] == list(raw)
    assert float(outputs["mean"]) == sum(raw) / 2
    assert int(outputs["sum"]) == sum(raw)
    assert context.non_tensor_outputs == {"kind": ("halves",), "where": "cross"}
    assert context.iterations == iterations
    assert context.run_op is None


@pytest.mark.parametrize("in_replica", [False, True])
def test_an_op_that_is_none(pair, in_replica):
    def step(context, inputs):
        put = lambda x: context.set_last_step_output("x", x, reduce_op="max")
        return pair.run(put, args=(inputs,)) if in_replica else put(inputs)

    iterator = iter(pair.distribute_dataset(batches(8, 4)))
    with pytest.raises(ValueError, match="^set_last_step_output: reduce_op needs a ReduceOp: "):
        pair.extended.run_steps_on_iterator(step, iterator)


@pytest.mark.api_row("set_last_step_output")
def test_r327_a_replica_needs_a_reduce_op(pair):
    def step(context, inputs):
        pair.run(lambda x: context.set_last_step_output("x", x), args=(inputs,))

    iterator = iter(pair.distribute_dataset(batches(8, 4)))
    with pytest.raises(ValueError, match="needs a reduce_op in a replica context"):
        pair.extended.run_steps_on_iterator(step, iterator)


@pytest.mark.api_row("set_non_tensor_output")
@pytest.mark.parametrize("where", ["cross", "replica", "in a tree"])
def test_a_value_of_the_program_is_no_python_object(pair, where):
    def step(context, inputs):
        keep = lambda x: context.set_non_tensor_output("kept", x)
        if where == "replica":
            pair.run(keep, args=(inputs,))
        else:
            keep(inputs if where == "cross" else {"x": (1, inputs)})

    iterator = iter(pair.distribute_dataset(batches(8, 4)))
    with pytest.raises(TraceLeakError) as caught:
        pair.extended.run_steps_on_iterator(step, iterator)
    text = str(caught.value)
    assert text.startswith("set_non_tensor_output('kept') needs Python objects.\n  Got: a traced v")
    assert text.endswith("Fix: context.set_last_step_output('kept', x, reduce_op='mean')")


def test_the_end_of_the_data(pair):
    """Decision 27: the steps that are left are run; with none left, StopIteration."""
    context = half_sums(pair, iterations=10)
    assert context.iterations == 3
    assert int(context.last_step_outputs["sum"]) == 38
    iterator = iter(pair.distribute_dataset(batches(4, 4)))
    step = lambda context, inputs: None
    assert pair.extended.run_steps_on_iterator(step, iterator).iterations == 1
    with pytest.raises(StopIteration):
        pair.extended.run_steps_on_iterator(step, iterator)


@pytest.mark.parametrize("iterations", [0, -1, 2.0, True])
def test_iterations_is_a_positive_int(pair, iterations):
    with pytest.raises(ValueError, match="iterations needs an int of 1 or more"):
        half_sums(pair, iterations)


@pytest.mark.api_row("initial_loop_values")
def test_initial_loop_values_reach_the_first_step(pair):
    def step(context, inputs):
        before = context.last_step_outputs["steps"]
        context.set_last_step_output("steps", before + 1)

    iterator = iter(pair.distribute_dataset(batches(12, 4)))
    context = pair.extended.run_steps_on_iterator(
        step, iterator, 3, initial_loop_values={"steps": jnp.int32(10)}
    )
    assert int(context.last_step_outputs["steps"]) == 13


def test_outputs_of_the_default_strategys_run():
    strategy = dj.get_strategy()

    def step(context, x):
        def replica(x):
            context.set_last_step_output("mean", jnp.sum(x), reduce_op="mean")
            context.set_last_step_output("kept", x)

        strategy.run(replica, args=(x,))
        context.set_last_step_output("sum", jnp.sum(x), reduce_op="sum")

    outputs = strategy.extended.run_steps_on_iterator(
        step, iter(batches(8, 4)), 2
    ).last_step_outputs
    assert (float(outputs["mean"]), int(outputs["sum"])) == (22.0, 22)
    assert outputs["kept"].tolist() == [4, 5, 6, 7]


def test_any_iterator_of_the_default_strategy():
    strategy = dj.get_strategy()

    def step(context, inputs):
        context.set_last_step_output("x", inputs.sum(), reduce_op="sum")

    context = strategy.extended.run_steps_on_iterator(step, iter(batches(8, 4)), 2)
    assert int(context.last_step_outputs["x"]) == 4 + 5 + 6 + 7
    assert isinstance(context.last_step_outputs["x"], jax.Array)


def sum_steps(iterator, iterations):
    """Returns the number of steps and the sum of all their elements."""
    strategy = dj.get_strategy()
    total = dj.Variable(0, dtype=jnp.int32)
    step = lambda context, inputs: total.assign_add(inputs.sum())
    try:
        context = strategy.extended.run_steps_on_iterator(step, iterator, iterations)
        return context.iterations, int(total.value)
    except OSError as error:
        return str(error), int(total.value)


def test_any_iterator_may_end_with_a_smaller_element():
    elements = [np.ones(4, np.int32), np.ones(4, np.int32), np.ones(2, np.int32)]
    iterator = iter([*elements, *elements])
    assert sum_steps(iterator, 3) == (3, 10)
    assert sum_steps(iterator, 9) == (3, 10)
    with pytest.raises(StopIteration):
        sum_steps(iterator, 1)


def test_any_iterator_may_give_batches_of_a_distributed_dataset(strategy):
    dataset = strategy.distribute_dataset([{"x": np.full(24, i, np.int32)} for i in (1, 2, 3)])
    counted = (batch for batch in dataset)

    def step(context, batch):
        summed = strategy.run(lambda batch: batch["x"].sum(), args=(batch,))
        context.set_last_step_output("x", summed, reduce_op="sum")

    outputs = [
        strategy.extended.run_steps_on_iterator(step, counted, 2).last_step_outputs["x"]
        for _ in range(2)
    ]
    assert outputs == [48, 72]


@pytest.mark.parametrize("call", [dj.jit, jax.jit, lambda f: lambda: dj.check(f)])
def test_not_in_a_trace(pair, call):
    """It would read the iterator once: each call would take the same steps."""
    iterator = iter(batches(8, 4))
    step = lambda context, x: context.set_last_step_output("x", x.sum())
    run = lambda: pair.extended.run_steps_on_iterator(step, iterator).last_step_outputs["x"]
    with pair.scope(), pytest.raises(dj.errors.ContextError) as e:
        call(run)()
    assert str(e.value).startswith("run_steps_on_iterator needs to be called outside of traced")
    assert str(e.value).endswith("strategy.run(step, args=(batch,)), batch)")
    assert list(next(iterator)) == [0, 1, 2, 3]


def test_elements_before_an_error_of_any_iterator_are_used():
    def source():
        yield from [np.ones(4, np.int32), np.ones(4, np.int32)]
        raise OSError("gone")

    assert sum_steps(source(), 3) == ("gone", 8)


def test_a_step_function_that_raises_leaves_variables_as_they_were(pair):
    with pair.scope():
        v = dj.Variable(1.0)

    def step(context, inputs):
        v.assign(2.0)
        raise KeyError("step")

    iterator = iter(pair.distribute_dataset(batches(8, 4)))
    with pytest.raises(KeyError, match="step"):
        pair.extended.run_steps_on_iterator(step, iterator, 2)
    assert float(v.value) == 1.0
