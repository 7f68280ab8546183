"""merge_call as a primitive: binding, derivatives, batching.

A merge holds a function of the global view, while its operands and results are in the replica
view; the emitter evaluates it between two segments, with proved localities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.errors import MergeError, message
from distjax.jax_compat import ShapedArray, Zero
from distjax.placement.topology import Topology
from distjax.replica.analysis import MERGE_NAME
from distjax.replica.global_value import GlobalValue, replica_mean, replica_sum, stack_replicas
from distjax.typing import PyTree


class Merge(Protocol):
    """The content of a merge equation.

    Attributes:
      out_avals: shapes and dtypes of the results, in the replica view.
      out_varying: which results differ; None: that is not known until it is emitted.
    """

    out_avals: Sequence[ShapedArray]
    out_varying: Sequence[bool] | None

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Evaluates the merge in the global view."""
        ...


merge_p = jax_compat.Primitive(MERGE_NAME)
merge_p.multiple_results = True


@merge_p.def_abstract_eval
def _merge_abstract_eval(*_: ShapedArray, merge: Merge) -> list[ShapedArray]:
    return list(merge.out_avals)


def _is_differentiable(aval: ShapedArray) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _plain(aval: ShapedArray) -> ShapedArray:
    return ShapedArray(aval.shape, aval.dtype)


# -- forward mode -------------------------------------------------------------


class TangentMerge:
    """The merge that is linear in the tangents of another merge's operands.

    Operands: all operands of `base`, then one tangent for each index in `live`.
    Results: one tangent for each differentiable result of `base`.
    """

    out_varying: Sequence[bool] | None = None

    def __init__(self, base: Merge, num_operands: int, live: tuple[int, ...]):
        self.base, self.num_operands, self.live = base, num_operands, live
        self.out_avals: Sequence[ShapedArray] = [
            _plain(a) for a in base.out_avals if _is_differentiable(a)
        ]

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Returns the tangents, each with the locality of its result."""
        operands, tangents = values[: self.num_operands], values[self.num_operands :]
        fn = _Flat(self.base, operands, self.live, topology)
        aligned = [
            _align_tangent(t, operands[i].varying, topology)
            for i, t in zip(self.live, tangents, strict=True)
        ]
        _, outs = jax.jvp(fn, fn.primals, aligned)
        return [GlobalValue(o, f) for o, f in zip(outs, fn.out_varying, strict=True)]


def _align_tangent(tangent: GlobalValue, operand_varying: bool, topology: Topology) -> jax.Array:
    # An equal operand stands for R equal copies, of which the function sees only one, so
    # differing tangents enter as their mean: the transpose of the 1/R in CotangentMerge.
    if operand_varying:
        return stack_replicas(tangent, topology)
    return replica_mean(tangent, topology)


class _Flat:
    """A merge as a function of its live operands to its differentiable results."""

    def __init__(
        self, base: Merge, operands: Sequence[GlobalValue], live: Sequence[int], topology: Topology
    ):
        self._base, self._operands, self._live = base, list(operands), live
        self._topology = topology
        self.primals = [jnp.asarray(operands[i].array) for i in live]
        self.out_varying: list[bool] = []

    def __call__(self, *live: jax.Array) -> list[Any]:
        values = list(self._operands)
        for i, array in zip(self._live, live, strict=True):
            values[i] = GlobalValue(array, values[i].varying)
        outs = [
            o
            for o, aval in zip(
                self._base.emit(values, self._topology), self._base.out_avals, strict=True
            )
            if _is_differentiable(aval)
        ]
        self.out_varying = [o.varying for o in outs]
        return [jnp.asarray(o.array) for o in outs]


def _merge_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, merge: Merge
) -> tuple[list[Any], list[Any]]:
    outs = merge_p.bind(*primals, merge=merge)
    live = tuple(
        i
        for i, t in enumerate(tangents)
        if not isinstance(t, Zero) and t.dtype != jax.dtypes.float0
    )
    zeros = [Zero(jax_compat.aval_of(o).to_tangent_aval()) for o in outs]
    if not live:
        return outs, zeros
    tangent_merge = TangentMerge(merge, len(primals), live)
    found = iter(merge_p.bind(*primals, *(tangents[i] for i in live), merge=tangent_merge))
    return outs, [
        next(found) if _is_differentiable(a) else z
        for a, z in zip(merge.out_avals, zeros, strict=True)
    ]


jax_compat.primitive_jvps[merge_p] = _merge_jvp


# -- reverse mode -------------------------------------------------------------


class CotangentMerge:
    """The transpose of a TangentMerge.

    Operands: all operands of the base merge, then one cotangent for each index in `given` of
    the tangent results. Results: one cotangent for each live operand.

    A result that is equal on all replicas receives the sum of the cotangents they send back. An
    equal operand stands for R copies, so each replica's share of its cotangent is 1/R.
    """

    out_varying: Sequence[bool] | None = None

    def __init__(self, tangent: TangentMerge, given: tuple[int, ...], avals: Sequence[Any]):
        self.tangent, self.given = tangent, given
        self.out_avals = [_plain(a) for a in avals]

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Returns the cotangents, each with the locality of its operand."""
        tangent = self.tangent
        operands, sent = values[: tangent.num_operands], values[tangent.num_operands :]
        fn = _Flat(tangent.base, operands, tangent.live, topology)
        outs, pull_back = jax.vjp(fn, *fn.primals)
        cotangents = [jnp.zeros_like(o) for o in outs]
        for i, value in zip(self.given, sent, strict=True):
            combine = stack_replicas if fn.out_varying[i] else replica_sum
            cotangents[i] = combine(value, topology).astype(outs[i].dtype)
        returned = pull_back(cotangents)
        varying = [operands[i].varying for i in tangent.live]
        return [
            GlobalValue(r if d else r / topology.num_replicas, d)
            for r, d in zip(returned, varying, strict=True)
        ]


def _merge_transpose(cotangents: Sequence[Any], *operands: PyTree, merge: Merge) -> list[Any]:
    if not isinstance(merge, TangentMerge):
        raise MergeError(
            message(
                "jax.linear_transpose needs a function without a merge_call",
                got="a merge_call in the function to transpose",
                why="nothing says that a merge function is linear; its derivatives are",
                fix="_, transpose = jax.vjp(fn, x), in place of jax.linear_transpose(fn, x)",
            )
        )
    linear = operands[merge.num_operands :]
    given = tuple(i for i, ct in enumerate(cotangents) if not isinstance(ct, Zero))
    avals = [t.aval if jax_compat.is_undefined_primal(t) else jax_compat.aval_of(t) for t in linear]
    transposed = CotangentMerge(merge, given, avals)
    sent = [jax.numpy.asarray(cotangents[i]) for i in given]
    outs = merge_p.bind(*operands[: merge.num_operands], *sent, merge=transposed)
    return [None] * merge.num_operands + [
        o if jax_compat.is_undefined_primal(t) else None for o, t in zip(outs, linear, strict=True)
    ]


jax_compat.primitive_transposes[merge_p] = _merge_transpose


# -- batching -----------------------------------------------------------------


class BatchedMerge:
    """A merge mapped over an extra axis of its operands, leading in its results."""

    out_varying: Sequence[bool] | None = None

    def __init__(self, base: Merge, dims: Sequence[int | None], size: int):
        self.base, self.dims, self.size = base, tuple(dims), size
        self.out_avals = [ShapedArray((size, *a.shape), a.dtype) for a in base.out_avals]

    def emit(self, values: Sequence[GlobalValue], topology: Topology) -> list[GlobalValue]:
        """Maps the global-view function over the extra axis, after any replica axis."""
        out_varying: list[bool] = []

        def one(*arrays: jax.Array) -> list[Any]:
            global_values = [GlobalValue(a, v.varying) for a, v in zip(arrays, values, strict=True)]
            outs = self.base.emit(global_values, topology)
            out_varying[:] = [o.varying for o in outs]
            return [jnp.asarray(o.array) for o in outs]

        axes = tuple(
            None if d is None else d + int(v.varying)
            for d, v in zip(self.dims, values, strict=True)
        )
        outs = jax.vmap(one, in_axes=axes, out_axes=0, axis_size=self.size)(
            *(v.array for v in values)
        )
        return [
            GlobalValue(jnp.moveaxis(o, 0, 1) if f else o, f)
            for o, f in zip(outs, out_varying, strict=True)
        ]


def _merge_batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, merge: Merge
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    outs = merge_p.bind(*operands, merge=BatchedMerge(merge, dims, size))
    return outs, [0] * len(outs)


jax_compat.primitive_batchers[merge_p] = _merge_batch
