"""The table of reads and writes: synchronization x aggregation x method x context.

The numbers are those of tf.distribute 2.21 with the decisions of distjax where it differs (a
mirrored variable never diverges), as closed forms in the values that replicas write. All kinds of
variables are in one program, each written by all methods in turn. They have 24 elements, which
every R of the table divides, so that sharded strategies split them; a ramp shows a shard at a
wrong place.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.strategies.default import DEFAULT_STRATEGY
from distjax.errors import AggregationError, LocalityError
from tests.replicas import here, local, num_copies, per_replica

NONE, SUM, MEAN = (getattr(dj.VariableAggregation, n) for n in ("NONE", "SUM", "MEAN"))
FIRST = dj.VariableAggregation.ONLY_FIRST_REPLICA
ON_WRITE, ON_READ = dj.VariableSynchronization.ON_WRITE, dj.VariableSynchronization.ON_READ

MODES = [(s, a) for s in (ON_WRITE, ON_READ) for a in (NONE, SUM, MEAN, FIRST)]
COMBINED = {SUM: sum, MEAN: lambda xs: sum(xs) / len(xs), FIRST: lambda xs: xs[0]}
#: Each with a factor of its own, so that no two sequences of writes end alike.
METHODS = {
    "assign_add": (1, lambda old, x: old + x),
    "assign_sub": (3, lambda old, x: old - x),
    "assign": (2, lambda old, x: x),
}
START, RAMP = 10.0, np.arange(24, dtype=np.float32)
FULL = np.full_like(RAMP, START)

NO_AGGREGATION = "You must specify an aggregation method to update variable 'v' in a replica "
NOT_DISTRIBUTED = "variable 'v' with aggregation SUM needs an array"
NO_CROSS_WRITE = "SyncOnReadVariable does not support `{}` in cross-replica context with "


def is_plain(strategy):
    """Says whether synchronization and aggregation have no effect: one replica, one copy."""
    return strategy is DEFAULT_STRATEGY or isinstance(strategy, dj.OneDeviceStrategy)


def is_on_read(strategy, mode):
    return mode[0] is ON_READ and not is_plain(strategy)


def make(strategy, mode, start=FULL):
    synchronization, aggregation = mode
    with strategy.scope():
        return dj.Variable(
            start, name="v", synchronization=synchronization, aggregation=aggregation
        )


def write_all(variables, methods, value):
    """Writes multiples of `value` by the methods in turn; returns what they return, [3, ...]."""
    return [
        # As one array: a program with fewer outputs compiles faster.
        jnp.stack([getattr(v, m)(METHODS[m][0] * value) for m in methods(mode)] or [FULL])
        for mode, v in variables.items()
    ]


def sequence(methods, value):
    """Returns what a variable holds after each of the writes."""
    held, seen = START, []
    for factor, change in (METHODS[m] for m in methods):
        held = change(held, factor * value)
        seen.append(held)
    return seen


def read_across(strategy, mode, components):
    """Returns what a cross-replica read makes of the components."""
    return COMBINED[mode[1]](components) if is_on_read(strategy, mode) else components[0]


def assert_close(got, expected, message):
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-5, err_msg=str(message))


def assert_components(strategy, mode, variable, expected):
    count = num_copies(strategy, variable)
    assert_close(local(strategy, variable), np.stack(expected[:count]), mode)


def assert_on_replicas(strategy, mode, value, expected):
    assert_close(local(strategy, value), np.stack(expected), mode)


def assert_refused(write, kind, text, variable):
    """The first line of the error has the text, and nothing is written."""
    with pytest.raises(kind) as caught:
        write()
    assert text in str(caught.value).splitlines()[0]
    for component in variable.local_results():
        np.testing.assert_array_equal(component, np.full(variable.shape, START))


def ramps(strategy):
    """Returns (r + 1) * RAMP on replica r, and the list of these."""
    values = [(r + 1) * RAMP for r in range(strategy.num_replicas_in_sync)]
    return per_replica(strategy, values), values


# -- in a replica function ------------------------------------------------------


def refused_in_a_replica(strategy, mode, *, number):
    """Returns the error of a write of a Python number or an array, None where it is legal."""
    if is_plain(strategy) or mode[0] is ON_READ:
        return None
    if mode[1] is NONE:
        return AggregationError, NO_AGGREGATION
    return (ValueError, NOT_DISTRIBUTED) if number and mode[1] is SUM else None


@pytest.mark.api_row(
    "aggregation of assign in a replica",
    "sync-on-read variable: reads and writes in a replica",
    "VariableAggregation",
)
def test_written_in_a_replica(strategy, how):
    """Arrays are combined by the aggregation; a Python number is one value for all."""
    arrays, numbers = (
        {
            mode: make(strategy, mode, start)
            for mode in MODES
            if not refused_in_a_replica(strategy, mode, number=number)
        }
        for number, start in ((False, FULL), (True, START))
    )
    x, values = ramps(strategy)
    every = lambda mode: METHODS

    def fn(x):
        return write_all(arrays, every, x), write_all(numbers, every, 4.0)

    seen_of_arrays, seen_of_numbers = how(lambda x: strategy.run(fn, args=(x,)))(x)
    for (mode, v), results in zip(arrays.items(), seen_of_arrays, strict=True):
        xs = values
        if not is_plain(strategy) and mode[0] is ON_WRITE:
            xs = [COMBINED[mode[1]](values)] * len(values)
        expected = [sequence(METHODS, x) for x in xs]
        assert_on_replicas(strategy, mode, results, expected)
        last = [e[-1] for e in expected]
        assert_components(strategy, mode, v, last)
        if mode[1] is not NONE:
            assert_close(v.value, read_across(strategy, mode, last), mode)
    for (mode, v), results in zip(numbers.items(), seen_of_numbers, strict=True):
        expected = sequence(METHODS, 4.0)
        assert_on_replicas(strategy, mode, results, [expected] * len(values))
        assert_components(strategy, mode, v, expected[-1:] * len(values))


@pytest.mark.api_row("no write in a replica without aggregation")
def test_refused_in_a_replica(strategy, how):
    """Decisions 9 and 10."""
    for mode in MODES:
        for number, start, value in ((False, FULL, RAMP), (True, START, 4.0)):
            refusal = refused_in_a_replica(strategy, mode, number=number)
            for method in METHODS if refusal else ():
                v = make(strategy, mode, start)
                write = lambda v=v, m=method, x=value: getattr(v, m)(x)
                assert_refused(how(lambda w=write: strategy.run(w)), *refusal, v)


# -- in cross-replica context ---------------------------------------------------


def legal_across(strategy, mode):
    """Returns the methods by which cross-replica code may write."""
    if not is_on_read(strategy, mode) or mode[1] in (MEAN, FIRST):
        return list(METHODS)
    return ["assign"] if mode[1] is SUM else []


@pytest.mark.api_row("reads and writes in cross-replica context")
def test_written_in_cross_replica_context(strategy, how):
    sets = [{mode: make(strategy, mode) for mode in MODES} for _ in range(3)]
    methods = lambda mode: legal_across(strategy, mode)

    def in_merge():
        dj.get_replica_context().merge_call(lambda s: write_all(sets[2], methods, RAMP) and None)

    def step():
        seen = write_all(sets[0], methods, RAMP)
        with strategy.scope():
            seen_in_scope = write_all(sets[1], methods, RAMP)
        strategy.run(in_merge)
        return seen, seen_in_scope

    results = how(step)()
    count = strategy.num_replicas_in_sync
    for i, mode in enumerate(MODES):
        held = sequence(methods(mode), RAMP)
        last = held[-1] if held else FULL
        if is_on_read(strategy, mode) and mode[1] is SUM:
            last = last / count  # so that it reads back as it was assigned
        for variables in sets:
            assert_components(strategy, mode, variables[mode], [last] * count)
        for variables, seen in zip(sets, results, strict=False):
            if held:
                assert_close(seen[i], np.stack(held), mode)
            if mode[1] is not NONE:
                read = read_across(strategy, mode, [last] * count)
                assert_close(variables[mode].value, read, mode)


@pytest.mark.api_row("sync-on-read variable: no assign_add across replicas")
def test_refused_in_cross_replica_context(strategy, how):
    for mode in MODES:
        for method in METHODS.keys() - legal_across(strategy, mode):
            v, text = make(strategy, mode), NO_CROSS_WRITE.format(method)
            write = lambda *_, v=v, method=method: getattr(v, method)(RAMP)
            merge = lambda write=write: dj.get_replica_context().merge_call(write)
            assert_refused(how(write), AggregationError, text, v)
            assert_refused(how(lambda m=merge: strategy.run(m)), AggregationError, text, v)


def test_a_per_replica_value_is_not_assigned_across(strategy, how):
    """Decision 11, for every kind of variable; strategies that never wrap have none to assign."""
    x, _ = ramps(strategy)
    assert isinstance(x, dj.PerReplica) != is_plain(strategy)
    for mode in MODES if isinstance(x, dj.PerReplica) else ():
        for method in METHODS:
            v, text = make(strategy, mode), f"{method} of variable 'v' needs one value"
            write = how(lambda x, v=v, method=method: getattr(v, method)(x))
            assert_refused(lambda write=write: write(x), LocalityError, text, v)


# -- in update functions --------------------------------------------------------


@pytest.mark.api_row("update context")
def test_written_in_an_update(strategy, how):
    """Writes are raw; a component takes its replica's argument."""
    raw = {mode: make(strategy, mode) for mode in MODES}
    by_component = {mode: make(strategy, mode) for mode in MODES if mode[0] is ON_READ}
    x, values = ramps(strategy)

    def step(x):
        for variables, value in ((raw, RAMP), (by_component, x)):
            for v in variables.values():
                update = lambda v, x: [getattr(v, m)(METHODS[m][0] * x) for m in METHODS] and None
                strategy.extended.update(v, update, args=(value,))

    how(step)(x)
    for mode, v in raw.items():
        assert_components(strategy, mode, v, [sequence(METHODS, RAMP)[-1]] * len(values))
    for mode, v in by_component.items():
        assert_components(strategy, mode, v, [sequence(METHODS, x)[-1] for x in values])


# -- reads ----------------------------------------------------------------------


@pytest.mark.api_row("update context", "sync-on-read variable: read across replicas")
def test_read(strategy, how):
    """In a replica and in an update its component, across replicas the aggregate."""
    variables, (x, values) = {m: make(strategy, m) for m in MODES}, ramps(strategy)
    on_read = [v for mode, v in variables.items() if mode[0] is ON_READ]
    readable = {m: v for m, v in variables.items() if m[1] is not NONE}
    extended = strategy.extended
    merge = lambda s: [v.value for v in readable.values()]

    def step(x):
        strategy.run(lambda x: [v.assign(x) for v in on_read] and None, args=(x,))
        return (
            strategy.run(lambda: [v.value for v in variables.values()]),
            [(v.value, extended.read_var(v)) for v in readable.values()],
            strategy.run(lambda: dj.get_replica_context().merge_call(merge)),
            [extended.update(v, lambda v: v.value * 1, group=False) for v in variables.values()],
        )

    replica, across, merged, updated = how(step)(x)
    held = {m: values if m[0] is ON_READ else [FULL] * len(values) for m in MODES}
    for mode, seen, parts in zip(MODES, replica, updated, strict=True):
        assert_on_replicas(strategy, mode, seen, held[mode])
        count = num_copies(strategy, variables[mode])
        rows = here(strategy, held[mode][:count], how)
        assert_close(np.stack(parts), np.stack(rows), mode)
    for mode, seen, in_merge in zip(readable, across, merged, strict=True):
        for value in (*seen, in_merge):
            assert isinstance(value, jax.Array)
            assert_close(value, read_across(strategy, mode, held[mode]), mode)
