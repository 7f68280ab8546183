"""What a mapped function has of the replica machine: variables, merges, proofs, warnings."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from tests.pmap.kinds import Replicas
from tests.replicas import ids


@pytest.fixture(params=[(2, "mirrored"), (8, "virtual")], ids=["mirrored2", "virtual8"])
def few(request):
    """Two kinds of replicas, with a strategy of their own."""
    return Replicas(*request.param)


def test_the_context_works_under_any_name(few):
    def step(x):
        ctx = dj.get_replica_context()
        assert ctx.num_replicas_in_sync == few.count and ctx.strategy is few.strategy_of("batch")
        merged = ctx.merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(x,))
        return (
            ctx.replica_id_in_sync_group,
            ctx.all_reduce("mean", x) - lax.pmean(x, "batch"),
            merged - lax.psum(x, "batch"),
            ctx.all_gather(x[None], axis=0) - lax.all_gather(x, "batch"),
        )

    number, *differences = few.pmap(step, "batch")(few.rows(3))
    assert number.tolist() == list(range(few.count))
    assert all(not leaf.any() for leaf in differences)


@pytest.mark.parametrize("part", ["optimizer", "gradients", "parameters"])
def test_split_variables(part):
    strategy = dj.ShardedStrategy(
        jax.devices()[:2], partition=part, axis_name="batch", min_split_bytes=0
    )
    with strategy.scope():
        w = dj.Variable(jnp.arange(6.0), aggregation=dj.VariableAggregation.MEAN)
        count = dj.Variable(
            0.0,
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )

    def step(x):
        w.assign_add(x * jnp.ones(6))
        count.assign_add(x)
        return w.value.sum()

    found = dj.pmap(step, "batch", strategy=strategy)(np.array([1.0, 3.0], np.float32))
    np.testing.assert_allclose(found, [27.0, 27.0])
    np.testing.assert_allclose(w.value, np.arange(6) + 2)
    assert float(count.value) == 4.0


def test_variables_made_inside_belong_to_the_strategy_of_the_devices():
    made = []

    def step(x):
        if not made:
            made.append(dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM))
        made[0].assign_add(x)
        return made[0].value

    assert dj.pmap(step, "a")(np.ones(4, np.float32)).tolist() == [4.0] * 4
    again = dj.pmap(lambda x: made[0].value + lax.psum(x, "a"), "a")
    assert again(np.ones(4, np.float32)).tolist() == [8.0] * 4


def test_a_scope_says_whose_replicas(few):
    with few.strategy.scope():
        out = dj.pmap(lambda x: x + dj.get_replica_context().num_replicas_in_sync)(few.rows())
    np.testing.assert_array_equal(out, few.rows() + few.count)


def test_values_of_run_are_taken_as_rows(few):
    strategy = few.strategy_of("i")
    own = strategy.run(lambda x: x, args=(strategy.per_replica(few.rows()),))
    again = few.pmap(lambda x, y: x + y, "i", in_axes=(0, 0))(own, few.rows())
    np.testing.assert_array_equal(again, 2 * few.rows())


def test_a_per_replica_is_refused_where_one_value_is_needed(few):
    own = ids(few.strategy)
    with pytest.raises(dj.errors.LocalityError, match="argument w of .* needs one value for all"):
        few.pmap(lambda w, x: w + x, in_axes=(None, 0))(own, few.rows())


def train_step(params, x):
    grads = jax.grad(lambda p: jnp.mean((p["w"] * x - 1) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)  # the line of the update


def right_step(params, x):
    grads = lax.pmean(jax.grad(lambda p: jnp.mean((p["w"] * x - 1) ** 2))(params), "batch")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_a_forgotten_reduction_is_one_warning_with_its_line(few):
    step = few.pmap(train_step, "batch", in_axes=(None, 0), out_axes=None)
    with pytest.warns(dj.errors.LocalityWarning) as found:
        out = step({"w": np.float32(0), "b": np.float32(0)}, few.rows(4))
    assert len(found) == 1
    text = str(found[0].message)
    assert text.startswith(
        "train_step needs to return what is equal on every replica where out_axes is None.\n"
    )
    line = next(
        number
        for number, line in enumerate(open(__file__), 1)
        if "the line of the update" in line and "open" not in line
    )
    assert f"at result['w']; made different at {__file__}:{line} (" in text
    assert "pmean(x, 'batch')" in text
    by_jax = jax.pmap(train_step, "batch", in_axes=(None, 0), out_axes=None)
    theirs = by_jax({"w": np.float32(0), "b": np.float32(0)}, few.rows(4))
    np.testing.assert_allclose(out["w"], theirs["w"], rtol=1e-6)
    assert dj.locality(out["b"]).kind == "mirrored"


def test_a_value_that_is_lost_on_purpose_is_expected(few):
    def step(x):
        with dj.expect("the first row tells enough"):
            sample = x * 2
        return sample, x + 1

    meant = lambda x: step(x)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = few.pmap(meant, out_axes=None)(few.rows())
        with dj.expect("one row is as good as another"):
            both = few.pmap(step, out_axes=None)(few.rows())
    first = few.rows()[0]
    np.testing.assert_array_equal([inside, *both], [2 * first, 2 * first, first + 1])
    with pytest.warns(
        dj.errors.LocalityWarning, match=r"per replica at result\[1\]; made"
    ) as found:
        few.pmap(step, out_axes=None)(few.rows())
    assert len(found) == 1


def test_the_right_step_is_silent(few):
    step = few.pmap(right_step, "batch", in_axes=(None, 0), out_axes=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = step({"w": np.float32(0)}, few.rows(4))
        out = step(out, few.rows(4))
        few.pmap(train_step, in_axes=(None, 0))({"w": np.float32(0)}, few.rows(4))  # stacked
    assert out["w"].shape == ()


def test_state_with_the_axis_stays_silent(few):
    """Of stacked state nothing is proved, as under `jax.pmap`."""
    params = {"w": np.zeros(few.count, np.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few.assert_as_jax(train_step, params, few.rows(4))


def test_modules_are_shared():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.BatchNorm(2, axis_name="batch", rngs=nnx.Rngs(0))

    def step(model, x):
        return model(x)

    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    out = dj.pmap(step, "batch", in_axes=(None, 0))(model, x)
    flat = x.reshape(4, 2)
    normal = (flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5)
    np.testing.assert_allclose(np.asarray(out).reshape(4, 2), normal, rtol=1e-4)
    np.testing.assert_allclose(model.mean[...], 0.01 * flat.mean(0), rtol=1e-5)
    text = r"rows along axis 0 as argument model\.\n  Got: an object [^$]*as_pure"
    with pytest.raises(ValueError, match=text):
        dj.pmap(step, "batch")(model, x)


def test_rows_of_the_arrays_of_a_state():
    nnx = pytest.importorskip("flax.nnx")
    graphdef, state = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    rows = nnx.as_pure(jax.tree.map(lambda x: jnp.stack([x, x + 1]), state))

    def step(state, x):
        model = nnx.merge(graphdef, state)
        model.bias[...] += lax.pmean(model(x).sum(), "batch")
        return nnx.as_pure(nnx.state(model))

    x = np.ones((2, 3, 2), np.float32)
    ours = dj.pmap(step, "batch")(rows, x)
    theirs = jax.pmap(step, "batch", devices=jax.devices()[:2])(rows, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def test_under_a_mesh_of_the_user():
    with jax.set_mesh(jax.make_mesh((8,), ("user",))):
        out = dj.pmap(lambda x: lax.psum(x, "i"), "i")(np.arange(4))
    assert out.tolist() == [6] * 4


def test_explain_sees_the_mapped_step():
    found = dj.explain(
        dj.pmap(right_step, "batch", in_axes=(None, 0)),
        {"w": jnp.float32(0)},
        np.ones((8, 2), np.float32),
    )
    assert "right_step" in str(found)
