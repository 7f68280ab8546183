"""Two threads that step one NNX module take turns: no step is lost."""

import threading

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import distjax as dj

NUM_STEPS = 15
PATIENCE = 0.2  # seconds, for which one waits in vain

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
    "sharded": lambda: dj.ShardedStrategy(
        jax.devices()[:2], partition="parameters", min_split_bytes=0
    ),
}


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(2))


@jax.tree_util.register_pytree_node_class
class Meeting:
    """An argument without arrays: both threads meet where JAX takes their arguments apart.

    Each has read the module's state by then, if nothing makes them take turns; if
    something does, the one that comes first waits once, in vain, and then no more.
    """

    def __init__(self, barrier=None):
        self.barrier = barrier

    def tree_flatten(self):
        if self.barrier is not None:
            try:
                self.barrier.wait()
            except threading.BrokenBarrierError:
                self.barrier = None
        return (), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls()


def in_two_threads(work):
    """Calls ``work()`` in two threads at once; raises what they raise."""
    errors = []

    def run():
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [thread.is_alive() for thread in threads] == [False, False]
    assert errors == []


def make_step(owner, counter, form):
    """Returns a step of `counter`: it is captured by the function, or given to it."""

    def captured(x, meeting):
        counter.count[...] += x

    def argument(given, x, meeting):
        given.count[...] += x

    x = jnp.ones(2)
    if form == "captured":
        return lambda meeting: owner.run(captured, args=(x, meeting))
    return lambda meeting: owner.run(argument, args=(counter, x, meeting))


@pytest.mark.parametrize("form", ["captured", "argument"])
def test_each_step_counts(owner, form):
    counter, barrier = Counter(), threading.Barrier(2, timeout=PATIENCE)
    step = make_step(owner, counter, form)

    def steps():
        meeting = Meeting(barrier)
        for _ in range(NUM_STEPS):
            step(meeting)

    step(Meeting())
    in_two_threads(steps)
    assert counter.count[...].tolist() == [1 + 2 * NUM_STEPS] * 2


@pytest.mark.parametrize("form", ["captured", "argument"])
def test_two_first_calls_count(owner, form):
    counter, barrier = Counter(), threading.Barrier(2, timeout=PATIENCE)
    in_two_threads(lambda: make_step(owner, counter, form)(Meeting(barrier)))
    assert counter.count[...].tolist() == [2, 2]
