"""Checkpoints: saved on some number of replicas, restored on another."""

import itertools
import tempfile

import numpy as np
import tensorflow as tf

from tests.golden.recording import tensorflow_side as side

MODES = [("ON_WRITE", "MEAN")] + [
    ("ON_READ", aggregation) for aggregation in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
]
MOVES = [("mirrored2", "mirrored3"), ("mirrored3", "mirrored2"), ("mirrored2", "mirrored8")]
MOVES += [("mirrored2", "default"), ("default", "mirrored2")]


def records():
    for (sync, aggregation), dtype, (saved_by, restored_by) in itertools.product(
        MODES, ("float32", "int32"), MOVES
    ):
        if aggregation == "MEAN" and dtype == "int32":
            continue  # no such variable
        case = dict(sync=sync, aggregation=aggregation, dtype=dtype, saved_by=saved_by)
        case["restored_by"] = restored_by
        yield "/".join(case.values()), case, side.outcome_of(lambda case=case: ask(**case))


def ask(sync, aggregation, dtype, saved_by, restored_by):
    """Returns the components that a restore leaves."""
    old = side.make_strategy(saved_by)
    scalar = np.dtype(dtype).type
    with old.scope():
        v = side.make_variable(scalar(5), sync=sync, aggregation=aggregation)
    if sync == "ON_READ":
        count = old.num_replicas_in_sync
        old.run(v.assign, (side.per_replica(old, [scalar(3 + r) for r in range(count)]),))
    new = side.make_strategy(restored_by)
    with new.scope():
        w = side.make_variable(scalar(0), sync=sync, aggregation=aggregation)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(v=v).write(f"{folder}/checkpoint")
        tf.train.Checkpoint(v=w).read(path).assert_consumed()
    return {
        "components": [side.plain(c) for c in new.experimental_local_results(w)],
        "read": side.array(w.read_value()),
    }
