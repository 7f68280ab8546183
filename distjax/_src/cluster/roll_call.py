"""The roll call: every process identifies itself, before JAX's own rendezvous.

If JAX's rendezvous fails, it aborts the process, and Python code never learns why. So process 0
listens first, at the coordinator's address, for one short connection from each process: it reads
one line of JSON, and when all have arrived or the time is up, it answers with one line of JSON,
the same for all. Nothing that is read is ever executed, and the number of bytes read is bounded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import time
from typing import Any

import jax
import jaxlib

from distjax._src.cluster.job import Settings, as_line, as_plain, parse_line
from distjax.errors import ClusterError, message

_PROTOCOL = "distjax roll call 1"
_RECORD_BYTES = 4096
_VERDICT_BYTES = 1 << 20
#: How long process 0 waits for the line of a new connection.
_LINE_SECONDS = 5.0
#: Once something is wrong, how much longer process 0 waits for the others, to tell them as well.
_GRACE_SECONDS = 5.0
_RETRY_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Record:
    """Who a process says it is.

    Attributes:
      process_id: its index.
      host: its machine's name.
      pid: its operating system process id.
      facts: (what, value) pairs that must be equal on every process.
    """

    process_id: int
    host: str
    pid: int
    facts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.place}"

    @property
    def place(self) -> str:
        """Where it runs, as errors name it."""
        return f"{self.host} (pid {self.pid})"


def hold_roll_call(settings: Settings) -> tuple[str, ...]:
    """Returns "host (pid N)" of every process once all have arrived and agree.

    If a process is missing, duplicated or different, all present raise the same ClusterError.
    """
    own = _describe_self(settings)
    verdict = (_call_roll if settings.process_id == 0 else _answer)(settings, own)
    if verdict["error"] is not None:
        raise ClusterError(verdict["error"])
    return tuple(verdict["places"])


def _describe_self(settings: Settings) -> Record:
    import distjax  # here, to avoid an import cycle

    facts = {
        "num_processes": str(settings.num_processes),
        "DISTJAX_ATTEMPT": str(settings.attempt),
        "distjax": distjax.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    host = socket.gethostname()[:64]
    return Record(settings.process_id, host, os.getpid(), tuple(facts.items()))


# -- process 0 ----------------------------------------------------------------


def _call_roll(settings: Settings, own: Record) -> dict[str, Any]:
    """Returns the verdict, after sending it to all processes that arrived."""
    began = time.monotonic()
    deadline = began + settings.timeouts.initialization_timeout
    came: dict[Record, socket.socket | None] = {own: None}
    with contextlib.ExitStack() as connections, _listen(settings) as listening:
        while time.monotonic() < deadline:
            present, wrong = _drop_gone(came), bool(_find_wrong(list(came)))
            ids = {record.process_id for record in present}
            if ids.issuperset(range(settings.num_processes)):
                break
            if wrong and len(present) >= settings.num_processes:
                break  # no further process is expected
            if wrong:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            arrived = _accept(listening, deadline)
            if arrived is not None:
                came[arrived[0]] = connections.enter_context(arrived[1])
        listening.close()  # from now on the coordinator answers there
        in_order = sorted(_drop_gone(came), key=lambda record: record.process_id)
        verdict = _judge(in_order, settings, time.monotonic() - began)
        for connection in filter(None, came.values()):
            with contextlib.suppress(OSError):  # it is gone; JAX will notice
                connection.sendall(as_line(verdict).encode())
    return verdict


def _listen(settings: Settings) -> socket.socket:
    """Returns the socket on which process 0 listens, at the coordinator's address."""
    address = settings.coordinator_bind_address or settings.coordinator_address
    host, port = split_address(address, "coordinator_bind_address")
    try:
        resolved = resolve_host(host or "0.0.0.0", port)
        family = socket.AF_INET6 if ":" in resolved else socket.AF_INET
        # The address is reusable immediately, as the coordinator listens there next.
        return socket.create_server((resolved, port), family=family, backlog=1024)
    except OSError as error:
        raise ClusterError(
            message(
                f"process 0 needs to listen at {address}",
                got=f"{type(error).__name__}: {error}",
                why="the other processes of the job look for it there: it is an address of the "
                "machine of process 0, and no other program, nor a second process 0, uses its port",
                fix="start process 0 on that machine, with a port that is free",
            )
        ) from error


def _accept(listening: socket.socket, deadline: float) -> tuple[Record, socket.socket] | None:
    """Returns a process that has arrived and its connection; rejects strangers."""
    listening.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        connection, _ = listening.accept()
    except TimeoutError:
        return None
    with contextlib.suppress(OSError):  # it is gone, or silent
        record = _parse_record(_read_line(connection, _RECORD_BYTES, _LINE_SECONDS))
        if record is not None:
            return record, connection
    connection.close()
    return None


def _drop_gone(came: dict[Record, socket.socket | None]) -> list[Record]:
    """Removes processes that have ended since they arrived, and returns the others.

    JAX's rendezvous would wait for them; one that was started again in their place is not a second.
    """
    for record, connection in list(came.items()):
        if connection is not None and _is_closed(connection):
            del came[record]
    return list(came)


def _is_closed(connection: socket.socket) -> bool:
    """Returns whether the other end has closed it: while it waits, it sends nothing more."""
    seconds = connection.gettimeout()
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:  # it was reset
        return True
    finally:
        connection.settimeout(seconds)


def _judge(came: list[Record], settings: Settings, waited_seconds: float) -> dict[str, Any]:
    """Returns the verdict, which is sent to all present."""
    wrong = _find_wrong(came)
    ids = {record.process_id for record in came}
    missing = [i for i in range(settings.num_processes) if i not in ids]
    if missing:
        names = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        wrong["start them, or give them more time: initialize(..., initialization_timeout=600)"] = [
            f"no process {names} within {waited_seconds:.0f} s"
        ]
    if not wrong:
        return {"protocol": _PROTOCOL, "error": None, "places": [r.place for r in came]}
    text = message(
        f"a job of {settings.num_processes} processes needs each of them once, and all alike",
        got="; ".join(text for texts in wrong.values() for text in texts[:8]),
        why=f"they call process 0 at {settings.coordinator_address} before they start JAX, whose "
        "own rendezvous would abort them",
        fix="; ".join(wrong),
    )
    return {"protocol": _PROTOCOL, "error": text, "places": []}


def _find_wrong(came: list[Record]) -> dict[str, list[str]]:
    """Returns what is wrong with those present: texts keyed by their fix."""
    by_id: dict[int, list[Record]] = {}
    for record in came:
        by_id.setdefault(record.process_id, []).append(record)
    twice = [
        f"process {i} is there {len(them)} times: on {' and on '.join(r.place for r in them)}"
        for i, them in by_id.items()
        if len(them) > 1
    ]
    first = came[0]
    different = [
        f"{record} has {what} {value}, and {first} has {what} {dict(first.facts).get(what)}"
        for record in came
        for what, value in record.facts
        if dict(first.facts).get(what) != value
    ]
    wrong = {
        "give each process a process_id (DISTJAX_PROCESS_ID) of its own": twice,
        "start all with the same arguments, code and versions": different,
    }
    return {fix: texts for fix, texts in wrong.items() if texts}


# -- the other processes ------------------------------------------------------


def _answer(settings: Settings, own: Record) -> dict[str, Any]:
    """Tells process 0 who this process is, and returns its verdict."""
    assert settings.coordinator_address is not None
    address = split_address(settings.coordinator_address, "coordinator_address")
    patience = settings.timeouts.initialization_timeout
    deadline = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection(address, timeout=patience) as connection:
                record = {"protocol": _PROTOCOL, **dataclasses.asdict(own)}
                connection.sendall(as_line(record).encode())
                verdict = _parse_verdict(
                    _read_line(connection, _VERDICT_BYTES, patience + _LINE_SECONDS)
                )
            if verdict is not None and verdict["error"] is None:
                _wait_for_coordinator(address)
            if verdict is not None:
                return verdict
            reason = "another program answers there, or a job that has begun"
        except OSError as error:  # process 0 is not there yet
            reason = f"{type(error).__name__}: {error}"
        if time.monotonic() > deadline:
            break
        time.sleep(_RETRY_SECONDS)
    raise ClusterError(
        message(
            f"process 0 of the job needs to answer at {settings.coordinator_address}",
            got=f"{reason}, for {patience:g} s",
            why=f"{own} says there who it is; process 0 has not begun, is elsewhere, or gave up",
            fix="start all processes together, with the address of process 0, or give them more "
            "time: initialize(..., initialization_timeout=600)",
        )
    )


def _wait_for_coordinator(address: tuple[str, int]) -> None:
    """Waits until process 0 listens as coordinator; JAX checks only once a second."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(address, timeout=_LINE_SECONDS).close()
        except OSError:
            time.sleep(_RETRY_SECONDS)


# -- lines --------------------------------------------------------------------


def _read_line(connection: socket.socket, max_bytes: int, seconds: float) -> bytes:
    """Returns a line without its newline; empty if none arrived within these bounds."""
    read, deadline = b"", time.monotonic() + seconds
    while len(read) < max_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(min(65536, max_bytes - len(read)))
        read += part
        if not part or read.endswith(b"\n"):
            break
    connection.settimeout(seconds)  # for what is sent on it
    return read[:-1] if read.endswith(b"\n") else b""


def _parse_record(line: bytes) -> Record | None:
    match parse_line(line):
        case {
            "protocol": protocol,
            "process_id": int(own),
            "host": str(host),
            "pid": int(pid),
            "facts": list(facts),
        } if protocol == _PROTOCOL:
            pairs = [f for f in facts if isinstance(f, list) and len(f) == 2]
            texts = tuple((as_plain(what), as_plain(value)) for what, value in pairs)
            return Record(own, as_plain(host), pid, texts)
        case _:
            return None


def _parse_verdict(line: bytes) -> dict[str, Any] | None:
    match parse_line(line):
        case {
            "protocol": protocol,
            "error": str() | None,
            "places": list(),
        } as verdict if protocol == _PROTOCOL:
            return verdict
        case _:
            return None


# -- addresses: how they resolve, and what listens where -------------------------


#: Hosts that mean all interfaces of a machine.
_EVERYWHERE = ("0.0.0.0", "::", "")


def split_address(address: object, name: str) -> tuple[str, int]:
    """Returns (host, port) of "host:port" or "[::1]:port", or raises ClusterError."""
    if isinstance(address, str):
        host, colon, port = address.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        is_number = port.isascii() and port.isdecimal() and len(port) < 6
        if colon and is_number and 0 < int(port) < 65536 and _is_host(host):
            return host, int(port)
    raise ClusterError(
        message(
            f"{name} of initialize needs to be an address 'host:port'",
            got=repr(address),
            why="process 0 listens there, and the others connect to it",
            fix="dj.initialize('10.0.0.1:1234', ...), with a port that is free",
        )
    )


def _is_host(host: str) -> bool:
    """Returns whether `host` can be looked up: Python raises no OSError if it cannot."""
    try:
        host.encode("idna")
    except UnicodeError:  # an empty label, or a long one
        return False
    return not host.count("]") and "\0" not in host


def join_address(host: str, port: int) -> str:
    """Returns "host:port", with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve_host(host: str, port: int) -> str:
    """Returns the IP address of `host`, preferring IPv4; an OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return str(found[0][4][0])


def local_address_towards(host: str, port: int) -> str:
    """Returns the IP address of the local interface that reaches `host`.

    Connecting a UDP socket sends nothing; it only consults the routing table.
    """
    address = resolve_host(host, port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((address, port))
        return str(asked.getsockname()[0])


def collectives_host(coordinator_address: str, bind_address: str | None) -> str:
    """Returns the IP address at which this process's collectives listen.

    It is that of the interface that reaches the coordinator, so loopback for a coordinator on
    loopback. A coordinator bound to a specific address uses that one.
    """
    if bind_address is not None:
        host, port = split_address(bind_address, "coordinator_bind_address")
        if host not in _EVERYWHERE:
            return resolve_host(host, port)
    return local_address_towards(*split_address(coordinator_address, "coordinator_address"))
