"""Partitioned variables in an update: each shard is computed from its own rows, where possible.

The user's merge works on whole values. Here it becomes a function of shards: an equation that
computes each row from the same row of its operands runs shard by shard, and a lookup of rows runs
in each shard. All others run on whole values, concatenated from the shards. That is correct too,
but it needs shards of several servers, which is for `stages.py` to find.

What has an operand in shards is computed in these. The rest is computed whole, and by rows as well;
of the forms of a value only those remain that a result needs, so that it is sliced early.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from distjax._src import jax_compat
from distjax._src.jax_compat import Jaxpr, JaxprEqn, Literal, Var
from distjax._src.placement import ELEMENTWISE
from distjax._src.servers.cutting.code import (
    Code,
    aval_of_atom,
    eval_equation,
    eval_opened,
    opens_call,
    trace_code,
)

# -- what equations do to rows ------------------------------------------------


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
    """Returns the rows `here` of the result of an equation for which `rows_taken` is not None.

    The operands that it takes by rows are these rows of them; the others are whole.
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


# -- a function of shards -----------------------------------------------------


#: How many rows the shards of a value have, in order; empty: it is whole.
Sizes: TypeAlias = tuple[int, ...]


def in_shards(code: Code, taken: Sequence[Sizes], given: Sequence[Sizes]) -> Code:
    """Returns code that takes and returns shards, of these sizes, in place of whole values."""
    code = _with_reshapes_merged(_without_branches(code))
    avals = [aval for v, sizes in zip(code.inputs, taken, strict=True) for aval in _avals(v, sizes)]
    all_sizes = list(dict.fromkeys(filter(None, (*taken, *given))))
    bind = functools.partial(_bind, code.jaxpr, all_sizes)

    def run(*arrays: jax.Array) -> list[Any]:
        rest = iter(arrays)
        consts = [_Value({(): (c,)}) for c in code.consts]
        inputs = [_Value({sizes: tuple(next(rest) for _ in sizes or (0,))}) for sizes in taken]
        results = jax_compat.eval_jaxpr(code.jaxpr, (), consts + inputs, bind)
        return [x for v, sizes in zip(results, given, strict=True) for x in _value(v).get(sizes)]

    made = trace_code(run, avals)
    return made.cut_to(range(len(made.outputs)))  # without the forms that nothing needs


def _without_branches(code: Code) -> Code:
    """Returns the code with calls inlined, and branches that do nothing but compute.

    All branches are computed, and then selected from element by element, so also row by row.
    """

    def evaluate(jaxpr: Jaxpr, eqn: JaxprEqn, ins: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive.name != "cond" or eqn.effects:
            return eval_equation(jaxpr, eqn, ins)
        index, *operands = ins
        branches = map(jax_compat.open_jaxpr, eqn.params["branches"])
        cases = [eval_opened(*branch, operands, opens_call, evaluate) for branch in branches]
        return [jax.lax.select_n(index, *each) for each in zip(*cases, strict=True)]

    def run(*arrays: jax.Array) -> list[Any]:
        everything = *code.consts, *arrays
        return eval_opened(code.jaxpr, (), everything, opens_call, evaluate)

    return trace_code(run, [aval_of_atom(v) for v in code.inputs])


def _with_reshapes_merged(code: Code) -> Code:
    """Returns the code with successive reshapes merged into one.

    A dimension of size 1 that comes first and goes again would hide the rows.
    """

    def run(*arrays: jax.Array) -> list[Any]:
        roots: dict[int, Any] = {}  # what reshaped values were before, by name

        def bind(eqn: JaxprEqn, ins: Sequence[Any]) -> Sequence[Any]:
            if not keeps_elements(eqn):
                return eval_equation(code.jaxpr, eqn, ins)
            (out,) = eqn.outvars
            roots[id(out)] = roots.get(id(eqn.invars[0]), ins[0])
            return [jax.lax.reshape(roots[id(out)], shape_of(out))]

        return jax_compat.eval_jaxpr(code.jaxpr, (), (*code.consts, *arrays), bind)

    return trace_code(run, [aval_of_atom(v) for v in code.inputs])


def _avals(atom: Var, sizes: Sizes) -> list[Any]:
    whole = aval_of_atom(atom)
    shapes = [(n, *whole.shape[1:]) for n in sizes] or [whole.shape]
    return [jax_compat.ShapedArray(shape, whole.dtype) for shape in shapes]


def _row_ranges(sizes: Sizes) -> list[RowRange]:
    return [RowRange(sum(sizes[:i]), n) for i, n in enumerate(sizes)]


class _Value:
    """A value in the form that was computed, whole or in shards; converted to any that is needed.

    Attributes:
      forms: its shards, by their sizes; a whole value is its only shard. The first one is computed
        from what there is: if that is in shards, the value is not computed whole.
    """

    def __init__(self, forms: dict[Sizes, tuple[Any, ...]]):
        self.forms = forms

    @property
    def sizes(self) -> Sizes:
        """The sizes in which it was computed."""
        return next(iter(self.forms))

    def get(self, sizes: Sizes) -> tuple[Any, ...]:
        """Returns its shards of these sizes."""
        if sizes not in self.forms and () not in self.forms:
            self.forms[()] = (jnp.concatenate(self.forms[self.sizes]),)
        if sizes not in self.forms:
            (whole,) = self.forms[()]
            rows = _row_ranges(sizes)
            cut = [jax.lax.slice_in_dim(whole, p.start, p.start + p.num_rows) for p in rows]
            self.forms[sizes] = tuple(cut)
        return self.forms[sizes]


def _value(found: object) -> _Value:
    return found if isinstance(found, _Value) else _Value({(): (found,)})  # a literal


def _bind(
    jaxpr: Jaxpr, all_sizes: Sequence[Sizes], eqn: JaxprEqn, ins: Sequence[Any]
) -> Sequence[_Value]:
    """Evaluates an equation: in shards if an operand is; else whole, and in any that may be needed.

    So what a worker sends is sliced before anything is computed from it.
    """
    values, takes = list(map(_value, ins)), rows_taken(eqn)
    by_rows = functools.partial(_by_rows, jaxpr, eqn, values, takes or ())
    taken = [v.sizes for v, is_taken in zip(values, takes or (), strict=False) if is_taken]
    sizes = next(filter(None, taken), ())
    if sizes:
        return [_Value({sizes: by_rows(sizes)})]
    outs = [_Value({(): (x,)}) for x in _whole(jaxpr, eqn, values)]
    if takes is not None:
        (num_rows, *_), (out,) = shape_of(eqn.outvars[0]), outs
        out.forms.update((s, by_rows(s)) for s in all_sizes if sum(s) == num_rows)
    return outs


def _whole(jaxpr: Jaxpr, eqn: JaxprEqn, values: Sequence[_Value]) -> Sequence[Any]:
    others = [v.get(())[0] for v in values[1:]]
    if values and values[0].sizes:
        found = look_up(jaxpr, eqn, values[0].get(values[0].sizes), others)
        if found is not None:
            return [found]
    return eval_equation(jaxpr, eqn, [v.get(())[0] for v in values[:1]] + others)


def _by_rows(
    jaxpr: Jaxpr, eqn: JaxprEqn, values: Sequence[_Value], takes: Sequence[bool], sizes: Sizes
) -> tuple[Any, ...]:
    pairs = zip(values, takes, strict=True)
    operands = [v.get(sizes) if rows else v.get(()) * len(sizes) for v, rows in pairs]
    return tuple(
        run_on_rows(jaxpr, eqn, here, rows)
        for here, *rows in zip(_row_ranges(sizes), *operands, strict=True)
    )
