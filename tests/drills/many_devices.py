"""512 virtual devices train digits a few steps with the loss of 8.

    python -m tests.drills.many_devices

Some 20 seconds on two free cores.
"""

import os
import subprocess
import sys

import numpy as np

COUNTS, NUM_STEPS, BATCH = (8, 512), 4, 1024
SCRIPT = f"""
import sys; sys.path.insert(0, "examples/digits")
import jax, data, model, train, distjax as dj
images, labels = (part[:{BATCH}] for part in data.load()[0])
strategy = dj.MirroredStrategy(jax.devices())
count = strategy.num_replicas_in_sync
with strategy.scope():
    network = model.ConvNet(axis_name=strategy.axis_name)
    initial = model.initialize(network, images, 0)
    trainer = train.Trainer(network, model.make_optimizer({NUM_STEPS}), initial)
step = dj.jit(lambda x, y: strategy.reduce("mean", strategy.run(trainer.train_step, args=(x, y))))
rows = [strategy.per_replica(x.reshape(count, -1, *x.shape[1:])) for x in (images, labels)]
for _ in range({NUM_STEPS}):
    print(float(step(*rows)))
"""


def losses_on(count: int) -> list[float]:
    """Returns the losses on so many virtual devices, in a process of their own."""
    own = {"JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT]
    said = subprocess.run(command, env=os.environ | own, check=True, capture_output=True, text=True)
    return [float(line) for line in said.stdout.split()]


def main() -> None:
    """Prints the losses; ends with 1 if they differ by more than 1e-5."""
    few, many = map(losses_on, COUNTS)
    for count, losses in zip(COUNTS, (few, many), strict=True):
        print(f"{count:4} devices:", *(f"{loss:.7f}" for loss in losses))
    difference = np.max(np.abs(np.subtract(few, many)))
    print(f"the greatest difference is {difference:.1e}")
    sys.exit(bool(difference > 1e-5))


if __name__ == "__main__":
    main()
