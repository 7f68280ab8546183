"""Attempt: a worker's execution of a closure, on a thread or in its own process."""

# Everything is passed on as futures: nothing here waits for a program.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from distjax.context.thread_settings import ProgramModes
from distjax.jax_compat import ShapedArray
from distjax.placement.topology import Topology
from distjax.servers.elements import Argument
from distjax.servers.engine import Task
from distjax.servers.plan import Push, Stage
from distjax.servers.programs import (
    CompiledPlans,
    Given,
    OutShardings,
    Programs,
    outs_of,
    place,
    sharding_of,
)
from distjax.servers.server import Answer


class Parcel(NamedTuple):
    """The data sent to one server.

    Attributes:
      push: the push of the plan.
      arrays: its operands.
      pulled: the version pulled from this server, or None.
    """

    push: Push
    arrays: Sequence[jax.Array]
    pulled: int | None


class Servers(Protocol):
    """The servers, as a worker sees them."""

    def arrives_as(self, aval: ShapedArray, sharding: Sharding) -> jax.ShapeDtypeStruct:
        """Returns the shape, dtype and sharding that an array from a server has at the worker."""
        ...

    def compile_pull(self, wanted: Mapping[int, Sequence[str]]) -> None:
        """Has servers compile what they run to be pulled from."""
        ...

    def compile(self, task: Task, stage: int, push: Push, operands: Sequence[Given]) -> None:
        """Has a server compile a push for a worker's operands in these forms."""
        ...

    def pull(
        self, wanted: Mapping[int, Sequence[str]]
    ) -> Mapping[int, tuple[int, Sequence[jax.Array]]]:
        """Returns, by server, the version and values of the wanted keys."""
        ...

    def push(self, task: Task, stage: int, parcels: Sequence[Parcel]) -> Iterable[Answer]:
        """Sends the pushes of a stage; returns the answers in the same order."""
        ...


class Attempt:
    """One attempt at a closure: the slots of its plan, and what was sent.

    Args:
      task: the task to run.
      servers: the servers it uses.
      programs: runs the worker's parts.
      home: the worker's devices.

    Attributes:
      versions: of each server used: after its last push, or as pulled.
      tokens: ready when everything has run.
    """

    def __init__(self, task: Task, servers: Servers, programs: Programs, home: Topology):
        self._task, self._servers, self._programs, self._home = task, servers, programs, home
        self._slots: dict[int, jax.Array] = {}
        self._bring(task.plan.arguments, task.arrays)
        self._pulled: dict[int, int] = {}  # versions, by server
        self.versions: dict[int, int] = {}
        self.tokens: list[jax.Array] = []

    @property
    def results(self) -> tuple[jax.Array, ...]:
        """The flat results."""
        return tuple(self._slots[slot] for slot in self._task.plan.results)

    def compile(self, compiled: CompiledPlans) -> None:
        """Compiles the plan's programs, including those of servers, unless this has been done."""
        forms = tuple([_memory_of(x) for x in self._slots.values()])
        signature = self._home.devices, ProgramModes.of_this_thread(), forms
        compiled.compile_once(self._task.plan, signature, self._compile)

    def pull(self) -> None:
        """Reads the snapshot: one version of each server."""
        for server, (version, values) in self._servers.pull(self._wanted()).items():
            self._pulled[server] = self.versions[server] = version
            plan = self._task.plan
            self._bring([s for s, key in plan.pulls if plan.owners[key] == server], values)

    def _wanted(self) -> dict[int, list[str]]:
        """Returns the keys to pull from each server that the plan uses."""
        plan = self._task.plan
        wanted: dict[int, list[str]] = {server: [] for server in plan.owners.values()}
        for _, key in plan.pulls:
            wanted[plan.owners[key]].append(key)
        return wanted

    def compute(self, number: int) -> None:
        """Runs the worker's part of a stage."""
        stage = self._task.plan.stages[number]
        operands = [self._slots[slot] for slot in stage.operands]
        outs = self._outs(stage, operands)
        results, token = self._programs.run(stage.program, operands, outs=outs)
        self._slots.update(zip(stage.results, results, strict=True))
        self.tokens.append(token)

    def push(self, number: int) -> None:
        """Sends the pushes of a stage to the servers."""
        pushes = self._task.plan.stages[number].pushes
        parcels = [
            Parcel(
                push,
                [self._slots[slot] for slot in push.operands],
                self._pulled.get(push.server),
            )
            for push in pushes
        ]
        answers = self._servers.push(self._task, number, parcels)
        for push, answer in zip(pushes, answers, strict=True):
            self._bring(push.answers, answer.arrays)
            self.versions[push.server] = answer.version
            self.tokens.append(answer.token)

    def _compile(self) -> None:
        self._servers.compile_pull(self._wanted())
        known: dict[int, Given] = {**self._slots}

        def forms(slots: Sequence[int], avals: Sequence[ShapedArray]) -> list[Given]:
            for slot, aval in zip(slots, avals, strict=True):
                if slot not in known:
                    known[slot] = self._servers.arrives_as(aval, self._sharding(slot))
            return [known[slot] for slot in slots]

        for number, stage in enumerate(self._task.plan.stages):
            operands = forms(stage.operands, stage.program.avals)
            outs = self._outs(stage, operands)
            results = self._programs.compile(stage.program, operands, outs=outs)
            for slot, result in zip(stage.results, results, strict=True):
                known[slot] = result.update(sharding=self._sharding(slot))
            for push in stage.pushes:
                sent = forms(push.operands, push.program.avals[len(push.takes) :])
                self._servers.compile(self._task, number, push, sent)
        self._task.require_wanted()

    def _outs(self, stage: Stage, operands: Sequence[Given]) -> OutShardings | None:
        """Returns the out_shardings of a program; None if its operands say where it runs."""
        if self._home.mesh is not None:
            return outs_of(stage, self._task.plan, self._home)
        return None if any(map(_is_placed, operands)) else self._home.mirrored

    def _bring(self, slots: Sequence[int], arrays: Sequence[Argument]) -> None:
        """Fills slots with arrays from elsewhere."""
        if self._home.mesh is None:
            placed = place(arrays, self._home.devices[0])
        else:
            pairs = zip(slots, arrays, strict=True)
            placed = [place([x], self._sharding(slot))[0] for slot, x in pairs]
        self._slots.update(zip(slots, placed, strict=True))

    def _sharding(self, slot: int) -> Sharding:
        return sharding_of(slot, self._task.plan, self._home)


def _is_placed(array: Given) -> bool:
    return not isinstance(array, np.ndarray) and array.sharding is not None


def _memory_of(array: Given) -> str | None:
    return None if isinstance(array, np.ndarray) else array.sharding.memory_kind
