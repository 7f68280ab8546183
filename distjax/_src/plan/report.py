"""What a plan says, as data, as JSON and as text: see `distjax.plan.Report`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distjax._src.tables import Table, as_text, format_bytes

CAUSES = (
    "parameters",
    "optimizer",
    "state",
    "batch",
    "gradients",
    "activations",
    "code",
    "unattributed",
)


@dataclasses.dataclass(frozen=True)
class PlannedVariable:
    """One array that the step takes.

    Attributes:
      name: its name: that of a variable, or the path of an argument.
      cause: "parameters", "optimizer", "state" or "batch".
      shape: its shape, over all chips.
      dtype: its dtype.
      bytes_per_chip: what it takes of a chip's memory, as laid out there.
      split: how it is split over the chips; "": each holds all of it.
      donated: whether its memory is reused for a result.
    """

    name: str
    cause: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_chip: int
    split: str
    donated: bool


@dataclasses.dataclass(frozen=True)
class PlannedMemory:
    """Bytes on one chip, as its compiler counts them.

    Attributes:
      limit_bytes: what programs may use; None: unknown, or no limit.
      peak_bytes: arguments + outputs - alias + temporaries + code.
      argument_bytes: what the step takes.
      output_bytes: what it returns.
      alias_bytes: results in the memory of donated arguments.
      temp_bytes: intermediate values.
      by_cause: the peak, by `CAUSES`.
      by_variable: every argument, the largest first.
    """

    limit_bytes: int | None
    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    by_cause: Mapping[str, int]
    by_variable: tuple[PlannedVariable, ...]


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """Collectives of one kind and cause.

    Attributes:
      kind: "all-reduce" and so on.
      bytes: of their results, on one chip.
      axis: the mesh axes over which they go.
      count: how many operations.
      lines: the user's lines.
      variables: the variables that they gather, or whose gradients they reduce.
      made_by_xla: what the compiler made them for; "": they are in the code.
      overlaps: whether other work is scheduled while they run.
    """

    kind: str
    bytes: int
    axis: str
    count: int
    lines: tuple[str, ...]
    variables: tuple[str, ...] = ()
    made_by_xla: str = ""
    overlaps: bool = False


@dataclasses.dataclass(frozen=True)
class NotSplit:
    """An array over 64 KiB of which each chip holds all, and why."""

    name: str
    bytes: int
    why: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step compiled for one topology under one strategy.

    Attributes:
      topology: its name.
      slices: how many of it.
      chips: the number of devices.
      strategy: "mirrored", "zero1", "zero2", "zero3" or "central".
      model_axes: sizes of the axes inside of a replica.
      num_replicas: R.
      fits: whether it compiles for the memory there is; None: it was not found out.
      largest_batch_per_replica: the largest that fits; None: not asked, or no limit.
      compiler_options: those given.
      error: why there is no plan, or "".
      memory: bytes on one chip; None after an error.
      flops_per_chip: of one step; loops count once. None: the compiler does not say.
      seconds_at_least: {compute, memory, network, step}; None: unknown.
      written: the collectives in the code.
      compiled: the collectives of the compiled program.
      not_split: the large arrays that are whole on each chip.
      notes: what else to know, in sentences.
      schedule: {live_bytes: over the schedule, collectives: [place of 1, kind, bytes]}.
    """

    topology: str
    slices: int
    chips: int
    strategy: str
    model_axes: Mapping[str, int]
    num_replicas: int
    fits: bool | None = None
    largest_batch_per_replica: int | None = None
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: str = ""
    memory: PlannedMemory | None = None
    flops_per_chip: float | None = None
    seconds_at_least: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    written: tuple[PlannedCollective, ...] = ()
    compiled: tuple[PlannedCollective, ...] = ()
    not_split: tuple[NotSplit, ...] = ()
    notes: tuple[str, ...] = ()
    schedule: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The strategy, with its model axes and options."""
        axes = "".join(f" {axis}={size}" for axis, size in self.model_axes.items())
        return f"{self.strategy}{axes}{' +options' if self.compiler_options else ''}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The plans of one step. ``print`` it: it fits a screen.

    Attributes:
      target: what was planned.
      jax: the version of JAX.
      libtpu: that of libtpu, or "".
      plans: one for each topology, strategy and set of options.
    """

    target: str
    jax: str
    libtpu: str
    plans: tuple[Plan, ...]

    def to_json(self, indent: int | None = None) -> str:
        """Returns the report as JSON: `docs/plan.md` has the keys.

        Args:
          indent: spaces to indent by; None: one line.
        """
        plans = []
        for plan in self.plans:
            own = dataclasses.asdict(plan)
            own["collectives"] = {k: own.pop(k) for k in ("written", "compiled")}
            plans.append(own)
        head = {"schema": 1, "target": self.target, "jax": self.jax, "libtpu": self.libtpu}
        return json.dumps({**head, "plans": plans}, indent=indent)

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return any(plan.fits for plan in self.plans)

    def __str__(self) -> str:
        return as_text(list(self._tables()))

    # -- text -------------------------------------------------------------------

    def _tables(self) -> Iterator[Table]:
        with_libtpu = f", libtpu {self.libtpu}" if self.libtpu else ""
        yield Table(f"{self.target}, compiled by JAX {self.jax}{with_libtpu}")
        for key in dict.fromkeys((p.topology, p.slices) for p in self.plans):
            plans = [p for p in self.plans if (p.topology, p.slices) == key]
            yield Table(answer(plans))
            yield Table("memory of a chip by cause:", *memory_rows(plans))
            yield from error_tables(plans)
        shown = self.shown
        if shown is None or shown.memory is None:
            return
        yield Table(f"of {shown.name} on {shown.topology}:", (), tuple(_facts(shown)))
        variables = shown.memory.by_variable
        cut = f"; {len(variables) - 5} more in --json" if len(variables) > 5 else ""
        yield Table(f"largest arrays, bytes of a chip{cut}:", (), tuple(_largest(variables)))
        for title, which in (("as written", shown.written), ("compiled", shown.compiled)):
            yield Table(f"collectives {title}:", (), tuple(_collective_rows(which)))

    @property
    def shown(self) -> Plan | None:
        """The plan to tell most of: the first that fits, or else the first."""
        done = [p for p in self.plans if p.memory is not None]
        return next((p for p in done if p.fits), done[0] if done else None)


def answer(plans: Sequence[Plan]) -> str:
    """Returns whether a step fits a topology, by how much, and under which strategies."""
    first = plans[0]
    limit = next((p.memory.limit_bytes for p in plans if p.memory and p.memory.limit_bytes), None)
    times = f"{first.slices} x " if first.slices > 1 else ""
    each = f", {format_bytes(limit)} each" if limit else ""
    where = f"{times}{first.topology} ({first.chips} chips{each})"
    planned = [p for p in plans if p.memory is not None]
    told = [_one_answer(p) for p in planned] if limit else []
    if planned and not limit:
        told = ["no limit of memory to compare with"]
    failed = [p.name for p in plans if p.error]
    others = [f"no plan for {', '.join(failed)} (see below)"] if failed else []
    return f"{where}: {'; '.join([*told, *others])}"


def error_tables(plans: Sequence[Plan]) -> Iterator[Table]:
    """Yields why there is no plan for some strategies, and what helps."""
    for plan in plans:
        if plan.error:
            rows = tuple((line.strip(),) for line in plan.error.splitlines())
            yield Table(f"no plan for {plan.name}:", (), rows)


def _one_answer(plan: Plan) -> str:
    memory = plan.memory
    assert memory is not None and memory.limit_bytes is not None
    rest = memory.limit_bytes - memory.peak_bytes
    if plan.fits:
        return f"{plan.name} fits, {format_bytes(max(rest, 0))} free"
    return f"{plan.name} does not fit, by {format_bytes(max(-rest, 0))}"


def memory_rows(plans: Sequence[Plan]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Returns the table of memory by cause: header and rows."""
    header = ("", "fits", "peak", *CAUSES, "batch/replica")
    rows = []
    for plan in plans:
        if plan.memory is None:
            rows.append((plan.name, "?", *[""] * (len(header) - 2)))
            continue
        parts = plan.memory.by_cause
        best = plan.largest_batch_per_replica
        rows.append(
            (
                plan.name,
                "?" if plan.fits is None else "yes" if plan.fits else "NO",
                format_bytes(plan.memory.peak_bytes),
                *(format_bytes(parts[cause]) for cause in CAUSES),
                "" if best is None else f"up to {best}",
            )
        )
    used = [i for i in range(len(header)) if i < 3 or any(r[i] not in ("", "0 B") for r in rows)]
    cut = lambda row: tuple(row[i] for i in used)
    return cut(header), tuple(map(cut, rows))


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    flops = plan.flops_per_chip
    yield "flops of a chip", "unknown" if flops is None else f"{flops:.4g}"
    seconds = plan.seconds_at_least
    if seconds.get("step") is not None:
        parts = ", ".join(f"{k} {_time(seconds[k])}" for k in ("compute", "memory", "network"))
        yield "a step takes at least", f"{_time(seconds['step'])} ({parts})"
    for note in plan.notes:
        yield "note", note
    for each in plan.not_split[:3]:
        yield "whole", f"{each.name}, {format_bytes(each.bytes)}: {each.why}"
    if len(plan.not_split) > 3:
        yield "whole", f"{len(plan.not_split) - 3} more arrays over 64 KiB, in --json"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _largest(variables: Sequence[PlannedVariable]) -> Iterator[tuple[str, ...]]:
    for v in variables[:5]:
        how = f"{v.split or 'whole'}{', donated' if v.donated else ''}"
        yield v.name, v.cause, f"{v.dtype}{list(v.shape)}", format_bytes(v.bytes_per_chip), how


def _collective_rows(collectives: Sequence[PlannedCollective]) -> Iterator[tuple[str, ...]]:
    ordered = sorted(collectives, key=lambda c: -c.bytes)
    for c in ordered[:4]:
        yield (
            f"{c.count} {c.kind} over {c.axis}",
            format_bytes(c.bytes),
            "overlaps" if c.overlaps else "",
            cause_of(c),
        )
    if len(ordered) > 4:
        rest = ordered[4:]
        yield f"{sum(c.count for c in rest)} more", format_bytes(sum(c.bytes for c in rest)), "", ""
    if not ordered:
        yield "none", "", "", ""


def cause_of(collective: PlannedCollective) -> str:
    """Returns why there is a collective: the user's line, or what XLA made it for."""
    parts = [collective.made_by_xla] if collective.made_by_xla else []
    if collective.variables:
        more = f" and {len(collective.variables) - 2} more" if len(collective.variables) > 2 else ""
        parts.append(", ".join(collective.variables[:2]) + more)
    return "; ".join([*parts, *collective.lines[:1]])
