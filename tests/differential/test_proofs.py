"""What the analysis proves equal is equal on every replica, in random programs of JAX.

A few here, `make fuzz SEEDS=500` for many; a program is its seed. The truth comes from the same
program with nothing proved, where every replica computes and keeps its own value of everything.
"""

import collections
import contextlib
import os
from unittest import mock

import jax
import numpy as np
import pytest

import distjax as dj
from distjax._src.replica.analysis import Analysis
from distjax.errors import DivergenceError
from tests.differential import transformed
from tests.differential.drawn import Drawing
from tests.differential.outcomes import per_replica_leaves
from tests.replica.blindness import blind

SEEDS = int(os.environ.get("FUZZ_SEEDS", "12"))

pytestmark = [
    pytest.mark.filterwarnings("ignore::distjax.errors.LocalityWarning"),
    pytest.mark.filterwarnings("ignore::distjax.errors.ReductionWarning"),
]


@contextlib.contextmanager
def nothing_proved():
    """No value is proved equal, and no predicate is required to be."""
    with blind(), mock.patch.object(Analysis, "require_uniform", lambda *args: None):
        yield


@contextlib.contextmanager
def rules_counted(counts):
    """Adds to `counts` each primitive analyzed, with what was proved of its results."""
    outputs = Analysis.outputs_of

    def counted(self, eqn, ins):
        outs = outputs(self, eqn, ins)
        kind = "equal" if not any(outs) else "differs" if all(outs) else "both"
        counts[f"{eqn.primitive.name} {kind}{' of different' if any(ins) else ''}"] += 1
        return outs

    with mock.patch.object(Analysis, "outputs_of", counted):
        yield


def holds(tree, *words):
    """Returns whether a program holds one of the words."""
    return any(holds(x, *words) if isinstance(x, tuple) else x in words for x in tree)


def assert_proofs_hold(strategy, found, rows, what):
    """Asserts that each value proved equal is: in the truth, and on each device.

    Returns:
      The number of values that were proved equal.
    """
    proved = [(x, r) for x, r in zip(found, rows, strict=True) if isinstance(x, jax.Array)]
    for number, (value, values) in enumerate(proved):
        where = f"proof {number} of {what}"
        for shard in value.addressable_shards:
            first = value.addressable_shards[0].data
            np.testing.assert_array_equal(shard.data, first, err_msg=where)
        for other in values[1:]:
            # Rows of one batch are rounded as they lie in it; devices round alike.
            rtol = 0 if strategy.extended.topology.mesh is not None else 1e-5
            np.testing.assert_allclose(other, values[0], rtol=rtol, atol=rtol, err_msg=where)
    return len(proved)


def assert_values_are_as_unproved(strategy, found, rows, what):
    """Asserts that proofs have changed no value."""
    for ours, theirs in zip(per_replica_leaves(strategy, found), rows, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3, err_msg=what)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_proved_equal_is_equal(seed, record_property):
    drawing, counts = Drawing(seed), collections.Counter()
    make = transformed.maker(drawing.program, drawing.flag)
    devices = jax.devices()[: drawing.count]
    kind = dj.MirroredStrategy if drawing.on_devices else dj.VirtualStrategy
    strategy = kind(devices if drawing.on_devices else drawing.count)
    what = f"{drawing.program} with {drawing.flag} on {strategy}"
    counts["programs"] += 1
    try:
        with rules_counted(counts):
            found = run(make(strategy))
    except DivergenceError:
        counts["refused"] += 1
    else:
        with nothing_proved():
            rows = per_replica_leaves(strategy, run(make(strategy)))
        counts["proved"] += assert_proofs_hold(strategy, found, rows, what)
        counts["values"] += len(rows)
        if not holds(drawing.program, "count", "io"):
            assert_values_are_as_unproved(strategy, found, rows, what)
    finally:
        record_property("proofs", dict(counts))


def run(case):
    """Returns the results of a case, as a flat list."""
    result = case.step(*case.args)
    return jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, dj.PerReplica))
