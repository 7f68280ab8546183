"""What copies and pickles does so, or is an error that says what to do instead."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.faults.four_parts import is_explained


def variable_of(strategy):
    with strategy.scope():
        return dj.Variable(jnp.arange(3.0), aggregation=dj.VariableAggregation.MEAN)


def per_replica_of(strategy):
    return strategy.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group)
    )


OBJECTS = {
    "strategy": lambda strategy: strategy,
    "variable": variable_of,
    "per_replica": per_replica_of,
}


def test_a_copy_of_a_variable_is_a_variable_of_its_own_as_a_deep_copy_is(pair):
    v = variable_of(pair)
    copied = copy.copy(v)
    v.assign(jnp.zeros(3))
    assert isinstance(copied, dj.Variable) and copied.strategy is pair
    np.testing.assert_array_equal(copied.value, np.arange(3.0))


def test_a_deep_copy_of_a_variable_is_a_variable_of_its_own(pair):
    v = variable_of(pair)
    copied = copy.deepcopy(v)
    v.assign(jnp.zeros(3))
    np.testing.assert_array_equal(copied.value, np.arange(3.0))


def contents(value):
    """Returns what a pickle has to bring back, next to the class."""
    if isinstance(value, dj.Strategy):
        return value.num_replicas_in_sync
    return np.asarray(value).tolist()


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("module", ["pickle", "cloudpickle"])
def test_a_pickle_holds_the_value_or_is_an_error_in_four_parts(pair, module, kind):
    dumps = pytest.importorskip(module).dumps
    value = OBJECTS[kind](pair)
    try:
        back = pickle.loads(dumps(value))
    except Exception as error:
        assert is_explained(error), error
    else:
        assert type(back) is type(value)
        assert contents(back) == contents(value)


def test_a_deep_copy_of_an_object_calls_the_compiled_method_of_the_copy():
    class Model:
        def __init__(self):
            self.factor = 2
            self.step = dj.jit(self.scaled)

        def scaled(self, x):
            return self.factor * x

    model = Model()
    assert float(model.step(jnp.float32(1))) == 2
    copied = copy.deepcopy(model)
    copied.factor = 3
    assert float(copied.step(jnp.float32(1))) == 3
    assert float(model.step(jnp.float32(1))) == 2


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_iterator_stays_one_object(pair, call):
    """Of a copy, which would read the same source, some elements came twice."""
    iterator = iter(pair.distribute_dataset([np.ones(2), np.ones(2)]))
    with pytest.raises(TypeError) as caught:
        call(iterator)
    assert str(caught.value).startswith("an iterator over a dataset needs to stay one object.")
    assert is_explained(caught.value)
    assert len(list(iterator)) == 2
