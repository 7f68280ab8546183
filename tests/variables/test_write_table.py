"""The whole table of writes: synchronization x aggregation x method x context.

Expected numbers: tf.distribute 2.21 from start value 10 on two replicas, with the
decisions of distjax where it differs (a mirrored variable never diverges).
"""

import jax.numpy as jnp
import numpy as np
import pytest
from replicas import local, per_replica

import distjax as dj
from distjax.errors import AggregationError, LocalityError

NONE, SUM, MEAN = (getattr(dj.VariableAggregation, n) for n in ("NONE", "SUM", "MEAN"))
FIRST = dj.VariableAggregation.ONLY_FIRST_REPLICA
ON_WRITE, ON_READ = dj.VariableSynchronization.ON_WRITE, dj.VariableSynchronization.ON_READ

METHODS = ("assign", "assign_add", "assign_sub")
MODES = [(s, a) for s in (ON_WRITE, ON_READ) for a in (NONE, SUM, MEAN, FIRST)]
MODE_IDS = [f"{s.name}-{a.name}" for s, a in MODES]

NO_AGGREGATION = "You must specify an aggregation method to update variable 'v' in a replica "
NOT_DISTRIBUTED = "variable 'v' with aggregation SUM needs an array"
NO_CROSS_WRITE = "SyncOnReadVariable does not support `{method}` in cross-replica context with "

#: What one write leaves in the two components, for assign, assign_add, assign_sub.
#: Arrays: 1 on replica 0, 2 on replica 1. Python number and cross-replica value: 4.
REPLICA_ARRAY = {
    (ON_WRITE, NONE): (AggregationError, NO_AGGREGATION),
    (ON_WRITE, SUM): ([3, 3], [13, 13], [7, 7]),
    (ON_WRITE, MEAN): ([1.5, 1.5], [11.5, 11.5], [8.5, 8.5]),
    (ON_WRITE, FIRST): ([1, 1], [11, 11], [9, 9]),
    (ON_READ, NONE): ([1, 2], [11, 12], [9, 8]),
    (ON_READ, SUM): ([1, 2], [11, 12], [9, 8]),
    (ON_READ, MEAN): ([1, 2], [11, 12], [9, 8]),
    (ON_READ, FIRST): ([1, 2], [11, 12], [9, 8]),
}
EACH_FOUR = ([4, 4], [14, 14], [6, 6])
REPLICA_NUMBER = {
    **dict.fromkeys(MODES, EACH_FOUR),
    (ON_WRITE, NONE): (AggregationError, NO_AGGREGATION),
    (ON_WRITE, SUM): (ValueError, NOT_DISTRIBUTED),
}
CROSS_REPLICA = {
    **dict.fromkeys(MODES, EACH_FOUR),
    (ON_READ, NONE): (AggregationError, NO_CROSS_WRITE),
    (ON_READ, SUM): (
        [2, 2],
        (AggregationError, NO_CROSS_WRITE),
        (AggregationError, NO_CROSS_WRITE),
    ),
}
#: What a cross-replica read makes of components [1, 2].
READ_OF_1_2 = {SUM: 3.0, MEAN: 1.5, FIRST: 1.0}


def make(strategy, mode, start=10.0, **options):
    with strategy.scope():
        return dj.Variable(start, name="v", synchronization=mode[0], aggregation=mode[1], **options)


def parts(variable):
    return [float(c) for c in variable.local_results()]


def expected_of(table, mode, method):
    row = table[mode]
    return row if row[0] in (AggregationError, ValueError) else row[METHODS.index(method)]


def is_error(expected):
    return isinstance(expected[0], type)


def check(variable, expected, method, write):
    """Calls `write` and compares the components; after an error they are as before."""
    if is_error(expected):
        kind, text = expected
        with pytest.raises(kind) as caught:
            write()
        assert text.format(method=method) in str(caught.value).splitlines()[0]
        assert parts(variable) == [10, 10]
    else:
        write()
        assert parts(variable) == expected


@pytest.mark.seed(
    "aggregation of assign in a replica",
    "no write in a replica without aggregation",
    "sync-on-read variable: reads and writes in a replica",
    "VariableAggregation",
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_write_of_an_array_in_a_replica(pair, how, mode, method):
    v = make(pair, mode)
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    step = how(lambda x: pair.run(lambda x: getattr(v, method)(x), args=(x,)))
    expected = expected_of(REPLICA_ARRAY, mode, method)
    results = []
    check(v, expected, method, lambda: results.append(step(x)))
    if not is_error(expected):
        assert local(pair, results[0]) == expected  # the value that each replica then sees


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_write_of_a_python_number_in_a_replica(pair, how, mode, method):
    v = make(pair, mode)
    step = how(lambda: pair.run(lambda: getattr(v, method)(4.0)))
    expected = expected_of(REPLICA_NUMBER, mode, method)
    results = []
    check(v, expected, method, lambda: results.append(step()))
    if not is_error(expected):
        assert local(pair, results[0]) == expected


@pytest.mark.seed(
    "reads and writes in cross-replica context",
    "sync-on-read variable: no assign_add across replicas",
)
@pytest.mark.parametrize("where", ["no scope", "scope", "jit"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_write_in_cross_replica_context(pair, mode, method, where):
    v = make(pair, mode)

    def write():
        if where == "scope":
            with pair.scope():
                return getattr(v, method)(4.0)
        return getattr(v, method)(4.0)

    write = dj.jit(write) if where == "jit" else write
    results = []
    expected = expected_of(CROSS_REPLICA, mode, method)
    check(v, expected, method, lambda: results.append(write()))
    if not is_error(expected):
        value = {SUM: sum(expected), MEAN: sum(expected) / 2}.get(mode[1], expected[0])
        assert float(results[0]) == (value if mode[0] is ON_READ else expected[0])
        assert float(v.value) == float(results[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_write_in_a_merge_function(pair, how, mode, method):
    v = make(pair, mode)

    def fn():
        def merge(strategy):
            getattr(v, method)(4.0)

        dj.get_replica_context().merge_call(merge)

    step = how(lambda: pair.run(fn))
    check(v, expected_of(CROSS_REPLICA, mode, method), method, step)


@pytest.mark.seed("update context")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_write_in_update_context_is_raw(pair, how, mode, method):
    v = make(pair, mode)
    step = how(
        lambda: pair.extended.update(v, lambda v, x: getattr(v, method)(x), args=(4.0,)) is None
    )
    step()
    assert parts(v) == EACH_FOUR[METHODS.index(method)]


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST], ids=lambda a: a.name)
def test_update_of_components_takes_per_replica_arguments(pair, how, aggregation):
    v = make(pair, (ON_READ, aggregation))
    x = per_replica(pair, [np.float32(1), np.float32(2)])

    def step(x):
        pair.extended.update(v, lambda v, x: v.assign_add(x), args=(x,))

    how(step)(x)
    assert parts(v) == [11, 12]


# -- reads --------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_read_in_a_replica_is_the_local_component(pair, how, mode):
    v = make(pair, mode)
    expected = [10, 10]
    if mode[0] is ON_READ:
        pair.run(lambda x: v.assign(x), args=(per_replica(pair, [np.float32(1), np.float32(2)]),))
        expected = [1, 2]
    assert local(pair, how(lambda: pair.run(lambda: v.value))()) == expected


@pytest.mark.seed("sync-on-read variable: read across replicas")
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST], ids=lambda a: a.name)
def test_read_across_replicas_aggregates(pair, how, aggregation):
    v = make(pair, (ON_READ, aggregation))
    pair.run(lambda x: v.assign(x), args=(per_replica(pair, [np.float32(1), np.float32(2)]),))
    expected = READ_OF_1_2[aggregation]
    assert float(how(lambda: v.value)()) == expected
    assert float(how(lambda: pair.extended.read_var(v))()) == expected
    with pair.scope():
        assert float(how(lambda: v.value)()) == expected
    seen = pair.run(lambda: dj.get_replica_context().merge_call(lambda strategy: v.value))
    assert float(seen) == expected


READS = {
    "value": lambda v: v.value,
    "asarray": lambda v: np.asarray(v),
    "operator": lambda v: v + 1,
    "read_var": lambda v: v.strategy.extended.read_var(v),
}


@pytest.mark.parametrize("read", list(READS))
def test_read_across_replicas_without_aggregation(pair, read):
    v = make(pair, (ON_READ, NONE))
    with pytest.raises(AggregationError) as caught:
        READS[read](v)
    assert str(caught.value).splitlines()[0] == (
        "a cross-replica read of variable 'v' needs an aggregation."
    )
    assert "Could not convert from" in str(caught.value)


@pytest.mark.seed("update context")
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_read_in_update_context_is_the_component(pair, how, mode):
    v = make(pair, mode)
    expected = [10, 10]
    if mode[0] is ON_READ:
        pair.run(lambda x: v.assign(x), args=(per_replica(pair, [np.float32(1), np.float32(2)]),))
        expected = [1, 2]
    got = how(lambda: pair.extended.update(v, lambda v: v.value * 1, group=False))()
    assert [float(x) for x in got] == expected


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


def test_sum_of_integers_reads_back_exactly_on_two_devices(pair, how):
    v = make(pair, (ON_READ, SUM), start=np.zeros(3, np.int32))
    step = how(lambda x: v.assign(x))
    assert step(np.array([7, 4, -1], np.int32)).tolist() == [7, 4, -1]
    assert [c.tolist() for c in v.local_results()] == [[4, 2, 0], [3, 2, -1]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_a_per_replica_value_across_replicas_is_refused(pair, how, mode, method):
    """Decision 11, for every kind of variable."""
    v = make(pair, mode)
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    with pytest.raises(LocalityError) as caught:
        how(lambda x: getattr(v, method)(x))(x)
    assert str(caught.value).splitlines()[0] == f"{method} of variable 'v' needs one value."
    assert parts(v) == [10, 10]


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


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_one_device_variables_are_plain(mode, how):
    """Synchronization and aggregation have no effect there."""
    strategy = dj.OneDeviceStrategy()
    v = make(strategy, mode)
    assert float(how(lambda: v.assign_add(4.0))()) == 14
    assert (
        float(how(lambda: strategy.run(lambda x: v.assign_sub(x), args=(jnp.float32(1),)))()) == 13
    )
    assert float(how(lambda: strategy.run(lambda: v.assign(4.0)))()) == 4
    strategy.extended.update(v, lambda v: v.assign_add(1.0))
    assert parts(v) == [5] and float(v.value) == 5


@pytest.mark.parametrize("mode", [m for m in MODES if m[0] is ON_WRITE], ids=MODE_IDS[:4])
def test_one_mirrored_replica_follows_the_same_table(mode):
    strategy = dj.MirroredStrategy([*dj.MirroredStrategy().extended.worker_devices[:1]])
    v = make(strategy, mode)
    if mode[1] is NONE:
        with pytest.raises(AggregationError, match="You must specify an aggregation method"):
            strategy.run(lambda: v.assign(jnp.float32(3)))
        return
    strategy.run(lambda: v.assign_add(jnp.float32(3)))
    assert parts(v) == [13]
