"""What dj.check says."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from distjax._src import user_lines
from distjax._src.check.comparing import Difference
from distjax._src.check.locating import EQUAL, LARGEST, ROWS, SHARE, SMALLEST, Break, Kind
from distjax._src.check.mending import Fix
from distjax._src.check.replay import DRAWS, Node, Tags
from distjax._src.context import Finding
from distjax._src.lint.findings import PADDED
from distjax._src.user_lines import UNKNOWN
from distjax._src.variables.variable import Variable, write_scope
from distjax.errors import message

RULE = "numbers that depend on the number of replicas"
_LEVELS = ("error", "warning", "note")


def finding(
    name: str,
    count: int,
    where: Break | None,
    wrong: Sequence[Difference],
    fix: Fix | None,
    line: str,
    is_redrawn: bool,
) -> Finding:
    """Returns the finding for values that differ, which one line makes wrong."""
    at, asked = None, ""
    if fix is not None:
        is_made = where is not None and where.kind is None  # there, of what is right
        by_value = is_made and not fix.node.is_reduction
        at = _asked_at(where.node if where and by_value else fix.node, wrong)
    if at not in (None, UNKNOWN):
        line, asked = at, f"; or by an argument of what is made at {at}"
    got, lines = _differing(wrong), _reasons(where, fix)
    if is_redrawn:
        got += ", with other zeros and ones in the masks of the batch"
    text = message(
        f"{name} needs to compute the same for {count} replicas as for one with the whole batch",
        got=got,
        why="; ".join(lines) if lines else "the numbers would depend on how many devices there are",
        fix=_usual_fix(where) if fix is None else f"{fix.text}{asked}",
    )
    return Finding("error", RULE, text, line)


def _asked_at(node: Node, wrong: Sequence[Difference]) -> str | None:
    """Returns the line that makes the object whose argument says how a value is reduced.

    An optimizer's reduce_op, or a variable's aggregation; None: of no such object.
    """
    scopes = " ".join(str(eqn.source_info.name_stack) for eqn in node.eqns)
    variables = (d.key for d in wrong if isinstance(d.key, Variable))
    own = (v.made_at for v in variables if re.search(rf"{write_scope(v)}\b", scopes))
    return next(own, node.asked_at)


def _usual_fix(where: Break | None) -> str:
    """Returns what mostly helps, where no fix that was tried did."""
    if where is not None and where.node.name in DRAWS:
        return "key = dj.get_replica_context().fold_in(key), where rows need numbers of their own"
    if where is not None and user_lines.is_called_in(where.node.eqns, "BatchNorm"):
        return (
            "BatchNorm(..., axis_name=strategy.axis_name), for the statistics of all replicas' "
            "examples; for those of its own on each replica: with dj.expect(reason) around its call"
        )
    if where is not None and _pairs_rows(where):
        return (
            "ctx.all_gather(y, axis=0) of the rows that each one is compared with; its own are "
            "number ctx.replica_id_in_sync_group * len(y) and following"
        )
    return "reduce sums and counts, and compute what is not linear from the totals"


def _pairs_rows(where: Break) -> bool:
    """Returns whether each row is combined with each other one, as in a contrastive loss."""
    if where.came_in is None or where.kind is None or where.kind.form != ROWS:
        return False
    before, after = (np.shape(node.value)[1:] for node in (where.came_in, where.node))
    return any(1 <= before.count(n) < after.count(n) for n in after if n > 1)


def excuse_note(excused: Mapping[str, Tags]) -> Finding:
    """Returns a note on values that are not compared, and why."""
    names = [f"{name} ({', '.join(sorted(tags))})" for name, tags in excused.items()]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    text = f"Not compared, since they depend on more than the batch: {', '.join(names[:4])}{more}"
    return Finding("note", "values that are not compared", text, UNKNOWN)


def padding_finding(name: str, different: Sequence[Difference]) -> Finding:
    """Returns the finding for a step in which padding counts."""
    names = ", ".join(d.value.name or "the result" for d in different[:4])
    text = message(
        f"{name} needs to compute the same whatever stands in padded rows",
        got=f"{names}, which changes with rows for which the mask of the batch is false",
        why="they are copies of other rows, and would count twice",
        fix="dj.losses.average_loss(losses, batch.mask); metric.update(losses, mask=batch.mask)",
    )
    return Finding("error", PADDED, text, UNKNOWN)


def _differing(wrong: Sequence[Difference]) -> str:
    """Returns what differs, with the factor: one for all, or that of each value that has one."""
    factors = [d.factor for d in wrong]
    is_one = np.ptp(factors) <= 0.02 * np.max(np.abs(factors))  # not with a NaN among them
    named = [f"{d.value.name or 'the result'} {d.what}" for d in wrong[:4]]
    if not is_one:
        pairs = zip(named, factors, strict=False)
        named = [f"{x} by the factor {f:.4g}" if np.isfinite(f) else x for x, f in pairs]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    shared = f", by the factor {np.median(factors):.4g}" if is_one else ""
    return f"{', '.join(named)}{more}{shared}"


#: What is wrong where a term does not fit, by what would make it fit.
_TERMS = {
    "divided": "it adds a value that is equal on all replicas to each replica's own share of a "
    "sum, which counts it R times",
    "multiplied": "it adds values of which one is R times as large as the other, beside those of "
    "one replica: a mean of each replica's rows, and a share of the whole batch's",
}


def _reasons(where: Break | None, fix: Fix | None) -> list[str]:
    """Returns where the law breaks, by what, and where that came from, in sentences."""
    if where is None:
        return []
    node, kind, made = where.node, where.kind, where.made_by
    first = f"the first line whose result is not that of one replica: {node.line}"
    if node.line == UNKNOWN and not node.inputs:
        return ["it is a number that Python computes, as it does of x.shape, by no line of JAX"]
    if kind is None or made is None:
        return [first]
    takes = f"it takes {_kind_text(kind)}"
    if kind.form == EQUAL or made.is_reduction:
        told = [takes] if where.came_in is not node else []
        told += [f"made by {made.name} at {made.line}"] if made is not node else []
        return [first, *told]
    if where.term is not None and (fix is None or fix.is_of_term):
        return [first, _TERMS[where.term.edit]]
    if node.is_merge:
        return [first, f"it reduces {_kind_text(kind)}, made at {made.told}"]
    frames = user_lines.user_frames(node.eqns, False)
    level, _ = user_lines.meeting_level(frames, made.frames)
    used = user_lines.line_within(frames, level)
    first += f", called at {used}" if used not in (UNKNOWN, node.line) else ""
    at = next(map(str, made.frames[level:]), UNKNOWN)
    at = made.told if at == node.line else at
    if kind.form == ROWS or at in (node.line, UNKNOWN):
        return [first, takes]
    return [first, f"{takes}, made at {at}, before anything reduces it"]


def _kind_text(kind: Kind) -> str:
    size = {0: "", 1: ", R times too large", -1: ", R times too small"}.get(
        kind.power, f", R ** {kind.power} times too large"
    )
    what = {
        EQUAL: "a value that is equal on all replicas",
        ROWS: "each replica's own rows",
        SHARE: "each replica's own share of a sum",
        LARGEST: "the largest of each replica's own rows",
        SMALLEST: "the smallest of each replica's own rows",
    }[kind.form]
    return what + (size if kind.form == EQUAL else "")


def describe(name: str, found: Sequence[Finding]) -> str:
    """Returns the text of the error for findings."""
    found = sorted(found, key=lambda f: _LEVELS.index(f.level))
    counts = Counter(f.level for f in found)
    text = message(
        f"{name} needs to pass dj.check",
        got=", ".join(f"{n} {level}{'s' if n > 1 else ''}" for level, n in counts.items()),
        why="such steps train, but not as one device with the whole batch would",
        fix="as each finding says; or, where it is meant: with dj.expect(reason)",
    )
    return "\n".join([text, *map(_describe, found)])


def _describe(finding: Finding) -> str:
    head = f"{finding.level}: {finding.rule}, at {finding.source}"
    return textwrap.indent(f"{head}\n{textwrap.indent(finding.text, '  ')}", "  ")
