"""Attempt: what a worker does with a closure, on a thread or in a process of its own."""

# Everything is handed on as futures: nothing here waits for a program.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax

from distjax.servers.applied import Answer
from distjax.servers.engine import Task
from distjax.servers.placing import place
from distjax.servers.plan import Push
from distjax.servers.programs import Programs


class Parcel(NamedTuple):
    """What is sent to one server.

    Attributes:
      push: of the plan.
      arrays: its operands.
      pulled: the version that was pulled from this server; None: nothing was.
    """

    push: Push
    arrays: Sequence[jax.Array]
    pulled: int | None


class Servers(Protocol):
    """The servers, as a worker sees them."""

    def pull(
        self, wanted: Mapping[int, Sequence[str]]
    ) -> Mapping[int, tuple[int, Sequence[jax.Array]]]:
        """Returns version and values, by server, of the keys that are wanted of each."""
        ...

    def push(self, task: Task, stage: int, parcels: Sequence[Parcel]) -> Iterable[Answer]:
        """Sends what is pushed in a stage; returns the answers in the same order."""
        ...


class Attempt:
    """One attempt at a closure: the slots of its plan, and what was sent.

    Args:
      task: what is run.
      servers: those it meets.
      programs: run the parts at the worker.
      device: the worker's.

    Attributes:
      versions: by server, of those that it met: after the push, else as pulled.
      tokens: ready when all has run.
    """

    def __init__(self, task: Task, servers: Servers, programs: Programs, device: jax.Device):
        self._task, self._servers, self._programs, self._device = task, servers, programs, device
        arrays = place(task.arrays, device)
        self._slots = dict(zip(task.plan.arguments, arrays, strict=True))
        self._pulled: dict[int, int] = {}  # versions, by server
        self.versions: dict[int, int] = {}
        self.tokens: list[jax.Array] = []

    @property
    def results(self) -> tuple[jax.Array, ...]:
        """The flat results."""
        return tuple(self._slots[slot] for slot in self._task.plan.results)

    def pull(self) -> None:
        """Reads the snapshot: one version of each server."""
        plan = self._task.plan
        wanted: dict[int, list[tuple[int, str]]] = {k: [] for k in plan.owners.values()}
        for slot, key in plan.pulls:
            wanted[plan.owners[key]].append((slot, key))
        keys = {server: [key for _, key in pulls] for server, pulls in wanted.items()}
        for server, (version, values) in self._servers.pull(keys).items():
            self._pulled[server] = self.versions[server] = version
            self._slots.update(zip((slot for slot, _ in wanted[server]), values, strict=True))

    def compute(self, number: int) -> None:
        """Runs the worker's part of a stage."""
        stage = self._task.plan.stages[number]
        operands = [self._slots[slot] for slot in stage.operands]
        results, token = self._programs.run(stage.program, operands)
        self._slots.update(zip(stage.results, results, strict=True))
        self.tokens.append(token)

    def push(self, number: int) -> None:
        """Pushes what a stage has for the servers."""
        pushes = self._task.plan.stages[number].pushes
        parcels = [
            Parcel(push, [self._slots[slot] for slot in push.operands], pulled)
            for push in pushes
            for pulled in (self._pulled.get(push.server),)
        ]
        answers = self._servers.push(self._task, number, parcels)
        for push, answer in zip(pushes, answers, strict=True):
            arrays = place(answer.arrays, self._device)
            self._slots.update(zip(push.answers, arrays, strict=True))
            self.versions[push.server] = answer.version
            self.tokens.append(answer.token)
