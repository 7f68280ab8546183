"""What a step was cut into, in words: what runs where, and what is sent."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from distjax._src import jax_compat
from distjax._src.jax_compat import Jaxpr
from distjax._src.servers.cutting.code import aval_of_atom, code_of
from distjax._src.servers.plan import Program, Push, Stage, StepPlan
from distjax._src.servers.storage import Part, num_bytes, parts_of
from distjax._src.tables import Table, format_bytes
from distjax._src.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class CutPart:
    """One program of a step.

    Attributes:
      where: "worker" or "server 0".
      operations: its primitives, the most frequent first.
      received_bytes: bytes that the worker sends to the server; 0 for the worker.
      answered_bytes: bytes that the server sends back; 0 for the worker.
    """

    where: str
    operations: tuple[str, ...]
    received_bytes: int
    answered_bytes: int


@dataclasses.dataclass(frozen=True)
class CutVariable:
    """A variable that a step uses, or a shard of one.

    Attributes:
      name: its name; `name/part_i` for a shard.
      lives: where it lives, such as "at server 0".
      num_bytes: the bytes of its value.
      use: in words: "pulled" for the worker's snapshot, "read now" and "written" at its server.
    """

    name: str
    lives: str
    num_bytes: int
    use: str


@dataclasses.dataclass(frozen=True)
class CutDescription:
    """What a step was cut into.

    Attributes:
      parts: its programs, in order.
      variables: the variables that it uses.
      num_round_trips: how often the worker waits for servers after its pull.
      pulled_bytes: bytes of the snapshot.
    """

    parts: tuple[CutPart, ...]
    variables: tuple[CutVariable, ...]
    num_round_trips: int
    pulled_bytes: int

    @property
    def pushed_bytes(self) -> int:
        """Bytes from a worker to servers, in one step."""
        return sum(part.received_bytes for part in self.parts)

    @property
    def answered_bytes(self) -> int:
        """Bytes of the servers' answers, in one step."""
        return sum(part.answered_bytes for part in self.parts)

    def tables(self) -> Iterator[Table]:
        """Yields the description as tables."""
        travel = (
            ("round trips", str(self.num_round_trips)),
            ("pulled", format_bytes(self.pulled_bytes)),
            ("pushed", format_bytes(self.pushed_bytes)),
            ("answered", format_bytes(self.answered_bytes)),
        )
        yield Table("cut, per step of one worker:", (), travel)
        few = lambda names: ", ".join(names[:6]) + f" and {len(names) - 6} more" * (len(names) > 6)
        sizes = lambda part: map(format_bytes, (part.received_bytes, part.answered_bytes))
        rows = tuple((p.where, *sizes(p), few(p.operations)) for p in self.parts)
        yield Table("runs, in this order:", ("where", "gets", "answers", "operations"), rows)
        yield Table(
            "variables at servers (pulled: the worker's snapshot; read now: in a merge, at its "
            "server):",
            ("name", "lives", "bytes", "use"),
            tuple((v.name, v.lives, format_bytes(v.num_bytes), v.use) for v in self.variables),
        )


def describe_plan(plan: StepPlan, variables: Sequence[Variable]) -> CutDescription:
    """Returns the description of a plan."""
    by_key = {part.key: part for v in variables for part in parts_of(v)}
    used = [_describe_part(by_key[key], plan) for key in plan.owners if key in by_key]
    parts = [part for stage in plan.stages for part in _describe_stage(stage)]
    return CutDescription(
        parts=tuple(parts),
        variables=tuple(used),
        num_round_trips=sum(bool(stage.pushes) for stage in plan.stages),
        pulled_bytes=sum(v.num_bytes for v in used if "pulled" in v.use),
    )


def _describe_stage(stage: Stage) -> Iterator[CutPart]:
    operations = _operations(stage.program)
    if operations or stage.results:
        yield CutPart("worker", operations, 0, 0)
    for push in stage.pushes:
        answers = map(aval_of_atom, code_of(push.program).outputs[len(push.writes) :])
        received = sum(map(num_bytes, push.program.avals[len(push.takes) :]))
        where = f"server {push.server}"
        yield CutPart(where, _operations(push.program), received, sum(map(num_bytes, answers)))


def _operations(program: Program) -> tuple[str, ...]:
    names = _primitive_names(code_of(program).jaxpr)
    return tuple(name for name, _ in collections.Counter(names).most_common())


def _primitive_names(jaxpr: Jaxpr) -> Iterator[str]:
    """Yields the names of the primitives of a jaxpr; for a call, of those inside of it."""
    for eqn in jaxpr.eqns:
        inner = list(jax_compat.sub_jaxprs(eqn))
        if not inner:
            yield eqn.primitive.name
        for sub in inner:
            yield from _primitive_names(sub)


def _describe_part(part: Part, plan: StepPlan) -> CutVariable:
    key = part.key
    pushes: list[Push] = [push for stage in plan.stages for push in stage.pushes]
    uses = {
        "pulled": any(pulled == key for _, pulled in plan.pulls),
        "read now": any(_reads(push, key) for push in pushes),
        "written": any(key in push.writes for push in pushes),
    }
    use = ", ".join(name for name, is_so in uses.items() if is_so)
    return CutVariable(part.name, part.lives, num_bytes(part), use)


def _reads(push: Push, key: str) -> bool:
    return key in push.takes and code_of(push.program).used[push.takes.index(key)]
