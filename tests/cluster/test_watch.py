"""What the watch finds between meetings, and what is no difference, with a store of our own."""

import contextlib
import dataclasses
import signal
import sys
import threading
import types

import jax
import pytest

from distjax._src.cluster import programs, watch
from distjax._src.cluster.ledger import (
    Launch,
    Ledger,
    Phase,
    as_text,
    find_difference,
    hear,
    mark_of,
    parse_mark,
    phase,
    phases,
    waiting,
)
from tests.cluster.test_ending import Store, closed_output, make_job

print_stacks = watch.print_stacks  # as it is but for `ends`

TRAIN, EVALUATE = Launch("train"), Launch("evaluate")


class Ended(BaseException):
    """Stands for the end of the process."""


class Token:
    """An output of a program that completes when told to."""

    def __init__(self, ready=False):
        self.ready = ready

    def is_ready(self):
        if self.ready is None:
            raise RuntimeError("deleted")
        return self.ready


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """The end of a process raises; whether stacks were printed."""

    def leave(joined, code, text, others_code):
        assert code == others_code
        raise Ended(code, text)

    printed = []
    monkeypatch.setattr(watch, "begin_to_end", lambda: None)
    monkeypatch.setattr(watch, "leave", leave)
    monkeypatch.setattr(watch, "print_stacks", lambda: printed.append(True))
    monkeypatch.setattr(watch, "phases", lambda: ())
    return printed


def make_processes(count=3, store=None):
    job = dataclasses.replace(
        make_job(),
        num_processes=count,
        client=store or Store(),
        hosts=tuple(f"host-{i} (pid {i})" for i in range(count)),
    )
    made = []
    for process_id in range(count):
        ledger = Ledger()
        joined = dataclasses.replace(job, process_id=process_id)
        made.append((ledger, watch.Watch(joined, int, ledger)))
    return made


def launch(ledger, *launches, token=None):
    for each in launches:
        ledger.begin_launch(each)
        ledger.end_launch(each, token or Token(ready=True))


def look_all(processes, now=0.0):
    """Each process looks, twice, so that all have seen the marks of all; who ends raises."""
    for _, each in processes * 2:
        each.look(now)
    for _, each in processes:
        assert len(hear(each._job)) == len(processes) - 1


def difference(processes):
    with pytest.raises(Ended) as end:
        look_all(processes)
    code, text = end.value.args
    assert code == 77
    return text


def test_who_is_only_slower_is_not_different():
    processes = make_processes()
    for _ in range(50):
        for (ledger, _), steps in zip(processes, (1, 7, 40), strict=True):
            launch(ledger, *[TRAIN] * steps)
        look_all(processes)


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("steps", [(3, 3, 3), (3, 2000, 3), (2000, 3, 3), (3, 3, 2000)], ids=str)
def test_another_order_is_found_however_far_ahead_one_is(who, steps):
    processes = make_processes()
    for i, (ledger, _) in enumerate(processes):
        launch(ledger, TRAIN, EVALUATE if i == who else TRAIN, *[TRAIN] * steps[i])
    others = "process 1 on host-1 (pid 1), " if who == 0 else f"process {who} on host-{who}"
    text = difference(processes)
    assert text.startswith("processes need to do the same, and process ")
    assert "differs from process 0 in what they have launched" in text
    assert "or one before" in text or "'call 2: evaluate' on process " in text
    assert who == 0 or others in text


def test_who_has_called_exit_keeps_its_code(monkeypatch):
    """The others end with 77, whoever finds the difference first."""
    (ledger, other), (second, each) = make_processes(2)
    launch(ledger, TRAIN)
    launch(second, EVALUATE)
    other.look(0.0)
    ended = []
    monkeypatch.setattr(
        watch, "leave", lambda joined, code, text, others: ended.extend([code, others])
    )
    monkeypatch.setattr(each, "_exit_status", lambda: 3)
    each.look(0.0)
    assert ended == [3, 77]


@pytest.mark.parametrize(
    "what, shown", [("arguments", "train of arguments"), ("program", "train, program")]
)
def test_other_arguments_and_another_program_are_found(what, shown):
    processes = make_processes(2)
    for i, (ledger, _) in enumerate(processes):
        launch(ledger, TRAIN, Launch("train", **{what: 7 + i}), TRAIN)
    text = difference(processes)
    assert f"'call 2: {shown} 00000008' on process 1" in text
    assert f"'call 2: {shown} 00000007' on process 0" in text


def test_another_written_value_is_found():
    processes = make_processes(2)
    for i, (ledger, _) in enumerate(processes):
        ledger.add_write("assign of variable 'rate'", 7 + i)
    text = difference(processes)
    assert "assign of variable 'rate' of arguments 00000008" in text


def test_a_meeting_of_one_where_another_launches():
    processes = make_processes(2)
    launch(processes[0][0], TRAIN)
    processes[1][0].add_meeting("the creation of 'w'")
    assert "'call 1: the creation of 'w'' on process 1" in difference(processes).replace('"', "'")


def test_meetings_of_different_occasions_are_told_by_themselves():
    processes = make_processes(2)
    for i, (ledger, _) in enumerate(processes):
        ledger.add_meeting(f"occasion {i}")
    look_all(processes)


@pytest.mark.parametrize("who", [0, 1])
def test_a_step_more_than_one_that_has_come_to_its_end(who):
    processes = make_processes(2)
    for i, (ledger, _) in enumerate(processes):
        launch(ledger, TRAIN, *[EVALUATE] * (i != who))
        if i == who:
            ledger.add_meeting("the end of the program")
    text = difference(processes)
    assert f"'call 2: the end of the program' on process {who}" in text
    assert f"'call 2: evaluate' on process {1 - who}" in text


def test_a_meeting_that_another_does_not_come_to_has_a_bound_of_its_own():
    processes = make_processes(2)
    processes[0][0].add_meeting("the creation of 'w'")
    look_all(processes)


def test_a_launch_that_was_refused_is_none():
    processes = make_processes(2)
    processes[0][0].begin_launch(TRAIN)
    processes[0][0].end_launch(TRAIN, None)
    launch(processes[1][0], EVALUATE)
    launch(processes[0][0], EVALUATE)
    look_all(processes)
    assert processes[0][0].describe() == processes[1][0].describe()


def test_a_launch_that_does_not_return_counts_after_a_while():
    """As on one CPU device, where the thread that launches a program runs it."""
    processes = make_processes(2)
    processes[0][0].begin_launch(TRAIN)
    launch(processes[1][0], EVALUATE)
    for now in (0.0, 0.5, 1.0, 1.9):
        look_all(processes, now)
    with pytest.raises(Ended, match="'call 1: evaluate' on process 1; 'call 1: train' on pro"):
        look_all(processes, 2.5)


def test_a_launch_that_returns_while_it_is_looked_at_is_told_once():
    ledger = Ledger()

    class Name(str):
        def encode(self):
            if ledger.starting is not None:
                ledger.end_launch(launched, Token())
            return super().encode()

    launched = Launch(Name("train"))
    ledger.begin_launch(launched)
    assert ledger.find_blocked()[:2] == ledger.find(1)[:2]


# -- what does not complete ----------------------------------------------------


def test_a_step_that_does_not_complete(ends, capsys):
    processes = make_processes(3)
    token = Token()
    for ledger, _ in processes:
        launch(ledger, TRAIN)
    for ledger, _ in processes[:2]:
        launch(ledger, EVALUATE, token=token)
    look_all(processes, 0.0)
    look_all(processes, 600.0)
    with pytest.raises(Ended) as end:
        look_all(processes, 600.1)
    code, text = end.value.args
    assert code == 76 and ends == [True]
    assert text.startswith(
        "call 2 of process 0 on host-0 (pid 0) (evaluate) needs to complete within step_deadline "
        "(600 s).\n  Got: process 2 on host-2 (pid 2): 1 calls, of 3 processes."
    )
    assert capsys.readouterr().err == text + "\n"


def test_a_step_that_all_have_launched():
    processes = make_processes(2)
    for ledger, _ in processes:
        launch(ledger, TRAIN, token=Token())
    look_all(processes, 0.0)
    with pytest.raises(Ended, match="Got: no process that is behind, of 2 processes"):
        look_all(processes, 601.0)


@pytest.mark.parametrize(
    "token", [Token(ready=True), Token(ready=None)], ids=["completed", "deleted"]
)
def test_what_has_completed_or_is_gone_is_not_awaited(token):
    processes = make_processes(2)
    launch(processes[0][0], TRAIN, token=token)
    look_all(processes, 0.0)
    look_all(processes, 1e6)


def test_each_step_has_a_deadline_of_its_own():
    processes = make_processes(2)
    for step in range(4):
        token = Token()
        launch(processes[0][0], TRAIN, token=token)
        look_all(processes, 500.0 * step)
        token.ready = True


def test_steps_that_wait_for_others_of_this_process_have_a_deadline_of_their_own():
    """Ten in flight of 100 s each; the last one completes 1000 s after its launch."""
    processes = make_processes(2)
    tokens = [Token() for _ in range(10)]
    for token in tokens:
        launch(processes[0][0], TRAIN, token=token)
    look_all(processes, 0.0)
    for number, token in enumerate(tokens[:-1], 1):
        look_all(processes, 100.0 * number - 1.0)
        token.ready = True
        look_all(processes, 100.0 * number)
    look_all(processes, 1499.0)
    with pytest.raises(Ended, match="call 10 of process 0 .* needs to complete within"):
        look_all(processes, 1501.0)


def test_a_launch_that_does_not_return_has_the_deadline_too():
    processes = make_processes(2)
    processes[0][0].begin_launch(TRAIN)
    for now in range(5):
        processes[0][1].look(float(now))
    with pytest.raises(Ended, match="call 1 of process 0 .* \\(train\\) needs to complete"):
        look_all(processes, 601.0)


def test_who_compiles_is_not_stuck(monkeypatch):
    """While it is at work; then the deadline begins."""
    processes = make_processes(2)
    at = {0: [], 1: [Phase("compiling evaluate", 0.0, is_work=True)]}

    def look(now):
        for i, (_, each) in enumerate(processes * 2):
            monkeypatch.setattr(watch, "phases", lambda i=i: tuple(at[i % 2]))
            each.look(now)

    launch(processes[0][0], TRAIN, token=Token())
    for now in range(0, 1600, 100):
        look(float(now))
    at[1] = []
    look(2000.0)  # the mark that it sees first is the former one
    look(2600.0)
    with pytest.raises(Ended, match="needs to complete within step_deadline"):
        look(2600.5)


def test_who_is_at_work_for_too_long_is_stuck(monkeypatch):
    """C code that keeps the interpreter's lock lets its own watch say nothing more."""
    (ledger, waiting_one), (_, other) = make_processes(2)
    launch(ledger, TRAIN, token=Token())
    monkeypatch.setattr(watch, "phases", lambda: (Phase("compiling evaluate", 0.0, is_work=True),))
    other.look(0.0)
    monkeypatch.setattr(watch, "phases", lambda: ())
    for now in range(0, 4800, 100):  # for a phase, and the step before and after it
        waiting_one.look(float(now))
    with pytest.raises(Ended, match="Got: process 1 on .*: 0 calls, compiling evaluate"):
        waiting_one.look(4900.0)


def test_a_phase_has_a_bound(monkeypatch, ends):
    processes = make_processes(2)
    at = (Phase("waiting", 0.0, is_work=False), Phase("compiling train", 100.0, is_work=True))
    monkeypatch.setattr(watch, "phases", lambda: at)
    look_all(processes, 3700.0)
    with pytest.raises(Ended) as end:
        look_all(processes, 3701.0)
    code, text = end.value.args
    assert code == 76 and ends == [True]
    assert text.startswith("compiling train needs to be done within phase_timeout (3600 s).\n")


def test_a_phase_is_named_by_a_text():
    """Anything else would end the job later, in the thread that tells the others of it."""
    with pytest.raises(TypeError) as caught:
        phase(3)
    assert str(caught.value) == (
        "dj.phase needs a string.\n"
        "  Got: int (3).\n"
        "  Why: it says what this process is doing, in the errors of the others.\n"
        "  Fix: with dj.phase('drawing samples'):"
    )


def test_phases_of_one_thread_are_nested():
    names = lambda: [p.what for p in phases()]
    with phase("outer"):
        with contextlib.suppress(ValueError), waiting("inner"):
            assert names() == ["inner"]
            raise ValueError
        assert names() == ["outer"]
    assert names() == []


@pytest.mark.parametrize("error", [RuntimeError("deleted"), ValueError("UNAVAILABLE: gloo")])
def test_a_launch_of_another_thread_waits_for_the_latest(error):
    """And what failed tells who reads it."""
    ledger, waited = Ledger(), []

    def fail():
        waited.append(threading.get_ident())
        raise error

    token = types.SimpleNamespace(is_ready=lambda: True, block_until_ready=fail)
    launch(ledger, TRAIN, TRAIN, token=token)
    assert waited == []
    thread = threading.Thread(target=launch, args=(ledger, TRAIN, TRAIN), kwargs={"token": token})
    thread.start()
    thread.join()
    launch(ledger, TRAIN, token=token)
    assert waited == [thread.ident, threading.get_ident()]  # the first launch of each


def test_one_thread_launches_at_a_time():
    """Neither beside another's program, nor between the beginning and the end of its launch."""
    ledger, order = Ledger(), []
    token = types.SimpleNamespace(block_until_ready=lambda: order.append("first is awaited"))

    def launch_second():
        ledger.begin_launch(EVALUATE)
        order.append("second begins")
        ledger.end_launch(EVALUATE, token)

    ledger.begin_launch(TRAIN)
    thread = threading.Thread(target=launch_second)
    thread.start()
    thread.join(0.2)
    order.append("first ends")
    assert ledger.starting is TRAIN
    ledger.end_launch(TRAIN, token)
    thread.join()
    assert order == ["first ends", "first is awaited", "second begins"]
    assert [ledger.find(number).text for number in (1, 2)] == [TRAIN.text, EVALUATE.text]


def test_an_interrupt_waits_until_an_operation_is_recorded(monkeypatch):
    monkeypatch.setattr(programs, "ledger", ledger := Ledger())
    array = types.SimpleNamespace(is_fully_addressable=False, dtype="float32", shape=(2,))
    end = programs.begin_operation("reduce", max, array, ())
    signal.raise_signal(signal.SIGINT)
    assert ledger.starting.name == "reduce"
    with pytest.raises(KeyboardInterrupt):
        end(Token())
    assert ledger.count == 1 and ledger.starting is None


# -- messages ------------------------------------------------------------------


def test_at_a_prompt_it_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(watch, "is_interactive", lambda: True)
    processes = make_processes(2)
    launch(processes[0][0], TRAIN)
    launch(processes[1][0], EVALUATE)
    look_all(processes)
    look_all(processes)
    assert capsys.readouterr().err.count("processes need to do the same") == 2  # on each process


def test_messages_of_a_look():
    """One mark of each process that has moved; process 0 reads all at once, others what it says."""
    asked = []

    class Counted(Store):
        def key_value_set(self, key, value, allow_overwrite=False):
            asked.append(len(value))
            super().key_value_set(key, value, allow_overwrite)

        def key_value_dir_get(self, key):
            asked.append(0)
            return super().key_value_dir_get(key)

    processes = make_processes(256, Counted())
    for ledger, _ in processes:
        launch(ledger, *[Launch("a name of 28 characters here", 2**32 - 1, 2**32 - 1)] * 100)
    for _, each in processes:
        each.look(0.0)
    assert len(asked) == 2 * 256
    assert max(asked) < 1000
    for _, each in processes:
        each.look(1.0)
    assert len(asked) == 3 * 256  # nobody has moved
    assert [make_processes(p)[0][1]._period for p in (2, 64, 256, 4096)] == [0.25, 0.5, 2.0, 2.0]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"calls": [[1]]}', '{"calls": [], "x": 1}'])
def test_what_is_no_mark(line):
    assert parse_mark(line) is None


def test_a_mark_as_text_and_back():
    ledger = Ledger()
    launch(ledger, TRAIN, Launch("evaluate", 5, 3))
    mark = mark_of(ledger, [Phase("compiling step", 0.0, is_work=True)])
    assert parse_mark(as_text(mark)) == mark
    assert mark.describe() == "2 calls, compiling step"
    assert find_difference(mark, ledger, mark) is None


def test_a_coordinator_that_does_not_answer_ends_nothing(monkeypatch):
    ((_, each), _) = make_processes(2)
    looks = []

    def fail(now):
        looks.append(now)
        if len(looks) == 3:
            each._stopped.set()
        raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    monkeypatch.setattr(each, "look", fail)
    monkeypatch.setattr(each, "_period", 0.001)
    each.start()
    each._thread.join()
    each.stop()
    assert len(looks) == 3


def test_a_closed_stderr_does_not_keep_a_process_from_its_end(monkeypatch):
    """The thread that ends it would end itself, and block all others that want to."""
    monkeypatch.setattr(sys, "stderr", closed_output())
    each = watch.Watch(make_job(), int, Ledger())
    with pytest.raises(Ended) as end:
        each._end(watch.DIFFERENT, "they differ")
    assert end.value.args == (watch.DIFFERENT, "they differ")


@pytest.mark.parametrize("stderr", [None, closed_output()], ids=["none", "closed"])
def test_stacks_that_cannot_be_printed(monkeypatch, stderr):
    def fail(fd):
        raise (RuntimeError if fd is None else ValueError)("not a valid file descriptor")

    monkeypatch.setattr(watch.sys, "stderr", stderr)
    monkeypatch.setattr(watch.logging, "shutdown", lambda: None)
    monkeypatch.setattr(watch.faulthandler, "dump_traceback", fail)
    print_stacks()


@pytest.mark.parametrize("is_file", [True, False])
def test_stacks_are_printed(monkeypatch, capfd, is_file):
    if not is_file:
        monkeypatch.setattr(watch.sys, "stderr", types.SimpleNamespace(flush=lambda: None))
    monkeypatch.setattr(watch.logging, "shutdown", lambda: None)
    print_stacks()
    assert "test_stacks_are_printed" in capfd.readouterr().err
