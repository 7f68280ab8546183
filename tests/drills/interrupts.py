"""Interrupts steps at random moments, and prints a table: python -m tests.drills.interrupts.

Each campaign repeats one operation until Ctrl-C, sent by a timer, raises in it, and then asks
whether what it changes is whole: all of it as after one number of operations, and that number no
less than before. A signal that comes between two operations counts too.
"""

import argparse
import dataclasses
import itertools
import logging
import multiprocessing
import pathlib
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import distjax as dj

MEAN = dj.VariableAggregation.MEAN


class Alarm(KeyboardInterrupt):
    """Raised where distjax lets Ctrl-C raise, after the alarm went off."""


class StateOfJaxLost(Exception):
    """JAX has lost the state of the thread, as an interrupted trace may: see docs/limits.md.

    Args:
      interrupts: how many there were before.
      done: how many operations.
    """

    def __init__(self, interrupts: int, done: int):
        super().__init__(f"none lost of {done}, then JAX's own state, at interrupt {interrupts}")


class Failure(Exception):
    """A value is lost, or values are of several operations."""


@dataclasses.dataclass(frozen=True)
class Campaign:
    """An operation that is interrupted.

    Attributes:
      operate: does it once.
      count: returns how often it has been done, by all that it changes; raises a Failure
        where two values disagree.
      seconds: the longest time until the signal.
    """

    operate: Callable[[], object]
    count: Callable[[], int]
    seconds: float = 0.002


def step_variables(strategy: dj.Strategy, folder: pathlib.Path) -> Campaign:
    """Returns steps that write twelve variables."""
    variables = _make_variables(strategy, 12)

    def step() -> None:
        for variable in variables:
            variable.assign_add(_one_on_average())

    return Campaign(lambda: strategy.run(step), lambda: _agree(v.value for v in variables))


def step_optimizer(strategy: dj.Strategy, folder: pathlib.Path) -> Campaign:
    """Returns steps of an optimizer that counts them in its state too."""
    with strategy.scope():
        parameters = [dj.Variable(jnp.zeros(8)) for _ in range(4)]
        optimizer = dj.optim.Optimizer(optax.scale_by_schedule(lambda count: 1.0), "mean")
        optimizer.init(parameters)

    def step() -> None:
        optimizer.apply_gradients([(_one_on_average(), v) for v in parameters])

    changed = lambda: [*parameters, *jax.tree.leaves(optimizer.state)]
    return Campaign(lambda: strategy.run(step), lambda: _agree(v.value for v in changed()))


def step_module(strategy: dj.Strategy, folder: pathlib.Path) -> Campaign:
    """Returns steps that write the parameters of an NNX module."""
    with strategy.scope():
        module = nnx.Linear(4, 4, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))

    def step(module: nnx.Linear) -> None:
        for leaf in (module.kernel, module.bias):
            leaf[...] = leaf[...] + 1

    return Campaign(
        lambda: strategy.run(step, (module,)),
        lambda: _agree(jax.tree.leaves(nnx.state(module))),
    )


def update_variables(strategy: dj.Strategy, folder: pathlib.Path) -> Campaign:
    """Returns an update of a variable and of its slot, in cross-replica context."""
    variable, slot = _make_variables(strategy, 2)

    def add(v: dj.Variable) -> None:
        slot.assign_add(jnp.ones(8))
        v.assign_add(jnp.ones(8))

    update = lambda: strategy.extended.update(variable, add)
    return Campaign(update, lambda: _agree([variable.value, slot.value]))


def draw_elements(strategy: dj.Strategy, folder: pathlib.Path) -> Campaign:
    """Returns steps of an iterator with prefetch: each element comes at most once, in order."""
    size = strategy.num_replicas_in_sync
    elements = iter(strategy.distribute_dataset(np.full(size, i) for i in itertools.count()))
    drawn: list[dj.PerReplica] = []
    num_counted = 0

    def draw() -> None:
        for element in elements:  # no signal is handled between `next` and `append`
            drawn.append(element)
            if len(drawn) % 20 == 0:
                return

    def count() -> int:
        nonlocal num_counted
        for element in drawn:
            number = _agree([element.stacked])  # one in hand at an interrupt may be lost
            if number < num_counted:
                raise Failure(f"element {number} comes after element {num_counted - 1}")
            num_counted = number + 1
        drawn.clear()
        return num_counted

    return Campaign(draw, count)


def save_and_restore(strategy: dj.Strategy, folder: pathlib.Path) -> Campaign:
    """Returns a step, a save of it, and a restore: all variables are of one step."""
    variables = _make_variables(strategy, 20)
    checkpointer = dj.checkpoint.Checkpointer(folder, max_to_keep=3)

    def operate() -> None:
        number = (checkpointer.latest_step() or 0) + 1
        for variable in variables:
            variable.assign(jnp.full(8, float(number)))
        checkpointer.save(number, variables)
        checkpointer.wait()

    def count() -> int:
        checkpointer.wait()
        step = checkpointer.latest_step() or 0
        checkpointer.restore(variables)
        if _agree(v.value for v in variables) != step:
            raise Failure(f"step {step} is not what was saved")
        return step

    return Campaign(operate, count, seconds=0.3)


def _make_variables(strategy: dj.Strategy, number: int) -> list[dj.Variable]:
    with strategy.scope():
        return [dj.Variable(jnp.zeros(8), aggregation=MEAN) for _ in range(number)]


def _one_on_average() -> jax.Array:
    """Returns 0 on replica 0 and 2 on replica 1."""
    return jnp.full(8, 2.0) * dj.get_replica_context().replica_id_in_sync_group


def _agree(arrays: Iterable[jax.Array]) -> int:
    """Returns the one number that all elements of all arrays are."""
    numbers = {float(x) for array in arrays for x in np.asarray(array).flat}
    if len(numbers) != 1:
        raise Failure(f"values of several steps: {sorted(numbers)}")
    return int(numbers.pop())


# -- running them -------------------------------------------------------------


def drill(campaign: Campaign, interrupts: int, chance: random.Random) -> int:
    """Interrupts an operation so often; returns how often it was done in all.

    Raises:
      Failure: something is lost, or of several operations.
    """
    for _ in range(3):  # first calls have limits of their own
        campaign.operate()
    done = campaign.count()
    for number in range(interrupts):
        try:
            _ring_after(chance.uniform(campaign.seconds / 100, campaign.seconds), campaign.operate)
            now = campaign.count()
        except AttributeError as error:
            if "process_primitive" not in str(error):
                raise
            raise StateOfJaxLost(number, done) from error
        if now < done:
            raise Failure(f"{done} operations became {now}")
        done = now
    return done


_has_rung = False


def _ring(*_: object) -> None:
    global _has_rung
    _has_rung = True
    raise Alarm


def _ring_after(seconds: float, operate: Callable[[], object]) -> None:
    """Repeats an operation until a signal raises in it.

    Python drops what is raised in a destructor, or in a callback of its garbage collector; the
    operations end all the same then. JAX makes a ValueError of what is raised while it compares
    two trees.
    """
    global _has_rung
    _has_rung = False
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        _repeat(operate)
    except BaseException as error:
        if "Alarm" in str(error):  # where JAX compares keys of a cache, in its text only
            return
        causes: BaseException | None = error
        while not isinstance(causes, Alarm):
            if causes is None:
                raise
            causes = causes.__cause__ or causes.__context__


def _repeat(operate: Callable[[], object]) -> None:
    """A function: Python 3.13 handles signals at the end of a loop outside the `try` around it."""
    while not _has_rung:
        operate()


CAMPAIGNS = {
    "steps": step_variables,
    "optimizer": step_optimizer,
    "modules": step_module,
    "updates": update_variables,
    "elements": draw_elements,
    "checkpoints": save_and_restore,
}
STRATEGIES: dict[str, Callable[[], dj.Strategy]] = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
    "sharded": lambda: dj.ShardedStrategy(jax.devices()[:2], min_split_bytes=0),
}


def main() -> None:
    """Runs all campaigns under all strategies; ends with 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.interrupts", description=__doc__)
    parser.add_argument("--interrupts", type=int, default=5000, help="of each kind (5000)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    options = parser.parse_args()
    failures = 0
    print(f"{'operation':12} {'strategy':9} {'interrupts':>10}  result", flush=True)
    for kind, name in itertools.product(CAMPAIGNS, STRATEGIES):
        number = -(-options.interrupts // len(STRATEGIES))
        if kind == "checkpoints":
            number = -(-number // 50)  # each writes a directory
        # A process each: what JAX may lose is a thread's, and signals reach the main thread only.
        row = multiprocessing.get_context("spawn").Process(
            target=_run_row, args=(kind, name, number, options.seed)
        )
        row.start()
        row.join()
        failures += row.exitcode != 0
    sys.exit(bool(failures))


def _run_row(kind: str, name: str, number: int, seed: int) -> None:
    """Runs a campaign under a strategy, and prints its row; ends with 1 if it failed."""
    jax.config.update("jax_num_cpu_devices", 2)
    logging.disable(logging.CRITICAL)  # orbax tells of each save
    signal.signal(signal.SIGINT, _ring)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="distjax-interrupts-") as folder:
        try:
            campaign = CAMPAIGNS[kind](STRATEGIES[name](), pathlib.Path(folder))
            result = f"none lost of {drill(campaign, number, random.Random(seed))}"
        except StateOfJaxLost as lost:
            result = str(lost)
        except Failure as error:
            has_failed, result = True, f"FAILED: {error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    print(f"{kind:12} {name:9} {number:10}  {result}", flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
