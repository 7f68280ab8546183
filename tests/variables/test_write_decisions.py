"""Decisions on single reads and writes; the whole table is in `conformance/test_writes.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import AggregationError
from tests.replicas import local, per_replica

NONE, SUM, MEAN = (getattr(dj.VariableAggregation, n) for n in ("NONE", "SUM", "MEAN"))
FIRST = dj.VariableAggregation.ONLY_FIRST_REPLICA
ON_WRITE, ON_READ = dj.VariableSynchronization.ON_WRITE, dj.VariableSynchronization.ON_READ


def make(strategy, mode, start=10.0, **options):
    with strategy.scope():
        return dj.Variable(start, name="v", synchronization=mode[0], aggregation=mode[1], **options)


def parts(variable):
    return [float(c) for c in variable.local_results()]


READS = {
    "value": lambda v: v.value,
    "asarray": lambda v: np.asarray(v),
    "operator": lambda v: v + 1,
    "read_var": lambda v: v.strategy.extended.read_var(v),
}


FIRST = dj.VariableAggregation.ONLY_FIRST_REPLICA


@pytest.mark.parametrize("read", list(READS))
def test_read_across_replicas_without_aggregation(pair, read):
    v = make(pair, (ON_READ, NONE))
    with pytest.raises(AggregationError) as caught:
        READS[read](v)
    assert str(caught.value).splitlines()[0] == (
        "a cross-replica read of variable 'v' needs an aggregation."
    )
    assert "Could not convert from" in str(caught.value)


def test_read_of_another_sync_on_read_variable_in_update_context(pair):
    v, other = make(pair, (ON_WRITE, NONE)), make(pair, (ON_READ, SUM))
    with pytest.raises(dj.errors.ContextError) as caught:
        pair.extended.update(v, lambda v: v.assign(other.value))
    assert str(caught.value).splitlines()[0] == (
        "a read of sync-on-read variable 'v' needs a context with one value."
    )


# -- decisions ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8, jnp.int16])
@pytest.mark.parametrize("total", [7, 0, 1, 6, -7])
def test_sum_of_integers_is_split_without_loss(dtype, total):
    """Decision 12: the remainder goes to the first replicas."""
    if total < 0 and dtype == jnp.uint8:
        total = 9
    strategy = dj.VirtualStrategy(3)
    v = make(strategy, (ON_READ, SUM), start=0, dtype=dtype)
    v.assign(total)
    assert int(v.value) == total
    share = total // 3
    rest = total - 3 * share
    assert [int(c) for c in v.local_results()] == [share + (r < rest) for r in range(3)]


@pytest.mark.parametrize("total", [np.array([True, False]), jnp.array([True, False])], ids=type)
def test_sum_of_bools_is_split_without_loss(pair, how, total):
    """Decision 12: a total of 1 is True on one replica, not on each."""
    for strategy in (pair, dj.testing.ReferenceStrategy(2)):
        v = make(strategy, (ON_READ, SUM), start=np.array([False, False]))
        step = how(lambda v=v: v.assign(total)) if strategy is pair else lambda v=v: v.assign(total)
        assert step().tolist() == v.value.tolist() == [1, 0]
        assert [c.tolist() for c in v.local_results()] == [[True, False], [False, False]]


def test_sums_of_keys_name_the_variable_and_what_was_called(pair, how):
    key = jax.random.key(1)
    mirrored, own = (make(pair, (sync, SUM), start=key) for sync in (ON_WRITE, ON_READ))
    calls = {
        "assign": lambda: pair.run(lambda: mirrored.assign(key)),
        "assign ": lambda: own.assign(key),
        "a cross-replica read": lambda: own.value,
    }
    for what, call in calls.items():
        with pytest.raises(TypeError) as caught:
            how(call)()
        assert str(caught.value).splitlines()[0] == (
            f"{what.strip()} of variable 'v' with aggregation SUM needs numbers, not PRNG keys."
        )
    assert mirrored.assign(key) == key and len(own.local_results()) == 2


def test_sum_of_integers_reads_back_exactly_on_two_devices(pair, how):
    v = make(pair, (ON_READ, SUM), start=np.zeros(3, np.int32))
    step = how(lambda x: v.assign(x))
    assert step(np.array([7, 4, -1], np.int32)).tolist() == [7, 4, -1]
    assert [c.tolist() for c in v.local_results()] == [[4, 2, 0], [3, 2, -1]]


def test_an_equal_value_is_refused_too_without_aggregation(pair, how):
    """Decision 9: an M value written in a replica to ON_WRITE + NONE."""
    v = make(pair, (ON_WRITE, NONE))
    step = how(lambda: pair.run(lambda: v.assign(dj.get_replica_context().all_reduce("sum", 1.0))))
    with pytest.raises(AggregationError, match="You must specify an aggregation method"):
        step()
    fixes = pytest.raises(AggregationError, step).value.args[0]
    assert "dj.VariableAggregation.SUM" in fixes and "merge_call" in fixes  # both ways out
    assert parts(v) == [10, 10]


@pytest.mark.parametrize("number", [4, 4.0, True])
def test_python_numbers_do_not_sum(pair, number):
    """Decision 10; an array, a numpy scalar too, sums."""
    v = make(pair, (ON_WRITE, SUM))
    with pytest.raises(ValueError, match="with aggregation SUM needs an array"):
        pair.run(lambda: v.assign(number))
    pair.run(lambda: v.assign(jnp.float32(4)))
    assert parts(v) == [8, 8]
    pair.run(lambda: v.assign(np.float32(5)))
    assert parts(v) == [10, 10]


def test_mean_divides_truly_and_keeps_the_dtype(pair):
    v = make(pair, (ON_WRITE, MEAN), dtype=jnp.bfloat16)
    x = per_replica(pair, [np.int32(1), np.int32(2)])
    pair.run(lambda x: v.assign(x), args=(x,))
    assert v.dtype == v.value.dtype == jnp.bfloat16 and parts(v) == [1.5, 1.5]


def test_a_write_sees_the_writes_before_it(pair, how):
    v, r = make(pair, (ON_WRITE, SUM)), make(pair, (ON_READ, SUM))
    x = per_replica(pair, [np.float32(1), np.float32(2)])

    def fn(x):
        v.assign(x)
        first = v.value
        r.assign_sub(first)
        v.assign_add(r.value * 0 + x)
        return first, v.value, r.value

    first, second, third = how(lambda x: pair.run(fn, args=(x,)))(x)
    assert local(pair, first) == [3, 3]
    assert local(pair, second) == [6, 6]
    assert local(pair, third) == [7, 7]


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int32", 3_000_000_000),
        ("int8", [300, 1]),
        ("uint8", -1),
        ("float16", 1e6),
        ("float16", np.full(2, 70_000)),
        ("bfloat16", 1e300),
        ("complex64", 1e300j),
    ],
)
def test_a_value_out_of_the_range_is_refused(pair, method, dtype, value):
    with pair.scope():
        v = dj.Variable(jnp.ones(2, dtype), name="v", aggregation=FIRST)
    value = np.broadcast_to(np.asarray(value), 2)
    for call in (lambda: getattr(v, method)(value), lambda: getattr(v, method)(value.tolist())):
        for how in (lambda call: call(), pair.run):
            with pytest.raises(
                OverflowError, match=rf"^{method} of variable 'v' needs values that"
            ):
                how(call)
    assert v.value.tolist() == [1, 1]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 65504.0, 1e-30])
def test_what_a_float_holds_rounded_is_taken(pair, value):
    with pair.scope():
        v = dj.Variable(jnp.float16(1))
    v.assign(value)
    np.testing.assert_array_equal(np.float16(v.value), np.float16(value))


def test_keys_that_do_not_fit_say_what_to_do(pair):
    with pair.scope():
        v = dj.Variable(jax.random.split(jax.random.key(0), 2), name="v")
    with pytest.raises(TypeError, match=r"jax\.random\.wrap_key_data\(data, impl='threefry2x32'\)"):
        v.assign(jax.random.PRNGKey(1))
    with pytest.raises(ValueError, match=r"as many keys: jax\.random\.split\(key, v\.shape\)"):
        v.assign(jax.random.key(1))
