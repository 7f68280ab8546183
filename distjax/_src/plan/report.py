"""What a plan says, as data, as JSON and as text: see `distjax.plan.Report`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from distjax._src.tables import Table, as_text, format_bytes

CAUSES: Sequence[str] = (
    "parameters optimizer state batch gradients activations code unattributed".split()
)


class Record(dict[str, Any]):
    """A part of a report: a dictionary, as in the JSON, whose keys are attributes, too."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


@dataclasses.dataclass(frozen=True)
class Report:
    """The plans of one step. ``print`` it: it fits a screen.

    Parts of a plan are dictionaries, as in the JSON, and their keys are attributes, too. Bytes are
    those of one chip, as its compiler counts them; None is what is not known. A plan has:

    - ``topology``, ``slices``, ``chips``, ``strategy``, ``model_axes``, ``num_replicas``,
      ``compiler_options``: what was planned; ``error``: why there is no plan, or "".
    - ``fits``: whether there is memory for it; ``largest_batch_per_replica``: if asked for.
    - ``memory``: ``peak_bytes`` is ``argument_bytes`` + ``output_bytes`` - ``alias_bytes`` (results
      in the memory of donated arguments) + ``temp_bytes`` + the code; ``limit_bytes`` what programs
      may use; ``by_cause`` the peak by parameters, optimizer, state, batch, gradients, activations,
      code, unattributed; ``by_variable`` every argument, the largest first: ``name``, ``cause``,
      ``shape`` over all chips, ``dtype``, ``bytes_per_chip`` as laid out there, ``split`` ("": each
      chip has all of it), ``why`` it is whole where others are split, and whether it is
      ``donated``: its memory is reused for a result.
    - ``flops_per_chip`` of a step, loops counted once; ``seconds_at_least`` of ``compute``,
      ``memory``, ``network``, and the ``step``.
    - ``collectives``: those ``written`` in the code, and those ``compiled``: of one ``kind`` and
      cause the ``count`` and the ``bytes`` of their results, the mesh ``axis`` over which they go,
      the user's ``lines``, the ``variables`` that they gather, what the compiler made them for
      (``made_by_xla``; "": they are in the code), and whether other work ``overlaps`` with them.
    - ``not_split``: ``name`` and ``bytes`` of arrays over 64 KiB of which each chip has all, and
      ``why``; ``notes``: what else to know, in sentences.
    - ``schedule``: ``live_bytes`` along it, and ``collectives`` as [place of 1, kind, bytes].

    Attributes:
      target: what was planned.
      jax: the version of JAX.
      libtpu: that of libtpu, or "".
      plans: one for each topology, strategy and set of options.
    """

    target: str
    jax: str
    libtpu: str
    plans: tuple[Any, ...]

    def to_json(self, indent: int | None = None) -> str:
        """Returns the report as JSON, whose keys are those above, and ``schema``: 1.

        Args:
          indent: spaces to indent by; None: one line.
        """
        return json.dumps({"schema": 1, **vars(self)}, indent=indent)

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return any(plan.fits for plan in self.plans)

    @property
    def head(self) -> str:
        """What was planned, and by what it was compiled."""
        with_libtpu = f", libtpu {self.libtpu}" if self.libtpu else ""
        return f"{self.target}, compiled by JAX {self.jax}{with_libtpu}"

    def by_topology(self) -> Iterator[list[Any]]:
        """Yields the plans of each topology."""
        for key in dict.fromkeys((p.topology, p.slices) for p in self.plans):
            yield [p for p in self.plans if (p.topology, p.slices) == key]

    def __str__(self) -> str:
        tables = [Table(self.head)]
        for plans in self.by_topology():
            tables += [Table(answer(plans)), memory_table(plans), *error_tables(plans)]
        planned = [p for p in self.plans if p.memory]
        if planned:  # more of the first that fits, or else of the first
            shown = next((p for p in planned if p.fits), planned[0])
            tables += [Table(f"of {name_of(shown)} on {shown.topology}:"), *plan_tables(shown, 4)]
        return as_text(tables)

    __repr__ = __str__  # what a prompt shows


def name_of(plan: Record) -> str:
    """Returns the strategy of a plan, with its model axes and options."""
    axes = "".join(f" {axis}={size}" for axis, size in plan.model_axes.items())
    return f"{plan.strategy}{axes}{' +options' if plan.compiler_options else ''}"


def answer(plans: Sequence[Record]) -> str:
    """Returns whether a step fits a topology, by how much, and under which strategies."""
    first, told = plans[0], list[str]()
    limit = next((p.memory.limit_bytes for p in plans if p.memory), None)
    for plan in plans:
        if plan.memory and limit:
            rest = limit - plan.memory.peak_bytes
            how = f"fits, {format_bytes(max(rest, 0))} free"
            how = how if plan.fits else f"does not fit, by {format_bytes(max(-rest, 0))}"
            told.append(f"{name_of(plan)} {how}")
    if not limit and any(p.memory for p in plans):
        told = ["no limit of memory to compare with"]
    if failed := [name_of(p) for p in plans if p.error]:
        told.append(f"no plan for {', '.join(failed)} (see below)")
    times = f"{first.slices} x " if first.slices > 1 else ""
    each = f", {format_bytes(limit)} each" if limit else ""
    return f"{times}{first.topology} ({first.chips} chips{each}): {'; '.join(told)}"


def error_tables(plans: Sequence[Record]) -> Iterator[Table]:
    """Yields why there is no plan for some strategies, and what helps."""
    for plan in plans:
        if plan.error:
            rows = tuple((line.strip(),) for line in plan.error.splitlines())
            yield Table(f"no plan for {name_of(plan)}:", (), rows)


def memory_table(plans: Sequence[Record]) -> Table:
    """Returns the memory of a chip by cause, a row for each strategy, without empty columns."""
    rows: list[tuple[str, ...]] = [("", "fits", "peak", *CAUSES, "batch/replica")]
    for plan in plans:
        cells = [""] * (len(CAUSES) + 1)
        if plan.memory:
            sizes = plan.memory.peak_bytes, *plan.memory.by_cause.values()
            cells = [format_bytes(size) for size in sizes]
        fits = "?" if plan.fits is None else "yes" if plan.fits else "NO"
        best = plan.largest_batch_per_replica
        rows.append((name_of(plan), fits, *cells, "" if best is None else f"up to {best}"))
    columns = zip(*rows, strict=True)
    used = [c for i, c in enumerate(columns) if i < 3 or {*c[1:]} - {"", "0 B"}]
    header, *rows = zip(*used, strict=True)
    return Table("memory of a chip by cause:", header, tuple(rows))


def plan_tables(plan: Record, most: int) -> list[Table]:
    """Returns the tables of one plan, each with so many rows at most."""
    facts = [("flops of a chip", _number(plan.flops_per_chip))]
    if (seconds := plan.seconds_at_least)["step"] is not None:
        parts = ", ".join(f"{k} {_time(seconds[k])}" for k in ("compute", "memory", "network"))
        facts.append(("a step takes at least", f"{_time(seconds['step'])} ({parts})"))
    facts += [("note", note) for note in plan.notes]
    tables = [Table("costs:", (), tuple(facts))]
    variables = [
        (v.name, v.cause, f"{v.dtype}{[*v.shape]}", format_bytes(v.bytes_per_chip))
        + (f"{v.split or 'whole'}{', donated' if v.donated else ''}",)
        for v in plan.memory.by_variable
    ]
    tables.append(_cut("largest arrays, bytes of a chip", variables, most))
    for title, which in plan.collectives.items():
        ordered = sorted(which, key=lambda c: -c.bytes)
        size, count = sum(c.bytes for c in which), sum(c.count for c in which)
        rows = [
            (f"{c.count} {c.kind} over {c.axis}", format_bytes(c.bytes))
            + ("overlaps" if c.overlaps else "", _cause_of(c))
            for c in ordered
        ]
        total = f"{count}, {format_bytes(size)}" if count else "none"
        tables.append(_cut(f"collectives {title}, {total}", rows, most))
    whole = [(w.name, format_bytes(w.bytes), w.why) for w in plan.not_split]
    return [*tables, _cut("whole on each chip, over 64 KiB", whole, most)] if whole else tables


def _cut(caption: str, rows: Sequence[tuple[str, ...]], most: int) -> Table:
    more = f"; {len(rows) - most} more in --json" if len(rows) > most else ""
    return Table(f"{caption}{more}:", (), tuple(rows[:most]))


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _cause_of(collective: Record) -> str:
    """Returns why there is a collective: what XLA made it for, of what, and the user's line."""
    names = collective.variables
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    parts = [collective.made_by_xla, ", ".join(names[:2]) + more, *collective.lines[:1]]
    return "; ".join(filter(None, parts))
