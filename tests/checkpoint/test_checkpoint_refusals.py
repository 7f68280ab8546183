"""What save and restore refuse, in which words; a full disk; nothing is changed."""

import os
import pathlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import distjax as dj
from distjax.errors import AggregationError, CheckpointError, ContextError
from tests.cluster.test_ending import make_job


def make_on_read(strategy):
    with strategy.scope():
        return dj.Variable(0.0, name="v", synchronization=dj.VariableSynchronization.ON_READ)


def first_line(error):
    return str(error.value).splitlines()[0]


# -- what is saved ------------------------------------------------------------


@pytest.mark.parametrize("method", ["save", "restore"])
def test_components_that_are_no_one_value(method, checkpointer, pair):
    checkpointer.save(1, {"v": 1.0})
    v = make_on_read(pair)
    with pytest.raises(AggregationError) as error:
        checkpointer.save(2, {"v": v}) if method == "save" else checkpointer.restore({"v": v})
    assert first_line(error) == f"{method} of variable 'v' needs an aggregation."
    assert "at key 'v'" in str(error.value)


def test_an_object_that_holds_nothing(checkpointer):
    with pytest.raises(CheckpointError) as error:
        checkpointer.save(1, {"model": {"f": object()}})
    assert first_line(error) == "'model/f' needs to be something that a checkpoint can hold."


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_a_dtype_that_cannot_be_written_does_not_blame_the_disk(dtype, checkpointer):
    with pytest.raises(CheckpointError) as error:
        checkpointer.save(1, {"x": np.ones(3, dtype)})
    assert first_line(error) == "'x' needs to be something that a checkpoint can hold."


def test_a_shape_cannot_be_saved(checkpointer):
    with pytest.raises(CheckpointError) as error:
        checkpointer.save(1, {"x": jax.ShapeDtypeStruct((3,), jnp.float32)})
    assert first_line(error) == "save of 'x' needs a value."


def test_two_leaves_of_one_key(checkpointer):
    with pytest.raises(CheckpointError) as error:
        checkpointer.save(1, {"a/b": 1, "a": {"b": 2}})
    assert first_line(error) == "the tree needs a key of its own for each leaf."


def test_a_state_that_is_no_json(checkpointer):
    class Source:
        def get_state(self):
            return {"at": object()}

        def set_state(self, state):
            raise NotImplementedError

    with pytest.raises(CheckpointError) as error:
        checkpointer.save(1, {"data": Source()})
    assert first_line(error).startswith("save of 'data' needs a state of numbers, text, bytes")
    assert isinstance(error.value.__cause__, TypeError)
    assert str(error.value.__cause__) == "a object has no form in JSON"


def test_an_optimizer_without_its_state(checkpointer):
    with pytest.raises(ContextError) as error:
        checkpointer.save(1, {"optimizer": dj.optim.Optimizer(optax.sgd(0.1))})
    assert first_line(error) == "a checkpoint needs an optimizer that has its state."


# -- when and where -----------------------------------------------------------


@pytest.mark.parametrize("method", ["save", "restore"])
@pytest.mark.parametrize("place", ["replica", "jit"])
def test_inside_of_traces(method, place, checkpointer, pair):
    def call():
        checkpointer.save(1, {}) if method == "save" else checkpointer.restore({})

    with pytest.raises(ContextError) as error:
        pair.run(call) if place == "replica" else dj.jit(call)()
    assert first_line(error) == (
        f"{method} needs to be called outside of replica functions and traces."
    )


@pytest.mark.parametrize("step", [-1, 1.5, True, "1"])
def test_no_step_number(step, checkpointer):
    with pytest.raises(ValueError, match="^save: step needs an int of 0 or more"):
        checkpointer.save(step, {})


def test_a_removal_needs_a_step_number(checkpointer):
    """It took None, as of a best step that there is not, for the latest."""
    checkpointer.save(1, {"x": 1})
    with pytest.raises(ValueError, match="^delete: step needs an int of 0 or more") as error:
        checkpointer.delete(checkpointer.best_step())
    assert "Fix: checkpointer.delete(checkpointer.all_steps()[0])" in str(error.value)
    assert checkpointer.all_steps() == [1]


@pytest.mark.parametrize("step", [3, 2])
def test_a_step_that_is_not_after_the_latest(step, checkpointer):
    checkpointer.save(3, {"x": 1})
    with pytest.raises(CheckpointError, match="^save needs a step after the latest one in .*, 3"):
        checkpointer.save(step, {"x": 2})
    assert checkpointer.restore({"x": 0}) == {"x": 1}


@pytest.mark.parametrize("metrics", [None, {"accuracy": 1.0}, {"loss": "low"}])
def test_metrics_without_the_best(metrics, tmp_path):
    checkpointer = dj.checkpoint.Checkpointer(tmp_path, best_metric="loss")
    with pytest.raises(ValueError, match="^save: metrics needs numbers by name, 'loss' among them"):
        checkpointer.save(1, {}, metrics=metrics)


@pytest.mark.parametrize("options", [{"max_to_keep": 0}, {"best_mode": "least"}])
def test_options(options, tmp_path):
    with pytest.raises(ValueError, match="^Checkpointer needs max_to_keep=None or a positive int"):
        dj.checkpoint.Checkpointer(tmp_path, **options)


def test_a_step_that_is_not_there(checkpointer):
    with pytest.raises(CheckpointError, match="needs a complete checkpoint.\n  Got: none"):
        checkpointer.restore({})
    checkpointer.save(3, {})
    for call in (checkpointer.description, checkpointer.delete, checkpointer.delayed):
        with pytest.raises(CheckpointError, match="complete checkpoint of step 4.\n.*the steps 3"):
            call(4)


# -- directories --------------------------------------------------------------


@pytest.mark.parametrize("content", ["a file", "a directory of something else", "a URL"])
def test_a_directory_that_is_not_one(content, tmp_path):
    path = "gs://bucket/run" if content == "a URL" else tmp_path / "path"
    if content == "a file":
        path.write_text("x")
    elif content != "a URL":
        path.mkdir()
        (path / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError) as error:
        dj.checkpoint.Checkpointer(path)
    assert first_line(error) == (
        f"Checkpointer needs a directory for checkpoints, or a new or empty one: {str(path)!r}."
    )
    assert content in str(error.value)


@pytest.mark.parametrize("path", [None, 3, b"run"])
def test_a_directory_that_is_no_path(path):
    with pytest.raises(TypeError) as error:
        dj.checkpoint.Checkpointer(path)
    text = str(error.value).splitlines()
    assert text[0] == "Checkpointer needs the path of a directory."
    assert text[1].startswith(f"  Got: {type(path).__name__}")
    assert text[3] == "  Fix: dj.checkpoint.Checkpointer('runs/first')"


def test_a_step_that_cannot_be_removed(checkpointer):
    checkpointer.save(1, {"x": 1})
    checkpointer.wait()
    removed = os.path.join(checkpointer.directory, ".removed")
    with open(removed, "w"):  # where steps go first: no folder can be made of it, even by root
        pass
    with pytest.raises(CheckpointError) as error:
        checkpointer.delete(1)
    assert first_line(error) == (
        f"the checkpoint of step 1 in {checkpointer.directory!r} needs to be removed from the disk."
    )
    assert "call checkpointer.delete(step) again" in str(error.value)
    os.remove(removed)
    assert checkpointer.restore({"x": 0}) == {"x": 1}
    checkpointer.delete(1)
    assert checkpointer.all_steps() == []


@pytest.mark.parametrize("text", ['{"format": 1}', "[1]", "3"])
def test_a_description_of_another_form(text, checkpointer):
    checkpointer.save(1, {"x": 1})
    checkpointer.wait()
    pathlib.Path(checkpointer.directory, "1", "description", "metadata").write_text(text)
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore({"x": 0})
    assert "needs to be one that distjax wrote, with all its files" in first_line(error)
    if text != "3":
        got = "Got: ValueError: a description that lacks its format, keys or values"
        assert got in str(error.value)


def test_a_checkpoint_of_another_program(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"x": np.ones(3)}))
    checkpointer = dj.checkpoint.Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match="^the checkpoint of step 1 in .* needs to be one th"):
        checkpointer.restore({"x": np.zeros(3)})


def test_a_checkpoint_of_a_later_format(checkpointer, monkeypatch):
    checkpointer.save(1, {"x": 1})
    with monkeypatch.context() as patch:
        patch.setattr("distjax._src.checkpoint.saved.FORMAT", 2)
        checkpointer.save(2, {"x": 1})
        checkpointer.wait()
    assert checkpointer.restore({"x": 0}, 1) == {"x": 1}
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore({"x": 0}, 2)
    assert str(error.value).splitlines() == [
        f"the checkpoint of step 2 in {checkpointer.directory!r} needs a version of distjax that "
        "can read it.",
        f"  Got: format 2, written by distjax {dj.__version__}.",
        f"  Why: distjax {dj.__version__} reads formats up to 1. Nothing has been changed.",
        f"  Fix: restore it with distjax {dj.__version__} or later",
    ]


def test_one_that_was_made_before_the_job_was_joined(checkpointer, monkeypatch):
    """Each process would write by itself, to one directory."""
    joined = make_job()
    with monkeypatch.context() as patch:
        patch.setattr("distjax._src.checkpoint.storage.job", lambda: joined)
        with pytest.raises(CheckpointError) as error:
            checkpointer.save(1, {"x": 1})
    assert str(error.value).splitlines() == [
        "Checkpointer needs to be constructed after the process has joined its job.",
        "  Got: one made before dj.initialize, in what is now process 0 on a (pid 1).",
        "  Why: each process would save by itself, all into one directory.",
        "  Fix: dj.initialize() at the start of the program; for what one process alone keeps: "
        "dj.checkpoint.Checkpointer(directory, local=True)",
    ]
    assert not os.path.exists(checkpointer.directory)
    checkpointer.save(1, {"x": 1})
    with monkeypatch.context() as patch:
        patch.setattr("distjax._src.checkpoint.storage.job", lambda: joined)
        with pytest.raises(CheckpointError, match="to be constructed after the process has join"):
            checkpointer.restore({"x": 0})
    assert checkpointer.restore({"x": 0}) == {"x": 1}


def test_a_directory_that_cannot_be_read(checkpointer, monkeypatch):
    def refuse(path):
        raise PermissionError("closed to this user")

    checkpointer.save(1, {"x": 1})
    checkpointer.wait()
    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as error:
        patch.setattr(os, "scandir", refuse)
        checkpointer.latest_step()
    assert str(error.value).splitlines()[:2] == [
        f"a look at the steps needs a directory that can be read, {checkpointer.directory!r}.",
        "  Got: PermissionError: closed to this user.",
    ]
    assert checkpointer.restore({"x": 0}) == {"x": 1}


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    checkpointer = dj.checkpoint.Checkpointer(tmp_path / "file" / "checkpoints")
    with pytest.raises(
        CheckpointError, match="^the checkpoint of step 1 in .* needs to be written"
    ):
        checkpointer.save(1, {"x": 1})


def test_damaged_files_change_nothing(checkpointer, pair):
    with pair.scope():
        v = dj.Variable(jnp.zeros(1000))
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    checkpointer.save(1, {"n": dj.Variable(3.0), "v": x})
    checkpointer.wait()
    for folder, _, names in os.walk(os.path.join(checkpointer.directory, "1", "values")):
        for name in names:
            if os.path.basename(folder) == "d":
                os.truncate(os.path.join(folder, name), 0)
    n = dj.Variable(0.0)
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore({"n": n, "v": v})
    assert "needs to be one that distjax wrote, with all its files" in first_line(error)
    assert float(n.value) == 0.0


# -- a disk that is full ------------------------------------------------------


@pytest.fixture
def no_room():
    """Files of this process cannot grow over 256 KiB: as on a full disk, a write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    make_room = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    yield make_room
    make_room()


def noise():
    return np.random.default_rng(0).normal(size=1 << 18)  # 2 MiB that do not compress


@pytest.mark.parametrize("where", ["wait", "save", "latest_step", "close"])
def test_a_full_disk_surfaces_at_the_next_call(where, checkpointer, no_room):
    checkpointer.save(1, {"x": np.zeros(3)})
    checkpointer.wait()
    checkpointer.save(2, {"x": noise()})
    call = getattr(checkpointer, where)
    with pytest.raises(CheckpointError) as error:
        call(3, {"x": np.zeros(3)}) if where == "save" else call()
    assert first_line(error) == (
        f"the checkpoint of step 2 in {checkpointer.directory!r} needs to be written to the disk."
    )
    assert error.value.__cause__ is not None
    no_room()
    assert checkpointer.latest_step() == 1
    np.testing.assert_array_equal(checkpointer.restore({"x": np.ones(3)})["x"], np.zeros(3))
    checkpointer.save(2, {"x": noise()})
    np.testing.assert_array_equal(checkpointer.restore({"x": noise()})["x"], noise())


# -- iterators that refuse ----------------------------------------------------


def test_an_iterator_that_refuses_leaves_all_as_it_was(checkpointer, pair):
    def iterator_over(count):
        return iter(pair.distribute_dataset([np.full(2, i) for i in range(count)]))

    long, other = iterator_over(6), iterator_over(6)
    for _ in range(5):
        next(long)
    next(other)
    v = dj.Variable(1.0)
    checkpointer.save(1, {"a": other, "b": long, "v": v})
    v.assign(0.0)
    first, short = iterator_over(6), iterator_over(3)
    next(short)
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore({"a": first, "b": short, "v": v})
    assert first_line(error).startswith("'b' needs to take the state that the checkpoint of step 1")
    assert float(v.value) == 0.0
    assert next(first).stacked.ravel().tolist() == [0, 0]
    assert next(short).stacked.ravel().tolist() == [1, 1]
