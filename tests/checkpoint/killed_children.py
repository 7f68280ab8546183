"""Processes that save and are killed."""

import contextlib
import multiprocessing
import multiprocessing.connection

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distjax as dj
from tests.processes.jobs import kill_all
from tests.processes.warm import starter

NUM_BATCHES, GLOBAL_BATCH = 12, 8
KEPT = 2  # with steps removed, so that a kill may come in the middle of that, too
SIZE = 20_000


@contextlib.contextmanager
def running(function, directory):
    """Yields a process of its own that runs ``function(pipe, directory)``, and the pipe to it.

    It is killed with SIGKILL at the end of the block, wherever it is.
    """
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        call, arguments = f"{__name__}:call", (function.__name__, str(directory))
        process = starter().call(call, arguments, files=(1, 2, theirs.fileno()))
    try:
        yield ours
    finally:
        kill_all([process])
        ours.close()


def call(file, name, directory):
    """Calls a function of this module with the pipe of this number, on eight devices."""
    jax.config.update("jax_num_cpu_devices", 8)
    globals()[name](multiprocessing.connection.Connection(file), directory)


# -- saving again and again ----------------------------------------------------


def contents(step):
    """What is saved at `step`: no two steps have the same."""
    return {f"x{i}": jnp.full(SIZE, step * 10.0 + i) for i in range(3)}


def save_again_and_again(pipe, directory):
    """Says "started" after each call of save, "complete" when the step is."""
    checkpointer = dj.checkpoint.Checkpointer(directory, max_to_keep=KEPT)
    for step in range((checkpointer.latest_step() or 0) + 1, 1000):
        checkpointer.save(step, contents(step))
        pipe.send(("started", step))
        checkpointer.wait()
        pipe.send(("complete", step))


# -- training ------------------------------------------------------------------


class Training:
    """A regression whose whole state is one tree."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.w = dj.Variable(jnp.zeros((8, 4)), name="w")
            self.loss = dj.metrics.Mean("loss")
        self.optimizer = dj.optim.Optimizer(optax.adam(0.1), "mean")
        self.optimizer.init([self.w])
        random = np.random.default_rng(0)
        x = random.normal(size=(NUM_BATCHES, GLOBAL_BATCH, 8)).astype(np.float32)
        y = x @ random.normal(size=(8, 4)).astype(np.float32)
        self.data = iter(strategy.distribute_dataset(list(zip(x, y, strict=True))))
        self.state = {
            "w": self.w,
            "optimizer": self.optimizer,
            "loss": self.loss,
            "data": self.data,
        }

    def step(self, batch):
        x, y = batch

        def loss_fn(w):
            losses = jnp.mean((x @ w - y) ** 2, axis=1)  # one per example, of any replica
            return jnp.mean(losses), losses

        gradient, losses = jax.grad(loss_fn, has_aux=True)(self.w.value)
        self.optimizer.apply_gradients([(gradient, self.w)])
        self.loss.update(losses)

    def run(self):
        """Yields the number of each step that is left."""
        for batch in self.data:
            self.strategy.run(self.step, args=(batch,))
            yield self.data.get_state()["delivered"]

    def outcome(self):
        """The loss over all steps, and the weights."""
        return float(self.loss.result()), np.asarray(self.w.value)


def train_on_two_replicas(pipe, directory):
    """Trains and saves; says each step whose save has started."""
    training = Training(dj.MirroredStrategy(jax.devices()[:2]))
    checkpointer = dj.checkpoint.Checkpointer(directory, max_to_keep=KEPT)
    for step in training.run():
        checkpointer.save(step, training.state)
        pipe.send(step)
    pipe.recv()  # the end of the process is its being killed
