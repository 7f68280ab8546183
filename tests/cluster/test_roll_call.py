"""The roll call: who is named when a process is missing, there twice, different or a stranger."""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import time

import pytest

from distjax._src.cluster import roll_call
from distjax._src.cluster.job import Settings
from distjax._src.cluster.joining import make_timeouts
from distjax.errors import ClusterError
from tests.processes.jobs import free_address


@pytest.fixture
def settings(monkeypatch):
    """Settings of process 0 of a job of three; who is wrong ends it without more waiting."""
    monkeypatch.setattr(roll_call, "_GRACE_SECONDS", 0.2)
    timeouts = make_timeouts(20.0, 10, 10, 600.0, None, 3600.0)
    return Settings(free_address(), 3, 0, None, None, timeouts, 0, ())


def waiting(settings, seconds):
    """The same, with another time for all to come."""
    timeouts = dataclasses.replace(settings.timeouts, initialization_timeout=seconds)
    return dataclasses.replace(settings, timeouts=timeouts)


def call_as(settings, *ids, also=()):
    """Has the processes `ids`, and what `also` does, call at once; what each came to."""

    def outcome(call):
        try:
            return call()
        except ClusterError as error:
            return str(error)

    calls = [
        lambda i=i: roll_call.hold_roll_call(dataclasses.replace(settings, process_id=i))
        for i in ids
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        return list(threads.map(outcome, [*calls, *also]))


def connect(settings):
    """Returns a connection to process 0, once it listens."""
    host, port = settings.coordinator_address.split(":")
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), timeout=20)
        assert time.monotonic() < deadline, "process 0 does not listen"


def connect_and_say(settings, line):
    """Sends a line to process 0, once it listens, and returns the connection."""
    connection = connect(settings)
    with contextlib.ExitStack() as closing:
        closing.callback(connection.close)
        connection.sendall(line)
        if not line.endswith(b"\n"):  # who has sent a whole line waits for the answer
            connection.shutdown(socket.SHUT_WR)
        closing.pop_all()
    return connection


def say(settings, line):
    """Sends a line to process 0, once it listens, and returns what it answers."""
    with connect_and_say(settings, line) as connection:
        return connection.makefile("rb").read()


def record_of(settings, process_id, **changed):
    """The line of another process, as it would send it from another machine."""
    own = roll_call._describe_self(dataclasses.replace(settings, process_id=process_id))
    facts = dict(own.facts) | changed.pop("facts", {})
    content = dataclasses.asdict(own) | {"host": "elsewhere", "pid": 7, **changed}
    content["facts"] = list(facts.items())
    return json.dumps({"protocol": roll_call._PROTOCOL, **content}).encode() + b"\n"


def test_all_come(settings):
    places = call_as(settings, 0, 1, 2)
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == 3 and "(pid " in places[0][0]


def test_a_missing_process_is_named_on_all_that_came(settings):
    first, second = call_as(waiting(settings, 2.0), 0, 1)
    assert first == second
    assert first.startswith(
        "a job of 3 processes needs each of them once, and all alike.\n  Got: no process 2 within "
    )
    assert "initialization_timeout=600" in first


def test_a_process_that_is_there_twice_is_named_on_all(settings):
    twice = lambda: json.loads(say(settings, record_of(settings, 1)))["error"]
    first, second, third = call_as(settings, 0, 1, also=[twice])
    assert first == second == third
    assert "process 1 is there 2 times: on " in first and "elsewhere (pid 7)" in first
    assert "no process 2 within" in first
    assert "give each process a process_id (DISTJAX_PROCESS_ID) of its own" in first


def test_a_process_that_asks_again_is_not_there_twice(settings):
    """Its first connection broke before process 0 could answer."""
    again = record_of(settings, 1)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        called = threads.submit(call_as, settings, 0)
        connect_and_say(settings, again).close()
        with connect_and_say(settings, again) as connection:
            (places,) = call_as(settings, 2)  # the last, as connections are taken in order
            answered = json.loads(connection.makefile("rb").read())
        assert called.result() == [places]
    assert answered["places"] == list(places)
    assert places[1] == "elsewhere (pid 7)"


def test_a_process_that_has_ended_is_missing(settings):
    """It was killed while process 0 waited for the last one."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        called = threads.submit(call_as, waiting(settings, 2.0), 0)
        connect_and_say(settings, record_of(settings, 1)).close()
        (last,) = call_as(settings, 2)
        assert called.result() == [last]
    assert "Got: no process 1 within " in last


def test_a_process_that_is_started_again_takes_its_place(settings):
    """A scheduler does so where one is killed while the others arrive."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        called = threads.submit(call_as, settings, 0)
        connect_and_say(settings, record_of(settings, 1)).close()
        with connect_and_say(settings, record_of(settings, 1, pid=8)):
            (places,) = call_as(settings, 2)
            assert called.result() == [places]
    assert places[1] == "elsewhere (pid 8)"


@pytest.mark.parametrize(
    "what, value", [("jax", "0.9.0"), ("num_processes", "4"), ("DISTJAX_ATTEMPT", "1")]
)
def test_a_process_that_differs_is_named_on_all(settings, what, value):
    other = record_of(settings, 2, facts={what: value})
    first, second, third = call_as(
        settings, 0, 1, also=[lambda: json.loads(say(settings, other))["error"]]
    )
    assert first == second == third
    assert f"process 2 on elsewhere (pid 7) has {what} {value}, and process 0 on " in first
    assert "start all with the same arguments, code and versions" in first


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\n",
        b"[" * 4000 + b"\n",
        b"x" * 10_000,
        b'{"protocol": "distjax roll call 1", "process_id": "2"}\n',
        b"",
    ],
    ids=["http", "nested", "long", "no record", "nothing"],
)
def test_a_stranger_is_sent_away(settings, line):
    """Before the last process comes, which would end the roll call."""

    def stranger_then_process_2():
        try:
            answer = say(settings, line)
        except OSError:  # it was sent away while it still spoke
            answer = b""
        return answer, say(settings, record_of(settings, 2))

    first, second, (answer, _) = call_as(settings, 0, 1, also=[stranger_then_process_2])
    assert first == second and len(first) == 3
    assert answer == b""


def test_a_stranger_that_speaks_slowly_is_sent_away_too(settings, monkeypatch):
    monkeypatch.setattr(roll_call, "_LINE_SECONDS", 0.3)
    num_sent = 0

    def stranger_then_process_2():
        nonlocal num_sent
        with contextlib.suppress(OSError), connect(settings) as connection:
            for _ in range(50):
                connection.sendall(b"x")
                num_sent += 1
                time.sleep(0.1)
        return say(settings, record_of(settings, 2))

    first, second, _ = call_as(settings, 0, 1, also=[stranger_then_process_2])
    assert first == second and len(first) == 3
    assert num_sent < 20


def test_what_a_stranger_writes_cannot_move_the_cursor(settings):
    other = record_of(settings, 2, host="\x1b[2J" + "h" * 500, facts={"jax": "1"})
    first, _ = call_as(settings, 0, also=[lambda: say(settings, other)])
    assert "\x1b" not in first and "h" * 61 not in first and "?[2Jhhh" in first


def test_a_process_that_finds_nobody_says_where_it_looked(settings):
    (late,) = call_as(waiting(settings, 0.2), 1)
    assert late.startswith(
        f"process 0 of the job needs to answer at {settings.coordinator_address}"
    )
    assert "ConnectionRefusedError" in late and "process 1 on " in late


def test_a_process_that_finds_somebody_else_says_so(settings):
    host, port = settings.coordinator_address.split(":")
    with socket.create_server((host, int(port))) as other:
        threads = concurrent.futures.ThreadPoolExecutor(1)
        answered = threads.submit(call_as, waiting(settings, 0.2), 1)
        while not answered.done():
            other.settimeout(0.2)
            try:
                connection, _ = other.accept()
            except TimeoutError:
                continue
            with connection:
                connection.recv(4096)
                connection.sendall(b'{"protocol": "distjax roll call 1", "places": 3}\n')
        assert (
            "Got: another program answers there, or a job that has begun, for 0.2 s"
            in answered.result()[0]
        )
        threads.shutdown()


def test_process_0_needs_its_port(settings):
    host, port = settings.coordinator_address.split(":")
    with socket.create_server((host, int(port))):
        (taken,) = call_as(settings, 0)
    assert taken.startswith(f"process 0 needs to listen at {settings.coordinator_address}")
    assert "Address already in use" in taken and "a second process 0" in taken


def test_process_0_needs_to_be_on_the_machine_of_its_address(settings):
    elsewhere = dataclasses.replace(settings, coordinator_address="198.51.100.1:1234")
    (text,) = call_as(elsewhere, 0)
    assert text.startswith("process 0 needs to listen at 198.51.100.1:1234")
    assert "Cannot assign requested address" in text
