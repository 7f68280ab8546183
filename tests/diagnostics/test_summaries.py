"""Summaries are written once, by one process, from any context."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from distjax._src.diagnostics import summaries
from tests.replicas import ids


def records(folder):
    """Returns the JSON lines of a folder without their times."""
    lines = (folder / "summaries.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert all(isinstance(record.pop("time"), float) for record in found)
    return found


def events(folder):
    """Returns (step, tag, value) of the scalars in a folder of event files."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in folder.glob("events.*"):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return sorted(found)


def test_numbers_arrays_and_variables(tmp_path):
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        v = dj.Variable(2.5, name="v")
        count = dj.Variable(3, name="count")
    with dj.diagnostics.SummaryWriter(tmp_path / "new" / "run") as writer:
        writer.write(1, {"python": 1, "numpy": np.float32(0.5), "v": v})
        writer.write(jnp.int32(2), {"mean": strategy.reduce("mean", ids(strategy))})
        writer.write(count, {"flax": nnx.Param(jnp.ones(()))})
    assert records(tmp_path / "new" / "run") == [
        {"step": 1, "python": 1.0, "numpy": 0.5, "v": 2.5},
        {"step": 2, "mean": 0.5},
        {"step": 3, "flax": 1.0},
    ]


def test_both_formats_say_the_same(tmp_path):
    formats = ("jsonl", "tensorboard")
    with dj.diagnostics.SummaryWriter(tmp_path, formats=formats) as writer:
        for step in range(3):
            writer.write(step, {"loss": 1 / 2**step, "rate": 0.25})
    expected = [{"step": s, "loss": 1 / 2**s, "rate": 0.25} for s in range(3)]
    assert records(tmp_path) == expected
    assert events(tmp_path) == sorted(
        (r["step"], k, r[k]) for r in expected for k in r if k != "step"
    )


def test_lines_are_added_and_seen_at_once(tmp_path):
    for step in (1, 2):
        writer = dj.diagnostics.SummaryWriter(tmp_path)
        writer.write(step, {"x": step})
        assert [r["step"] for r in records(tmp_path)] == list(range(1, step + 1))
        writer.close()


def test_files_are_closed_though_a_callback_of_some_program_has_failed(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("CpuCallback error")

    writer = dj.diagnostics.SummaryWriter(tmp_path, formats=("jsonl", "tensorboard"))
    writer.write(1, {"x": 1.0})
    monkeypatch.setattr(jax, "effects_barrier", fail)
    with pytest.raises(RuntimeError, match="CpuCallback"):
        writer.close()
    assert len(events(tmp_path)) == 1 and writer._sinks[-1]._file.closed


def test_a_loss_that_blew_up_is_still_json(tmp_path):
    with dj.diagnostics.SummaryWriter(tmp_path) as writer:
        writer.write(1, {"nan": np.nan, "inf": jnp.inf})
    assert records(tmp_path) == [{"step": 1, "nan": "nan", "inf": "inf"}]


def test_replica_0_writes_in_the_reference_interpreter(tmp_path):
    strategy = dj.testing.ReferenceStrategy(3)
    with dj.diagnostics.SummaryWriter(tmp_path) as writer:
        strategy.run(lambda x: writer.write(7, {"replica": x}), args=(ids(strategy),))
    assert records(tmp_path) == [{"step": 7, "replica": 0.0}]


# -- in traces -----------------------------------------------------------------


def test_r329_only_replica_0_writes(strategy, how, tmp_path):
    x = ids(strategy)
    with dj.diagnostics.SummaryWriter(tmp_path) as writer:

        def replica(x):
            writer.write(7, {"replica": x, "all": jnp.float32(4)})
            return x + 1

        jax.block_until_ready(how(lambda x: strategy.run(replica, args=(x,)))(x))
    assert records(tmp_path) == [{"step": 7, "replica": 0.0, "all": 4.0}]


def test_once_in_cross_replica_code(pair, tmp_path):
    with dj.diagnostics.SummaryWriter(tmp_path) as writer:

        @dj.jit
        def step(i, x):
            total = pair.reduce("sum", pair.run(lambda x: x + i, args=(x,)))
            writer.write(i, {"total": total})
            return total

        for i in range(3):
            jax.block_until_ready(step(i, ids(pair)))
            jax.effects_barrier()
    assert records(tmp_path) == [{"step": i, "total": 1.0 + 2 * i} for i in range(3)]


def test_in_a_loop_of_steps(pair, tmp_path):
    with pair.scope():
        count = dj.Variable(0, name="count", aggregation=dj.VariableAggregation.SUM)
    batches = pair.distribute_dataset([np.full(2, i, np.float32) for i in range(4)])
    with dj.diagnostics.SummaryWriter(tmp_path) as writer:

        def step(context, x):
            count.assign_add(1)
            writer.write(count.value, {"x": pair.reduce("mean", x, axis=0)})

        pair.extended.run_steps_on_iterator(step, iter(batches), iterations=4)
        jax.block_until_ready(count.value)
    written = sorted(records(tmp_path), key=lambda record: record["step"])
    assert written == [{"step": i + 1, "x": float(i)} for i in range(4)]


# -- one process ---------------------------------------------------------------


def test_other_processes_write_nothing_and_show_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    formats = ("jsonl", "tensorboard")
    with dj.diagnostics.SummaryWriter(tmp_path / "run", formats=formats) as writer:
        writer.write(1, {"x": 1})
    assert not (tmp_path / "run").exists()
    numbers = range(3)
    assert dj.diagnostics.progress(numbers) is numbers


def test_progress_shows_a_bar_on_the_first(capfd):
    assert list(dj.diagnostics.progress(range(3), desc="epoch")) == [0, 1, 2]
    assert "epoch" in capfd.readouterr().err


def test_progress_needs_no_tqdm(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    numbers = range(3)
    assert dj.diagnostics.progress(numbers) is numbers


# -- bad input -----------------------------------------------------------------


def first_line(error):
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize("formats", ["jsonl", ("csv",)])
def test_unknown_formats(formats, tmp_path):
    with pytest.raises(ValueError) as error:
        dj.diagnostics.SummaryWriter(tmp_path, formats=formats)
    expected = "SummaryWriter: formats needs names among tensorboard, jsonl."
    assert first_line(error) == expected
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError) as error:
        summaries.TensorBoard(tmp_path)
    assert first_line(error) == "TensorBoard event files need the package tensorboardX."
    with pytest.raises(ImportError):
        dj.diagnostics.SummaryWriter(tmp_path / "run", formats=("jsonl", "tensorboard"))
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_no_scalar(pair, tmp_path):
    with dj.diagnostics.SummaryWriter(tmp_path) as writer:
        for wrong in (
            ids(pair),
            np.ones(3),
            "text",
            None,
            jnp.complex64(1),
            np.str_("1"),
            jax.random.key(0),
        ):
            with pytest.raises(TypeError) as error:
                writer.write(1, {"ok": 1, "x": wrong})
            assert first_line(error) == "write needs one number for 'x'."
    assert records(tmp_path) == []


@pytest.mark.parametrize("step", [None, np.arange(3), {"loss": 1.0}])
def test_a_step_that_is_no_number(step, tmp_path):
    with dj.diagnostics.SummaryWriter(tmp_path) as writer:
        with pytest.raises(TypeError) as error:
            writer.write(step, {"ok": 1})
        assert first_line(error) == "write needs one number for its step."
    assert records(tmp_path) == []


# -- while a program runs --------------------------------------------------------


def counting(strategy, writer):
    """Returns a variable, and a step that adds 1 to it and writes it."""
    with strategy.scope():
        count = dj.Variable(0, name="count", aggregation=dj.VariableAggregation.SUM)

    def step(x):
        count.assign_add(x)
        writer.write(count.value, {"x": x})

    def run():
        strategy.run(step, args=(jnp.int32(1),))
        jax.effects_barrier()
        return int(count.value) // strategy.num_replicas_in_sync

    return run


def test_a_step_that_writes_to_a_closed_writer_keeps_its_variables(pair, tmp_path):
    with dj.diagnostics.SummaryWriter(tmp_path) as writer:
        run = counting(pair, writer)
        assert run() == 1
    with pytest.warns(RuntimeWarning, match="^a program needs an open SummaryWriter to write to"):
        assert run() == 2
    assert len(records(tmp_path)) == 1
    with pytest.raises(ValueError) as error:
        writer.write(1, {"x": 1})
    assert first_line(error) == "write needs an open SummaryWriter to write to."


@pytest.mark.parametrize("method", ["write", "close"])
def test_an_error_of_the_file_is_raised_after_the_step(pair, tmp_path, monkeypatch, method):
    def full(*args):
        raise OSError("No space left on device")

    writer = dj.diagnostics.SummaryWriter(tmp_path)
    run = counting(pair, writer)
    with monkeypatch.context() as patch:
        patch.setattr(summaries.JsonLines, "add", full)
        assert run() == 1
    with pytest.raises(OSError, match="No space left"):
        writer.write(1, {"x": 1}) if method == "write" else writer.close()
    assert run() == 2 if method == "write" else True
    writer.close()
    assert len(records(tmp_path)) == (method == "write")
