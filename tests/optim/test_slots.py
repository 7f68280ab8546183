"""The state of an optimizer: which variables there are, and where they live."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from tests.faults.four_parts import is_explained
from tests.optim.regression import make_variables


def state_variables(optimizer):
    return {v.name: v for v in jax.tree.leaves(optimizer.state)}


@pytest.fixture
def variables(strategy):
    return make_variables(strategy)


@pytest.mark.api_row("slot variable", "non-slot variable")
def test_slots_live_with_their_variable_and_counts_on_the_non_slot_devices(strategy, variables):
    optimizer = dj.optim.Optimizer(optax.adam(optax.constant_schedule(0.1)))
    optimizer.init(variables)
    found = state_variables(optimizer)
    assert sorted(found) == ["b/mu", "b/nu", "count", "w/mu", "w/nu"]
    for name in ("b/mu", "b/nu", "w/mu", "w/nu"):
        owner = variables[name[0]]
        assert dj.locality(found[name]) == dj.locality(owner)
        assert found[name].shape == owner.shape
        assert not found[name].trainable
    assert all(v.strategy is strategy for v in found.values())
    if strategy.num_replicas_in_sync > 1:
        devices = set(strategy.extended.non_slot_devices(list(variables.values())))
        assert found["count"].value.sharding.device_set == devices


def test_initial_values_come_from_the_variables(strategy, variables):
    tx = optax.GradientTransformation(
        lambda params: optax.EmaState(jnp.int32(5), jax.tree.map(lambda p: 2 * p, params)),
        lambda updates, state, params=None: (updates, state),
    )
    optimizer = dj.optim.Optimizer(tx)
    optimizer.init(variables)
    state = optimizer.state
    assert int(state.count.value) == 5
    for key, variable in variables.items():
        np.testing.assert_array_equal(state.ema[key].value, 2 * variable.value)


def test_the_state_keeps_the_structure_that_optax_gives_it(mirrored):
    variables = make_variables(mirrored)
    tx = optax.chain(optax.clip(1.0), optax.masked(optax.trace(0.9), {"b": False, "w": True}))
    optimizer = dj.optim.Optimizer(tx)
    assert optimizer.state is None
    assert optimizer.variables is None
    optimizer.init(variables)
    arrays = jax.tree.map(lambda v: v.value, optimizer.state)
    params = jax.tree.map(lambda v: v.value, variables)
    assert jax.tree.structure(arrays) == jax.tree.structure(tx.init(params))
    assert optimizer.variables is variables
    assert sorted(state_variables(optimizer)) == ["w/trace"]


def test_slots_of_another_shape_than_their_variable(mirrored):
    """Adafactor keeps a row and a column of a matrix."""
    variables = make_variables(mirrored)
    optimizer = dj.optim.Optimizer(optax.adafactor(0.1, min_dim_size_to_factor=2))
    optimizer.init(variables)
    found = state_variables(optimizer)
    assert {found["w/v_row"].shape, found["w/v_col"].shape} == {(2,), (3,)}
    assert dj.locality(found["w/v_row"]) == dj.locality(variables["w"])


def test_a_transformation_that_looks_inside_its_parameters_has_non_slot_state(mirrored):
    """optax cannot tell whose its state is: the init of this one needs the key "w"."""
    tx = optax.GradientTransformation(
        lambda params: {"sum": jnp.zeros_like(params["w"])},
        lambda g, s, p=None: (jax.tree.map(jnp.negative, g), {"sum": s["sum"] + g["w"]}),
    )
    with mirrored.scope():
        w = dj.Variable(np.zeros(2, np.float32), name="w")
    optimizer = dj.optim.Optimizer(tx)
    optimizer.init({"w": w})
    mirrored.run(lambda: optimizer.apply_gradients([(np.ones(2, np.float32), w)]))
    np.testing.assert_array_equal(w.value, [-2.0, -2.0])
    np.testing.assert_array_equal(optimizer.state["sum"].value, [2.0, 2.0])


def test_state_that_is_no_array_is_kept_as_it_is(mirrored):
    marker = jax.tree_util.Partial(len)  # a callable: static in jit, a leaf here
    tx = optax.GradientTransformation(
        lambda params: (marker.func, 3),
        lambda g, s, p=None: (jax.tree.map(jnp.negative, g), (s[0], s[1] + 1)),
    )
    with mirrored.scope():
        w = dj.Variable(0.0)
    optimizer = dj.optim.Optimizer(tx, "mean")
    optimizer.init([w])
    mirrored.run(lambda: optimizer.apply_gradients([(jnp.float32(1), w)]))
    assert optimizer.state[0] is len
    assert int(optimizer.state[1].value) == 4


def test_a_state_whose_structure_changes_is_refused(strategy):
    """As that of `optax.monitor` does, and of the first update only."""
    measure = lambda g, s, p=None: (g, {"norm": optax.tree.norm(g), "ema": s["ema"]})
    tx = optax.GradientTransformation(lambda params: {"ema": jnp.zeros(())}, measure)
    with strategy.scope():
        w = dj.Variable(2.0, name="w")
    optimizer = dj.optim.Optimizer(tx, "mean")
    optimizer.init([w])
    text = r"(?s)^Optimizer needs a transformation whose update.*differs at \['norm'\]"
    with pytest.raises(ValueError, match=text) as raised:
        strategy.run(lambda: optimizer.apply_gradients([(jnp.float32(1), w)]))
    assert is_explained(raised.value)
    assert float(w.value) == 2.0


def test_a_second_init_starts_afresh(strategy, variables):
    optimizer = dj.optim.Optimizer(optax.sgd(1.0, momentum=1.0), "mean")
    with strategy.scope():
        w = dj.Variable(0.0, name="w")

    def step():
        optimizer.apply_gradients([(jnp.float32(1), w)])

    optimizer.init([w])
    strategy.run(step)
    assert float(w.value) == -1.0
    optimizer.init([w])
    strategy.run(lambda: step())
    assert float(w.value) == -2.0  # with the former momentum it would be -3


def test_init_in_a_replica_function_is_created_once(pair):
    optimizer = dj.optim.Optimizer(optax.sgd(0.5, momentum=0.9))
    with pair.scope():
        w = dj.Variable(0.0, name="w")

    def step():
        if optimizer.state is None:
            optimizer.init([w])
        optimizer.apply_gradients([(jnp.float32(1), w)])
        return w.value

    assert float(pair.run(step)) == -1.0
    np.testing.assert_allclose(float(pair.run(step)), -2.9, rtol=1e-6)
    trace = jax.tree.leaves(optimizer.state)[0]
    assert dj.locality(trace) == dj.locality(w)


def test_a_key_may_be_part_of_the_state(pair):
    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1))
    with pair.scope():
        w = dj.Variable(np.zeros(4, np.float32), name="w")
    optimizer = dj.optim.Optimizer(tx, "mean")
    optimizer.init([w])
    params = [jnp.zeros(4)]
    state = tx.init(params)
    for _ in range(2):
        pair.run(lambda: optimizer.apply_gradients([(np.ones(4, np.float32), w)]))
        updates, state = tx.update([jnp.ones(4)], state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(w.value, params[0], rtol=1e-5)


def test_repr_names_the_variables(mirrored):
    optimizer = dj.optim.Optimizer(optax.sgd(0.1))
    optimizer.init(make_variables(mirrored))
    assert repr(optimizer) == "Optimizer(SUM, accumulate_steps=1, of ['b', 'w'])"
