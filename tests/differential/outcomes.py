"""Running one program under one strategy, and what came of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import distjax as dj
from tests.replica.blindness import blind


@dataclasses.dataclass
class Case:
    """A program of one strategy, ready to run.

    Attributes:
      step: the cross-replica function.
      args: its arguments.
      variables: the variables that it may write, looked at afterwards.
      expected: R -> the results per replica in closed form, if there is one.
    """

    step: Callable[..., Any]
    args: Sequence[Any] = ()
    variables: Sequence[Any] = ()
    expected: Callable[[int], Any] | None = None


def compiled_strategies(num_replicas):
    """Returns the strategies that are compared with the reference, by name."""
    return {
        "virtual": dj.VirtualStrategy(num_replicas),
        "mirrored": dj.MirroredStrategy(jax.devices()[:num_replicas]),
    }


def outcome(strategy, make, how=lambda fn: fn):
    """Returns (results, components of each variable), leaves as lists over replicas."""
    case = make(strategy)
    result = how(case.step)(*case.args)
    finals = [list(map(np.asarray, v.local_results())) for v in case.variables]
    return per_replica_leaves(strategy, result), finals


def unproved_outcome(strategy, make):
    """Returns the outcome with no locality proved, or None where that is refused."""
    try:
        with blind():
            return outcome(strategy, make)
    except dj.errors.LocalityError:
        return None  # a mirrored variable needs a proof
    except TypeError as error:
        if "not one value per replica" not in str(error):
            raise
        return None  # a merge function computes with it


def per_replica_leaves(strategy, value):
    """Returns the leaves of `value`, each as a list of R numpy arrays."""
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, dj.PerReplica))
    return [
        rows if len(rows) == strategy.num_replicas_in_sync else rows * strategy.num_replicas_in_sync
        for rows in (list(map(np.asarray, strategy.local_results(x))) for x in leaves)
    ]


def assert_same(found, wanted, what, rtol=1e-5, atol=1e-5):
    """Asserts that two outcomes agree in numbers, shapes and dtypes."""
    for part, ours, theirs in zip(("result", "variable"), found, wanted, strict=True):
        assert len(ours) == len(theirs), f"{what}: number of {part}s"
        for i, (our_rows, their_rows) in enumerate(zip(ours, theirs, strict=True)):
            for r, (x, y) in enumerate(zip(our_rows, their_rows, strict=True)):
                where = f"{what}: {part} {i} on replica {r}"
                assert x.dtype == y.dtype, f"{where}: {x.dtype} is not {y.dtype}"
                np.testing.assert_allclose(x, y, rtol, atol, err_msg=where)
