"""Laws of variables: creation, conversions, mirrored and sync-on-read ones, reads in traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax._src.strategies.default import DEFAULT_STRATEGY
from distjax.errors import TraceLeakError
from tests.replicas import everywhere, local, num_copies

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def make(strategy, initial_value, **options):
    with strategy.scope():
        return dj.Variable(initial_value, name="v", **options)


def parts(variable):
    return local(variable.strategy, variable)


def replica_id():
    return dj.get_replica_context().replica_id_in_sync_group


# -- creation -------------------------------------------------------------------


def test_r167_strategy_of_a_variable(strategy):
    for sync in (SYNC.ON_WRITE, SYNC.ON_READ):
        v = make(strategy, 1.0, synchronization=sync)
        assert v.strategy is strategy
        assert strategy.extended.variable_created_in_scope(v)


def test_invalid_aggregation(strategy):
    for mode in ("SUM", 3, dj.ReduceOp.SUM):
        with pytest.raises(ValueError) as caught:
            make(strategy, 1.0, aggregation=mode)
        first = str(caught.value).splitlines()[0]
        assert first == f"Invalid variable aggregation mode: {mode} for variable: v."


def test_defaults(strategy):
    """Sync-on-read variables are not trainable unless they are said to be."""
    for sync, given, expected in [
        (SYNC.AUTO, None, True),
        (SYNC.ON_WRITE, None, True),
        (SYNC.ON_READ, None, False),
        (SYNC.ON_READ, True, True),
        (SYNC.ON_WRITE, False, False),
    ]:
        assert make(strategy, 1.0, synchronization=sync, trainable=given).trainable is expected
    with strategy.scope():
        assert dj.Variable(1.0).name == "Variable"


def test_initial_values(strategy):
    """Of arrays and functions, split or not, empty, and PRNG keys."""
    v = make(strategy, np.arange(3), dtype=jnp.float16)
    assert v.dtype == v.value.dtype == jnp.float16 and v.value.tolist() == [0, 1, 2]
    v = make(strategy, lambda: jnp.arange(24).reshape(24, 1), dtype="bfloat16")
    assert v.dtype == v.value.dtype == jnp.bfloat16
    np.testing.assert_array_equal(v.value, np.arange(24)[:, None])
    assert make(strategy, jnp.zeros((0, 24))).value.shape == (0, 24)
    key = jax.random.key(7)
    assert (jax.random.key_data(make(strategy, key).value) == jax.random.key_data(key)).all()


@pytest.mark.api_row("variable created in a replica function")
def test_guarded_creation(strategy, how):
    """Made in a replica function at its first call."""
    made, size = [], 24

    def layer(x):
        if not made:
            made.append(dj.Variable(jnp.ones(size), name="v", aggregation=AGG.SUM))
        return made[0].value * x

    step = how(lambda x: strategy.run(layer, args=(x,)))
    for _ in range(2):
        assert local(strategy, step(jnp.float32(3))) == everywhere(strategy, [3] * size)
    assert made[0].strategy is strategy and made[0].name == "v"
    made[0].assign(jnp.full(size, 2.0))
    assert local(strategy, step(jnp.float32(3))) == everywhere(strategy, [6] * size)


# -- conversions ----------------------------------------------------------------


def test_conversions(strategy):
    v = make(strategy, 3.0)
    assert float(v) == 3 and int(v) == 3 and bool(v) and f"{v:.1f}" == "3.0"
    assert np.asarray(v).dtype == np.float32 and np.asarray(v, np.int64).dtype == np.int64
    assert isinstance(jnp.asarray(v), jax.Array) and float(jnp.asarray(v)) == 3
    assert np.float32(3) == np.asarray(v)
    assert complex(make(strategy, 1 + 2j)) == 1 + 2j and complex(v) == 3
    assert [7, 8, 9][make(strategy, 2)] == 9 and list(range(make(strategy, 2))) == [0, 1]
    with pytest.raises(TypeError, match="integer"):
        [7, 8, 9][v]


def test_conversions_that_lose_nothing_in_kind(strategy):
    v = make(strategy, 0.0, dtype=jnp.float16)
    for value in (1, True, np.int8(1), np.float64(1), jnp.int32(1)):
        v.assign(0.0)
        assert v.assign(value).dtype == jnp.float16 and float(v.value) == 1
        assert strategy.local_results(v)[0].dtype == jnp.float16


# -- mirrored -------------------------------------------------------------------


def test_r181_sum_is_assigned_across_replicas(strategy, how):
    v = make(strategy, 0.0, aggregation=AGG.SUM)
    assert float(how(lambda: v.assign(1.0))()) == 1 and float(v.value) == 1


def test_r191_the_value_is_another_variable(strategy, how):
    methods = {"assign": 2.0, "assign_add": 2.0, "assign_sub": -2.0}
    others = [make(strategy, x, aggregation=AGG.MEAN) for x in methods.values()]
    targets = [make(strategy, 0.0, aggregation=AGG.MEAN) for _ in methods]

    def write():
        for method, v, other in zip(methods, targets, others, strict=True):
            getattr(v, method)(other)

    for step in (lambda: strategy.run(write), write):
        how(step)()
        assert [float(v.value) for v in targets] == [2, 2, 2]
        assert [float(v.value) for v in others] == [2, 2, -2]
        for v in targets:
            v.assign(0.0)


@pytest.mark.api_row("replica context")
def test_r193_read_in_a_replica(strategy):
    variables = [make(strategy, 3.0, aggregation=aggregation) for aggregation in AGG]
    for seen in strategy.run(lambda: [v.value for v in variables]):
        assert local(strategy, seen) == everywhere(strategy, 3)


def test_r195_assign_with_no_scope(strategy):
    v = make(strategy, 0.0)
    assert not dj.has_strategy()
    v.assign(3.0)
    assert parts(v) == [3] * num_copies(strategy, v)


# -- sync-on-read ---------------------------------------------------------------


def on_read(strategy, aggregation=AGG.SUM):
    return make(strategy, 0.0, synchronization=SYNC.ON_READ, aggregation=aggregation)


def test_r215_r219_write_in_a_replica(strategy, how):
    """Integers, of Python and of JAX, are converted."""
    variables = [on_read(strategy, aggregation) for aggregation in AGG]

    def write():
        return [[v.assign(1), v.assign_add(1.0), v.assign_sub(jnp.int32(3))] for v in variables]

    for v, seen in zip(variables, how(lambda: strategy.run(write))(), strict=True):
        assert [local(strategy, x) for x in seen] == [everywhere(strategy, x) for x in (1, 2, -1)]
        assert v.dtype == jnp.float32 and parts(v) == everywhere(strategy, -1)


def test_r217_assign_across_replicas_divides_a_sum(strategy, how):
    count = strategy.num_replicas_in_sync
    v = on_read(strategy)
    assert float(how(lambda: v.assign(1.0 * count))()) == count
    assert parts(v) == everywhere(strategy, 1)


def test_r223_assign_returns_the_component(strategy):
    variables = [on_read(strategy, aggregation) for aggregation in AGG]
    for seen in strategy.run(lambda: [v.assign(jnp.float32(replica_id())) for v in variables]):
        assert local(strategy, seen) == list(range(strategy.num_replicas_in_sync))


# -- reads in traces ------------------------------------------------------------


def test_read_in_the_users_own_jit(strategy):
    v = make(strategy, 0.0)
    with pytest.raises(TraceLeakError) as caught:
        jax.jit(lambda x: v.value * x)(1.0)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[0] == (
        "a read of variable 'v' needs to happen in the function that distjax traces."
    )
    assert lines[1] == "Got: a read inside jax.jit."
    assert lines[3] == (
        "Fix: compile the step with distjax.jit (dj.jit) in place of jax.jit: it follows variables"
    )


READERS = {
    "jit": lambda fn: jax.jit(fn)(jnp.float32(2)),
    "grad": lambda fn: jax.grad(fn)(jnp.float32(2)) * 2,
    "vmap": lambda fn: jax.vmap(fn)(jnp.full(1, 2.0))[0],
    "checkpoint": lambda fn: jax.checkpoint(fn)(jnp.float32(2)),
    "scan": lambda fn: lax.scan(lambda c, x: (fn(c), x), jnp.float32(2), jnp.ones(1))[0],
    "cond": lambda fn: lax.cond(jnp.bool_(True), fn, lambda x: x, jnp.float32(2)),
    "while_loop": lambda fn: lax.while_loop(lambda c: c < 6, fn, jnp.float32(2)),
}


def test_reads_work_in_every_inner_trace(strategy):
    """Decision 5: the first read may stand at any depth. A variable for each reader."""
    readers = dict(READERS)
    if strategy is DEFAULT_STRATEGY:
        del readers["jit"]  # its functions run as they are: a jax.jit of the user's own
    variables = {name: make(strategy, jnp.full(24, 3.0)) for name in readers}

    def fn():
        return [
            read(lambda x, v=variables[name]: x * v.value.sum() / 24)
            for name, read in readers.items()
        ]

    step = dj.jit(fn) if strategy is DEFAULT_STRATEGY else lambda: strategy.run(fn)
    across = dj.jit(fn)
    for seen in step():
        assert local(strategy, seen) == everywhere(strategy, 6)
    assert [float(x) for x in across()] == [6] * len(readers)
    for v in variables.values():
        v.assign(jnp.full(24, 4.0))
    for name, seen in zip(readers, across(), strict=True):
        assert float(seen) == 8, name


def test_eager_grad_and_vmap_read_the_value_of_now(strategy):
    v = make(strategy, 3.0)
    assert float(jax.grad(lambda x: v.value * x)(2.0)) == 3
    assert jax.vmap(lambda x: v.value * x)(jnp.arange(2.0)).tolist() == [0, 3]
    v.assign(4.0)
    assert float(jax.grad(lambda x: v.value * x)(2.0)) == 4
