"""Chunks: what one call of an iterator delivers, an element or several as `Steps`."""

from __future__ import annotations

import dataclasses
from typing import Any

from distjax.data.agreement import Report, describe_elements
from distjax.data.block import Block, HostElement
from distjax.data.elements import HostTree
from distjax.data.input_layout import InputLayout
from distjax.data.stream import End, HostStream
from distjax.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Steps:
    """Input of K steps, moved to the devices in one transfer.

    To process them in one compiled loop, scan over `arrays` and pass each step
    ``steps.as_element(slice)``, which equals what `next` would have returned.

    Attributes:
      num_steps: K.
      arrays: the structure of an element; leaves are arrays [K, R, B, ...] laid out
        over the replicas along their second dimension; [K, B, ...] if R is 1.
      layout: how elements lie on the devices.
    """

    num_steps: int
    arrays: Any
    layout: InputLayout

    def as_element(self, arrays: PyTree) -> Any:
        """Returns one step's slices [R, B, ...] of `arrays` as an element."""
        return self.layout.as_element(arrays)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one call of the iterator returns.

    Attributes:
      block: its elements on the host.
      result: what is returned to the user.
      said: what the processes of a job compare.
    """

    block: Block
    result: Any
    said: Report | None


def outcomes_of(items: list[Chunk | End]) -> list[HostElement | End]:
    """Takes items apart: returns their elements one by one, and the ends among them."""
    return [
        outcome
        for item in items
        for outcome in ([item] if isinstance(item, End) else item.block.elements)
    ]


def peek_chunk(
    stream: HostStream, layout: InputLayout, steps: int | None
) -> tuple[Chunk | End, list[HostElement | End]]:
    """Returns the next element, or up to `steps` of them stacked, and what follows."""
    try:
        allocate = layout.allocate if layout.copies or steps is not None else None
        block = stream.peek(steps or 1, allocate)
        if isinstance(block, End):
            return block, stream.ahead
        return make_chunk(block, block.tree, layout, steps), stream.ahead[len(block) :]
    except Exception as error:  # re-raised in the loop
        return End(error), stream.ahead


def make_chunk(block: Block, tree: HostTree, layout: InputLayout, steps: int | None) -> Chunk:
    """Returns elements, leaves [k, R, B, ...], as delivered: k steps, or one element."""
    said = None
    if layout.spans_processes:
        is_first = block.state_before["delivered"] == 0
        said = describe_elements(tree, is_own=layout.is_own, is_first=is_first)
    if steps is None:
        element = HostTree(tree.treedef, [leaf[0] for leaf in tree.leaves])
        return Chunk(block, layout.to_element(element), said)
    return Chunk(block, Steps(len(tree.leaves[0]), layout.to_steps(tree), layout), said)
