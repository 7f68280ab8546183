"""Laws of run: what goes in, what comes out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.replicas import everywhere, local


def rid():
    return dj.get_replica_context().replica_id_in_sync_group


@pytest.mark.api_row("merging: the same object from every replica")
def test_r061_python_objects_come_back_as_they_are(strategy, how):
    captured = object()

    def fn(x):
        return "abc", None, 3, 2.5, True, captured, x.shape[0], len(x.shape)

    out = how(lambda x: strategy.run(fn, args=(x,)))(jnp.ones((4, 2)))
    assert out == ("abc", None, 3, 2.5, True, captured, 4, 2)
    assert out[5] is captured and type(out[2]) is int and type(out[4]) is bool


def test_r063_args_need_to_be_a_tuple_or_list(strategy):
    for args in (5, np.ones(2), {"x": 1}, "ab"):
        with pytest.raises(ValueError, match="^run: positional args must be a list or tuple"):
            strategy.run(lambda *a: a, args=args)
        merge = lambda args=args: dj.get_replica_context().merge_call(lambda s, *a: a, args=args)
        with pytest.raises(ValueError, match="^merge_call: positional args must be a list or"):
            strategy.run(merge)


def test_kwargs_need_to_be_a_dict(strategy):
    with pytest.raises(ValueError, match="^run: kwargs must be a dict"):
        strategy.run(lambda: 1, kwargs=[1])
    with pytest.raises(ValueError, match="^merge_call: kwargs must be a dict"):
        strategy.run(lambda: dj.get_replica_context().merge_call(lambda s: 1, kwargs=[1]))


def test_empty_args_and_lists(strategy):
    assert strategy.run(lambda: [], args=[]) == []
    assert strategy.run(lambda x: x, args=((),)) == ()


@pytest.mark.api_row("replica_id_in_sync_group")
def test_replica_id_is_the_replicas_number(strategy, how):
    out = how(lambda: strategy.run(lambda: jnp.asarray(rid()) + 0))()
    assert local(strategy, out) == list(range(strategy.num_replicas_in_sync))


def test_local_results_of_a_mirrored_array_are_R_arrays(strategy):
    out = strategy.run(lambda: jnp.float32(3) * 2)
    assert local(strategy, out) == everywhere(strategy, 6.0)


def test_arrays_and_numbers_are_given_to_all(strategy, how):
    out = how(lambda a, b, c: strategy.run(lambda a, b, c: a + b + c, args=(a, b, c)))(
        np.float32(1), jnp.float32(2), 3
    )
    assert local(strategy, out) == everywhere(strategy, 6.0)


def test_python_objects_are_passed_as_they_are(strategy, how):
    activation = {"relu": jax.nn.relu}
    out = how(
        lambda x: strategy.run(
            lambda x, name, fns: fns[name](x), args=(x,), kwargs={"name": "relu", "fns": activation}
        )
    )(jnp.float32(-2))
    assert local(strategy, out) == everywhere(strategy, 0.0)


def test_an_empty_program(strategy, how):
    assert how(lambda: strategy.run(lambda: None))() is None
    assert how(lambda: strategy.run(lambda: ()))() == ()
    assert how(lambda x: strategy.run(lambda x: x, args=(x,)))([]) == []


def test_closed_over_arrays(strategy, how):
    host, device = np.arange(2.0, dtype=np.float32), jnp.ones(2)
    got = how(lambda: strategy.run(lambda: host + device))()
    assert local(strategy, got) == everywhere(strategy, [1, 2])


def test_r267_values_from_function_then_run(strategy, how):
    n = strategy.num_replicas_in_sync
    x = strategy.distribute_values_from_function(
        lambda ctx: [np.float32(ctx.replica_id_in_sync_group)]
    )
    out = how(lambda x: strategy.run(lambda x: [x[0] ** 2], args=(x,)))(x)
    assert local(strategy, out[0]) == [float(r * r) for r in range(n)]
