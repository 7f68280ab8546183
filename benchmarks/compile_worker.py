"""Times trace, lowering and compilation in a process of its own.

The number of virtual CPU devices is fixed when JAX starts, so each number of
replicas needs a fresh process. It prints one JSON list of rows.
"""

import argparse
import json
import time
from typing import Any

import jax

from benchmarks.forms import OURS, Lower, lower_handwritten
from benchmarks.models import transformer
from benchmarks.timing import interleave, medians

BATCH_SIZE = 2
BAR = 1.15


def compile_seconds(lower: Lower) -> tuple[float, float]:
    """Seconds to trace and lower, and seconds to compile, nothing cached."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = lower()
    lowered_at = time.perf_counter()
    lowered.compile()
    return lowered_at - start, time.perf_counter() - lowered_at


def measure(form: str, num_layers: int, num_pairs: int) -> dict[str, Any]:
    """One row for one form of state, on all devices of this process."""
    model, devices = transformer(num_layers), jax.devices()
    baseline = lower_handwritten(model, devices, BATCH_SIZE)
    ours = OURS[form](model, devices, BATCH_SIZE)
    for lower in (ours, baseline):
        compile_seconds(lower)
    pairs = interleave(lambda: compile_seconds(ours), lambda: compile_seconds(baseline), num_pairs)
    total = medians([(sum(a), sum(b)) for a, b in pairs])
    lowering = medians([(a[0], b[0]) for a, b in pairs])
    return {
        "replicas": len(devices),
        "state": form,
        "ours s": total.ours_seconds,
        "hand-written s": total.baseline_seconds,
        "trace + lower ratio": lowering.ratio,
        "ratio": total.ratio,
        "bar": BAR,
        "within bar": total.ratio <= BAR,
    }


def main() -> None:
    """Prints the rows of each form of state as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    rows = [measure(form, options.layers, options.pairs) for form in OURS]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
