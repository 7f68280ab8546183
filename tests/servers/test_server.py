"""A server applies each push once, whoever comes again, and keeps no record for ever."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distjax as dj
from distjax._src.placement.topology import REPLICA_AXIS, one_device_topology
from distjax._src.servers.plan import Program, Push
from distjax._src.servers.server import RefusedPush, Server, ServerDied
from distjax.errors import ServerLostError
from tests.servers.hand_made import numbers


def to_total(fn, num_answers=0, shape=()):
    """A push of a program that writes the total."""
    avals = (*numbers(1, shape=shape), *numbers(1))
    program = Program("", fn, avals)
    return Push(0, (0,), ("total",), ("total",), tuple(range(num_answers)), program)


ADD = to_total(lambda total, x: (total + x, total + x), 1)


def make_server(value=0.0):
    server = Server(0, jax.devices()[0])
    server.create("total", np.float32(value))
    return server


def push(server, closure, stage=0, x=1.0, **options):
    return server.push((closure, stage), ADD, [jnp.float32(x)], **options)


def total(server):
    return float(server.read(["total"])[1][0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 1), st.booleans()),
        max_size=25,
    )
)
def test_any_sequence_of_pushes_applies_each_closure_and_stage_once(calls):
    """Beside a model that remembers everything."""
    server, applied, done = make_server(), {}, set()
    for closure, stage, is_end in calls:
        if is_end:
            server.mark_done(closure)
            done.add(closure)
        elif closure in done:
            with pytest.raises(RefusedPush):
                push(server, closure, stage)
        else:
            is_new = (closure, stage) not in applied
            if is_new:
                applied[closure, stage] = len(applied) + 1
            answer = push(server, closure, stage)
            assert float(answer.arrays[0]) == applied[closure, stage] == answer.version
    assert total(server) == len(applied) == server.version
    assert server.report().num_kept <= 5
    for closure in range(5):
        server.mark_done(closure)
    assert server.report().num_kept == 0


def test_a_zombie_is_refused_once_its_closure_is_done():
    server = make_server()
    push(server, 0, stage=0)
    server.mark_done(0)
    with pytest.raises(RefusedPush, match="closure 0 is done"):
        push(server, 0, stage=1)
    assert total(server) == 1


def test_staleness_counts_the_pushes_of_others():
    server = make_server()
    push(server, 0, pulled=0)
    push(server, 1, stage=0, pulled=0)
    push(server, 1, stage=1, pulled=0)  # its own first push is not others'
    push(server, 1, stage=1, pulled=0)  # applied already: not counted
    assert server.staleness == {0: 1, 1: 2}


def test_what_was_given_to_a_worker_stays_as_it_was():
    """Pushes reuse the memory of values, but of none that somebody holds."""
    server = make_server()
    own, other = (one_device_topology(d, 1, REPLICA_AXIS) for d in jax.devices()[:2])
    held = {}
    for i in range(6):
        home = (own, other, None)[i % 3]
        version, (value,) = server.pull(["total"], home) if home else server.read(["total"])
        answer = push(server, i)
        held[version] = value, answer.arrays[0]
    for version, (value, answer) in held.items():
        assert (float(value), float(answer)) == (version, version + 1)


def test_an_old_value_that_is_not_a_number_can_be_pulled():
    """A step may replace it, also where JAX looks for what makes one."""
    server = make_server(np.nan)
    with jax.debug_nans(True):
        _, (value,) = server.pull(["total"], one_device_topology(server.device, 1, REPLICA_AXIS))
    assert np.isnan(value)


def test_a_value_that_nobody_holds_is_replaced_in_its_memory():
    server = Server(0, jax.devices()[0])
    server.create("total", np.zeros(1000, np.float32))
    add = to_total(lambda total, x: (total + x,), shape=(1000,))
    push_it = lambda i: server.push((i, 0), add, [jnp.float32(1)])
    before = server._values["total"]
    push_it(0)
    assert before.is_deleted()
    for i, device in enumerate(jax.devices()[:2]):
        server.pull(["total"], one_device_topology(device, 1, REPLICA_AXIS))  # a copy of it leaves
        before = server._values["total"]
        push_it(1 + i)
        assert before.is_deleted()


def test_what_a_user_gives_or_gets_is_a_copy():
    given_value, server = jnp.arange(3.0), Server(0, jax.devices()[0])
    server.create("total", given_value)
    _, (read,) = server.read(["total"])
    assert server.write({"total": read}) == 1
    server.push((0, 0), to_total(lambda total, x: (total + x,), shape=(3,)), [jnp.float32(1)])
    np.testing.assert_array_equal(given_value, read)
    np.testing.assert_array_equal(server.read(["total"])[1][0], np.arange(3.0) + 1)


def test_an_update_whose_callback_raises_changes_nothing():
    def fail(x):
        raise ZeroDivisionError

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    bad = to_total(lambda total, x: (total + jax.pure_callback(fail, shape, x),))
    server = make_server(3.0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        server.push((0, 0), bad, [jnp.float32(1)])
    assert total(server) == 3 and server.version == 0
    push(server, 0)
    assert total(server) == 4


def test_a_lost_server_says_so_until_it_is_restored():
    server = make_server(3.0)
    saved = server.snapshot()
    push(server, 0)

    def die():
        raise ServerDied

    with pytest.raises(ServerLostError, match=r"^server 0 needs to have what a closure pulls"):
        push(server, 1, before=die)
    for use in (server.snapshot, lambda: push(server, 2), lambda: total(server)):
        with pytest.raises(ServerLostError, match="Got: a server that is lost"):
            use()
    server.restore(saved, 3)
    assert (total(server), server.version, server.report().num_kept) == (3, 0, 0)
    with pytest.raises(RefusedPush, match="closure 2 is done"):
        push(server, 2)
    push(server, 3)
    assert total(server) == 4
    with pytest.raises(ServerLostError, match="Got: no variable of that key"):
        server.read(["made later"])
    server.restore(saved, 4)  # the snapshot is still what it was
    assert total(server) == 3


def test_a_new_process_has_what_a_snapshot_has():
    server = make_server()
    server.create("gone", np.ones(256, np.float32))
    snapshot, nbytes = server.snapshot(), server.report().nbytes
    server.remove(["gone"])
    assert server.report().nbytes == nbytes - 1024
    new = Server(0, jax.devices()[0])
    new.restore(snapshot, 0)
    assert new.report().nbytes == nbytes and new.pull(["gone"], None)[1][0].sum() == 256


def test_a_step_may_return_what_it_pulled():
    strategy = dj.ParameterServerStrategy(workers=1)
    with strategy.scope():
        v = dj.Variable(jnp.arange(3.0))

    def step(x):
        before = v.value
        v.assign_add(before * x)
        return before

    with dj.Coordinator(strategy) as coordinator:
        values = [coordinator.schedule(step, args=(np.float32(1),)) for _ in range(3)]
        for power, value in enumerate(values):
            np.testing.assert_array_equal(value.fetch(), np.arange(3.0) * 2**power)


@pytest.mark.parametrize("workers", [1, 2, [jax.devices()[:2]]])
@pytest.mark.parametrize("with_write", [False, True])
def test_a_result_is_the_users_own(workers, with_write):
    """Who donates or deletes it takes nothing from the server, or from another result."""
    strategy = dj.ParameterServerStrategy(workers)
    with strategy.scope():
        v = dj.Variable(jnp.arange(3.0), aggregation=dj.VariableAggregation.SUM)

    def step():
        before = v.value
        if with_write:
            v.assign_add(jnp.zeros(3))
        return before

    with dj.Coordinator(strategy) as coordinator:
        values = [coordinator.schedule(step).get() for _ in range(3)]
        values.append(strategy.run(step))
        for value in values:
            np.testing.assert_array_equal(jax.device_get(value), np.arange(3.0))
            jax.tree.leaves(value)[0].delete()
            np.testing.assert_array_equal(v.value, np.arange(3.0))
        np.testing.assert_array_equal(coordinator.schedule(step).fetch(), np.arange(3.0))


def test_a_variable_whose_value_was_returned_is_still_replaced_in_its_memory():
    strategy = dj.ParameterServerStrategy(workers=1)
    with strategy.scope():
        v = dj.Variable(jnp.arange(3.0))

    def step(x):
        before = v.value
        v.assign_add(x * before)
        return before

    [server] = strategy.engine.servers
    with dj.Coordinator(strategy) as coordinator:
        for _ in range(2):
            [value] = server._values.values()
            coordinator.schedule(step, args=(np.float32(1),)).get()
            assert value.is_deleted()
