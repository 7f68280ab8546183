"""The digits examples give the loss curve of a step written by hand, under the strategies."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from tests.examples.scripts import last_line, what_it_said
from tests.processes.warm import outside_of_jobs

#: In one worker, which makes the curve of plain JAX once.
pytestmark = pytest.mark.xdist_group("examples digits")

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
NUM_STEPS = 44  # two of the ten epochs
GLOBAL_BATCH = 64
EPOCHS = 10
SEED = 0
RUNS = [
    ("train.py", "mirrored"),
    pytest.param("train.py", "parameter_server", marks=pytest.mark.drill),
    pytest.param("functional.py", "mirrored", marks=pytest.mark.drill),
]


def example_module(name: str):
    """A module of the example, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def expected_losses() -> list[float]:
    """The loss curve of plain JAX: one device, the whole batch at once, no distjax in the step."""
    data, model = example_module("data"), example_module("model")
    network = model.ConvNet()
    train_split, _ = data.load()
    num_steps = EPOCHS * data.steps_per_epoch(train_split, GLOBAL_BATCH)
    optimizer = model.make_optimizer(num_steps)

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

    state = model.initialize(network, train_split.images, SEED)
    optimizer_state = optimizer.init(state["params"])
    batches = data.train_batches(train_split, GLOBAL_BATCH, SEED)
    losses = []
    for _ in range(NUM_STEPS):
        state, optimizer_state, loss = step(state, optimizer_state, next(batches))
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("script", "chosen"), RUNS)
def test_loss_curve_equals_plain_jax(script, chosen, expected_losses, tmp_path):
    losses = tmp_path / "losses.json"
    flags = ["--strategy", chosen, "--steps", str(NUM_STEPS), "--seed", str(SEED)]
    flags += ["--replicas", "1"] if chosen == "parameter_server" else []
    flags += ["--global-batch", str(GLOBAL_BATCH), "--epochs", str(EPOCHS)]
    flags += ["--out", str(tmp_path), "--dump-losses", str(losses)]
    said, complaints = what_it_said(f"digits/{script}", *flags)
    np.testing.assert_allclose(json.loads(losses.read_text()), expected_losses, rtol=0, atol=1e-4)
    assert (tmp_path / f"{Path(script).stem}_{chosen}.png").stat().st_size > 0
    assert "step/s" not in complaints, "a progress bar where there is no terminal"
    *_, heads, _, row = said.splitlines()
    assert heads.split()[:4] == ["strategy", "replicas", "devices", "steps"]
    name, num_replicas, num_devices, _, num_steps, _, accuracy, _ = row.split()
    assert (name, int(num_steps)) == (chosen, NUM_STEPS)
    assert int(num_replicas) == (8 if chosen == "mirrored" else 1)
    assert int(num_devices) == (8 if chosen == "mirrored" else 1)
    assert float(accuracy.rstrip("%")) >= 95


@pytest.mark.drill
def test_modules_train_the_same_on_eight_replicas_and_on_one(tmp_path):
    """NNX has other initial parameters than linen, so it is compared with itself."""
    curves = []
    for strategy in ("mirrored", "one_device"):
        losses = tmp_path / f"{strategy}.json"
        flags = ["--strategy", strategy, "--steps", "44", "--dump-losses", str(losses)]
        line = last_line("digits/modules.py", *flags, "--out", str(tmp_path))
        assert float(line.split()[-2].rstrip("%")) >= 97
        curves.append(json.loads(losses.read_text()))
    assert curves[0][0] > 2 > curves[0][-1]
    np.testing.assert_allclose(*curves, rtol=0, atol=1e-4)


@pytest.mark.drill
def test_equinox_trains_the_same_on_eight_replicas_and_on_one(tmp_path):
    pytest.importorskip("equinox")
    curves = []
    for strategy in ("mirrored", "one_device"):
        losses = tmp_path / f"{strategy}.json"
        flags = ["--strategy", strategy, "--steps", "12", "--dump-losses", str(losses)]
        last_line("digits/equinox_form.py", *flags, "--out", str(tmp_path))
        curves.append(json.loads(losses.read_text()))
    assert curves[0][0] > 2 > curves[0][-1]
    np.testing.assert_allclose(*curves, rtol=0, atol=1e-4)


def test_a_file_takes_the_place_of_the_digits(tmp_path):
    """Its images may have another size; eight of them are two steps of batch four.

    Started as a user does, while the other scripts are forks.
    """
    images = np.random.default_rng(0).integers(0, 256, (8, 6, 6), np.uint8)
    labels = np.arange(8) % 10
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    flags = ["--strategy", "one_device", "--global-batch", "4", "--epochs", "1"]
    paths = ["--data", str(tmp_path / "own.npz"), "--out", str(tmp_path)]
    command = [sys.executable, str(EXAMPLE / "train.py"), *flags, *paths]
    run = subprocess.run(
        command, env=outside_of_jobs(), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    name, _, _, _, num_steps, _, _, _ = run.stdout.splitlines()[-1].split()
    assert (name, int(num_steps)) == ("one_device", 2)


def test_a_batch_larger_than_the_data_is_refused():
    data = example_module("data")
    with pytest.raises(SystemExit, match="--global-batch 2000 is more than all 1437 examples"):
        data.steps_per_epoch(data.load()[0], 2000)


def test_replicas_must_divide_the_global_batch(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--strategy", "mirrored", "--replicas", "7"])
    with pytest.raises(SystemExit):
        example_module("options").parse("")
    assert "--replicas 7 does not divide --global-batch 64" in capsys.readouterr().err
