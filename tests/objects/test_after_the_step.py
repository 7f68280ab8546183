"""What raises after the step has run leaves its state whole: variables, modules and optimizers.

What runs of the user's code by then: the classes of the trees that the step returns, and those in a
module's attributes. They raise here on request, outside of traces, where nothing could foresee it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax._src.jax_compat import Tracer

MEAN = dj.VariableAggregation.MEAN


class Boom(ValueError):
    """Raised by the user's class; jit's own refusals are ValueErrors too."""


@jax.tree_util.register_pytree_node_class
class Checked:
    """A pytree whose constructor refuses its values while `refuses` says so."""

    refuses = None

    def __init__(self, x):
        value = x.get_raw_value() if isinstance(x, nnx.Variable) else x
        if self.refuses is not None and isinstance(value, jax.Array | dj.PerReplica):
            if not isinstance(value, Tracer):
                raise self.refuses
        self.x = x

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@pytest.fixture(autouse=True)
def _accepting():
    yield
    Checked.refuses = None


class WithArray(nnx.Module):
    """A parameter beside an array in no variable."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.offset = nnx.data(jnp.ones(2))


class WithArrays(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.parts = nnx.data([jnp.ones(2), {"deep": jnp.zeros(3)}])


class WithKey(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.key = nnx.data(jax.random.key(0))


class WithNorm(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.norm = nnx.WeightNorm(linear, rngs=nnx.Rngs(0))


class WithState(nnx.Module):
    """A state beside the variables: its arrays are in variables that are the module's own."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.numbers = nnx.data((np.float32(1), jnp.int32(2)))


def descend(net, x):
    net.w[...] -= dj.get_replica_context().all_reduce("mean", x).mean()


@pytest.mark.parametrize("make", [WithArray, WithArrays, WithKey, WithNorm, WithState])
@pytest.mark.parametrize("how", ["run", "jit", "strategy.jit"])
def test_a_module_with_bare_arrays_takes_a_step(make, how):
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    step = {
        "run": lambda net, x: strategy.run(descend, args=(net, x)),
        "jit": dj.jit(lambda net, x: strategy.run(descend, args=(net, x))),
        "strategy.jit": strategy.jit(descend),
    }[how]
    net, x = make(), jnp.ones(2)
    for _ in range(2):
        step(net, x)
    np.testing.assert_array_equal(net.w[...], [-1, -1])


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(2))


def all_state():
    """Everything that a step can write: a variable, an optimizer, a metric, and NNX objects."""
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        v = dj.Variable(jnp.zeros(2), name="v")
        optimizer = dj.optim.Optimizer(optax.sgd(1.0), reduce_op="mean")
        optimizer.init([v])
        metric = dj.metrics.Mean("loss")
    net = Net()
    theirs = nnx.Optimizer(net, optax.adam(1.0), wrt=nnx.Param)

    def step(net, theirs, x):
        optimizer.apply_gradients([(jnp.ones(2), v)])
        metric.update(-v.value)
        theirs.update(net, nnx.state(net, nnx.Param))
        net.w[...] = theirs.step[...] * jnp.ones(2)
        return Checked(x.sum())

    def counts():
        return [-float(v.value[0]), int(theirs.step[...]), float(metric.result())]

    return strategy, step, (net, theirs), counts


HOWS = {
    "run": lambda strategy, step: lambda *args: strategy.run(step, args=args),
    "jit": lambda strategy, step: dj.jit(lambda *args: strategy.run(step, args=args)),
    "strategy.jit": lambda strategy, step: strategy.jit(step),
}


@pytest.mark.parametrize("how", list(HOWS))
@pytest.mark.parametrize("error", [Boom("no"), MemoryError("no"), TypeError("deleted")], ids=repr)
def test_a_result_whose_class_refuses_it_leaves_the_step_whole(how, error):
    strategy, step, objects, counts = all_state()
    call = HOWS[how](strategy, step)
    x = jnp.ones(2)
    for number in (1, 2):  # the first call compiles; the second is a start of what is there
        Checked.refuses = error
        with pytest.raises(type(error), match=str(error)):
            call(*objects, x)
        assert counts() == [number, number, (number + 1) / 2]
        assert float(objects[0].w[0]) == number
    Checked.refuses = None
    assert float(call(*objects, x).x) == 2
    assert counts() == [3, 3, 2]


def test_without_objects_too(how):
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        v = dj.Variable(0.0, name="v", aggregation=MEAN)

    def step(x):
        v.assign_add(jnp.float32(1))
        return Checked(x)

    call = how(lambda x: strategy.run(step, args=(x,)))
    for number in (1, 2):
        Checked.refuses = Boom("no")
        with pytest.raises(Boom):
            call(jnp.ones(2))
        assert float(v.value) == number
        Checked.refuses = None
    assert call(jnp.ones(2)).x.tolist() == [1, 1]
    assert float(v.value) == 3


def test_an_error_after_the_step_does_not_start_it_again():
    """An argument on an Explicit mesh is one reason why a call is tried again."""
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        v = dj.Variable(0.0, name="v", aggregation=MEAN)
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    x = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, jax.P()))

    def step(x):
        v.assign_add(1.0)
        return Checked(x)

    call = dj.jit(step)
    call(x)
    Checked.refuses = Boom("no")
    with pytest.raises(Boom):
        call(x)
    assert float(v.value) == 2


def test_steps_on_an_iterator_and_pmap():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        v = dj.Variable(0.0, name="v", aggregation=MEAN)

    def step(context, x):
        v.assign_add(jnp.float32(1))
        context.set_last_step_output("x", Checked(x.sum()), "sum")

    data = iter(strategy.distribute_dataset([np.ones(2, np.float32)] * 4))
    on_replicas = lambda context, x: strategy.run(step, args=(context, x))
    run = lambda: strategy.extended.run_steps_on_iterator(on_replicas, data, 2)
    run()
    Checked.refuses = Boom("no")
    with pytest.raises(Boom):
        run()
    assert float(v.value) == 4
    net = Net()

    def rows(x):
        net.w[...] += 1
        return Checked(x)

    mapped = dj.pmap(rows)
    for number in (1, 2):
        with pytest.raises(Boom):
            mapped(jnp.ones((2, 3)))
        assert float(net.w[0]) == number


class Holder(nnx.Module):
    """A module with a pytree of the user's among its attributes, and another module."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros(2))
        self.other = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.held = nnx.data(Checked(nnx.Param(jnp.zeros(2))))


@pytest.mark.parametrize("how", list(HOWS))
def test_an_attribute_whose_class_refuses_it_leaves_values_new_and_attributes_old(how):
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    model = Holder()

    def step(model):
        model.w[...] += 1
        model.held.x[...] += 1
        model.other.bias[...] += 1
        model.seen = nnx.BatchStat(model.w[...])  # the graph changes: it is built anew

    call = HOWS[how](strategy, step)
    with strategy.scope():
        dj.flax.place(model)
    before = set(vars(model))
    Checked.refuses = Boom("no")
    with pytest.raises(Boom):
        call(model)
    Checked.refuses = None
    assert set(vars(model)) == before
    assert [float(v[0]) for v in (model.w, model.held.x, model.other.bias)] == [1, 1, 1]
    call(model)
    assert [float(v[0]) for v in (model.w, model.held.x, model.seen)] == [2, 2, 2]


class Hooked(nnx.Param):
    """A variable whose hook refuses every value that is not traced."""

    def on_set_value(self, value):
        if not isinstance(value, Tracer):
            raise Boom("a hook of the variable")
        return value


class Closed(nnx.Module):
    """A module that takes no attribute once it is made."""

    is_made = False

    def __init__(self):
        self.w = Hooked(jnp.zeros(2))
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
        self.is_made = True

    def __setattr__(self, name, value):
        if self.is_made:
            raise Boom("closed")
        super().__setattr__(name, value)


@pytest.mark.parametrize("how", list(HOWS))
def test_hooks_and_setattr_of_the_users_do_not_run_in_the_write_back(how):
    model = Closed()

    def step(model):
        model.w[...] += 1
        model.layers.append(nnx.Param(model.w[...]))  # the graph changes

    call = HOWS[how](dj.MirroredStrategy(jax.devices()[:2]), step)
    for number in (1, 2):
        call(model)
        assert float(model.w.get_raw_value()[0]) == number == float(model.layers[number][0])


def test_a_closure_whose_result_is_refused_is_applied_once():
    strategy = dj.ParameterServerStrategy(1, 1)
    with strategy.scope():
        v = dj.Variable(0.0, name="v", aggregation=dj.VariableAggregation.SUM)

    def step(x):
        v.assign_add(x)
        return Checked(x)

    with dj.Coordinator(strategy) as coordinator:
        for number in (1, 2):
            value = coordinator.schedule(step, args=(jnp.float32(1),))
            coordinator.join()
            Checked.refuses = Boom("no")
            with pytest.raises(Boom):
                value.fetch()
            Checked.refuses = None
            assert float(value.fetch().x) == 1
            assert float(v.value) == number
