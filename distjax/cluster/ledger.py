"""The ledger of a process: its calls that involve other processes, in order.

A call is the launch of a program over several processes, a meeting, or an eager write of a host
value. Compiled programs need no meeting, so processes might launch them in a different order,
launch one too often, or pass different host values. Ledgers reveal that: at the next meeting, where
they are compared first, and to the watch, which compares them in between. Each call updates a
checksum, and the checksums of the latest calls are kept, so that a process that is merely behind
is compared at its own count.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from typing import NamedTuple, Protocol

#: How many calls are remembered; a power of two. No process gets further ahead of another, since
#: launches are awaited.
_SIZE = 4096
#: How many launches may be in flight, with their tokens held; a power of two.
_NUM_AWAITED = 64
_NUM_SHOWN = 4


class Token(Protocol):
    """A program output that is ready when the program has completed."""

    def is_ready(self) -> bool: ...

    def block_until_ready(self) -> object: ...


class Launch(NamedTuple):
    """What is known about a launch before it happens.

    Attributes:
      name: the user's name of the function, or that of an operation.
      program: checksum of what the processes agreed on before its first launch. It distinguishes
        functions with the same name, and shapes, static values and modes of one function.
      arguments: checksum of its host arguments; 0: it has none.
    """

    name: str
    program: int = 0
    arguments: int = 0

    @property
    def text(self) -> str:
        """The description for people."""
        return f"{self.name} of arguments {self.arguments:08x}" if self.arguments else self.name

    def added_to(self, checksum: int) -> int:
        """Returns the checksum of all calls up to this one, given that of those before."""
        return zlib.crc32(self.name.encode(), checksum ^ self.program ^ self.arguments)


class Call(NamedTuple):
    """A call, as reported to other processes.

    Attributes:
      number: counted from 1.
      checksum: of all calls up to this one.
      text: a description for people.
      program: see `Launch`.
      is_meeting: whether it is a meeting rather than a launch.
    """

    number: int
    checksum: int
    text: str
    program: int = 0
    is_meeting: bool = False


_MEETING = Launch("a meeting")


class Ledger:
    """The calls of one process. Recording a launch costs a microsecond.

    Attributes:
      count: the number of calls.
      checksum: of all of them.
      starting: a launch that has not returned.
    """

    __slots__ = (
        "_calls",
        "_latest",
        "_launched",
        "_launching",
        "_num_meetings",
        "_one_at_a_time",
        "_thread",
        "checksum",
        "count",
        "starting",
    )

    def __init__(self) -> None:
        self.count = self.checksum = self._num_meetings = 0
        self.starting: Launch | None = None
        self._latest: Token | None = None
        self._thread = 0  # the one that launched `_latest`
        self._launched: list[tuple[int, Token | None]] = [(0, None)] * _NUM_AWAITED
        # (number, checksum, launch, occasion of a meeting)
        self._calls: list[tuple[int, int, Launch, str]] = [(0, 0, _MEETING, "")] * _SIZE
        self._one_at_a_time = threading.Lock()
        self._launching = threading.RLock()  # held from the beginning of a launch to its end

    def begin_launch(self, launch: Launch) -> Launch:
        """Records that a program over several processes is about to run.

        With one CPU device per process, JAX keeps launches in order only within a thread: another
        thread's program would run alongside those in flight, and their collectives would pair up.
        So this first waits for the latest launch of another thread, and no other thread begins one
        until `end_launch` or `abandon_launch`. Take no lock in between. Returns the launch.
        """
        try:
            self._launching.acquire()
            if self._thread != threading.get_ident():
                self.wait()
            self.starting = launch
            return launch
        except BaseException:  # a signal
            self.abandon_launch(launch)
            raise

    def wait(self) -> None:
        """Waits for the latest launch to complete; errors surface where its results are read."""
        if self._latest is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                self._latest.block_until_ready()

    def end_launch(self, launch: Launch, token: Token | None) -> None:
        """Records that the program was launched; `token` is ready when it completes."""
        try:
            self.starting = None
            self._latest, self._thread = token, threading.get_ident()
            number = self._add(launch)
            self._launched[number & _NUM_AWAITED - 1] = number, token
        finally:
            self._let_others_launch()

    def abandon_launch(self, launch: Launch) -> None:
        """Records that a launch failed, so the program did not run."""
        if self.starting is launch:
            self.starting = None
        self._let_others_launch()

    def _let_others_launch(self) -> None:
        try:
            self._launching.release()
        except RuntimeError:  # this thread has not begun, or has ended already
            pass

    def add_meeting(self, occasion: str) -> None:
        """Records a meeting; the checksum ignores its occasion, which meetings compare."""
        self._num_meetings += 1
        self._add(_MEETING, occasion)

    def add_write(self, name: str, value: int) -> None:
        """Records an eager write, of which each process does its own part.

        Args:
          name: what is written, in the user's words.
          value: checksum of the value on the host; 0: there is none.
        """
        self._add(Launch(name, arguments=value))

    def _add(self, launch: Launch, occasion: str = "") -> int:
        with self._one_at_a_time:
            number = self.count + 1
            self.checksum = checksum = launch.added_to(self.checksum)
            self._calls[number & _SIZE - 1] = number, checksum, launch, occasion
            self.count = number
        return number

    def find(self, number: int) -> Call | None:
        """Returns the call with a number; None if it has not happened yet or is forgotten."""
        found, checksum, launch, meeting = self._calls[number & _SIZE - 1]
        if found != number:
            return None
        return Call(number, checksum, meeting or launch.text, launch.program, bool(meeting))

    def find_launched(self) -> list[tuple[int, Token]]:
        """Returns (number, token) of the latest launches, in order."""
        launched = [(number, token) for number, token in [*self._launched] if token is not None]
        return sorted(launched, key=lambda each: each[0])

    def find_blocked(self) -> Call | None:
        """Returns the launch that has not returned, as the call it will become."""
        with self._one_at_a_time:  # else it may return meanwhile, and be reported twice
            starting, count, former = self.starting, self.count, self.checksum
        if starting is None:
            return None
        return Call(count + 1, starting.added_to(former), starting.text, starting.program)

    def describe(self) -> str:
        """Returns one line: number of launches, the latest of them, overall checksum."""
        calls = map(self.find, range(self.count, max(0, self.count - _SIZE), -1))
        launches = (call.text for call in calls if call is not None and not call.is_meeting)
        latest = ", ".join([*itertools.islice(launches, _NUM_SHOWN)][::-1]) or "none"
        number = self.count - self._num_meetings
        return f"{number} launches, the latest {latest} (checksum {self.checksum:08x})"


#: The ledger of this process.
ledger = Ledger()
