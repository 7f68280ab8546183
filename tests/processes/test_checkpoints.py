"""Checkpoints of a job: one directory, one step, restored on any number of processes."""

import json
import os
import pathlib
import re
import resource

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import distjax as dj
from distjax._src.cluster.job import job
from tests.processes import groups
from tests.processes.test_agreement import agreed_step
from tests.processes.test_local_views import STRATEGIES

pytestmark = pytest.mark.multiprocess

SUM = dj.VariableAggregation.SUM
ON_READ = dj.VariableSynchronization.ON_READ


@pytest.fixture
def group():
    return groups.group(2, 2)


def make_state(strategy, start=0.0):
    with strategy.scope():
        return {
            "w": dj.Variable(jnp.arange(8.0) + start, name="w", aggregation=SUM),
            "seen": dj.Variable(start, synchronization=ON_READ, aggregation=SUM),
            "key": dj.Variable(jax.random.key(3)),
        }


def step_of(strategy, state):
    def step():
        state["w"].assign_add(jnp.ones(8))
        state["seen"].assign_add(1.0)

    return lambda: strategy.run(step)


def values(state, strategy):
    whole = strategy.extended.broadcast_to(state["w"].value)
    return np.asarray(whole).tolist(), float(state["seen"].value)


def save_two_steps(directory, name):
    strategy = STRATEGIES[name]()
    state = make_state(strategy)
    step = step_of(strategy, state)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        before = checkpointer.latest_step()
        for i in (1, 2):
            step()
            checkpointer.save(i, state)
        return before, checkpointer.all_steps(), values(state, strategy)


def restore(directory, name):
    strategy = STRATEGIES[name]()
    state = make_state(strategy, start=100.0)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.restore(state, 1)
        first = values(state, strategy)
        checkpointer.restore(state)
        return first, values(state, strategy)


@pytest.mark.parametrize("name", ["multi_worker", "zero3", "central"])
def test_a_fresh_directory_and_back(group, name, tmp_path):
    directory = str(tmp_path / "checkpoints")
    counts = 4  # replicas
    saved = ([x + 2 * counts for x in range(8)], 2.0 * counts)
    assert group.call(save_two_steps, directory, name) == [(None, [1, 2], saved)] * 2
    former = ([x + counts for x in range(8)], float(counts))
    assert group.call(restore, directory, name) == [(former, saved)] * 2
    assert sorted(os.listdir(directory)) == ["1", "2"]


def test_one_process_goes_on_where_several_ended(group, tmp_path):
    directory = str(tmp_path / "checkpoints")
    (saved, *_) = group.call(save_two_steps, directory, "zero3")
    strategy = dj.MirroredStrategy(jax.devices()[:3])
    state = make_state(strategy)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.restore(state)
        assert values(state, strategy) == saved[2]
        step_of(strategy, state)()
        checkpointer.save(3, state)
    first, latest = group.call(restore, directory, "multi_worker")[0]
    assert latest == ([x + 8.0 + 3.0 for x in range(8)], 8.0 + 3.0)


def save_where_one_cannot_write(directory, who):
    """What the save says, the steps before and after it, and a save when there is room again."""
    strategy = STRATEGIES["zero3"]()
    with strategy.scope():
        noise = np.random.default_rng(0).normal(size=1 << 18)  # does not compress
        state = {"v": dj.Variable(noise.astype(np.float32))}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        if job().process_id == who:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
        try:
            checkpointer.save(2, state)
            with pytest.raises(dj.errors.CheckpointError) as caught:
                checkpointer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        before = checkpointer.all_steps()
        checkpointer.save(3, state)
        return str(caught.value), before, checkpointer.all_steps()


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_cannot_write_is_known_to_all(group, who, tmp_path):
    """The others were at another barrier of orbax, and all waited until it timed out."""
    directory = str(tmp_path / "checkpoints")
    ended = group.call(save_where_one_cannot_write, directory, who, seconds=60)
    needed = f"the checkpoint of step 2 in {directory!r} needs to be written to the disk."
    cause = "ValueError: OUT_OF_RANGE: Error writing "
    for process, (text, *steps) in enumerate(ended):
        first, got, *_ = text.splitlines()
        assert first == needed
        by_another = "" if process == who else rf"RuntimeError: process {who} on .* failed: "
        assert re.match(rf"  Got: {by_another}{cause}", got)
        assert steps == [[1], [1, 3]]


def own_data(strategy, lengths):
    me = job().process_id if job() else 0
    batches = [np.full(4, 100.0 * me + i, np.float32) for i in range(lengths[me])]
    return iter(strategy.distribute_dataset(batches, dj.InputOptions(shard="own", partial="pad")))


def masked_total(strategy, batch):
    masked = strategy.run(lambda b: (b.data * b.mask).sum(), args=(batch,))
    return float(strategy.reduce("sum", masked))


def save_within_own_data(directory, lengths, num_steps):
    """Positions, and what is left after them."""
    strategy = dj.MultiWorkerMirroredStrategy()
    data, state = own_data(strategy, lengths), make_state(strategy)
    for _ in range(num_steps):
        next(data)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.save(num_steps, {"data": data, **state})
        position = data.get_state()
    return position["consumed"], position["process"], [masked_total(strategy, b) for b in data]


def go_on_with_own_data(directory, lengths):
    strategy = dj.MultiWorkerMirroredStrategy()
    data, state = own_data(strategy, lengths), make_state(strategy)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.restore({"data": data, **state})
    return [masked_total(strategy, b) for b in data]


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (5, 0)])
def test_each_process_resumes_its_own_data(group, tmp_path, lengths):
    """Where one of them has ended before too."""
    saved = group.call(save_within_own_data, str(tmp_path / "saved"), lengths, 3)
    left = [100.0 * 4 * i + 4 * j for i, n in enumerate(lengths) for j in range(3, n)]
    for me, (consumed, process, totals) in enumerate(saved):
        assert (consumed, process) == (min(3, lengths[me]), [me, 2])
        assert totals == left
    assert group.call(go_on_with_own_data, str(tmp_path / "saved"), lengths) == [left] * 2


def test_own_data_resumes_on_the_same_number_of_processes_only(group, tmp_path):
    group.call(save_within_own_data, str(tmp_path / "saved"), (5, 5), 2)
    strategy = dj.MirroredStrategy(jax.devices()[:4])
    data, state = own_data(strategy, (5,)), make_state(strategy, start=100.0)
    next(data)
    before = data.get_state(), values(state, strategy)
    with dj.checkpoint.Checkpointer(tmp_path / "saved") as checkpointer:
        with pytest.raises(dj.errors.CheckpointError) as caught:
            checkpointer.restore({"data": data, **state})
    assert str(caught.value).startswith("'data' of the checkpoint of step 2 in ")
    assert "needs the number of processes that saved it, 2" in str(caught.value)
    assert (data.get_state(), values(state, strategy)) == before


class ByIndex:
    """Batches that are addressed by index, in an order of its own; what was read of them.

    Its iterator keeps its state, as bytes, as the loaders of grain do.
    """

    def __init__(self, num_batches):
        self.order = np.random.default_rng(7).permutation(num_batches)
        self.read = []

    def __iter__(self):
        return SampledInOrder(self)


class SampledInOrder:
    def __init__(self, source):
        self.source, self.next_index = source, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_index == len(self.source.order):
            raise StopIteration
        number = int(self.source.order[self.next_index])
        self.source.read.append(number)
        self.next_index += 1
        return np.arange(8 * number, 8 * number + 8, dtype=np.float32)

    def get_state(self):
        return json.dumps({"next": self.next_index}).encode()

    def set_state(self, state):
        self.next_index = json.loads(state)["next"]


def grain_by_index(num_batches):
    """The same of grain: a shuffled dataset, each of whose elements is found by its index."""
    import grain

    return grain.MapDataset.range(8 * num_batches).shuffle(seed=7).batch(8)


SAMPLED = {"an iterator with state": ByIndex, "grain": grain_by_index}


def of_all_processes(strategy, batch):
    """The rows of all replicas, in any order."""
    return sorted(np.asarray(strategy.gather(batch, axis=0)).reshape(-1).tolist())


def save_within_a_sampler(directory, kind):
    """Saves after three batches; what comes after them."""
    strategy = dj.MultiWorkerMirroredStrategy()
    data, state = iter(strategy.distribute_dataset(SAMPLED[kind](7))), make_state(strategy)
    for _ in range(3):
        next(data)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.save(3, {"data": data, **state})
        return [of_all_processes(strategy, batch) for batch in data]


def go_on_within_a_sampler(directory, kind):
    strategy, source = dj.MultiWorkerMirroredStrategy(jax.devices()[:4]), SAMPLED[kind](7)
    data = iter(strategy.distribute_dataset(source))
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.restore({"data": data, **make_state(strategy)})
        return [of_all_processes(strategy, batch) for batch in data], getattr(source, "read", [])


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_sampler_goes_on_on_any_number_of_processes(group, tmp_path, kind):
    """By its own state: of what was before it, only the last is read again."""
    if kind == "grain":
        pytest.importorskip("grain", reason="grain is an optional dependency")
    of_two, of_one = str(tmp_path / "two"), str(tmp_path / "one")
    left, again = group.call(save_within_a_sampler, of_two, kind)
    assert left == again and len(left) == 4
    on_one, read = go_on_within_a_sampler(of_two, kind)
    assert on_one == left
    assert kind == "grain" or read == ByIndex(7).order[2:].tolist()
    assert group.call(go_on_within_a_sampler, of_two, kind) == [(left, read)] * 2
    strategy = dj.MirroredStrategy(jax.devices()[:4])
    data = iter(strategy.distribute_dataset(SAMPLED[kind](7)))
    for _ in range(3):
        next(data)
    with dj.checkpoint.Checkpointer(of_one) as checkpointer:
        checkpointer.save(3, {"data": data, **make_state(strategy)})
    assert group.call(go_on_within_a_sampler, of_one, kind) == [(left, read)] * 2


def fail_to_resume_on_one(directory):
    """The data of process 1 is shorter than it was."""
    strategy = dj.MultiWorkerMirroredStrategy()
    data, state = own_data(strategy, (5, 1)), make_state(strategy, start=100.0)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        with pytest.raises(dj.errors.CheckpointError) as caught:
            checkpointer.restore({"data": data, **state})
    return str(caught.value), values(state, strategy)[1], data.get_state()["consumed"]


def test_a_position_that_one_process_cannot_take_changes_none(group, tmp_path):
    group.call(save_within_own_data, str(tmp_path / "saved"), (5, 5), 2)
    first, second = group.call(fail_to_resume_on_one, str(tmp_path / "saved"))
    assert first == second
    assert first[1:] == (400.0, 0)
    assert first[0].startswith("'data' needs to take the state that ")
    assert "Got: on process 1 on " in first[0]
    assert "ValueError: set_state needs a dataset of at least 2 elements" in first[0]


def take_the_position_of_another(directory):
    strategy = dj.MultiWorkerMirroredStrategy()
    data = own_data(strategy, (5, 5))
    with pytest.raises(ValueError) as caught:
        data.set_state({"delivered": 1, "consumed": 1})
    return str(caught.value).splitlines()[0]


def test_a_position_is_that_of_its_process(group, tmp_path):
    for me, text in enumerate(group.call(take_the_position_of_another, str(tmp_path))):
        assert (
            text == f"set_state needs a position of process {me} of 2, not of all processes alike."
        )


def save_arrays_of_one_process(directory):
    strategy = dj.MultiWorkerMirroredStrategy()
    local = {"x": jnp.zeros(3), "key": jax.random.key(3)}
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        texts = []
        for name, value in local.items():
            with pytest.raises(dj.errors.CheckpointError) as caught:
                checkpointer.save(1, {name: value})
            texts.append(str(caught.value))
        shared = jax.tree.map(strategy.extended.broadcast_to, local)
        checkpointer.save(1, shared)
        restored = checkpointer.restore(shared)
    draws = [jax.random.key_data(x) for x in (restored["key"], local["key"])]
    return texts, [np.asarray(x.addressable_data(0)).tolist() for x in draws]


def test_arrays_of_one_process_are_no_part_of_a_job(group, tmp_path):
    for texts, (restored, saved) in group.call(save_arrays_of_one_process, str(tmp_path / "c")):
        assert [text.splitlines()[0] for text in texts] == [
            f"save of {name!r} needs an array of all processes." for name in ("x", "key")
        ]
        assert "Fix: strategy.broadcast(x)" in texts[0]
        assert restored == saved


def open_apart(directory):
    own = pathlib.Path(directory, str(job().process_id))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distjax._src.cluster.meeting._LOOK_SECONDS", 0.5)
        with pytest.raises(dj.errors.CheckpointError) as caught:
            dj.checkpoint.Checkpointer(own)
    return str(caught.value).splitlines()[:2], sorted(os.listdir(own)) if own.is_dir() else []


def test_a_directory_that_is_not_shared_is_refused(group, tmp_path):
    first, second = group.call(open_apart, str(tmp_path))
    assert first == second
    (text, got), left = first
    assert text == "Checkpointer needs a directory that all processes of the job share."
    own, other = str(tmp_path / "0"), str(tmp_path / "1")
    assert re.fullmatch(
        rf"  Got: '{own}' on process 0, where process 1 on .* looked in '{other}'\.", got
    )
    assert left == []


def open_what_one_does_not_see(directory):
    with pytest.MonkeyPatch.context() as patch:
        if job().process_id == 1:
            patch.setattr("distjax._src.cluster.meeting._sees", lambda *args: False)
        with pytest.raises(dj.errors.CheckpointError) as caught:
            dj.checkpoint.Checkpointer(directory)
    return str(caught.value).splitlines()[1]


def test_a_path_that_leads_elsewhere_on_one_process_is_refused(group, tmp_path):
    for got in group.call(open_what_one_does_not_see, str(tmp_path)):
        assert re.fullmatch(
            rf"  Got: '{tmp_path}' on process 0, where process 1 on .* found something else\.", got
        )


def save_alone(directory, writer):
    """One process with values that are wholly its own; the other one reads them, later."""
    strategy = dj.MirroredStrategy(jax.local_devices())
    is_writer = job().process_id == writer
    with strategy.scope():
        state = {
            "w": dj.Variable(5.0 if is_writer else 0.0),
            "half": dj.Variable(jnp.full(3, 1.5 if is_writer else 0.0, jnp.bfloat16)),
            "key": dj.Variable(jax.random.key(7 if is_writer else 0)),
            "none": dj.Variable(jnp.zeros((0, 2))),
            "step": 4 if is_writer else 0,
        }
    with dj.checkpoint.Checkpointer(directory, local=True, max_to_keep=1) as checkpointer:
        if is_writer:
            checkpointer.save(1, state, metrics={"loss": 2.0})
            checkpointer.save(2, state)
            checkpointer.wait()
            state["w"].assign(0.0)
        agreed_step(dj.MultiWorkerMirroredStrategy())  # waits for it
        step = checkpointer.restore(state)["step"]
        half, key = state["half"].value.tolist(), jax.random.key_data(state["key"].value).tolist()
        return checkpointer.all_steps(), float(state["w"].value), half, key, step


@pytest.mark.parametrize("writer", [0, 1])
def test_one_process_alone(group, tmp_path, writer):
    key = jax.random.key_data(jax.random.key(7)).tolist()
    saved = ([2], 5.0, [1.5] * 3, key, 4)
    assert group.call(save_alone, str(tmp_path / "own"), writer) == [saved] * 2


def save_alone_and_together(directory, writer):
    """Saves of one process, then of both; process 0 looks whether the other waits for it."""
    state = make_state(STRATEGIES["multi_worker"]())
    if job().process_id == writer:
        with dj.checkpoint.Checkpointer(f"{directory}/own", local=True) as own:
            for step in range(3):
                own.save(step, {"x": jnp.ones(3)})
    kind = ocp.path.atomicity.AtomicRenameTemporaryPath
    create, early = kind.create, []

    async def look_first(self, *args, **kwargs):
        early.extend(path for path in [self.get()] * 2000 if path.exists())
        return await create(self, *args, **kwargs)

    kind.create = look_first if job().process_id == 0 else create
    try:
        with dj.checkpoint.Checkpointer(f"{directory}/all") as checkpointer:
            for step in range(4):
                checkpointer.save(step, {"w": state["w"]})
    finally:
        kind.create = create
    return [str(path) for path in early]


@pytest.mark.parametrize("writer", [0, 1])
def test_one_process_alone_and_then_all(group, tmp_path, writer):
    """What a process wrote before process 0 had made the directory would be removed."""
    assert group.call(save_alone_and_together, str(tmp_path), writer) == [[], []]


def open_a_file(path):
    with pytest.raises(dj.errors.CheckpointError) as caught:
        dj.checkpoint.Checkpointer(path)
    return str(caught.value)


def test_what_process_0_finds_wrong_is_known_to_all(group, tmp_path):
    path = tmp_path / "file"
    path.write_text("not a directory")
    first, second = group.call(open_a_file, str(path))
    assert first == second
    assert "Got: a file." in first


def look_at_a_closed_directory(directory):
    """Returns the errors where process 0 alone is refused a look, and the steps afterwards."""
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, {"n": 1})
        checkpointer.wait()
        with pytest.MonkeyPatch.context() as patch:
            if job().process_id == 0:
                patch.setattr("os.path.isdir", refuse_a_look)
            with pytest.raises(Exception, match="closed to this user") as caught:
                checkpointer.all_steps()
        return type(caught.value).__name__, str(caught.value), checkpointer.all_steps()


def refuse_a_look(path):
    raise PermissionError("closed to this user")


def test_any_error_of_process_0_is_known_to_all(group, tmp_path):
    first, second = group.call(look_at_a_closed_directory, str(tmp_path))
    assert first == second
    name, text, steps = first
    assert (name, steps) == ("CheckpointError", [1])
    assert text.splitlines() == [
        f"a look at the steps needs a directory that can be read, {str(tmp_path)!r}.",
        "  Got: PermissionError: closed to this user.",
        "  Why: the steps are folders in it; in a job, process 0 looks for all.",
        "  Fix: open it to this user: `chmod`, or another mount",
    ]


def restore_late(directory):
    """Returns the error where one process restores a key, and what is left then on each."""
    me = job().process_id
    state = make_state(STRATEGIES["multi_worker"]())
    w, seen = {"w": state["w"]}, {"seen": state["seen"]}
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, {**w, **seen})
        later = checkpointer.delayed()
        with pytest.raises(dj.errors.AgreementError) as caught:
            later.restore({"other": state["key"]} if me else w)
        left = later.remaining
        later.restore(w)
        later.restore(w)
        return str(caught.value), left, later.remaining


def test_a_delayed_restore_is_one_of_all_processes(group, tmp_path):
    first, second = group.call(restore_late, str(tmp_path))
    assert first == second
    text, left, remaining = first
    assert "differs from process 0 in 'w' in a delayed restoration" in text
    assert (left, remaining) == (("seen", "w"), ("seen",))


# -- what differs --------------------------------------------------------------


def differ(directory):
    """Returns the errors of this process, and what the directory and the variable hold then."""
    me = job().process_id
    state = make_state(STRATEGIES["multi_worker"]())
    w = {"w": state["w"]}
    said = []

    def refuse(do):
        with pytest.raises(dj.errors.AgreementError) as caught:
            do()
        said.append(str(caught.value))

    with dj.checkpoint.Checkpointer(directory, best_metric="loss") as checkpointer:
        save = lambda step, tree, loss=1.0: checkpointer.save(step, tree, metrics={"loss": loss})
        save(1, w), save(2, w)
        refuse(lambda: save(3 + me, w))
        refuse(lambda: save(3, {**w, "ab"[me]: state["key"]}))
        refuse(lambda: save(3, {**w, "x": jnp.zeros(3 + me)}))
        refuse(lambda: save(3, w, float(me)))
        refuse(lambda: checkpointer.restore(w, step=1 + me))
        refuse(lambda: checkpointer.restore(w, partial=bool(me)))
        refuse(lambda: checkpointer.delayed(step=1 + me))
        refuse(lambda: checkpointer.delete(1 + me))
        return said, checkpointer.all_steps(), values(state, state["w"].strategy)[0]


def test_processes_compare_what_they_save_and_restore(group, tmp_path):
    first, second = group.call(differ, str(tmp_path))
    assert first == second
    said, steps, value = first
    assert steps == [1, 2] and value == list(range(8))
    of = ["the step of the save", "'a' in the save", "'x' in the save", "loss of the save"]
    of += ["the step of the restoration", "partial of the restoration"]
    of += ["the step of the delayed restoration", "the step of the removal"]
    for text, what in zip(said, of, strict=True):
        assert f"differs from process 0 in {what}" in text
    assert "Got: '4' on process 1; '3' on process 0." in said[0]


# -- closed on one process ----------------------------------------------------------


def close_on_one(directory, who):
    strategy = dj.MultiWorkerMirroredStrategy()
    state = {"x": strategy.extended.broadcast_to(np.arange(2.0))}
    checkpointer = dj.checkpoint.Checkpointer(directory)
    checkpointer.save(1, state)
    checkpointer.wait()
    if job().process_id == who:
        checkpointer.close()
    checkpointer.save(2, state)
    checkpointer.restore(state)
    return checkpointer.all_steps()


@pytest.mark.parametrize("who", [0, 1])
def test_a_checkpointer_that_one_process_has_closed(group, tmp_path, who):
    assert group.call(close_on_one, str(tmp_path), who) == [[1, 2]] * 2
