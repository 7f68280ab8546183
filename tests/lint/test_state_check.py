"""State that goes in equal and comes out different (decision 2)."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import distjax as dj
from distjax.errors import LocalityError, LocalityWarning
from tests.replicas import ids, local


@jax.tree_util.register_pytree_node_class
class LossScale:
    """A node that takes arrays only, as a loss scale that checks its dtype does."""

    def __init__(self, scale):
        if not jnp.issubdtype(jax.eval_shape(lambda: scale).dtype, jnp.floating):
            raise TypeError("a loss scale needs a floating dtype")
        self.scale = scale

    def tree_flatten(self):
        return (self.scale,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_state_that_comes_out_different_warns(pair, how):
    params = {"w": jnp.ones(2), "b": jnp.zeros(())}

    def forgetful(params, x):
        return {"w": params["w"] - x, "b": params["b"]}, jnp.float32(0)

    with pytest.warns(LocalityWarning) as caught:
        how(lambda p, x: pair.run(forgetful, args=(p, x)))(params, ids(pair))
    text = str(caught[0].message)
    assert "forgetful takes state that is equal on every replica" in text.splitlines()[0]
    assert "params['w']" in text and "params['b']" not in text
    assert "all_reduce" in text


def test_state_that_stays_equal_does_not_warn(pair):
    def right(params, x):
        g = dj.get_replica_context().all_reduce("mean", x)
        return {"w": params["w"] - g, "b": params["b"]}, x

    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        pair.run(right, args=({"w": jnp.ones(2), "b": jnp.zeros(())}, ids(pair)))


def test_flax_train_state_that_comes_out_different_raises(pair):
    train_state = pytest.importorskip("flax.training.train_state")
    optax = pytest.importorskip("optax")

    class State(train_state.TrainState):
        batch_stats: dict

    start = State.create(
        apply_fn=None,
        params={"w": jnp.ones(2)},
        tx=optax.adam(0.1),
        batch_stats={"mean": jnp.zeros(2)},
    )

    def forgetful(state, x):
        return state.apply_gradients(grads={"w": state.params["w"] * x})

    with pytest.raises(LocalityError, match="^.*forgetful takes state that is equal") as info:
        pair.run(forgetful, args=(start, ids(pair)))
    assert "state.params['w']" in str(info.value)

    def diverging_statistics(state, x):
        return state.replace(batch_stats={"mean": state.batch_stats["mean"] + x})

    with pytest.warns(LocalityWarning, match="batch_stats") as warned:
        out = pair.run(diverging_statistics, args=(start, ids(pair)))
    assert str(warned[0].message).endswith(
        "  Got: values that differ per replica at state.batch_stats['mean'].\n"
        "  Why: each replica keeps what it computed from its own examples.\n"
        "  Fix: nn.BatchNorm(..., axis_name=strategy.axis_name), for the statistics of all "
        "replicas' examples; or, where it is meant: dj.expect(reason, differs=state.batch_stats)"
    )
    assert local(pair, out.batch_stats["mean"]) == [[0.0, 0.0], [1.0, 1.0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        pair.run(diverging_statistics, args=(out, ids(pair)))  # T in, T out


def test_a_class_that_checks_its_arrays_is_an_argument_and_a_result(pair):
    def step(w, scale, x):
        total = dj.get_replica_context().all_reduce("sum", x)
        return w - total, LossScale(scale.scale / 2)

    w, scale = pair.run(step, args=(jnp.ones(()), LossScale(jnp.float32(8)), ids(pair)))
    assert (w, scale.scale) == (0, 4)


def test_state_of_such_a_class_that_comes_out_different_warns(pair):
    def forgetful(scale, x):
        return LossScale(scale.scale + x)

    with pytest.warns(LocalityWarning) as caught:
        out = pair.run(forgetful, args=(LossScale(jnp.float32(8)), ids(pair)))
    assert "forgetful takes state" in str(caught[0].message)
    assert isinstance(out.scale, dj.PerReplica)


def test_the_warning_names_the_function_of_a_partial(pair):
    def forgetful(params, x, scale):
        return {"w": params["w"] - scale * x}

    step = functools.partial(functools.partial(forgetful), scale=0.1)
    with pytest.warns(LocalityWarning, match="forgetful takes state.*\n.*params\\['w'\\]"):
        pair.run(step, args=({"w": jnp.ones(2)}, ids(pair)))


def test_what_has_the_structure_of_state_that_comes_back_equal_is_no_state(pair):
    """Its update is equal; values per replica beside it are for the user."""

    def step(params, x):
        mean = dj.get_replica_context().all_reduce("mean", x)
        new = jax.tree.map(lambda p: p - mean, params)
        return new, jax.tree.map(lambda p: p * x, params)

    params = {"w": jnp.ones(2), "b": jnp.zeros(())}
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        pair.run(step, args=(params, ids(pair)))


def test_state_that_differs_is_found_beside_other_state_that_is_equal(pair):
    def step(params, average, x):
        mean = dj.get_replica_context().all_reduce("mean", x)
        return {"w": average["w"] - mean}, {"w": params["w"] - x}

    with pytest.warns(LocalityWarning, match=r"differ per replica at params\['w'\]"):
        pair.run(step, args=({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, ids(pair)))


def test_a_function_of_nothing_returns_numbers_of_the_code(pair):
    assert pair.run(lambda: (jnp.float32(1), None))[0] == 1
    out = pair.run(lambda: jnp.float32(2))
    assert out == 2


def test_statistics_that_differ_are_not_told_to_reduce_gradients(pair):
    """Every gradient is reduced; the smallest part that differs is named, and it silences."""

    def step(state, x):
        grads = jax.grad(lambda w: jnp.mean((w * x - 1) ** 2))(state["w"])
        grads = dj.get_replica_context().all_reduce("mean", grads)
        seen = {"mean": 0.9 * state["seen"]["mean"] + 0.1 * x}
        return {"w": state["w"] - grads, "seen": seen}

    state = {"w": jnp.ones(2), "seen": {"mean": jnp.zeros(2)}}
    with pytest.warns(LocalityWarning) as warned:
        pair.run(step, args=(state, ids(pair)))
    assert str(warned[0].message).endswith(
        "  Why: each replica keeps what it computed from its own examples.\n"
        "  Fix: x = dj.get_replica_context().all_reduce('mean', x) of the statistic, or of the "
        "loss that decides on the update, before it is used; or, where it is meant: "
        "dj.expect(reason, differs=state['seen'])"
    )
    meant = state | {"seen": dj.expect("statistics of each replica", differs=state["seen"])}
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        pair.run(step, args=(meant, ids(pair)))


def test_what_is_expected_of_a_train_state(pair):
    train_state = pytest.importorskip("flax.training.train_state")
    optax = pytest.importorskip("optax")
    params = {"w": jnp.ones(2)}
    start = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    def local(state, x):
        return state.apply_gradients(grads={"w": state.params["w"] * x})

    with pytest.raises(LocalityError, match=r"dj.expect\(reason, differs=state.params\)"):
        pair.run(local, args=(start, ids(pair)))
    meant = start.replace(params=dj.expect("local training", differs=start.params))
    out = pair.run(local, args=(meant, ids(pair)))
    assert isinstance(out.params["w"], dj.PerReplica)
