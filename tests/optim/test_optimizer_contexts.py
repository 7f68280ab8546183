"""apply_gradients in each context, its cost, and its errors."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax.compat import v1_12, v1_13, v1_15
from distjax.errors import ContextError, LocalityError, StrategyMismatchError
from tests.replicas import ids, per_replica


def make(strategy, tx=None, op="sum", shape=()):
    with strategy.scope():
        w = dj.Variable(np.zeros(shape, np.float32), name="w")
    optimizer = dj.optim.Optimizer(tx or optax.sgd(1.0), op)
    optimizer.init([w])
    return optimizer, w


# -- contexts -----------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.api_row("Optimizer._distributed_apply in cross-replica context")
@pytest.mark.parametrize("in_scope", [True, False])
def test_cross_replica_and_default_context(strategy, how, in_scope):
    optimizer, w = make(strategy)
    step = how(lambda g: optimizer.apply_gradients([(g, w)]))
    gradient = strategy.run(lambda i: i + 1, args=(ids(strategy),))
    if in_scope:
        with strategy.scope():
            step(gradient)
    else:
        step(gradient)
    count = strategy.num_replicas_in_sync
    assert float(w.value) == -count * (count + 1) / 2


@pytest.mark.api_row("Optimizer._distributed_apply in cross-replica context")
def test_in_a_merge_function(pair, how):
    optimizer, w = make(pair)

    def merge_fn(strategy, gradient):
        optimizer.distributed_apply(strategy, [(gradient, w)])

    def step(i):
        dj.get_replica_context().merge_call(merge_fn, args=(i,))
        return w.value

    assert float(how(lambda i: pair.run(step, args=(i,)))(ids(pair))) == -1.0


@pytest.mark.api_row("code with no knowledge of strategies")
def test_with_no_strategy_in_sight():
    """Code that knows nothing of strategies: the default strategy, the default context."""
    w = dj.Variable(2.0)
    optimizer = dj.optim.Optimizer(optax.sgd(0.5))
    optimizer.init([w])
    optimizer.apply_gradients([(2.0, w)])
    assert float(w.value) == 1.0


def test_a_mirrored_gradient_is_r_equal_ones(strategy):
    """As any reduction of a Mirrored value, however the step found out that it is one."""
    optimizer, w = make(strategy)
    strategy.run(lambda: optimizer.apply_gradients([(jnp.float32(1), w)]))
    assert float(w.value) == -strategy.num_replicas_in_sync


def test_python_numbers_are_gradients_in_a_replica(pair):
    optimizer, w = make(pair)
    pair.run(lambda: optimizer.apply_gradients([(1.0, w)]))
    assert float(w.value) == -2.0


def test_unplaced_gradients_are_averaged_as_they_are(pair):
    optimizer, w = make(pair, op="mean")
    optimizer.apply_gradients([(np.float32(3), w)])
    assert float(w.value) == -3.0


def test_inside_a_loop_of_dj_lax(pair):
    optimizer, w = make(pair, optax.sgd(1.0, momentum=0.5), "mean")

    def step():
        def body(_, total):
            optimizer.apply_gradients([(jnp.float32(1), w)])
            return total + w.value

        return dj.lax.fori_loop(0, 3, body, 0.0)

    assert float(pair.run(step)) == -(1.0 + 2.5 + 4.25)
    assert float(w.value) == -4.25


# -- cost ---------------------------------------------------------------------


def test_one_all_reduce_per_gradient(mirrored):
    with mirrored.scope():
        variables = [dj.Variable(np.zeros(n, np.float32), name=f"v{n}") for n in (2, 3, 4)]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    optimizer = dj.optim.Optimizer(tx)
    optimizer.init(variables)

    def step(i):
        optimizer.apply_gradients([(i * jnp.ones(v.shape), v) for v in variables])

    lowered = dj.jit(lambda i: mirrored.run(step, args=(i,))).lower(ids(mirrored))
    assert lowered.as_text().count('"stablehlo.all_reduce"') == 3


def test_the_moments_are_donated(mirrored):
    """Old and new state need not live at once: every written variable is donated."""
    with mirrored.scope():
        w = dj.Variable(np.zeros(1000, np.float32), name="w")
    optimizer = dj.optim.Optimizer(optax.adam(0.1), "mean")
    optimizer.init([w])

    def step(i):
        optimizer.apply_gradients([(i * jnp.ones(1000), w)])

    program = dj.jit(lambda i: mirrored.run(step, args=(i,))).lower(ids(mirrored)).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * 4000


# -- errors -------------------------------------------------------------------


def test_apply_before_init(mirrored):
    optimizer = dj.optim.Optimizer(optax.sgd(1.0))
    with pytest.raises(ContextError, match="needs an optimizer that has its state"):
        optimizer.apply_gradients([])


@pytest.mark.parametrize("tx", [None, 0.1, optax.sgd])
def test_not_a_transformation(tx):
    with pytest.raises(TypeError, match="^Optimizer needs an optax transformation"):
        dj.optim.Optimizer(tx)


def test_an_op_that_is_none():
    text = "^Optimizer: reduce_op needs a ReduceOp: .*\n  Got: 'MAX' is not a valid ReduceOp"
    with pytest.raises(ValueError, match=text):
        dj.optim.Optimizer(optax.sgd(1.0), "MAX")


def test_init_of_something_else(mirrored):
    optimizer, w = make(mirrored)
    with pytest.raises(TypeError, match="^Optimizer.init needs distjax.Variables only"):
        optimizer.init([w, w.value])
    with pytest.raises(ValueError, match="^Optimizer.init needs at least one variable"):
        optimizer.init([])
    with pytest.raises(ValueError, match="^Optimizer.init needs each variable once"):
        optimizer.init([w, w])
    with mirrored.scope():
        local = dj.Variable(0.0, synchronization=dj.VariableSynchronization.ON_READ)
    with pytest.raises(LocalityError, match="^Optimizer.init needs ON_WRITE variables"):
        optimizer.init([local])
    with pytest.raises(StrategyMismatchError, match="^Optimizer.init needs variables of one"):
        optimizer.init([w, dj.Variable(0.0)])


def test_gradients_that_do_not_fit_the_variables(mirrored):
    with mirrored.scope():
        w, b, other = (dj.Variable(np.zeros(2, np.float32), name=n) for n in "wbo")
    optimizer = dj.optim.Optimizer(optax.sgd(1.0))
    optimizer.init([w, b])
    g = np.ones(2, np.float32)

    def refused(pairs, text):
        with pytest.raises(ValueError, match=text):
            optimizer.apply_gradients(pairs)

    refused([(g, w)], r"needs a gradient for every variable.*\n.*none for \['b'\]")
    refused([(g, w), (g, b), (g, other)], "that init was called with, once(.|\n)*did not have")
    refused([(g, w), (g, b), (g, b)], "that init was called with, once(.|\n)*a second time")
    refused([(g, w), (None, b)], "gradient of shape .2,. for variable 'b'")
    refused([(g, w), (np.ones(3), b)], "gradient of shape .2,. for variable 'b'")
    refused([(g, w), ([1.0, 2.0], b)], "gradient of shape .2,. for variable 'b'")
    refused([g], r"needs pairs \(gradient, variable\)")
    refused([(w, g)], r"needs pairs \(gradient, variable\)")
    refused([({"w": g}, {"w": w, "b": b})], r"needs pairs \(gradient, variable\)")


def test_a_sum_of_what_is_not_on_the_replicas(mirrored):
    optimizer, w = make(mirrored)
    with pytest.raises(ValueError, match="needs the gradient of 'w' on the replicas"):
        optimizer.apply_gradients([(np.float32(1), w)])


def test_a_per_replica_that_the_function_closes_over(pair):
    optimizer, w = make(pair)
    g = ids(pair)
    with pytest.raises(LocalityError, match="in a replica context needs this replica's values"):
        pair.run(lambda: optimizer.apply_gradients([(g, w)]))


@pytest.mark.parametrize("across", [True, False])
def test_an_extra_argument_that_differs_per_replica(pair, across):
    optimizer, w = make(pair, op="mean")
    loss = ids(pair)
    with pytest.raises(LocalityError, match="needs argument value to be one value"):
        if across:
            optimizer.apply_gradients([(np.float32(1), w)], value=loss)
        else:
            pair.run(
                lambda x: optimizer.apply_gradients([(jnp.float32(1), w)], value=x), args=(loss,)
            )
    assert not dj.in_cross_replica_context()


def test_a_per_replica_of_another_strategy(pair):
    optimizer, w = make(pair)
    other = dj.VirtualStrategy(3)
    with pytest.raises(LocalityError):
        optimizer.apply_gradients([(per_replica(other, np.ones(3, np.float32)), w)])


def test_under_another_strategy(pair):
    optimizer, w = make(pair)
    other = dj.VirtualStrategy(3)
    with pytest.raises(StrategyMismatchError):
        other.run(lambda: optimizer.apply_gradients([(jnp.float32(1), w)]))
    with other.scope(), pytest.raises(StrategyMismatchError):
        optimizer.apply_gradients([(jnp.float32(1), w)])
    with pytest.raises(StrategyMismatchError, match="where its variables live"):
        optimizer.distributed_apply(other, [(ids(pair), w)])
    assert float(w.value) == 0.0


@pytest.mark.parametrize("version", [v1_12.DistributionStrategy, v1_13.Strategy, v1_15.Strategy])
def test_distributed_apply_of_the_strategy_of_an_older_api_version(pair, version):
    """A merge function of an older API version is handed its strategy under its names."""
    optimizer, w = make(pair)
    with pair.scope():
        optimizer.distributed_apply(version(pair), [(ids(pair), w)])
    assert float(w.value) == -1.0
    with pytest.raises(StrategyMismatchError, match="^apply_gradients needs .* to be active"):
        optimizer.distributed_apply(None, [(ids(pair), w)])


def test_distributed_apply_in_a_replica_context(pair):
    optimizer, w = make(pair)
    with pytest.raises(ContextError, match="^distributed_apply needs cross-replica context"):
        pair.run(lambda: optimizer.distributed_apply(pair, [(jnp.float32(1), w)]))


def test_variables_of_the_default_strategy_in_a_strategys_step(pair):
    w = dj.Variable(0.0)
    optimizer = dj.optim.Optimizer(optax.sgd(1.0))
    optimizer.init([w])
    with pytest.raises(StrategyMismatchError, match="where its variables live"):
        pair.run(lambda: optimizer.apply_gradients([(jnp.float32(1), w)]))
