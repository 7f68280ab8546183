"""Any asynchronous run is its own record, run again in the order of each server's versions."""

import numpy as np

from tests.servers.replay import run_recorded


def test_an_asynchronous_run_equals_its_replay():
    for seed in range(8):
        final, again = run_recorded(seed)
        for a, b in zip(final, again, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"seed {seed}")
