"""A training on digits that has one fault: python survivor.py CHECKPOINTS REPORT FAULT.

FAULT is JSON: {"kind", "moment", "process", "step", "delay"}, of the first attempt only. Process 0
leaves the weights, and each process a line for each step that it has done, in the folder REPORT.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import signal
import sys
import threading
import time

CHECKPOINTS, REPORT, FAULT = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
NUM_STEPS, SAVE_EVERY, BATCH = 24, 3, 48
OWN, ATTEMPT = int(os.environ["DISTJAX_PROCESS_ID"]), int(os.environ["DISTJAX_ATTEMPT"])
IS_FAULTY = FAULT["process"] == OWN and ATTEMPT == 0 and not (REPORT / "fault").exists()
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


def note(**what: object) -> None:
    """Appends a line to this process's report."""
    with open(REPORT / f"process-{OWN}.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), "attempt": ATTEMPT, **what}) + "\n")


def go_wrong(moment: str, step: int = 0) -> None:
    """Lets the fault happen, if this is its moment."""
    if not IS_FAULTY or (moment, step) != (FAULT["moment"], FAULT["step"]):
        return
    kind = FAULT["kind"]
    if kind in SIGNALS:

        def strike() -> None:
            (REPORT / "fault").write_text(str(time.time()))
            os.kill(os.getpid(), SIGNALS[kind])

        threading.Timer(FAULT["delay"], strike).start()
        return
    if kind != "callback":
        (REPORT / "fault").write_text(str(time.time()))
    if kind == "exception":
        raise ValueError("a fault")
    if kind == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    while kind == "loop":
        pass


def main() -> None:
    """Trains."""
    go_wrong("start")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from sklearn.datasets import load_digits

    import distjax as dj

    limits = dict(heartbeat_timeout=6, step_deadline=8, initialization_timeout=20)
    dj.initialize(**limits)
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))[: NUM_STEPS * BATCH]
    rows = order.reshape(NUM_STEPS, BATCH)
    batches = [((images[r] / 16).astype(np.float32), labels[r].astype(np.int32)) for r in rows]
    strategy = dj.MultiWorkerMirroredStrategy()
    mean = dj.VariableAggregation.MEAN
    with strategy.scope():
        draw = np.random.default_rng(1)
        w1 = dj.Variable(draw.normal(size=(64, 32)).astype(np.float32) / 8, aggregation=mean)
        w2 = dj.Variable(draw.normal(size=(32, 10)).astype(np.float32) / 6, aggregation=mean)
        applied = dj.Variable(np.int32(0), aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA)
    is_callback = FAULT["kind"] == "callback"

    def look(step: jax.Array) -> None:
        if is_callback and IS_FAULTY and int(step) == FAULT["step"]:
            (REPORT / "fault").write_text(str(time.time()))
            raise ValueError("a fault in a callback")

    def step(x, y):
        go_wrong("compilation")

        def loss_of(parameters):
            logits = jnp.tanh(x @ parameters[0]) @ parameters[1]
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])

        loss, (g1, g2) = jax.value_and_grad(loss_of)((w1.value, w2.value))
        jax.debug.callback(look, applied.value)
        w1.assign(w1.value - 0.5 * g1)
        w2.assign(w2.value - 0.5 * g2)
        applied.assign_add(1)
        return loss

    data = iter(strategy.distribute_dataset(batches))
    state = {"w1": w1, "w2": w2, "applied": applied, "data": data}
    with dj.checkpoint.Checkpointer(CHECKPOINTS, max_to_keep=3) as checkpointer:
        save = checkpointer.save

        def save_or_not(number: int, tree: object) -> None:
            go_wrong("save", number)
            save(number, tree)

        checkpointer.save = save_or_not
        with dj.launch.Job(checkpointer, state, save_every=SAVE_EVERY) as job:
            for number in job.steps(NUM_STEPS):
                go_wrong("step", number)
                loss = strategy.reduce("mean", strategy.run(step, args=next(data)))
                note(step=number, loss=float(loss).hex())
    if OWN == 0:
        weights = [float(v).hex() for w in (w1, w2) for v in np.asarray(w.value).ravel()]
        result = {"weights": weights, "applied": int(applied.value)}
        (REPORT / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
