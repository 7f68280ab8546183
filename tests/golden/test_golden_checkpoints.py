"""Moving variables between numbers of replicas, as TensorFlow's checkpoints do.

A checkpoint saves the value that a cross-replica read gives and restores it by a
cross-replica assignment; the replay does these two.
"""

import numpy as np
import pytest

from tests.golden.distjax_side import array, make_strategy, make_variable, per_replica, plain
from tests.golden.records import Ruling, check, load

RECORDS = load("checkpoints")


def exact(record):
    """Returns the saved sum, the remainder of a division on the first replicas."""
    is_one = record.case["saved_by"] == "default"
    total = 3 if is_one else sum(3 + r for r in range(int(record.case["saved_by"][-1])))
    count = int(record.case["restored_by"][-1])
    components = [total // count + (r < total % count) for r in range(count)]
    return {"components": components, "read": {"value": total, "dtype": "int32"}}


RULINGS = [
    Ruling("ON_READ/SUM/int32/mirrored2/mirrored*", 12, exact),
    Ruling("ON_READ/SUM/int32/default/mirrored2", 12, exact),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_as_recorded(record):
    check(record, lambda case: ask(**case), RULINGS)


def ask(sync, aggregation, dtype, saved_by, restored_by):
    old = make_strategy(saved_by)
    scalar = np.dtype(dtype).type
    with old.scope():
        v = make_variable(scalar(5), sync=sync, aggregation=aggregation)
    if sync == "ON_READ":
        values = [scalar(3 + r) for r in range(old.num_replicas_in_sync)]
        old.run(lambda x: v.assign(x), (per_replica(old, values),))
    new = make_strategy(restored_by)
    with new.scope():
        w = make_variable(scalar(0), sync=sync, aggregation=aggregation)
    w.assign(np.asarray(v.value))
    return {"components": [plain(c) for c in w.local_results()], "read": array(w.value)}
