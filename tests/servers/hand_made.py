"""A strategy whose steps are plans made by hand, for tests of what runs them."""

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src.jax_compat import ShapedArray
from distjax._src.placement.topology import REPLICA_AXIS, one_device_topology
from distjax._src.servers.board import Board
from distjax._src.servers.engine import ThreadEngine
from distjax._src.servers.plan import Program, Push, Stage, StepPlan


def numbers(count, dtype=np.float32, shape=()):
    """Returns the avals of a program that takes some arrays, all alike."""
    return (ShapedArray(shape, np.dtype(dtype)),) * count


class Step:
    """A function that `HandMade` knows how to cut."""

    def __init__(self, plan):
        self.plan = plan
        self.__name__ = plan.name

    def __call__(self, *args, **kwargs):
        raise AssertionError("it is cut, not called")


class HandMade:
    def __init__(self, *, workers=2, servers=1, max_staleness=None, fault=None):
        self.engine = ThreadEngine(fault=fault)
        self.num_workers, self.num_replicas_in_sync = workers, 1
        devices = jax.devices()
        homes = [one_device_topology(d, 1, REPLICA_AXIS) for d in devices]
        self.engine.start(
            [homes[i % len(homes)] for i in range(workers)], devices[:servers], max_staleness
        )
        self.board = Board(self.engine)

    def cut_step(self, fn, args, kwargs):
        if not isinstance(fn, Step):
            fn(*args, **(kwargs or {}))  # raises, as a trace does
        return fn.plan, [np.asarray(arg) for arg in jax.tree.leaves((args, kwargs))]

    def value(self, key, server=0):
        return self.engine.servers[server].read([key])[1][0]


def counter(server=0):
    """total += x; returns the total after it."""
    add = Program("add", lambda total, x: (total + x, total + x), numbers(2))
    send = Program("send", lambda x: (x,), numbers(1))
    push = Push(server, (1,), ("total",), ("total",), (2,), add)
    stage = Stage((0,), (1,), send, (push,))
    return Step(StepPlan("add", (0,), (), (stage,), (2,), lambda r: r[0], {"total": server}))


def read_total():
    """Returns the total."""
    twice = Program("twice", lambda total: (total * 1,), numbers(1))
    stage = Stage((0,), (1,), twice, ())
    return Step(StepPlan("read", (), ((0, "total"),), (stage,), (1,), lambda r: r[0], {"total": 0}))


def two_counters(dtype=np.float32):
    """One push to each of two servers, in parallel: a += x, b += 2 x."""
    add = Program("add", lambda total, x: (total + x,), numbers(2, dtype))
    double = Program("double", lambda x: (x, 2 * x), numbers(1, dtype))
    pushes = (Push(0, (1,), ("a",), ("a",), (), add), Push(1, (2,), ("b",), ("b",), (), add))
    stage = Stage((0,), (1, 2), double, pushes)
    return Step(StepPlan("both", (0,), (), (stage,), (), lambda r: None, {"a": 0, "b": 1}))


def two_stages(last_key="b", dtype=np.float32):
    """a += x; then b (or another) += what a is now, which comes back; returns 10 b."""
    send = Program("send", lambda x: (x,), numbers(1, dtype))
    add = Program("add", lambda total, x: (total + x, total + x), numbers(2, dtype))
    first = Stage((0,), (1,), send, (Push(0, (1,), ("a",), ("a",), (2,), add),))
    second = Stage((2,), (3,), send, (Push(0, (3,), (last_key,), (last_key,), (4,), add),))
    last = Stage((4,), (5,), Program("ten", lambda b: (10 * b,), numbers(1, dtype)), ())
    return Step(
        StepPlan(
            "chain",
            (0,),
            (),
            (first, second, last),
            (5,),
            lambda r: r[0],
            {"a": 0, last_key: 0},
        )
    )


def sgd(num_servers):
    """w[i], 5 numbers at server i, goes down a gradient that reads all of them, as pulled."""
    pulls = tuple((1 + i, f"w{i}") for i in range(num_servers))
    grads = tuple(1 + num_servers + i for i in range(num_servers))

    def gradient(x, *ws):
        return tuple(jnp.sin(w) - x * (i + 1) + 0.3 * sum(ws) for i, w in enumerate(ws))

    update = Program("update", lambda w, g: (w - 0.1 * g,), numbers(2, shape=(5,)))
    pushes = tuple(Push(i, (g,), (f"w{i}",), (f"w{i}",), (), update) for i, g in enumerate(grads))
    avals = numbers(1) + numbers(num_servers, shape=(5,))
    stage = Stage(
        (0, *(slot for slot, _ in pulls)), grads, Program("grad", gradient, avals), pushes
    )
    owners = {f"w{i}": i for i in range(num_servers)}
    return Step(StepPlan("sgd", (0,), pulls, (stage,), (grads[0],), lambda r: r[0], owners))
