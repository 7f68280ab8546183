"""Explanation, the result of `dj.explain`, and ExplanationDiff, between two of them."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from distjax._src.context import Finding
from distjax._src.diagnostics.collectives import (
    Collective,
    CollectiveCount,
    collective_table,
    count_by_kind,
)
from distjax._src.diagnostics.screen import (
    first_rows,
    fits_screen,
    group_by,
    name_together,
    short_lines,
    short_reason,
)
from distjax._src.tables import Table, as_html, as_text, format_bytes

_T = TypeVar("_T")
#: Bytes of results that are worth a hint.
_MUCH = 2**20
_PROVED = "proved (T: a value per replica, M: equal on every replica):"


@dataclasses.dataclass(frozen=True)
class RunProof:
    """What was proved about one `run` of a replica function.

    Attributes:
      function: its name.
      num_replicas: R.
      source: the line of the call.
      arguments: pairs of a path and "T" (per replica) or "M" (equal on every replica).
      results: the same for its array results.
      why: for each result and each variable that it writes, the path, the letter and the
        reason: the reductions that made it equal, or the lines that made it differ.
    """

    function: str
    num_replicas: int
    source: str
    arguments: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    why: tuple[tuple[str, str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class EqualReduction:
    """A reduction of a value that is already equal on every replica.

    Attributes:
      what: the primitive, or "reduce(SUM)".
      source: the user's line.
    """

    what: str
    source: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that the compiled program uses on one device.

    Attributes:
      argument_bytes: inputs: arguments and variables.
      output_bytes: outputs: results and new values of variables.
      donated_bytes: outputs that reuse the buffers of arguments.
      temporary_bytes: intermediate values.
      peak_bytes: arguments + outputs - donated + temporaries: the most that is live at
        once, if no argument is freed early.
      host_bytes: the same sum in host memory.
    """

    argument_bytes: int
    output_bytes: int
    donated_bytes: int
    temporary_bytes: int
    peak_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True)
class VariableUse:
    """How the program uses one variable.

    Attributes:
      name: its name.
      locality: "M" (mirrored), "T" (a component per replica) or "V" (placed otherwise:
        partitioned, or in host memory).
      placement: where it lives, as text.
      is_read: whether its value at the start is an input of the program.
      is_written: whether the program gives it a new value.
    """

    name: str
    locality: str
    placement: str
    is_read: bool
    is_written: bool


class Cut(Protocol):
    """The parts into which a strategy with servers splits a step; a dataclass."""

    def tables(self) -> Iterator[Table]:
        """Yields the parts as tables."""
        ...


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a step does, found by tracing and compiling it without running it.

    ``print`` it, or show it in a notebook. What does not fit a screen is grouped: collectives by
    their line, values by module and by the reason for what was proved about them.

    Attributes:
      name: the name of the function.
      arguments: path -> "T" (a value per replica) or "M" (one value for all), without
        arguments that are other Python objects.
      results: the same for its array results, as proved.
      runs: what was proved about each replica function that it runs.
      variables: the variables that it reads or writes.
      written: the collectives in the code, each with its bytes on one device and the
        user's line. One in a loop counts once. Under `ParameterServerStrategy`: those
        among the devices of a worker.
      compiled: the collectives after XLA has combined and moved them, including those
        that it inserted for sharded arrays, such as for a reduction at the start of a
        merge function that a worker computes.
      flops: floating-point operations of one call on one device, as counted by XLA;
        None if unknown.
      memory: bytes on one device.
      equal_reductions: reductions of values that are already equal on every replica.
      findings: what is probably wrong, including what `dj.expect` declares as intended.
      possible_rows: paths of host arrays [R, ...] among the arguments, which every
        replica sees whole; see `Strategy.per_replica`.
      cut: under `ParameterServerStrategy`, which parts of the step run on workers and
        servers, and what they exchange; else None.
      full: whether the text has a line for each array and collective, however many there are.
    """

    name: str
    arguments: Mapping[str, str]
    results: Mapping[str, str]
    runs: tuple[RunProof, ...]
    variables: tuple[VariableUse, ...]
    written: tuple[Collective, ...]
    compiled: tuple[Collective, ...]
    flops: float | None
    memory: Memory
    equal_reductions: tuple[EqualReduction, ...]
    possible_rows: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    cut: Cut | None = None
    full: bool = False

    @property
    def written_counts(self) -> dict[str, CollectiveCount]:
        """The number and bytes of the collectives in the code, by kind."""
        return count_by_kind((c.kind, c.result_bytes) for c in self.written)

    @property
    def compiled_counts(self) -> dict[str, CollectiveCount]:
        """The number and bytes of the compiled collectives, by kind."""
        return count_by_kind((c.kind, c.result_bytes) for c in self.compiled)

    def to_json(self, indent: int | None = None) -> str:
        """Returns the explanation as JSON.

        Args:
          indent: spaces to indent by; None: one line.
        """
        return json.dumps(dataclasses.asdict(self) | {"full": True}, indent=indent)

    def diff(self, other: Explanation) -> ExplanationDiff:
        """Returns how another step differs in reductions, proofs and findings.

        Args:
          other: the explanation of the second step; `self` explains the first.

        Example:
          >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
          >>> x = strategy.distribute_values_from_function(lambda ctx: jnp.ones(3))
          >>> forgetful = dj.explain(lambda w, x: w - x, jnp.ones(3), x, strategy=strategy)
          >>> mean = lambda x: dj.get_replica_context().all_reduce("mean", x)
          >>> right = dj.explain(lambda w, x: w - mean(x), jnp.ones(3), x, strategy=strategy)
          >>> [(each.path, each.first, each.second) for each in forgetful.diff(right).proofs]
          [('the result', 'T', 'M')]
        """
        return diff_explanations(self, other)

    def __str__(self) -> str:
        return as_text(list(self._tables()))

    __repr__ = __str__  # what a prompt shows

    def _repr_html_(self) -> str:
        return as_html(list(self._tables()))

    def _tables(self) -> Iterator[Table]:
        whole = list(self._whole())
        yield from whole if self.full or fits_screen(whole) else self._grouped()

    def _grouped(self) -> Iterator[Table]:
        """Yields the tables with what is alike in one line."""
        yield Table(f"{self.name}:", ("collectives", "as written", "compiled"), self._counts())
        yield from self._collectives(_collectives_by_line)
        yield Table("on one device:", (), self._costs())
        rows = [("argument", *row, "") for row in _by_letter(self.arguments.items())]
        if len(self.runs) != 1:
            rows += [("result", *row, "") for row in _by_letter(self.results.items())]
        yield Table(_PROVED, (), first_rows(rows))
        for run in self.runs:
            caption = f"why, in the run of {run.function} on {run.num_replicas} replicas:"
            yield Table(caption, (), first_rows(list(_by_reason(run.why))))
        uses = [
            (name_together([u[0] for u in group], _others(self._uses(), group)), *group[0][1:])
            for group in group_by(self._uses(), lambda use: use[1:])
        ]
        if uses:
            yield Table("variables:", ("name", "", "lives", "use"), first_rows(uses))
        for table in self._hints():
            rows = [tuple(map(short_lines, row)) for row in dict.fromkeys(table.rows)]
            yield Table(table.caption, table.header, first_rows(rows))
        if self.cut is not None:
            yield from self.cut.tables()
        yield Table("a line for each array and collective: dj.explain(..., full=True)")

    def _whole(self) -> Iterator[Table]:
        """Yields the tables with a line for each array and collective."""
        yield Table(f"{self.name}:", ("collectives", "as written", "compiled"), self._counts())
        yield from self._collectives(collective_table)
        yield Table("on one device:", (), self._costs())
        yield Table(_PROVED, ("", "value", ""), tuple(self._proofs()))
        why = [(path or "the result", *rest) for run in self.runs for path, *rest in run.why]
        if why:
            yield Table("why:", ("", "", ""), tuple(why))
        if self.variables:
            yield Table("variables:", ("name", "", "lives", "use"), self._uses())
        yield from self._hints()
        if self.cut is not None:
            yield from self.cut.tables()

    def _collectives(self, table: Callable[[str, Sequence[Collective]], Table]) -> Iterator[Table]:
        among = "" if self.cut is None else ", over the devices of each worker"
        yield table(f"as written{among}:", self.written)
        if self.compiled != self.written:
            yield table(f"compiled{among}:", self.compiled)

    def _hints(self) -> Iterator[Table]:
        """Yields the tables of what may be wrong."""
        if self.equal_reductions:
            yield Table(
                "reductions of what is equal on every replica already (a sum is R times the "
                "value, a mean the value itself):",
                ("", "line"),
                tuple((each.what, each.source) for each in self.equal_reductions),
            )

        if self.possible_rows:
            yield Table(
                "arrays with as many rows as there are replicas, each of which sees all rows (if "
                "row r is the value of replica r: strategy.per_replica(x)):",
                (),
                tuple((path,) for path in self.possible_rows),
            )
        if self.findings:
            found = tuple((f.level, f.rule, f.source, f.expected or "") for f in self.findings)
            yield Table("found:", ("level", "", "line", "meant, since"), found)

    def _counts(self) -> tuple[tuple[str, ...], ...]:
        written, compiled = self.written_counts, self.compiled_counts
        kinds = dict.fromkeys((*written, *compiled)) or ("none",)
        return tuple((k, _count_text(written.get(k)), _count_text(compiled.get(k))) for k in kinds)

    def _costs(self) -> tuple[tuple[str, str], ...]:
        memory = self.memory
        rows = [("flops", "unknown" if self.flops is None else f"{self.flops:.4g}")]
        named: list[tuple[str, Any]] = [
            ("arguments", memory.argument_bytes),
            ("results", memory.output_bytes),
            ("donated", memory.donated_bytes),
            ("temporary", memory.temporary_bytes),
            ("at most at once", memory.peak_bytes),
        ]
        if memory.host_bytes:
            named.append(("in host memory", memory.host_bytes))
        rows += [(name, format_bytes(count)) for name, count in named]
        keeps = memory.output_bytes > max(2 * memory.donated_bytes, _MUCH)
        if keeps and memory.argument_bytes > 0.9 * memory.output_bytes:  # as of state
            rows += [
                ("hint", "strategy.jit(step, donate_argnums=...) reuses the memory of old state")
            ]
        return tuple(rows)

    def _proofs(self) -> Iterator[tuple[str, str, str]]:
        yield from (("argument", path, letter) for path, letter in self.arguments.items())
        yield from ((f"result of {self.name}", p or "all", x) for p, x in self.results.items())
        for run in self.runs:
            yield (f"run of {run.function}", f"on {run.num_replicas} replicas, {run.source}", "")
            yield from (("  argument", path, letter) for path, letter in run.arguments)
            yield from (("  result", path or "all", letter) for path, letter in run.results)

    def _uses(self) -> tuple[tuple[str, ...], ...]:
        words = {(True, True): "read, written", (True, False): "read", (False, True): "written"}
        return tuple(
            (v.name, v.locality, v.placement, words[v.is_read, v.is_written])
            for v in self.variables
        )


def _collectives_by_line(caption: str, collectives: Sequence[Collective]) -> Table:
    rows = []
    for group in group_by(collectives, lambda c: (c.kind, c.over, c.source)):
        each, total = group[0], sum(c.result_bytes for c in group)
        over = f" over {each.over}" if each.over else ""
        line = short_lines(each.source)
        rows.append((total, (f"{len(group)} {each.kind}{over}", format_bytes(total), line)))
    rows.sort(key=lambda row: -row[0])
    return Table(caption, ("", "bytes", "line"), first_rows([row for _, row in rows]))


def _by_letter(proofs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields what is proved equal, and what is not, each in one row: (names, letter)."""
    proofs = list(proofs)
    for group in group_by(proofs, lambda proof: proof[1]):
        yield name_together(_names(group), _others(proofs, group), 60), group[0][1]


def _by_reason(why: Sequence[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yields (names, letter, reason), those with a value per replica first."""
    short = [(path, letter, short_reason(text)) for path, letter, text in why]
    why = sorted(short, key=lambda each: each[1] == "M")
    for group in group_by(why, lambda each: each[1:]):
        yield (name_together(_names(group), _others(why, group)), *group[0][1:])


def _names(rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [row[0].removesuffix(".value") or "the result" for row in rows]


def _others(rows: Iterable[tuple[str, ...]], group: Sequence[tuple[str, ...]]) -> list[str]:
    own = {id(row) for row in group}
    return _names(row for row in rows if id(row) not in own)


def _count_text(count: CollectiveCount | None) -> str:
    return "-" if count is None else f"{count.num_ops} ({format_bytes(count.result_bytes)})"


# -- what differs ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ProofChange:
    """A result or written variable for which the two steps prove different things.

    Attributes:
      path: its path; "the result" if there is only one.
      first: "M" (equal on every replica), "T" (a value per replica) or "-" (absent).
      second: the same for the second step.
      why_first: the reductions that made it equal, or the lines that made it differ.
      why_second: the same for the second step.
    """

    path: str
    first: str
    second: str
    why_first: str
    why_second: str


@dataclasses.dataclass(frozen=True)
class ExplanationDiff:
    """What only one of two explanations reduces, proves or finds.

    ``print`` it, or show it in a notebook. Since lines of code may have moved, collectives are
    compared by kind and bytes, results and variables by path, findings by rule.

    Attributes:
      names: the names of the two functions.
      reduced: the collectives in the code of only the first step, and of only the second.
      proofs: what is proved differently.
      findings: the findings of only the first step, and of only the second.
    """

    names: tuple[str, str]
    reduced: tuple[tuple[Collective, ...], tuple[Collective, ...]]
    proofs: tuple[ProofChange, ...]
    findings: tuple[tuple[Finding, ...], tuple[Finding, ...]]

    def to_json(self, indent: int | None = None) -> str:
        """Returns the difference as JSON.

        Args:
          indent: spaces to indent by; None: one line.
        """
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        return as_text(list(self._tables()))

    __repr__ = __str__  # what a prompt shows

    def _repr_html_(self) -> str:
        return as_html(list(self._tables()))

    def _tables(self) -> Iterator[Table]:
        differs = any((*self.reduced, self.proofs, *self.findings))
        what = "" if differs else " nothing differs in what is reduced, proved or found"
        yield Table(f"{' -> '.join(self.names)}:{what}")
        for which, collectives in zip(("first", "second"), self.reduced, strict=True):
            if collectives:
                yield collective_table(f"reduced in the {which} only:", collectives)
        if self.proofs:
            yield Table(
                _PROVED,
                ("", "first", "second", "why in the first", "why in the second"),
                tuple(dataclasses.astuple(change) for change in self.proofs),
            )
        for which, findings in zip(("first", "second"), self.findings, strict=True):
            if findings:
                rows = tuple((f.level, f.rule, f.source) for f in findings)
                yield Table(f"found in the {which} only:", ("level", "", "line"), rows)


def diff_explanations(first: Explanation, second: Explanation) -> ExplanationDiff:
    """Returns the differences between two explanations."""
    cost = lambda collective: (collective.kind, collective.result_bytes)
    return ExplanationDiff(
        names=(first.name, second.name),
        reduced=_only(first.written, second.written, cost),
        proofs=tuple(_changes(_proofs(first), _proofs(second))),
        findings=_only(first.findings, second.findings, lambda finding: finding.rule),
    )


def _only(
    first: Sequence[_T], second: Sequence[_T], key: Callable[[_T], Hashable]
) -> tuple[tuple[_T, ...], tuple[_T, ...]]:
    """Returns what only the first and what only the second has, regardless of order."""

    def missing(those: Sequence[_T], others: Sequence[_T]) -> Iterator[_T]:
        left = collections.Counter(map(key, others))
        for each in those:
            left[key(each)] -= 1
            if left[key(each)] < 0:
                yield each

    return tuple(missing(first, second)), tuple(missing(second, first))


def _proofs(explanation: Explanation) -> dict[tuple[int, str], tuple[str, str]]:
    """Returns (letter, why) of each run's results and written variables."""
    return {
        (number, path or "the result"): (letter, why)
        for number, run in enumerate(explanation.runs)
        for path, letter, why in run.why
    }


def _changes(
    first: Mapping[tuple[int, str], Any], second: Mapping[tuple[int, str], Any]
) -> Iterator[ProofChange]:
    for key in dict.fromkeys((*first, *second)):
        (before, why_before), (after, why_after) = first.get(key, _NONE), second.get(key, _NONE)
        if before != after:
            number, path = key
            where = f"{path} of run {number + 1}" if number else path
            yield ProofChange(where, before, after, why_before, why_after)


_NONE = ("-", "")
