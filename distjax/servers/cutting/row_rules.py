"""What equations do to rows: which compute each row from the same row of an operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from distjax.jax_compat import Jaxpr, JaxprEqn, Literal, Var
from distjax.placement.axis_rules import ELEMENTWISE
from distjax.servers.cutting.code import aval_of_atom, eval_equation

REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
    "reduce_xor".split()
)
SCATTERS = frozenset("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub".split())


class RowRange(NamedTuple):
    """The rows of a shard: the number of the first one, and how many there are."""

    start: int
    num_rows: int


Operands: TypeAlias = Sequence[Any]


def shape_of(atom: Var | Literal) -> tuple[int, ...]:
    """Returns the shape of an atom."""
    return aval_of_atom(atom).shape


def rows_taken(eqn: JaxprEqn) -> list[bool] | None:
    """Returns which operands an equation takes by rows to compute its result by rows.

    It takes the others whole. None: a row of the result depends on more than that.
    """
    rule = _TAKEN.get(eqn.primitive.name)
    shape = () if rule is None else shape_of(eqn.outvars[0])
    return rule(eqn, shape) if rule is not None and shape else None


def keeps_elements(eqn: JaxprEqn) -> bool:
    """Returns whether the result has the elements of the operand, in their order."""
    if eqn.primitive.name not in ("broadcast_in_dim", "reshape", "squeeze"):
        return False
    (operand, *others), (out,) = eqn.invars, eqn.outvars
    return not others and math.prod(shape_of(operand)) == math.prod(shape_of(out))


def _elementwise(eqn: JaxprEqn, shape: tuple[int, ...]) -> list[bool]:
    return [shape_of(v)[:1] == shape[:1] for v in eqn.invars]  # others are scalars, or one row


def _first(eqn: JaxprEqn, is_so: bool) -> list[bool] | None:
    return [True] + [False] * (len(eqn.invars) - 1) if is_so else None


def _broadcast(eqn: JaxprEqn, shape: tuple[int, ...]) -> list[bool]:
    of_rows = eqn.params["broadcast_dimensions"][:1] == (0,)
    is_long = of_rows and shape_of(eqn.invars[0])[0] == shape[0]
    return [bool(is_long), *(False for _ in eqn.invars[1:])]


def _reshaped(eqn: JaxprEqn, shape: tuple[int, ...]) -> list[bool] | None:
    return _first(eqn, shape_of(eqn.invars[0])[:1] == shape[:1] and shape[0] > 0)


def _scattered(eqn: JaxprEqn, shape: tuple[int, ...]) -> list[bool] | None:
    dims = eqn.params["dimension_numbers"]
    is_by_row = 0 in dims.inserted_window_dims and 0 in dims.scatter_dims_to_operand_dims
    is_plain = not dims.operand_batching_dims and eqn.params["mode"] != GatherScatterMode.CLIP
    return _first(eqn, is_by_row and is_plain)


_TAKEN: dict[str, Callable[[JaxprEqn, tuple[int, ...]], list[bool] | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS, lambda eqn, _: _first(eqn, 0 not in eqn.params["axes"])),
    **dict.fromkeys(SCATTERS, _scattered),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": lambda eqn, _: _first(eqn, 0 not in eqn.params["dimensions"]),
    "transpose": lambda eqn, _: _first(eqn, eqn.params["permutation"][0] == 0),
}


def run_on_rows(jaxpr: Jaxpr, eqn: JaxprEqn, here: RowRange, operands: Operands) -> Any:
    """Returns the rows `here` of the result of an equation.

    Args:
      jaxpr: the jaxpr that holds it.
      eqn: an equation for which `rows_taken` is not None.
      here: which rows.
      operands: these rows of the operands that it takes by rows; the others whole.
    """
    name, shape = eqn.primitive.name, (here.num_rows, *shape_of(eqn.outvars[0])[1:])
    if name == "broadcast_in_dim":
        return jax.lax.broadcast_in_dim(operands[0], shape, eqn.params["broadcast_dimensions"])
    if name == "reshape":
        return jax.lax.reshape(operands[0], shape)
    if name in SCATTERS:  # rows that are elsewhere are dropped
        array, indices, updates = operands
        column = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims.index(0)
        local = _in_shard(indices, column, here.start)
        dropping = {**eqn.params, "mode": GatherScatterMode.FILL_OR_DROP}
        operands, eqn = (array, local, updates), eqn.replace(params=dropping)
    return eval_equation(jaxpr, eqn, operands)[0]


def _in_shard(indices: jax.Array, column: int, start: int) -> jax.Array:
    """Returns indices whose `column` counts rows from `start` on."""
    first = [start if i == column else 0 for i in range(indices.shape[-1])]
    return _wide(indices) - jnp.array(first, jnp.int32)


def _wide(indices: jax.Array) -> jax.Array:
    """Returns indices in a signed dtype that can number all rows."""
    wide = jnp.int64 if indices.dtype.itemsize > 4 else jnp.int32
    if indices.dtype in (jnp.uint32, jnp.uint64):  # what is out of bounds stays so
        indices = jnp.minimum(indices, jnp.array(jnp.iinfo(wide).max, indices.dtype))
    return indices.astype(wide)


# -- lookups ------------------------------------------------------------------


def look_up(jaxpr: Jaxpr, eqn: JaxprEqn, shards: Operands, others: Operands) -> Any:
    """Returns the result of an equation that looks up rows; None if it does something else.

    All rows are looked up in each shard; each shard's answer counts for the rows that it has.

    Args:
      jaxpr: the jaxpr that holds the equation.
      eqn: any equation.
      shards: the shards of its first operand.
      others: its other operands.
    """
    rule = {"gather": _gathered, "dynamic_slice": _sliced_at, "slice": _sliced}
    found = rule.get(eqn.primitive.name)
    return None if found is None else found(jaxpr, eqn, shards, others)


def _starts(shards: Operands) -> list[int]:
    return [sum(shard.shape[0] for shard in shards[:i]) for i in range(len(shards))]


def _gathered(jaxpr: Jaxpr, eqn: JaxprEqn, shards: Operands, others: Operands) -> Any:
    dims, (indices,) = eqn.params["dimension_numbers"], others
    is_by_row = 0 in dims.collapsed_slice_dims and 0 in dims.start_index_map
    if not is_by_row or dims.operand_batching_dims:
        return None
    column, shape = dims.start_index_map.index(0), shape_of(eqn.outvars[0])
    indices = _wide(indices)
    batch = [i for i in range(len(shape)) if i not in dims.offset_dims]
    result = None
    for start, shard in zip(_starts(shards), shards, strict=True):
        (rows,) = eval_equation(jaxpr, eqn, [shard, _in_shard(indices, column, start)])
        if result is not None:
            is_here = jax.lax.broadcast_in_dim(indices[..., column] >= start, shape, batch)
            rows = jnp.where(is_here, rows, result)
        result = rows
    return result


def _sliced_at(jaxpr: Jaxpr, eqn: JaxprEqn, shards: Operands, others: Operands) -> Any:
    if eqn.params["slice_sizes"][0] != 1:
        return None
    first, *more = map(_wide, others)
    result = None
    for start, shard in zip(_starts(shards), shards, strict=True):
        (row,) = eval_equation(jaxpr, eqn, [shard, first - start, *more])
        result = row if result is None else jnp.where(first >= start, row, result)
    return result


def _sliced(jaxpr: Jaxpr, eqn: JaxprEqn, shards: Operands, others: Operands) -> Any:
    (first, *starts), (last, *ends) = eqn.params["start_indices"], eqn.params["limit_indices"]
    if eqn.params["strides"] is not None:
        return None
    found = []
    for start, shard in zip(_starts(shards), shards, strict=True):
        low, high = max(first - start, 0), min(last - start, shard.shape[0])
        if low < high:
            found.append(jax.lax.slice(shard, (low, *starts), (high, *ends)))
    return jnp.concatenate(found) if found else None
