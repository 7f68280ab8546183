"""Written variables are donated; every array that the user holds stays valid."""

import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.replicas import local

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def make(strategy, initial_value, **options):
    with strategy.scope():
        return dj.Variable(initial_value, aggregation=AGG.MEAN, **options)


def writer(strategy, variable, how):
    """Returns a step that adds 1 to the variable, on every replica."""
    if how == "jit":
        return dj.jit(lambda: (variable.assign_add(jnp.ones(4)), None)[1])
    fn = lambda: (variable.assign_add(jnp.ones(4)), None)[1]
    return lambda: strategy.run(fn)


#: What a user may hold: from a variable that is 1 to things that must stay 1.
HOLDERS = {
    "value": lambda v: [v.value],
    "value twice": lambda v: [v.value, v.value],
    "the array on a device": lambda v: [v.value.addressable_data(0)],
    "put where it is": lambda v: [jax.device_put(v.value, v.value.sharding)],
    "put on a device": lambda v: [jax.device_put(v.value, v.strategy.extended.worker_devices[0])],
    "shards": lambda v: [s.data for s in v.value.addressable_shards],
    "components": lambda v: list(v.local_results()),
    "one component": lambda v: [v.local_results()[-1]],
    "strategy.local_results": lambda v: list(v.strategy.local_results(v)),
    "read_var": lambda v: [v.strategy.extended.read_var(v)],
    "numpy of the value": lambda v: [np.asarray(v.value)],
    "numpy of the variable": lambda v: [np.asarray(v)],
    "numpy of a component": lambda v: [np.asarray(c) for c in v.local_results()],
    "dlpack": lambda v: [np.from_dlpack(v.local_results()[0])],
    "result of run": lambda v: v.strategy.local_results(v.strategy.run(lambda: v.value)),
    "result of jit": lambda v: [dj.jit(lambda: v.value)()],
    "result of assign": lambda v: [v.assign(jnp.ones(4))],
    "result of assign in jit": lambda v: [dj.jit(lambda: v.assign(jnp.ones(4)))()],
    "result of assign in run": lambda v: v.strategy.local_results(
        v.strategy.run(lambda: v.assign(jnp.ones(4)))
    ),
    "result through a tree": lambda v: [dj.jit(lambda: {"a": [v.value]})()["a"][0]],
    "result of a merge": lambda v: v.strategy.local_results(
        v.strategy.run(lambda: dj.get_replica_context().merge_call(lambda strategy: v.value))
    ),
    "result of update": lambda v: v.strategy.local_results(
        v.strategy.extended.update(v, lambda v: v.assign(jnp.ones(4)))
    ),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("how", ["run", "jit"])
@pytest.mark.parametrize("sync", [SYNC.ON_WRITE, SYNC.ON_READ], ids=["mirrored", "on_read"])
@pytest.mark.parametrize("holder", list(HOLDERS))
def test_what_the_user_holds_stays_valid(pair, holder, sync, how, collect_garbage):
    v = make(pair, jnp.ones(4), synchronization=sync)
    step = writer(pair, v, how)
    step()  # so that the stored array is one that a program has made
    v.assign(jnp.ones(4))
    held = HOLDERS[holder](v)
    collect_garbage()
    for _ in range(3):
        step()
    for array in held:
        np.testing.assert_array_equal(np.asarray(array), np.ones(4))
    np.testing.assert_array_equal(v.value, np.full(4, 4.0))


@pytest.mark.parametrize("writes", [False, True])
def test_what_a_failing_update_has_read_stays_valid(pair, writes):
    v = make(pair, jnp.ones(4))
    step = writer(pair, v, "run")
    held = []

    def fails(v):
        held.append(v.value)
        if writes:
            held.append(v.assign(jnp.zeros(4)))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pair.extended.update(v, fails)
    for _ in range(2):
        step()
    assert [array.tolist() for array in held] == [[1] * 4, [0] * 4][: len(held)]
    assert v.value.tolist() == [3] * 4


def test_what_two_threads_read_at_once_stays_valid(pair, switch_often):
    v = make(pair, jnp.ones(4))
    held = []

    def read():
        for _ in range(300):
            held.append(v.value)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer(pair, v, "run")()
    assert all(array.tolist() == [1, 1, 1, 1] for array in held)


@pytest.mark.parametrize("how", ["run", "jit"])
@pytest.mark.parametrize("kind", ["numpy", "jax", "placed", "variable"])
def test_the_initial_value_stays_valid(pair, kind, how):
    with pair.scope():
        initial = {
            "numpy": lambda: np.ones(4, np.float32),
            "jax": lambda: jnp.ones(4),
            "placed": lambda: jax.device_put(jnp.ones(4), pair.extended.topology.mirrored),
            "variable": lambda: dj.Variable(jnp.ones(4)),
        }[kind]()
    v = make(pair, initial)
    step = writer(pair, v, how)
    for _ in range(3):
        step()
    held = initial.value if kind == "variable" else initial
    np.testing.assert_array_equal(np.asarray(held), np.ones(4))
    if kind == "numpy":  # and the other way round
        initial[:] = 7
    np.testing.assert_array_equal(v.value, np.full(4, 4.0))


@pytest.mark.parametrize("how", ["run", "jit"])
@pytest.mark.parametrize("where", ["eager", "run", "jit"])
def test_an_assigned_array_stays_valid(pair, where, how):
    v = make(pair, jnp.zeros(4))
    x = jax.device_put(jnp.ones(4), pair.extended.topology.mirrored)
    y = np.ones(4, np.float32)
    for array in (x, y):
        {
            "eager": lambda a: v.assign(a),
            "run": lambda a: pair.run(lambda a: (v.assign(a), None)[1], args=(a,)),
            "jit": lambda a: dj.jit(lambda a: (v.assign(a), None)[1])(a),
        }[where](array)
        step = writer(pair, v, how)
        step()
        step()
        np.testing.assert_array_equal(np.asarray(array), np.ones(4))
        np.testing.assert_array_equal(v.value, np.full(4, 3.0))


@pytest.mark.parametrize("how", ["run", "jit"])
@pytest.mark.parametrize("sync", [SYNC.ON_WRITE, SYNC.ON_READ], ids=["mirrored", "on_read"])
def test_a_value_is_copied_once_if_it_was_seen(pair, how, sync, monkeypatch):
    """Nobody can tell whether an alias of it is still held: JAX's hold no reference."""
    v = make(pair, jnp.ones(4), synchronization=sync)
    step = writer(pair, v, how)
    step()
    copies = []
    copy = jnp.copy
    monkeypatch.setattr(jnp, "copy", lambda x: copies.append(1) or copy(x))
    for _ in range(3):
        former = v.storage  # not handed out
        step()
        assert former.is_deleted()
    assert copies == []
    for num_reads in (1, 2):
        held = [v.local_results() for _ in range(num_reads)]
        copies.clear()
        step(), step()
        assert copies == [1]
        assert all(x.tolist() == held[0][0].tolist() for parts in held for x in parts)


def test_variables_that_are_only_read_are_not_donated(pair):
    v, w = make(pair, jnp.ones(4)), make(pair, jnp.zeros(4))
    step = dj.jit(lambda: (w.assign(v.value), None)[1])
    step()
    stored = v.storage
    step()
    assert v.storage is stored and not stored.is_deleted()
    w.assign_add(jnp.ones(4))
    assert v.value.tolist() == [1] * 4  # w has a buffer of its own
    writer(pair, w, "jit")()
    assert v.value.tolist() == [1] * 4 and w.value.tolist() == [3] * 4


def test_two_variables_of_one_value_have_buffers_of_their_own(pair):
    a, b = make(pair, jnp.zeros(4)), make(pair, jnp.zeros(4))
    x = jnp.ones(4)
    dj.jit(lambda x: (a.assign(x), b.assign(x), None)[2])(x)
    both = dj.jit(lambda: (a.assign_add(jnp.ones(4)), b.assign_sub(jnp.ones(4)), None)[2])
    both()
    both()
    assert a.value.tolist() == [3] * 4 and b.value.tolist() == [-1] * 4


def test_variables_can_be_swapped(pair):
    a, b = make(pair, jnp.zeros(4)), make(pair, jnp.ones(4))

    @dj.jit
    def swap():
        first, second = a.value, b.value
        a.assign(second)
        b.assign(first)

    for _ in range(3):
        swap()
    assert a.value.tolist() == [1] * 4 and b.value.tolist() == [0] * 4


def test_arguments_of_run_are_never_donated(pair):
    v = make(pair, jnp.zeros(4))
    x = jax.device_put(jnp.ones(4), pair.extended.topology.mirrored)
    for _ in range(3):
        kept = pair.run(lambda x: (v.assign_add(x), x)[1], args=(x,))
    assert local(pair, kept) == [[1] * 4] * 2 and x.tolist() == [1] * 4


def test_jit_donates_what_it_is_told_to(pair):
    x = jax.device_put(jnp.ones(4), pair.extended.topology.mirrored)
    y = jax.device_put(jnp.ones(4), pair.extended.topology.mirrored)
    out = dj.jit(lambda x, y: x + y, donate_argnums=1)(x, y)
    assert y.is_deleted() and not x.is_deleted() and out.tolist() == [2] * 4


@pytest.mark.parametrize("jit", ["dj.jit", "strategy.jit"])
def test_what_is_passed_by_keyword_is_not_donated(pair, jit):
    add = lambda x, y: x + y
    if jit == "dj.jit":
        step = dj.jit(lambda x, y: pair.run(add, args=(x, y)), donate_argnums=(0, 1))
    else:
        step = pair.jit(add, donate_argnums=(0, 1))
    y = jax.device_put(jnp.ones(4), pair.extended.topology.mirrored)
    for _ in range(3):
        x = jax.device_put(jnp.ones(4), pair.extended.topology.mirrored)
        assert step(x, y=y).tolist() == [2] * 4
        assert x.is_deleted() and not y.is_deleted()


@pytest.mark.parametrize("jit", ["dj.jit", "strategy.jit"])
def test_a_negative_number_counts_from_the_last(pair, jit):
    """As jax.jit does; it gave the keywords away, and with them values of variables."""
    with pair.scope():
        v = dj.Variable(jnp.ones(4))
    step = (dj.jit if jit == "dj.jit" else pair.jit)(lambda x, y: x + y, donate_argnums=-1)
    x, y = (jax.device_put(jnp.ones(4), pair.extended.topology.mirrored) for _ in range(2))
    assert step(x, y).tolist() == [2] * 4
    assert y.is_deleted() and not x.is_deleted()
    assert step(x, y=v.value).tolist() == [2] * 4
    assert step(x, v.value).tolist() == [2] * 4
    assert v.value.tolist() == [1] * 4
    with pytest.raises(ValueError, match="donate_argnums needs positions of") as error:
        (dj.jit if jit == "dj.jit" else pair.jit)(lambda x, y: x, donate_argnums=(0, -3))
    assert "[-3]; its positional parameters are ['x', 'y']" in str(error.value)


@pytest.mark.parametrize("jit", ["dj.jit", "strategy.jit"])
def test_a_number_beyond_the_parameters_is_refused_as_by_jax(pair, jit):
    jit = dj.jit if jit == "dj.jit" else pair.jit
    for wrap in (jax.jit, jit):
        with pytest.raises(ValueError, match="donate_argnums") as error:
            wrap(lambda x, *, y=1: x, donate_argnums=(0, 1))
    assert "[1]; its positional parameters are ['x']" in str(error.value)
    for wrap in (jax.jit, jit):  # more may come
        assert wrap(lambda x, *rest: x, donate_argnums=5)(jnp.ones(1)).tolist() == [1]


def test_an_argument_that_was_donated_before_is_refused(pair):
    """JAX 0.10 ends the process where it is called with such an array on several devices."""
    x = pair.distribute_values_from_function(lambda _: np.ones(2, np.float32))

    def step(y, state):
        return pair.run(lambda state: state["x"] + y, args=(state,))

    step = dj.jit(step, donate_argnums=1)
    step(1.0, {"x": x})
    with pytest.raises(RuntimeError) as error:
        step(1.0, {"x": x})
    assert str(error.value) == (
        f"{step.__qualname__} needs argument state to hold arrays that were not donated.\n"
        "  Got: an array of float32[2, 2] that was donated before. Array has been deleted.\n"
        "  Why: state is named in donate_argnums, so each call reuses its memory.\n"
        f"  Fix: go on with what the call returns: state = {step.__qualname__}(state, ...)"
    )


def test_so_is_one_of_several_devices_in_a_function_without_strategies(mirrored):
    """Nothing in such a program names devices: only its arguments tell."""
    step = dj.jit(lambda state, x: {"w": state["w"] - x}, donate_argnums=0)
    one_device = step({"w": jnp.ones(3)}, 1.0)
    for _ in range(2):  # the guard stays when one device comes in between
        state, x = mirrored.extended.broadcast_to(({"w": jnp.ones(3)}, 1.0))
        step(state, x)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="needs argument state to hold arrays"):
                step(state, x)
        one_device = step(one_device, 1.0)
    assert one_device["w"].tolist() == [-2] * 3


@pytest.mark.parametrize("how", ["run", "jit"])
def test_an_error_leaves_variables_as_they_are(pair, how):
    v = make(pair, jnp.ones(4))
    writer(pair, v, how)()

    def fails():
        v.assign_add(jnp.ones(4))
        raise KeyError("mine")

    run = (lambda: pair.run(fails)) if how == "run" else dj.jit(fails)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            run()
        assert v.value.tolist() == [2] * 4
    assert not dj.has_strategy()


@pytest.mark.parametrize("change", ["assign", "a step", "another step that reads"])
def test_a_step_that_only_reads_keeps_no_array_that_is_gone(change):
    """It keeps what it has read, to launch faster: until a variable changes."""
    strategy = dj.OneDeviceStrategy()
    with strategy.scope():
        v, w = dj.Variable(jnp.zeros(1000)), dj.Variable(jnp.ones(3))
    read = lambda: v.value.sum()
    assert [float(strategy.run(read)) for _ in range(3)] == [0, 0, 0]
    former = weakref.ref(v.stored.read())
    if change == "another step that reads":
        strategy.run(lambda: w.value.sum())
        v.stored.array = None
    elif change == "assign":
        v.assign(jnp.ones(1000))
    else:
        strategy.run(lambda: v.assign(jnp.ones(1000)))
    assert former() is None or former().is_deleted()
    if change != "another step that reads":
        assert [float(strategy.run(read)) for _ in range(2)] == [1000, 1000]
