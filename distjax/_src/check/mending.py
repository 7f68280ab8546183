"""What mends a step: changes of what one line computes, which are tried one after the other.

A change with which everything agrees, and nothing differs that did not, is the fix that is told,
and its line that of the mistake. The values of a line are changed together: as the leaves of a tree
of gradients, which are reduced, or forgotten, together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from distjax._src.check.locating import (
    EQUAL,
    LARGEST,
    SHARE,
    SMALLEST,
    Break,
    Kind,
    Locator,
    may_be_right,
    upstream,
)
from distjax._src.check.replay import Node

_MEANS = "jax.lax.pmean(x, axis), ctx.all_reduce('mean', x) or reduce_op='mean'"
_SUMS = "jax.lax.psum(x, axis), ctx.all_reduce('sum', x) or reduce_op='sum'"
#: How many lines are tried on the way to what differs, and how many that reduce, the nearest.
_MOST_LINES, _NEAREST = 32, 4
#: How a reduction is made a mean in place of a sum, a sum in place of a mean, or none.
_CHANGED = ("divided", "multiplied", "not summed", "not averaged")
#: How a value of a kind is made that of one replica, the likeliest first: of `replay.EDITS`.
_REPAIRS = {
    Kind(SHARE, 1): ("averaged", "summed"),
    Kind(EQUAL, 1): ("divided",),
    Kind(EQUAL, -1): ("multiplied",),
    Kind(LARGEST): ("the largest",),
    Kind(SMALLEST): ("the smallest",),
}


class Edited(NamedTuple):
    """A change of a step that may mend it.

    Attributes:
      nodes: the values that are changed: all that one line computes, as of a tree of gradients.
      edit: how, one of `replay.EDITS`.
      told: the value whose line is told.
      is_term: whether it does not fit what it is added to.
    """

    nodes: tuple[Node, ...]
    edit: str
    told: Node
    is_term: bool = False


class Fix(NamedTuple):
    """A change of a step that was tried with success.

    Attributes:
      text: in words.
      node: the value whose line is told.
      left: the keys of all that differs with it.
      is_of_term: whether it is of a value that does not fit what it is added to.
    """

    text: str
    node: Node
    left: frozenset[Any]
    is_of_term: bool


def changes(breaks: Sequence[Break], ends: Sequence[Node], locator: Locator) -> list[Edited]:
    """Returns changes that may mend a step, the likeliest first.

    Args:
      breaks: where the law breaks.
      ends: what computes the values that differ.
      locator: knows what each value is to that of one replica.
    """
    found = [*_at_breaks(breaks, ends, locator.nodes), *_on_the_way(ends, locator)[:_MOST_LINES]]
    return [x for x in found if x.nodes]


def _at_breaks(
    breaks: Sequence[Break], ends: Sequence[Node], nodes: Sequence[Node]
) -> list[Edited]:
    """Returns changes of what goes into the first lines that are wrong, and of reductions."""
    breaks = list(dict.fromkeys(breaks))
    made = {b: b.made_by for b in breaks if b.made_by is not None and b.made_by.is_reduction}
    rest = [b for b in breaks if b.came_in is not None and b not in made]
    merges = [b.node for b in breaks if b.node.is_merge]  # as an optimizer's, or a variable's
    tried = [
        Edited(_alike(node, nodes), edit, node)
        for node in dict.fromkeys([*made.values(), *merges])
        for edit in _CHANGED
    ]
    terms = [b.term for b in rest if b.term is not None]
    if terms:
        told = min(terms, key=lambda term: term.told.is_backward).told
        own = tuple(dict.fromkeys(term.node for term in terms))
        tried.append(Edited(own, terms[0].edit, told, is_term=True))
    came_in = tuple(dict.fromkeys(b.came_in for b in rest if b.came_in is not None))
    repaired = list[Edited]()
    if came_in:
        told, edits = rest[0].made_by or came_in[0], _edits_of(rest[0].kind)
        repaired = [Edited(came_in, edit, told) for edit in edits or ("averaged", "summed")]
    nearest: dict[tuple[str, str], Node] = {}
    for node in upstream([*(b.node for b in breaks), *ends]):
        if node.is_reduction:
            nearest.setdefault((node.line, node.name), node)
    changed = [
        Edited(_alike(node, nodes), edit, node)
        for node in list(nearest.values())[:_NEAREST]
        for edit in _CHANGED
    ]
    if rest and rest[0].kind is not None and rest[0].kind.form == EQUAL:
        tried += repaired + changed
    else:  # a reduction that is there is changed before one is added
        tried += changed + repaired
    return [x._replace(nodes=_editable(x.nodes)) for x in dict.fromkeys(tried)]


def _editable(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Returns values whose edit is that of others, which cross-replica code computes."""
    across = [x for node in nodes if node.is_cross or node.is_merge for x in node.inputs]
    own = (node for node in nodes if not (node.is_cross or node.is_merge))
    return tuple(dict.fromkeys([*own, *(x for x in across if x.is_part and not x.is_cross)]))


def _alike(node: Node, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Returns the values that the same line computes in the same way."""
    return tuple(n for n in nodes if (n.line, n.name) == (node.line, node.name))


def _on_the_way(ends: Sequence[Node], locator: Locator) -> list[Edited]:
    """Returns changes of what values are computed from that make it that of one replica.

    A change is of all that one line computes of one kind (the leaves of a tree of gradients),
    but for what is only used there; the first line, where such a value is made, comes first.
    """
    behind = set(upstream(ends))
    by_line: dict[tuple[str, str], list[Node]] = {}
    for node in filter(behind.__contains__, locator.nodes):
        kinds = locator.kinds(node) or ()
        if kinds and not (may_be_right(kinds) or node.is_cross):
            for edit in _edits_of(kinds[0]):
                by_line.setdefault((node.told, edit), []).append(node)
    found = list[Edited]()
    for (_, edit), own in by_line.items():
        used = {x for node in own for x in node.inputs}
        last = tuple(node for node in own if node not in used)
        found.append(Edited(last, edit, last[-1]))
    return found


def _edits_of(kind: Kind | None) -> tuple[str, ...]:
    """Returns what may make a value of a kind that of one replica, the likeliest first."""
    is_share = kind is None or kind.form == SHARE  # its mean, too, where it is divided by another
    return _REPAIRS.get(kind or Kind(SHARE), ("summed", "averaged") if is_share else ())


def fix_text(edit: str, node: Node, *, is_term: bool = False) -> str:
    """Returns a fix that was tried with success, in words; see `Edited`."""
    line = node.line
    what = f"what {node.told} computes" + ("" if node.is_backward else f" ({node.name})")
    if is_term and edit == "divided":
        return (
            f"(...) / ctx.num_replicas_in_sync of the term that {line} adds, which is equal on "
            "all replicas; or the term added after the sum over the replicas"
        )
    if edit == "divided" and not node.is_reduction:
        return f"(...) / ctx.num_replicas_in_sync of {what}, which is R times too large"
    if edit == "multiplied" and not node.is_reduction:
        of = "a share of the whole batch's mean beside a mean of this replica's rows"
        of = of if is_term else "as a number of this replica's rows is of that of all"
        return (
            f"ctx.num_replicas_in_sync * (...) of {what}, which is 1 / R of what it has to be, {of}"
        )
    return {
        "divided": f"a mean in place of the sum at {line}: {_MEANS}",
        "multiplied": f"a sum in place of the mean at {line}: {_SUMS}",
        "not summed": f"each replica's own value in place of the sum at {line}",
        "not averaged": f"each replica's own value in place of the mean at {line}",
        "averaged": f"the mean over the replicas of {what}: {_MEANS}",
        "summed": f"the sum over the replicas of {what}: {_SUMS}",
        "the largest": f"the largest over the replicas of {what}: jax.lax.pmax(x, axis)",
        "the smallest": f"the smallest over the replicas of {what}: jax.lax.pmin(x, axis)",
    }[edit]
