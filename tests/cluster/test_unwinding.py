"""What the main thread handles when another process ends, and callbacks that raise."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import pytest

from distjax._src.cluster import watch
from distjax._src.cluster.ledger import Launch, Ledger, mark_of
from distjax._src.cluster.watch import error_in_hand
from tests.cluster.test_watch import Ended, Token, launch, look_all, make_processes

TRAIN = Launch("train")


class BadText(ValueError):
    def __str__(self):
        raise AttributeError("no such field")


def seen_while(error):
    """What is seen in `finally`, in `except`, and after both."""
    seen = []
    with contextlib.suppress(BaseException):
        try:
            try:
                raise error
            finally:
                seen.append(error_in_hand())
        except BaseException:
            seen.append(error_in_hand())
            raise
    return [*seen, error_in_hand()]


def test_an_error_is_seen_until_it_is_raised():
    error = ValueError("mine")
    assert seen_while(error) == [error, error, None]


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), GeneratorExit()], ids=repr)
def test_what_is_no_error(error):
    assert seen_while(error) == [None] * 3


def test_a_wait_ends_with_the_error_and_at_its_bound():
    assert watch._await_error(60.0) is None
    error = ValueError("mine")
    try:
        raise error
    except ValueError:
        assert watch._await_error(0.01) is error


@pytest.mark.parametrize(
    "error, said",
    [(ValueError("mine\nmore"), "handling ValueError: mine"), (BadText(), "handling B")],
)
def test_the_others_hear_of_it(error, said):
    assert mark_of(Ledger(), [], handled=error).at.startswith(said)


# -- callbacks ------------------------------------------------------------------


@pytest.fixture
def failed(monkeypatch):
    """A callback has raised in this process, while the first launch of its program ran."""
    watch.watch_callbacks()
    watch.forget_failed()
    monkeypatch.setattr(watch, "ledger", ledger := Ledger())
    ledger.begin_launch(TRAIN)
    raise_in_a_callback()
    yield watch.failed_callback()
    watch.forget_failed()


def raise_in_a_callback():
    def fail(x):
        raise ValueError("mine")

    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
        jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), 1.0).block_until_ready()


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    def leave(joined, code, text, others_code=71):
        raise Ended(code, text, others_code)

    monkeypatch.setattr(watch, "begin_to_end", lambda: None)
    monkeypatch.setattr(watch, "leave", leave)
    monkeypatch.setattr(watch, "phases", lambda: ())


def test_what_a_callback_raises_is_found(failed):
    assert "mine" in str(failed.error) and failed.number == 1


def test_what_one_raises_in_no_program_of_all_is_not(failed):
    watch.ledger.end_launch(TRAIN, Token(ready=True))
    watch.forget_failed()
    raise_in_a_callback()
    assert watch.failed_callback() is None


def test_a_launch_that_does_not_end_after_it(failed, capsys):
    processes = make_processes(2)
    for ledger, _ in processes:
        launch(ledger, TRAIN, token=Token())
    look_all(processes, failed.at + 0.2)
    look_all(processes, failed.at + 2.1)
    with pytest.raises(Ended) as end:
        look_all(processes, failed.at + 2.3)
    assert end.value.args == (70, "ValueError: mine", 71)
    assert (
        "a callback in train needs to return.\n  Got: ValueError: mine." in capsys.readouterr().err
    )


def test_a_launch_that_ends_tells_of_it_by_itself(failed):
    processes, token = make_processes(2), Token()
    for ledger, _ in processes:
        launch(ledger, TRAIN, token=token)
    look_all(processes, failed.at + 0.2)
    token.ready = True
    look_all(processes, failed.at + 1.0)
    assert watch.failed_callback() is None


def test_a_launch_that_begins_later_is_not_blamed_on_it(failed):
    processes = make_processes(2)
    for ledger, _ in processes:
        launch(ledger, TRAIN, TRAIN, token=Token(ready=True))
        launch(ledger, TRAIN, token=Token())
    for seconds in (3.2, 6.0, 60.0):
        look_all(processes, failed.at + seconds)
    assert watch.failed_callback() is None


def test_a_launch_that_waits_for_another_process_is_not_blamed_on_it(failed):
    processes = make_processes(2)
    launch(processes[0][0], TRAIN, token=Token())
    for seconds in (0.2, 2.1, 2.4, 100.0):
        look_all(processes, failed.at + seconds)


def test_only_the_main_thread_counts():
    """Threads that wait for work do so in `except queue.Empty`."""
    go_on, is_in = threading.Event(), threading.Event()

    def wait():
        try:
            raise KeyError("of a thread")
        except KeyError:
            is_in.set()
            go_on.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    is_in.wait()
    assert error_in_hand() is None
    go_on.set()
    thread.join()
