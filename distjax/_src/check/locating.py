"""Where the law breaks: the first line whose result is no longer that of one replica.

Every value of the R replicas is compared with that of the one. It is *equal* (the same on all
replicas), *rows* (the replicas' values joined) or a *share* (their sum is the value), times a power
of R, or its *largest*, or *smallest*, is the value. A line of which all operands
are one of these and the result is none is where the law breaks; where a result is equal, but R
times too large, it is the reduction that made it so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distjax._src import user_lines
from distjax._src.check.comparing import joined_axis, largest_change, numbers
from distjax._src.check.replay import ADDS, Node
from distjax._src.user_lines import UNKNOWN

EQUAL, ROWS, SHARE = "equal", "rows", "share"
#: What a maximum, or minimum, over each replica's rows is; what makes it, and what hands it on.
LARGEST, SMALLEST = "largest", "smallest"
_CHOOSES = frozenset("reduce_max reduce_min reduce_and reduce_or".split())
_HANDS_ON = frozenset("and or not reshape squeeze broadcast_in_dim convert_element_type".split())
#: How much of the largest element is rounding.
_TOLERANCE = 2e-3


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a value of R replicas is to that of one.

    Attributes:
      form: EQUAL, ROWS, SHARE, LARGEST or SMALLEST.
      power: it is R to this power too large.
    """

    form: str
    power: int = 0

    @property
    def is_right(self) -> bool:
        """Whether a loss, a gradient or state may be so: whole, and of the right size."""
        return self.form == EQUAL and self.power == 0


class Term(NamedTuple):
    """What is added and does not fit the other: an equal value to a share, or a share to a mean.

    Attributes:
      node: the value.
      edit: what would make it fit, one of `replay.EDITS`.
      told: the same value in the forward pass, whose line is told.
    """

    node: Node
    edit: str
    told: Node


@dataclasses.dataclass(frozen=True)
class Break:
    """Where the law breaks.

    Attributes:
      node: the result that is none of the kinds, or of the wrong size.
      came_in: the operand that is to blame; None: none is.
      kind: what this operand is.
      made_by: what computed it: a reduction, if there is one.
      term: what is added there, or in the gradient, and does not fit; None: nothing is.
    """

    node: Node
    came_in: Node | None = None
    kind: Kind | None = None
    made_by: Node | None = None
    term: Term | None = None


class Locator:
    """Finds where the law breaks, from the kept values of two runs.

    Args:
      several: the values of R replicas.
      alone: those of one.
      disturbed: what those of one become if its rows are changed by a few roundings: what cancels
        leaves nothing but these. (The gradient of a bias in front of a batch norm is zero but for
        rounding, and Adam makes a step of it.)
      num_replicas: R.
      written: what the step leaves in variables, which the next step reads.

    Attributes:
      nodes: the values of R replicas, each after those that it is computed from.
    """

    def __init__(
        self,
        several: Sequence[Node],
        alone: Sequence[Node],
        disturbed: Sequence[Any],
        num_replicas: int,
        written: Mapping[Any, Node | None],
    ):
        self._written = written
        self._disturbed = dict(zip((n.place for n in alone), disturbed, strict=True))
        self._mates: Mapping[Any, Node] = {node.place: node for node in alone}
        self._count = num_replicas
        self._order = {node: i for i, node in enumerate(several)}
        self.nodes = tuple(several)
        self._kinds: dict[Node, tuple[Kind, ...] | None] = {}

    def kinds(self, node: Node) -> tuple[Kind, ...] | None:
        """Returns what a value may be; () for none of the kinds, None where nothing is known."""
        if node not in self._kinds:
            self._kinds[node] = self._find_kinds(node)
        return self._kinds[node]

    def _find_kinds(self, node: Node) -> tuple[Kind, ...] | None:
        mate = self._mates.get(node.place)
        if node.value is None or mate is None or mate.value is None:
            return None
        ours, theirs = numbers(node.value), numbers(mate.value)
        # Cross-replica code may take the values of all replicas for one array.
        is_own = node.varying or ours.shape == (self._count, *theirs.shape) != theirs.shape
        ours = ours if is_own else np.broadcast_to(ours, (self._count, *ours.shape))
        theirs = theirs[0] if mate.varying else theirs
        is_truth = ours.dtype == bool  # of which a few are soon a sum by chance
        if is_truth:
            ours, theirs = ours.astype(np.int8), theirs.astype(np.int8)
        if not np.issubdtype(ours.dtype, np.number):
            return None
        ours, theirs = ours.astype(float), theirs.astype(float)
        floor = 8 * largest_change(mate.value, self._disturbed[mate.place])
        found: list[Kind] = []
        if ours.shape[1:] == theirs.shape:
            rows = ours.reshape(self._count, -1)
            if _close(rows, rows[:1], floor):
                found += (Kind(EQUAL, p) for p in self._powers(ours[0], theirs, floor))
            if not is_truth:
                found += (Kind(SHARE, p) for p in self._powers(ours.sum(0), theirs, floor))
            if not found and self._may_be_extreme(node):
                extremes = (LARGEST, ours.max(0)), (SMALLEST, ours.min(0))
                found += [Kind(form) for form, x in extremes if _close(x, theirs, floor)]
        elif (axis := joined_axis(ours, theirs)) is not None:
            joined = np.concatenate(list(ours), axis)
            found += (Kind(ROWS, p) for p in self._powers(joined, theirs, floor))
        return tuple(found)

    def _may_be_extreme(self, node: Node) -> bool:
        """Returns whether a value may be a maximum or minimum by more than chance."""
        if node.name not in _HANDS_ON:
            return node.name in _CHOOSES
        forms = {kind.form for x in node.inputs for kind in self.kinds(x) or ()}
        return not forms.isdisjoint((LARGEST, SMALLEST))

    def _powers(self, ours: np.ndarray, theirs: np.ndarray, floor: float) -> Iterable[int]:
        for power in (0, 1, -1, 2, -2):
            if _close(ours, theirs * float(self._count) ** power, floor):
                yield power

    def find(self, node: Node) -> tuple[list[Break], bool]:
        """Returns where the law breaks on the way to a value that differs; the first comes first.

        And whether nothing but rounding was found.
        """
        found: dict[Node, Break] = {}
        start, pending, seen, is_rounded = node, [node], set[Node](), False
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            kinds = self.kinds(node)
            if node is start and may_be_right(kinds or ()):
                kinds = ()  # new state differs by little of its size, though by much of its change
            if kinds:
                made_by = self._origin(node, kinds)
                wrong = [k for k in kinds if not k.is_right]
                if len(wrong) < len(kinds):
                    continue
                if _is_off(kinds[0]):
                    found[made_by] = Break(made_by, node, kinds[0], made_by)
                else:  # a share, or rows, where it must be equal
                    found[node] = Break(node, node, kinds[0], made_by)
                continue
            # But for numbers of Python's, which no line makes.
            broken = [x for x in node.inputs if self.kinds(x) == () and (x.inputs or x.eqns)]
            if kinds is None:  # a key, or what one replica does not compute
                pending += [*broken, *(x for x in node.inputs if self.kinds(x) is None)]
            elif broken:
                pending += broken
            elif self._is_rounding(node):
                is_rounded = True
            else:
                found[node] = self._break_at(node)
        found = {b.node: b for b in map(self._in_forward_pass, found.values())}
        breaks = sorted(found.values(), key=lambda b: self._order.get(b.node, len(self._order)))
        return breaks, is_rounded and not breaks

    def _in_forward_pass(self, where: Break) -> Break:
        """Returns where the loss itself breaks the law, of a break in its gradient."""
        if not where.node.is_backward:
            return where
        line, found = where.node.gradient_line, list[Break]()
        for node in self._order if line is not None else ():
            if node.is_backward or node.gradient_line != line:
                continue
            if self.kinds(node) == () and all(map(self.kinds, node.inputs)):
                own = self._break_at(node)
                if own.came_in is not None and not self._is_rounding(node):
                    found.append(own)
        edit_of = lambda b: None if b.term is None else b.term.edit
        alike = (own for own in found if edit_of(own) == edit_of(where))
        own = next(alike, next(iter(found), where))
        term = where.term or own.term  # in the gradient it can be changed, in the loss it is told
        if term is not None and own.term is not None:
            term = term._replace(told=own.term.node)
        return dataclasses.replace(own, term=term)

    def _is_rounding(self, node: Node) -> bool:
        """Returns whether a value is computed from nothing but what is right."""
        kinds = [self.kinds(x) for x in node.inputs]
        mate = self._mates.get(node.place)
        if node.name in ("scan", "while"):  # only its first turn is known
            return False
        if mate is not None and mate.literals != node.literals:
            return False
        return bool(kinds) and all(k is not None and any(x.is_right for x in k) for k in kinds)

    def _break_at(self, node: Node) -> Break:
        known = [(x, self.kinds(x) or ()) for x in node.inputs]
        suspects = [(x, kinds[0]) for x, kinds in known if kinds and not may_be_right(kinds)]
        if not suspects:
            return Break(node)
        # A wrong size is worse than a share, which is worse than rows; and of a quotient of shares
        # what divides is to be whole.
        by_rank = lambda s: (s[1].power == 0 or s[1].form != EQUAL, s[1].form == ROWS)
        came_in, kind = min(suspects[:: -1 if node.name == "div" else 1], key=by_rank)
        made_by = self._origin(came_in, (kind,), node.line if kind.form == ROWS else None)
        term = _term_of(node, suspects, kind) if node.name in ADDS else None
        return Break(node, came_in, kind, made_by, term)

    def line_to_mend(self, where: Break, mended: Node | None) -> str:
        """Returns the line that is to be changed: where a fix goes, or else the likeliest.

        What a value is to be is whole, before a line takes it that needs it so. Where a reduction
        comes next, of the value or of what is computed of it, that line is to wait for it. Else
        what makes the value is to reduce it: of a loss or a gradient the line that asks for it.
        Rows are well as they are, and what takes those of one replica is not.

        Args:
          where: where the law breaks.
          mended: what a fix changes; None: there is none.
        """
        taken, made = where.node, mended or where.made_by or where.node
        if mended is not None and where.made_by in upstream([mended]) and not mended.is_reduction:
            made = where.made_by or mended
        used = user_lines.user_frames(taken.eqns, False)
        level, are_lines = user_lines.meeting_level(used, made.frames)
        takes = user_lines.line_within(used, level) if made.frames else taken.line
        if made.line == UNKNOWN or made is taken:
            return taken.line
        if made.is_reduction:
            return made.line
        is_of_rows = mended is None and where.kind is not None and where.kind.form == ROWS
        if is_of_rows or (are_lines and self._is_reduced_next(made, level)):
            return takes
        is_inside = made.gradient_line == taken.gradient_line and not made.is_backward
        return made.line if is_inside else made.gradient_line or made.line

    def _is_reduced_next(self, made: Node, level: int) -> bool:
        """Returns whether a reduction takes a value, or what the next line makes of it.

        Lines count that are in the function at this level of the stack.
        """
        *around, function = made.frames[: level + 1]

        def line_of(node: Node) -> int | None:
            *outer, own = node.frames[: level + 1] or [None]
            return own.line if own and outer == around and own[:2] == function[:2] else None

        passed = {made: 0}  # how many lines lie between
        for node in self._order:  # each comes after its inputs
            before = [x for x in node.inputs if x in passed]
            at = line_of(node) if before else None
            if at is None or node.is_backward > made.is_backward:  # a gradient is reduced anyway
                continue
            lines = min(passed[x] + (line_of(x) != at) for x in before)
            if node.is_reduction and lines <= 2:
                return True
            passed[node] = lines
        return False

    def _origin(self, node: Node, kinds: Sequence[Kind], line: str | None = None) -> Node:
        """Returns what made a value such: the reduction behind it, or the value itself.

        With `line` the last one that is made elsewhere.
        """
        wanted, at, followed = set(kinds), node, set[Any]()
        while not at.is_reduction and line in (None, at.line):
            if (mean := next((x for x in at.inputs if _is_total_of(x, at)), None)) is not None:
                return mean
            known = [(x, self.kinds(x) or ()) for x in at.inputs]
            before = [
                x
                for x, k in known
                if not may_be_right(k) and (wanted.intersection(k) or any(map(_is_off, k)))
            ]
            if not before:
                written = None if at.variable in followed else self._written.get(at.variable)
                if written is None or may_be_right(kinds := self.kinds(written) or ()):
                    return at
                followed.add(at.variable)
                wanted, at = set(kinds), written
                continue
            at = max(before, key=lambda x: self._order.get(x, -1))
        return at


def _term_of(node: Node, suspects: Sequence[tuple[Node, Kind]], kind: Kind) -> Term | None:
    """Returns which operand of a sum does not fit, of those that are not right by themselves."""
    if len(suspects) < len(node.inputs) and kind.form == SHARE:
        shares = {x for x, _ in suspects}
        equal = next(x for x in node.inputs if x not in shares)
        return Term(equal, "divided", equal)
    if len(suspects) == 2:
        (a, of_a), (b, of_b) = suspects
        if of_a.form == of_b.form and abs(of_a.power - of_b.power) == 1:
            small = a if of_a.power < of_b.power else b
            return Term(small, "multiplied", small)
    return None


def _is_total_of(reduction: Node, node: Node) -> bool:
    """Returns whether a value is a mean over the replicas, of which this is the sum."""
    return reduction.is_reduction and reduction.line == node.line and node.name in ("div", "mul")


def upstream(nodes: Sequence[Node]) -> list[Node]:
    """Returns values, and all that they are computed from, nearest first."""
    found = dict.fromkeys(nodes)
    ahead = list(found)
    for node in ahead:
        new = [x for x in dict.fromkeys(node.inputs) if x not in found]
        found.update(dict.fromkeys(new))
        ahead += new
    return ahead


def _is_off(kind: Kind) -> bool:
    """Returns whether a value is whole, but of the wrong size."""
    return kind.form == EQUAL and kind.power != 0


def may_be_right(kinds: Sequence[Kind]) -> bool:
    """Returns whether a value may be whole, and of the right size (as zero is)."""
    return any(kind.is_right for kind in kinds)


def _close(a: np.ndarray, b: np.ndarray, floor: float) -> bool:
    """Returns whether values are equal up to rounding; `floor` is that of values that cancel."""
    with np.errstate(invalid="ignore"):
        size = np.max(np.abs(np.nan_to_num(np.concatenate([a.ravel(), b.ravel()]))), initial=0)
        near = np.abs(a - b) <= _TOLERANCE * size + floor + 1e-12
    same = (np.isnan(a) & np.isnan(b)) | (a == b)
    return bool((near | same).all())
