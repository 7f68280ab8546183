"""Objects come back from a program as the function left them, whatever it did."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import UnsupportedError
from distjax.testing import hlo
from tests.flax.image_loop import values
from tests.replicas import ids


class Pair(nnx.Module):
    """Two names for one layer."""

    def __init__(self, rngs):
        self.first = nnx.Linear(2, 2, rngs=rngs)
        self.second = self.first


def test_shared_references_stay_shared(pair, how):
    model = Pair(nnx.Rngs(0))
    other = nnx.List([model.first])

    def step(model, other):
        model.first.bias[...] += 1
        other[0].bias[...] += 1
        return model.second.bias[...]

    out = how(lambda m, o: pair.run(step, args=(m, o)))(model, other)
    assert np.asarray(out).tolist() == [2, 2]
    assert model.first is model.second is other[0]
    assert np.asarray(model.first.bias[...]).tolist() == [2, 2]


def test_several_runs_in_one_program(pair, how):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def add(model, x):
        model.bias[...] += dj.get_replica_context().all_reduce("sum", x)

    @how
    def step(model, x):
        pair.run(add, args=(model, x))
        model.bias[...] *= 2
        pair.run(add, args=(model, x))
        return model.bias[...]

    out = step(model, ids(pair))
    assert np.asarray(out).tolist() == np.asarray(model.bias[...]).tolist() == [3, 3]


def test_returned_variables_of_an_object_are_its_own(pair, how):
    """So an update by the returned state, which a loop in pure JAX makes, changes nothing."""
    metric, rngs = nnx.metrics.Average(), nnx.Rngs(0)
    key = jax.random.key_data(rngs.default.key[...])

    def step(metric, rngs, x):
        metric.update(values=x)
        rngs()
        return nnx.state((metric, rngs)), metric.count

    step = how(lambda *args, step=step: pair.run(step, args=args))
    for number in (1, 2):
        state, count = step(metric, rngs, ids(pair))
        assert count is metric.count and int(count[...]) == 2 * number
        nnx.update((metric, rngs), state)
    assert float(metric.compute()) == 0.5
    np.testing.assert_array_equal(jax.random.key_data(rngs.default.key[...]), key)
    assert int(rngs.default.count[...]) == 2


def test_a_variable_that_a_step_takes_out_is_returned_by_value(pair, how):
    box = nnx.Dict(kept=nnx.Param(jnp.zeros(2)), seen=nnx.Intermediate(jnp.zeros(())))

    def step(box, x):
        box["seen"][...] = x
        return nnx.pop(box, nnx.Intermediate)

    out = how(lambda box, x: pair.run(step, args=(box, x)))(box, ids(pair))
    values = pair.local_results(out["seen"].get_raw_value())
    assert [float(value) for value in values] == [0, 1]
    assert list(nnx.state(box)) == ["kept"]


def test_a_result_that_is_an_object_is_the_users_own(pair, how):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    step = how(lambda m: pair.run(lambda m: {"model": m, "sum": m.bias[...].sum()}, args=(m,)))
    out = step(model)
    assert out["model"] is model
    assert float(out["sum"]) == 0


def test_attributes_and_new_variables_come_back(pair, how):
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def step(model):
        model.deterministic = True
        model.seen = nnx.Variable(jnp.ones(3))
        model.mean = nnx.BatchStat(dj.get_replica_context().replica_id_in_sync_group * 1.0)

    how(lambda m: pair.run(step, args=(m,)))(model)
    assert model.deterministic is True
    assert np.asarray(model.seen[...]).tolist() == [1, 1, 1]
    assert float(model.mean[...]) == 0.5
    before = values(model.rngs)
    pair.run(lambda m: m(jnp.ones(3)), args=(model,))
    for old, new in zip(before, values(model.rngs), strict=True):
        np.testing.assert_array_equal(old, new)


class Two(nnx.Module):
    """Two layers of equal structure."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = (nnx.BatchNorm(8, rngs=rngs) for _ in range(2))


def exchange_modules(model):
    model.first, model.second = model.second, model.first
    model.first.scale[...] += 1
    model.second.mean[...] += 1


def exchange_variables(model):
    first, second = model.first, model.second
    first.scale, second.scale = second.scale, first.scale
    first.scale[...] += 1


@pytest.mark.pairwise
@pytest.mark.parametrize("exchange", [exchange_modules, exchange_variables])
def test_what_changes_places_stays_the_object_it_was(strategy, how, exchange):
    """As under `nnx.jit`, for whoever else refers to it."""
    model, plain = Two(), Two()
    kept = [[m.first, m.second, m.first.scale, m.second.scale] for m in (model, plain)]
    run = how(lambda m: strategy.run(exchange, args=(m,)))
    for _ in range(3):
        run(model)
        nnx.jit(exchange)(plain)
        now = [[m.first, m.second, m.first.scale, m.second.scale] for m in (model, plain)]
        places = [[[k is x for x in kept[i]] for k in now[i]] for i in range(2)]
        assert places[0] == places[1]
        for old, new in zip(values(kept[1][:2]), values(kept[0][:2]), strict=True):
            np.testing.assert_array_equal(old, new)


def test_an_exception_leaves_objects_as_they_were(pair, how):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(model):
        model.bias[...] += 1
        raise KeyError("mine")

    before = values(model)
    with pytest.raises(KeyError, match="mine"):
        how(lambda model: pair.run(step, args=(model,)))(model)
    for old, new in zip(before, values(model), strict=True):
        np.testing.assert_array_equal(old, new)
    pair.run(lambda model: model.bias[...], args=(model,))  # the next call finds nothing broken


def test_the_transforms_of_nnx_work_inside(pair):
    stack = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(nnx.Rngs(0).split(4))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def forward(layer, x):
        return jnp.tanh(layer(x))

    def loss_fn(stack, x):
        y = forward(stack, x)
        return nnx.cond(x.sum() > 0, lambda s, y: y.sum(), lambda s, y: -y.sum(), stack, y)

    def step(stack, x):
        grads = nnx.grad(loss_fn)(stack, x)
        return dj.get_replica_context().all_reduce("mean", grads["kernel"][...])

    x = jnp.arange(6.0).reshape(2, 3)
    expected = nnx.grad(loss_fn)(stack, x)["kernel"][...]
    np.testing.assert_allclose(pair.run(step, args=(stack, x)), expected, rtol=1e-5, atol=1e-6)


def test_modes_that_alternate_are_compiled_once_each(pair):
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    traced = []

    def step(model):
        traced.append(model.deterministic)
        return model(jnp.ones(3))

    for _ in range(3):
        model.train()
        pair.run(step, args=(model,))
        model.eval()
        pair.run(step, args=(model,))
    assert traced == [False, True]


def test_arguments_of_run_are_kept_and_those_donated_are_replaced(mirrored):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with mirrored.scope():
        dj.flax.place(model)
    held = model.kernel[...]

    def step(model):
        model.bias[...] += 1

    mirrored.run(step, args=(model,))
    assert not held.is_deleted()
    dj.jit(lambda m: mirrored.run(step, args=(m,)), donate_argnums=0)(model)
    assert held.is_deleted()
    assert np.asarray(model.bias[...]).tolist() == [2, 2]
    assert model.kernel[...].shape == (2, 2)


def test_statistics_and_metrics_travel_in_one_collective(mirrored):
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    metrics = nnx.MultiMetric(
        a=nnx.metrics.Average("x"), b=nnx.metrics.Average("y"), c=nnx.metrics.Average("z")
    )

    def step(model, metrics, x):
        model(x)
        metrics.update(x=x, y=x + 1, z=x + 2)

    (batch,) = mirrored.distribute_dataset([np.ones((4, 3), np.float32)])
    program = dj.jit(lambda *args: mirrored.run(step, args=args))
    with mirrored.scope():
        counts = hlo.count_collectives(program.lower(model, metrics, batch).compile().as_text())
    assert counts["all-reduce"].num_ops <= 2  # one for floats, one for the integer counts
    assert set(counts) == {"all-reduce"}


def test_dynamic_graphs_of_several_objects(pair):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    def step(state, x):
        loss, grads = nnx.value_and_grad(lambda m: m(x).sum())(state["model"])
        grads = dj.get_replica_context().all_reduce("sum", grads)
        state["optimizer"].update(state["model"], grads)
        return loss

    before = np.asarray(model.bias[...])
    pair.run(step, args=({"model": model, "optimizer": optimizer}, jnp.ones((3, 2))))
    np.testing.assert_allclose(model.bias[...], before - 0.5 * 2 * 3)
    assert int(optimizer.step[...]) == 1


def test_objects_inside_a_jax_trace_stay_functional(pair):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state, x):
        model = nnx.merge(graphdef, state)
        return pair.run(lambda m, x: m(x), args=(model, x))

    x = jnp.ones((1, 2))
    np.testing.assert_allclose(step(state, x), model(x), rtol=1e-6)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_an_interrupt_while_results_are_written_leaves_those_of_the_whole_step(
    pair, donated, monkeypatch
):
    with pair.scope():
        model = dj.flax.place(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

    def step(model):
        model.kernel[...] += 1
        model.bias[...] += 1

    program = dj.jit(lambda m: pair.run(step, args=(m,)), donate_argnums=donated)
    program(model)
    kernel = np.asarray(model.kernel[...])
    write, written = nnx.Param.set_raw_value, []

    def interrupted_once(variable, value, **options):
        written.append(variable)
        if len(written) == 2:
            signal.raise_signal(signal.SIGINT)
        write(variable, value, **options)

    monkeypatch.setattr(nnx.Param, "set_raw_value", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        program(model)
    assert np.asarray(model.bias[...]).tolist() == [2, 2]
    np.testing.assert_array_equal(model.kernel[...], kernel + 1)


class Box:
    """A node of a class that Flax is told about."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


nnx.graph.register_graph_node_type(
    Box,
    flatten=lambda box: (sorted(vars(box).items()), None),
    set_key=lambda box, key, value: setattr(box, key, value),
    pop_key=lambda box, key: vars(box).pop(key),
    create_empty=lambda _: Box(),
    clear=lambda box: vars(box).clear(),
    init=lambda box, items: vars(box).update(items),
)


def test_nodes_of_other_classes_hold_variables_and_no_arrays(pair, how):
    model = nnx.Dict(box=nnx.data(Box(count=nnx.Variable(jnp.zeros(2)))))

    def step(model):
        model["box"].count[...] += 1

    run = how(lambda model: pair.run(step, args=(model,)))
    run(model)
    assert np.asarray(model["box"].count[...]).tolist() == [1, 1]
    model["box"].scale = jnp.ones(2)
    with pytest.raises(UnsupportedError) as caught:
        run(model)
    assert str(caught.value).splitlines()[0] == (
        "Dict.box.scale needs to be a variable to be taken into a program."
    )
    assert np.asarray(model["box"].count[...]).tolist() == [1, 1]


def test_a_plain_tree_that_a_failing_step_changed_is_as_it_was(pair):
    model = nnx.Dict(table=nnx.data({"a": nnx.Variable(jnp.zeros(2)), "bare": jnp.zeros(3)}))
    table, bare = model["table"], model["table"]["bare"]

    def step(model):
        assert model["table"]["a"] is table["a"]
        model["table"]["a"][...] += 1
        model["table"]["b"] = nnx.Variable(jnp.ones(2))
        model["table"]["bare"] += 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pair.run(step, args=(model,))
    assert model["table"] is table
    assert table["bare"] is bare
    assert list(table) == ["a", "bare"]
    assert np.asarray(table["a"][...]).tolist() == [0, 0]
