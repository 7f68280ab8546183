"""distjax's side of what was asked of a ClusterCoordinator."""

import jax
import jax.numpy as jnp
import numpy as np

import distjax as dj
from tests.golden.records import Raised, check, outcome_of, plain

NUM_SERVERS = 2
NEGATIVE = np.float32(-1)


def check_record(record, ask, rulings):
    """Asserts that distjax answers as recorded, or as ruled.

    Args:
      record: what was asked.
      ask: the functions that ask, by name.
      rulings: see `records.check`.
    """
    strategy = dj.ParameterServerStrategy(workers=record.case["workers"], servers=NUM_SERVERS)
    with dj.Coordinator(strategy) as coordinator:
        cluster = Cluster(strategy, coordinator)
        asked = ask[f"ask_{record.case['what']}"]
        check(record, lambda case: as_json(asked(cluster, *case["parts"])), rulings)


class Cluster:
    """A strategy with its coordinator."""

    def __init__(self, strategy, coordinator):
        self.strategy, self.coordinator = strategy, coordinator

    def variable(self, value=0.0):
        with self.strategy.scope():
            return dj.Variable(value)

    def schedule(self, fn, *args, **kwargs):
        return self.coordinator.schedule(fn, args, kwargs)

    def dataset(self, fn):
        return iter(self.coordinator.create_per_worker_dataset(fn))


def as_json(tree):
    if isinstance(tree, dict):
        return {key: as_json(x) for key, x in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_json(x) for x in tree]
    return tree if tree is None or isinstance(tree, str) else plain(tree)


def raised(act):
    outcome = outcome_of(act)
    return type(outcome.error).__name__ if isinstance(outcome, Raised) else "nothing"


def did_raise(act):
    return raised(act) != "nothing"


def non_negative(x):
    if x < 0:
        raise ValueError("Condition x >= 0 did not hold")
    return x


def check_value(x):
    """Fails at the worker for what is negative."""
    return jax.pure_callback(non_negative, jax.ShapeDtypeStruct((), jnp.float32), x)


def waiting(go_on, value):
    """Returns a step that waits, and is then given a value."""

    def wait():
        go_on.wait()
        return np.float32(value)

    return lambda: jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32))


def of_numbers(count):
    return lambda context: iter(np.arange(count, dtype=np.int32))
