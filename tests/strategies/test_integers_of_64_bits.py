"""Integers that 32 bits cannot hold are refused wherever values enter, before anything changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj

PAIR = dj.MirroredStrategy(jax.devices()[:2])
ONE = dj.OneDeviceStrategy()

WIDE = {
    "int64": np.array([2**40, 1]),
    "negative": np.array([0, -(2**31) - 1]),
    "uint64": np.array([2**63, 1], np.uint64),
    "uint32 as int64": np.array([2**32 - 1, 0]),
}
HELD = {
    "int64": np.array([2**31 - 1, -(2**31)]),
    "uint64": np.array([2**32 - 1, 0], np.uint64),
}


def once(make):
    return next(iter(make))


DOORS = {
    "batch 0": lambda x: once(PAIR.distribute_dataset([{"x": x}])),
    "element 0": lambda x: once(PAIR.distribute_datasets_from_function(lambda context: [x, x])),
    "per_replica": lambda x: PAIR.per_replica(x),
    "distribute_values_from_function": lambda x: PAIR.distribute_values_from_function(
        lambda context: x
    ),
    "broadcast_to": lambda x: PAIR.extended.broadcast_to(x),
    "a value for destinations": lambda x: PAIR.extended.reduce_to("mean", x, destinations=None),
    "reduce(MEAN)": lambda x: PAIR.reduce("mean", x, mask=np.ones(x.shape, bool)),
    "reduce(SUM)": lambda x: ONE.reduce("sum", x, axis=0, mask=np.ones(x.shape, bool)),
    "an argument of ": lambda x: PAIR.run(lambda a: a, args=({"a": x},)),
    "an argument": lambda x: PAIR.run(lambda a=None: a, kwargs={"a": x}),
    "an argument of": lambda x: dj.jit(lambda a: a)(x),
    "an arg": lambda x: PAIR.jit(lambda a: a)(x),
    "args[0]": lambda x: dj.pmap(lambda a: a, strategy=PAIR)(x),
    "run_steps_on_iterator": lambda x: PAIR.extended.run_steps_on_iterator(
        lambda context, a: None, iter([x]), 1
    ),
    "the initial value": lambda x: dj.Variable(x),
    "assign": lambda x: dj.Variable(np.zeros(2, jax.dtypes.canonicalize_dtype(x.dtype))).assign(x),
}
CONTEXT = dj.get_replica_context
#: For integers that are made in a step, of Python's or NumPy's.
WITHIN = {
    "a result of ": lambda x: {"x": x},
    "all_reduce": lambda x: CONTEXT().all_reduce("mean", x),
    "all_gather": lambda x: CONTEXT().all_gather(x, 0),
    "merge_call": lambda x: CONTEXT().merge_call(lambda s, x: s.reduce("sum", x), args=(x,)),
    "a result of merge": lambda x: CONTEXT().merge_call(lambda s: x),
    "update of metric": lambda x: METRIC.update(x),
}
with PAIR.scope():
    METRIC = dj.metrics.Sum("total")


@pytest.mark.parametrize("door", WITHIN)
@pytest.mark.parametrize("kind", WIDE)
def test_refused_in_a_step(door, kind):
    for call in (lambda f: PAIR.run(f), lambda f: dj.jit(lambda: PAIR.run(f))()):
        with pytest.raises(OverflowError, match=f"^{door}.* needs integers that .*int32 holds"):
            call(lambda: WITHIN[door](WIDE[kind]))
    assert float(METRIC.result()) == 0


@pytest.mark.parametrize("kind", HELD)
def test_held_in_a_step(kind):
    for door in WITHIN:
        PAIR.run(lambda door=door: WITHIN[door](HELD[kind]))
    METRIC.reset()


def test_refused_as_a_result_of_cross_replica_code():
    with pytest.raises(OverflowError, match="^a result of .* needs integers that int32 holds"):
        dj.jit(lambda: WIDE["int64"])()
    with PAIR.scope():
        v = dj.Variable(1.0, synchronization=dj.VariableSynchronization.ON_READ)
    with pytest.raises(OverflowError, match="^a result of .* needs integers that int32 holds"):
        PAIR.extended.update(v, lambda v: WIDE["int64"])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", WIDE)
def test_refused(door, kind):
    with pytest.raises((OverflowError, dj.errors.BatchError)) as error:
        for _ in range(2):
            DOORS[door](WIDE[kind])
    text = str(error.value)
    assert "int32 holds" in text and "wrap around" in text
    if not door.startswith("args"):
        assert door in text


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", HELD)
def test_held(door, kind):
    DOORS[door](HELD[kind])


def test_every_call_of_a_step_is_checked_and_changes_nothing():
    with PAIR.scope():
        v = dj.Variable(jnp.zeros(2, jnp.int32), aggregation=dj.VariableAggregation.SUM)

    def step(x):
        v.assign_add(x)

    for i in range(3):
        PAIR.run(step, args=(np.array([i, i]),))
        with pytest.raises(OverflowError, match="an argument of .*step needs integers that int32"):
            PAIR.run(step, args=(np.array([i, 2**31]),))
    assert v.value.tolist() == [6, 6]


def test_a_sum_on_the_host_is_right_or_refused():
    assert int(ONE.reduce("sum", np.array([2**31, -(2**31), 5]), axis=0)) == 5
    with pytest.raises(OverflowError, match="SUM. needs integers that int32 holds"):
        ONE.reduce("sum", np.full(3, 2**30), axis=0)
    assert float(PAIR.reduce("mean", np.array([2**40, 2**41]), axis=0)) == 1.5 * 2**40


def test_the_fix_works():
    x = np.array([2**40 + 7, 5, 2**61])
    high, low = (x >> 31).astype(np.int32), (x & 0x7FFFFFFF).astype(np.int32)
    high, low = PAIR.run(lambda a, b: (a, b), args=(high, low))
    assert (np.asarray(high, np.int64) * 2**31 + np.asarray(low)).tolist() == x.tolist()


def test_empty_arrays_and_64_bits():
    PAIR.run(lambda x: x, args=(np.zeros((0,), np.int64),))
    with jax.enable_x64(True):
        assert PAIR.run(lambda x: x + 1, args=(WIDE["int64"],)).tolist() == [2**40 + 1, 2]
        (batch,) = PAIR.distribute_dataset([WIDE["int64"]])
        assert batch.stacked.tolist() == [[2**40], [1]]
