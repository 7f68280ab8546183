"""An array whose parts were being read when a signal came can be read again.

JAX before 0.12 keeps the shards that it had made until then, as if they were all.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.interrupts import campaign, in_packages
from tests.replicas import ids

#: Called once for each shard of an array that is taken apart for the first time.
MAKING_SHARDS = in_packages("jax._src.sharding_impls")
READS = {
    "components": lambda strategy, v: v.local_results(),
    "equal": lambda strategy, v: strategy.assert_mirrored({"v": v}),
}


@pytest.mark.parametrize("read", READS)
def test_a_variable_is_read_and_written_after_an_interrupted_read(mirrored, read):
    with mirrored.scope():
        v = dj.Variable(jnp.zeros(4), name="v", aggregation=dj.VariableAggregation.SUM)
    add_one = lambda: mirrored.run(lambda: (v.assign_add(jnp.full(4, 0.5)), None)[1])
    expected = [0.0]

    def make():
        add_one()  # the new array has not been taken apart
        expected[0] += 0.5 * mirrored.num_replicas_in_sync
        return None, lambda: READS[read](mirrored, v)

    def check(*_):
        np.testing.assert_array_equal(v.value, np.full(4, expected[0]))
        for part in v.local_results():
            np.testing.assert_array_equal(part, np.full(4, expected[0]))

    campaign(make, check, MAKING_SHARDS, limit=100)


def test_values_of_replicas_are_taken_apart_after_an_interrupt(mirrored):
    values = ids(mirrored)

    def make():
        x = mirrored.run(lambda x: x + 1, args=(values,))
        return x, lambda: mirrored.local_results(x)

    def check(x, _):
        parts = [float(part) for part in mirrored.local_results(x)]
        assert parts == [r + 1 for r in range(mirrored.num_replicas_in_sync)]

    campaign(make, check, MAKING_SHARDS, limit=100)
