"""What one process of a job cannot write, read or remove: an error on all, and the job goes on."""

import os
import pathlib
import re
import resource

import numpy as np
import pytest

import distjax as dj
from distjax._src.cluster.job import job
from distjax._src.cluster.meeting import exchange
from tests.processes import groups
from tests.processes.test_local_views import STRATEGIES

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def group():
    return groups.group(2, 2)


def split_noise():
    """A variable so large, and so random, that each process has a file of its own for its part."""
    noise = np.random.default_rng(0).normal(size=1 << 18).astype(np.float32)
    with STRATEGIES["zero3"]().scope():
        return dj.Variable(noise, aggregation=dj.VariableAggregation.SUM)


def first_value(v):
    return float(np.asarray(v.strategy.extended.broadcast_to(v.value))[0])


def said_by(do):
    with pytest.raises(dj.errors.CheckpointError) as caught:
        do()
    return str(caught.value).splitlines()


def save_where_one_cannot_begin(directory, who):
    """What saves say, the first and a later one, before which one process cannot write anything."""
    said = []
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        for step in (1, 3):
            if job().process_id == who:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
            try:
                said.append(said_by(lambda step=step: checkpointer.save(step, {"n": 1})))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            checkpointer.save(step + 1, {"n": 1})
            checkpointer.wait()
        return said, checkpointer.all_steps(), sorted(os.listdir(directory))


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_cannot_begin_a_save_is_known_to_all(group, who, tmp_path):
    """On process 0 orbax failed before a program over all processes, in which the others waited."""
    directory = str(tmp_path / "checkpoints")
    ended = group.call(save_where_one_cannot_begin, directory, who)
    for process, (said, *steps) in enumerate(ended):
        by_another = "" if process == who else rf"RuntimeError: process {who} on .* failed: "
        for step, (first, got, *_) in zip((1, 3), said, strict=True):
            assert first == (
                f"the checkpoint of step {step} in {directory!r} needs to be written to the disk."
            )
            assert re.match(rf"  Got: {by_another}OSError: .* File too large", got)
        assert steps == [[2, 4], ["2", "4"]]


def save_beside_what_cannot_be_removed(directory):
    """What a save says where a killed process has left something of another user's, and a later."""

    def refuse(path):
        raise PermissionError(f"not of this user: {path}")

    left = pathlib.Path(directory, "7.orbax-checkpoint-tmp", "values")
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        if job().process_id == 0:
            left.mkdir(parents=True)
        checkpointer.all_steps()  # process 0 looks for all: a meeting
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("distjax._src.checkpoint.storage.shutil.rmtree", refuse)
            said = said_by(lambda: checkpointer.save(1, {"n": 1}))
        checkpointer.save(2, {"n": 1})
        return said[1], checkpointer.all_steps(), sorted(os.listdir(directory))


def test_what_cannot_be_removed_before_a_save_is_known_to_all(group, tmp_path):
    """Orbax removed it on process 0, while the others waited in a program over all processes."""
    directory = str(tmp_path / "checkpoints")
    (first, *kept), (second, *also) = group.call(save_beside_what_cannot_be_removed, directory)
    assert first.startswith("  Got: PermissionError: not of this user: ")
    assert re.match(r"  Got: RuntimeError: process 0 on .* failed: PermissionError: not of", second)
    assert kept == also == [[2], ["2"]]


def damage_and_restore(directory, who):
    """What the restore of a damaged step says; the value before, after it, and of another step."""
    v = split_noise()
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, [v])
        v.assign(v.value + 1)
        checkpointer.save(2, [v])
        checkpointer.wait()
        own = job().process_id
        if own == who:
            parts = pathlib.Path(directory, "2", "values", f"ocdbt.process_{own}", "d")
            for part in parts.iterdir():
                os.truncate(part, part.stat().st_size // 2)
        checkpointer.all_steps()  # process 0 looks for all: a meeting
        v.assign(v.value + 1)
        before = first_value(v)
        said = said_by(lambda: checkpointer.restore([v]))
        kept = first_value(v)
        checkpointer.restore([v], step=1)
        return said, kept - before, before - first_value(v)


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_cannot_read_its_part_is_known_to_all(group, who, tmp_path):
    """The others waited in a program over all of them, which paired up with what this one ran."""
    directory = str(tmp_path / "checkpoints")
    for process, (said, changed, back) in enumerate(group.call(damage_and_restore, directory, who)):
        needed = f"the checkpoint of step 2 in {directory!r} needs to be one that distjax wrote"
        assert said[0].startswith(needed)
        by_another = "" if process == who else rf"RuntimeError: process {who} on .* failed: "
        assert re.match(rf"  Got: {by_another}Exception: Encountered error while reading", said[1])
        assert (changed, back) == (0, pytest.approx(2, abs=1e-6))


def remove_where_it_cannot_be(directory):
    """What the removal says, the steps after it, and those after another try and a new save."""
    v = split_noise()
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, [v])
        checkpointer.save(2, [v])
        checkpointer.wait()
        removed = os.path.join(directory, ".removed")
        if job().process_id == 0:
            with open(removed, "w"):  # where steps go first: no folder can be made of it
                pass
        said = said_by(lambda: checkpointer.delete(2))
        before = checkpointer.all_steps()
        if job().process_id == 0:
            os.remove(removed)
        checkpointer.delete(2)
        after = checkpointer.all_steps()
        checkpointer.save(2, [v])
        return said, before, after, checkpointer.all_steps()


def test_a_step_that_cannot_be_removed_is_known_to_all(group, tmp_path):
    """Process 0 removes it: the others waited for it, in a program over all of them."""
    directory = str(tmp_path / "checkpoints")
    first, second = group.call(remove_where_it_cannot_be, directory)
    assert first == second
    said, *steps = first
    assert said[0] == (
        f"the checkpoint of step 2 in {directory!r} needs to be removed from the disk."
    )
    assert steps == [[1, 2], [1], [1, 2]]


def lose_a_process(directory):
    """The classes of what a save and a restore raise where a process does not come to a meeting."""

    def wait_in_vain(joined, occasion, *args):
        if occasion in ("the start of a save", "the reading of a checkpoint"):
            raise dj.errors.StuckError("no process 2")
        return exchange(joined, occasion, *args)

    v = split_noise()
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, [v])
        checkpointer.wait()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("distjax._src.cluster.meeting.exchange", wait_in_vain)
            for do in (lambda: checkpointer.save(2, [v]), lambda: checkpointer.restore([v])):
                with pytest.raises(dj.errors.StuckError, match="^no process 2$"):
                    do()
        checkpointer.save(3, [v])
        return checkpointer.all_steps()


def test_a_process_that_is_lost_is_no_failure_of_the_disk(group, tmp_path):
    """Its error has an exit code of its own."""
    assert group.call(lose_a_process, str(tmp_path / "checkpoints")) == [[1, 3]] * 2
