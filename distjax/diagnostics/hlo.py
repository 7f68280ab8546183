"""Counts the collectives of a compiled program from its HLO text.

Two programs that move the same bytes with the same collectives have the same
communication cost. The counts are static: a collective in the body of a loop is one
operation, however often the loop runs.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
    "all-to-all",
)

# "name = type opcode(": a type contains neither the "%" of an operand nor the quotes
# of metadata, so the opcode found is the instruction's own. Of an asynchronous
# pair only "-done" counts: its type is that of the result, while that of "-start"
# also lists operands and context buffers for some kinds.
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?[\w.\-]+\s+=\s+(?P<type>[^\"%]*?)"
    rf"\s(?P<kind>{'|'.join(KINDS)})(?:-done)?\((?P<rest>.*)",
    re.MULTILINE,
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\]")
_BITS_WITHOUT_WIDTH = {"pred": 8, "token": 0}


class CollectiveCount(NamedTuple):
    """The number of collectives of one kind, and the bytes of their results.

    Attributes:
      num_ops: instructions; one that reduces several arrays at once counts once.
      result_bytes: bytes of all results, on one device.
    """

    num_ops: int
    result_bytes: int


def count_collectives(hlo_text: str) -> dict[str, CollectiveCount]:
    """Returns the collectives of a compiled program, by kind.

    Args:
      hlo_text: the text of an optimized HLO module, as returned by
        `compiled.as_text()`. The text of a program that is only lowered (StableHLO)
        has no HLO instructions and gives an empty result.

    Returns:
      A dictionary from kind (one of `KINDS`) to its `CollectiveCount`, without kinds
      that do not occur. An asynchronous pair counts once.

    Example:
      >>> count_collectives("  %sum = (f32[4]{0}, s8[]) all-reduce(%a, %b)")
      {'all-reduce': CollectiveCount(num_ops=1, result_bytes=17)}

      A data-parallel mean on 8 devices is one all-reduce of four bytes:

      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import Mesh, PartitionSpec
      >>> mesh = Mesh(jax.devices()[:8], "replica")
      >>> mean = jax.shard_map(
      ...     lambda x: jax.lax.pmean(x.mean(), "replica"),
      ...     mesh=mesh,
      ...     in_specs=PartitionSpec("replica"),
      ...     out_specs=PartitionSpec(),
      ... )
      >>> program = jax.jit(mean).lower(jnp.ones(16)).compile()
      >>> count_collectives(program.as_text())["all-reduce"]
      CollectiveCount(num_ops=1, result_bytes=4)
    """
    return count_by_kind((kind, size) for kind, size, _ in collective_instructions(hlo_text))


def count_by_kind(sizes: Iterable[tuple[str, int]]) -> dict[str, CollectiveCount]:
    """Returns the collectives by kind, given the kind and the bytes of each one."""
    counts: dict[str, CollectiveCount] = {}
    for kind, size in sizes:
        num_ops, result_bytes = counts.get(kind, (0, 0))
        counts[kind] = CollectiveCount(num_ops + 1, result_bytes + size)
    return counts


def collective_instructions(hlo_text: str) -> Iterator[tuple[str, int, str]]:
    """Yields the kind, the result bytes and the rest of the line of each collective."""
    for found in _INSTRUCTION.finditer(hlo_text):
        yield found["kind"], type_bytes(found["type"]), found["rest"]


def type_bytes(hlo_type: str) -> int:
    """Returns the size of a value of an HLO type; for a tuple, the sum over its parts.

    Args:
      hlo_type: a type in HLO syntax, with or without a layout.

    Returns:
      Bytes without padding. A bounded dimension (`<=8`) counts at its bound; each
      array of packed 2- or 4-bit elements is rounded up to a byte.

    Example:
      >>> type_bytes("(f32[2,3]{1,0:T(8,128)}, /*index=1*/bf16[], s4[3])")
      28
    """
    return sum(_array_bytes(array["dtype"], array["dims"]) for array in _ARRAY.finditer(hlo_type))


def _array_bytes(dtype: str, dims: str) -> int:
    num_elements = math.prod(int(dim.strip("<= ")) for dim in dims.split(",") if dim)
    return math.ceil(num_elements * _element_bits(dtype) / 8)


def _element_bits(dtype: str) -> int:
    # The first number in the name is the width: f8e4m3fn has 8 bits, c64 has 64.
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else _BITS_WITHOUT_WIDTH[dtype]
