"""What does a call cost for each object that its step reaches, compared with another checkout?

A warm call compares the objects that its trace reached with what is there now. This times calls of
this checkout and of one before, each in processes of its own, in turn:

    git worktree add /tmp/before 677f752
    python -m benchmarks.reached_objects --before /tmp/before
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[1]
_COUNTS = (1, 10, 30)
#: The bar: seconds more for ten objects, and for each more.
BAR_OF_TEN, BAR_OF_EACH = 0.5e-6, 0.05e-6

# Reads what it reaches, so that the launch itself is as short as it can be.
_TIMED = """
import json, sys, time, types
import jax, jax.numpy as jnp
import distjax as dj
kind, count = sys.argv[1], int(sys.argv[2])
strategy = dj.OneDeviceStrategy()
with strategy.scope():
    variable, metric = lambda i: dj.Variable(float(i)), lambda i: dj.metrics.Mean(str(i))
    objects = [(variable if kind == "variables" else metric)(i) for i in range(count)]
held = types.SimpleNamespace(**{f"o{i}": o for i, o in enumerate(objects)})
names = list(vars(held))
class Trainer:
    def step(self, x):
        for name in names:
            o = getattr(self, name)
            for v in [o] if kind == "variables" else o.variables.values():
                x = x + v.value
        return x
trainer = Trainer()
vars(trainer).update(vars(held))
step, x = trainer.step, jnp.float32(1)
for _ in range(300):
    strategy.run(step, (x,))
best = []
for _ in range(60):
    start = time.perf_counter()
    for _ in range(200):
        strategy.run(step, (x,))
    best.append((time.perf_counter() - start) / 200)
print(json.dumps(sorted(best)[:20]))
"""


def _batches(root: pathlib.Path, kind: str, count: int) -> list[float]:
    """Seconds of a call in each of the fastest batches of one process."""
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _TIMED, kind, str(count)]
    ran = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, check=True, text=True
    )
    return json.loads(ran.stdout)


def main() -> None:
    """Prints a row for each kind and number of objects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for kind in ("variables", "metrics"):
        more = {}
        for count in _COUNTS:
            ours: list[float] = []
            before: list[float] = []
            for _ in range(options.rounds):
                before += _batches(options.before, kind, count)
                ours += _batches(_ROOT, kind, count)
            fast = [sorted(each)[len(each) // 20] for each in (ours, before)]
            more[count] = fast[0] - fast[1]
            print(f"{count:3} {kind}: {fast[0] * 1e6:.2f} us, before {fast[1] * 1e6:.2f} us")
        each = (more[30] - more[10]) / 20
        print(f"    ten: {more[10] * 1e6:+.2f} us (bar {BAR_OF_TEN * 1e6})")
        print(f"    each more: {each * 1e6:+.3f} us (bar {BAR_OF_EACH * 1e6})")


if __name__ == "__main__":
    main()
