"""The digits examples give the loss curve of a step written by hand, under every strategy."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
NUM_STEPS = 8
GLOBAL_BATCH = 64
EPOCHS = 10
SEED = 0
RUNS = [
    ("train.py", "one_device"),
    ("train.py", "mirrored"),
    ("train.py", "virtual"),
    ("train.py", "default"),
    ("functional.py", "mirrored"),
]


@pytest.fixture(scope="module")
def expected_losses() -> list[float]:
    """The loss curve of plain JAX: one device, the whole batch at once, no distjax in the step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        import data
        import model
    network = model.ConvNet()
    optimizer = model.make_optimizer(EPOCHS * data.steps_per_epoch(GLOBAL_BATCH))

    @jax.jit
    def step(state, optimizer_state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, updates = network.apply(
                variables, batch.images, train=True, mutable="batch_stats"
            )
            return model.mean_loss(logits, batch.labels), updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        changes, optimizer_state = optimizer.update(grads, optimizer_state)
        state = {"params": optax.apply_updates(state["params"], changes), **updates}
        return state, optimizer_state, loss

    state = model.initialize(network, SEED)
    optimizer_state = optimizer.init(state["params"])
    batches = data.train_batches(data.load()[0], GLOBAL_BATCH, SEED)
    losses = []
    for _ in range(NUM_STEPS):
        state, optimizer_state, loss = step(state, optimizer_state, next(batches))
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("script", "strategy"), RUNS)
def test_loss_curve_equals_plain_jax(script, strategy, expected_losses, tmp_path):
    losses = tmp_path / "losses.json"
    command = [sys.executable, str(EXAMPLE / script)]
    command += ["--strategy", strategy, "--steps", str(NUM_STEPS), "--seed", str(SEED)]
    command += ["--global-batch", str(GLOBAL_BATCH), "--epochs", str(EPOCHS)]
    command += ["--out", str(tmp_path), "--dump-losses", str(losses)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    np.testing.assert_allclose(json.loads(losses.read_text()), expected_losses, rtol=0, atol=1e-4)
    assert (tmp_path / f"{Path(script).stem}_{strategy}.png").stat().st_size > 0
    *_, heads, _, row = run.stdout.splitlines()
    assert heads.split()[:4] == ["strategy", "replicas", "devices", "steps"]
    num_replicas = {"one_device": "1", "default": "1"}.get(strategy, "8")
    assert row.split()[:2] == [strategy, num_replicas]


def test_replicas_must_divide_the_global_batch(tmp_path):
    command = [sys.executable, str(EXAMPLE / "train.py"), "--strategy", "mirrored"]
    command += ["--replicas", "7", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2
    assert "--replicas 7 does not divide --global-batch 64" in run.stderr
