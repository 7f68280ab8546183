"""Cross-replica code reads and writes variables at servers while closures push."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj


def push_before(server, method, push):
    """Has `push` called before each read or write of cross-replica code at a server."""
    operate = getattr(server, method)

    def pushed_before(*args):
        if method != "read" or len(args) == 1:  # a worker's read has more
            push()
        return operate(*args)

    setattr(server, method, pushed_before)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("method", ["read", "write"])
def test_shards_at_a_server_are_read_and_written_together(method, servers):
    strategy = dj.ParameterServerStrategy(2, servers, partitioner=dj.parts.FixedShards(8))
    with strategy.scope():
        v = dj.Variable(jnp.zeros((8, 3)), name="v")
    add = lambda: v.assign_add(jnp.ones((8, 3)))
    strategy.run(add)
    for server in strategy.extended.servers:
        push_before(server, method, lambda: strategy.run(add))
    value = v.value if method == "read" else v.assign(np.zeros((8, 3)))
    for i in range(servers):  # shards are at the servers in turn
        assert len(set(np.ravel(value[i::servers]).tolist())) == 1


@pytest.mark.parametrize(
    "add", [lambda v: v.assign_add(10), lambda v: v.assign_sub(-10)], ids=["add", "sub"]
)
def test_an_addition_keeps_what_is_pushed_meanwhile(add):
    strategy = dj.ParameterServerStrategy(workers=2)
    with strategy.scope():
        v = dj.Variable(0, name="v")
    (server,) = strategy.extended.servers
    for method in ("read", "write", "add"):
        push_before(server, method, lambda: strategy.run(lambda: v.assign_add(1)))
    version = server.version
    add(v)
    num_pushed = server.version - version - 1
    (value,) = server.snapshot().values.values()
    assert num_pushed >= 1 and value == 10 + num_pushed


def test_an_addition_reaches_each_shard_and_each_copy():
    strategy = dj.ParameterServerStrategy(2, 2, partitioner=dj.parts.FixedShards(3))
    with strategy.scope():
        v = dj.Variable(jnp.zeros((5, 2)), name="v")
        with strategy.extended.colocate_vars_with(strategy.extended.non_slot_devices([])):
            count = dj.Variable(np.uint8(250), name="count")  # at every server
    rows = np.arange(10.0).reshape(5, 2)
    np.testing.assert_array_equal(v.assign_sub(rows), -rows)
    assert count.assign_add(np.uint8(3)) == 253 and count.assign_sub(np.uint8(4)) == 249
    for server in strategy.extended.servers:
        assert [x for key, x in server.snapshot().values.items() if "count" in key] == [249]


def test_an_addition_checks_what_jax_checks():
    strategy = dj.ParameterServerStrategy(workers=1)
    with strategy.scope():
        v = dj.Variable(jnp.inf, name="v")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        v.assign_sub(jnp.inf)
    assert v.value == jnp.inf


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_an_update_keeps_what_is_pushed_meanwhile(fails, writes):
    arrived, let_go = threading.Event(), threading.Event()

    def hold(point, worker, closure):
        if point == "before_push":
            arrived.set()
            let_go.wait()

    strategy = dj.ParameterServerStrategy(2, engine=dj.servers.ThreadEngine(fault=hold))
    pause = strategy.extended.pause_writers
    strategy.extended.pause_writers = lambda: (let_go.set(), pause())[1]
    with strategy.scope():
        v = dj.Variable(0, name="v")

    def change(v):
        before = v.value
        let_go.set()
        pushed.fetch()
        if writes:
            v.assign(before + 10)
        if fails:
            raise ZeroDivisionError

    fail = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
    with dj.Coordinator(strategy) as coordinator, strategy.scope():
        pushed = coordinator.schedule(lambda: v.assign_add(1))
        arrived.wait()
        with fail:
            strategy.extended.update(v, change)
        assert v.value == (11 if writes and not fails else 1)


@pytest.mark.parametrize("method", ["result", "reset"])
def test_a_metric_is_read_and_reset_between_closures(method):
    strategy = dj.ParameterServerStrategy(workers=2, servers=2)
    with strategy.scope():
        mean = dj.metrics.Mean()
    arrived, let_go = threading.Event(), threading.Event()
    last = strategy.extended.servers[1]
    push, pause = last.push, strategy.extended.pause_writers

    def held_push(*args, **how):  # the first server has the batch by now
        arrived.set()
        let_go.wait()
        return push(*args, **how)

    last.push = held_push
    strategy.extended.pause_writers = lambda: (let_go.set(), pause())[1]
    with dj.Coordinator(strategy) as coordinator:
        coordinator.schedule(mean.update, args=(np.float32(5),))
        arrived.wait()
        found = getattr(mean, method)()
        let_go.set()
    totals = [float(v.value) for v in mean.variables.values()]
    assert (found, totals) == ((5, [5, 1]) if method == "result" else (None, [0, 0]))
