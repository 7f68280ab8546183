"""Replicas that share a device: what `vmap` rejects, or does unlike separate devices.

On one device all replicas run under `vmap`. Its rules do not support groups of replicas or partial
permutations, give an `all_to_all` of an equal value the wrong shape, let a `custom_vmap` mistake
the replica axis for a user's, and cannot map some primitives. Such equations are evaluated here
from other operations of the same meaning; all others are left to JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distjax import jax_compat
from distjax.errors import message
from distjax.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn
from distjax.jaxprs import evaluate_inside
from distjax.replica.analysis import Analysis
from distjax.typing import ArrayLike

#: Primitives that are replaced by the evaluation of their inner jaxpr.
_INLINED = frozenset("jit closed_call eval_jaxpr composite custom_vmap_call".split())
#: Primitives whose `vmap` rule requires all operands to be mapped.
_ALL_MAPPED = frozenset("ragged_dot ragged_dot_general".split())


class OneDevice:
    """Evaluates jaxprs of replica functions inside `vmap`.

    Args:
      analysis: the analysis for the replica axis.
      num_replicas: R, the size of the axis.

    Attributes:
      axis_name: the name of the replica axis.
    """

    def __init__(self, analysis: Analysis, num_replicas: int):
        self._analysis, self.num_replicas = analysis, num_replicas
        self.axis_name = analysis.axis_name

    def evaluate(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of `jaxpr` as separate devices would compute them."""
        if not any(map(self._is_special, jaxpr.eqns)):
            return jax_compat.eval_jaxpr(jaxpr, consts, args)
        return jax_compat.eval_jaxpr(jaxpr, consts, args, self._equation)

    def _is_special(self, eqn: JaxprEqn) -> bool:
        name, params = eqn.primitive.name, eqn.params
        if name in _ALL_MAPPED or name in ("composite", "custom_vmap_call"):
            return True
        if name == "pure_callback":
            return params.get("vmap_method") is None
        if name == "io_callback":
            return bool(params.get("ordered"))
        if self._analysis.over_replicas(eqn):
            is_partial = name == "ppermute" and len(params["perm"]) != self.num_replicas
            return is_partial or name == "all_to_all" or bool(params.get("axis_index_groups"))
        return any(self._is_special(e) for sub in jax_compat.sub_jaxprs(eqn) for e in sub.eqns)

    def _equation(self, eqn: JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if not self._is_special(eqn):
            return jax_compat.bind_equation(eqn, ins)
        if self._analysis.over_replicas(eqn):
            return [self._collective(name, ins[0], params)]
        if name in _INLINED:
            return self.evaluate(*jax_compat.called_jaxpr(eqn), ins)
        if name == "remat2":
            options = {key: params[key] for key in ("prevent_cse", "policy")}
            return jax.checkpoint(self._as_function(params["jaxpr"]), **options)(*ins)
        if name in ("scan", "while", "cond"):
            return evaluate_inside(eqn, ins, self.evaluate)
        if name in ("custom_jvp_call", "custom_vjp_call"):
            evaluate = jax.custom_jvp(self._as_function(params["call_jaxpr"]))
            evaluate.defjvp(_refuse_derivative)
            return evaluate(*ins)
        if name in _ALL_MAPPED:
            return jax_compat.bind_equation(eqn, list(map(self._spread, ins)))
        if "callback" in name:
            return self._one_by_one(eqn, ins)
        return jax_compat.bind_equation(eqn, ins)  # JAX reports what it cannot map

    def _one_by_one(self, eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
        """Returns the results of an equation that runs for one replica at a time."""
        rows = [lax.all_gather(x, self.axis_name) for x in ins]
        run = lambda row: list(jax_compat.bind_equation(eqn, row[1:]))
        outs = lax.map(run, [jnp.arange(self.num_replicas), *rows])
        return [self.own_row(out) for out in outs]

    def own_row(self, rows: ArrayLike) -> jax.Array:
        """Returns this replica's row of an array or table shared by all."""
        return jnp.asarray(rows)[lax.axis_index(self.axis_name)]

    def _spread(self, x: ArrayLike) -> jax.Array:
        """Returns `x` as a mapped value, even if it is equal on all replicas."""
        is_any = jnp.broadcast_to(lax.axis_index(self.axis_name) >= 0, jnp.shape(x))
        return lax.select(is_any, jnp.asarray(x), jnp.asarray(x))

    # -- collectives -----------------------------------------------------------

    def _collective(self, name: str, x: ArrayLike, params: Mapping[str, Any]) -> jax.Array:
        groups = params.get("axis_index_groups")
        if name == "ppermute":
            return self._permute(x, params["perm"])
        if not groups:  # `vmap` handles an all_to_all of mapped values correctly
            return lax.all_to_all_p.bind(self._spread(x), **params)
        group = _Group(self, x, groups)
        if name == "all_gather":
            return _join(group.rows, params["all_gather_dimension"], params["tiled"])
        if name == "reduce_scatter":
            total, axis = group.reduce(jnp.sum, 0), params["scatter_dimension"]
            return group.part(total, axis, params["tiled"])
        if name == "all_to_all":
            axis = params["split_axis"]  # the equation is in tiled form either way
            parts = jax.vmap(lambda row: group.part(row, axis, tiled=True))(group.rows)
            return _join(parts, params["concat_axis"], tiled=True)
        reduce = {"pmax": jnp.max, "pmin": jnp.min}.get(name)
        return group.reduce(jnp.sum, 0) if reduce is None else group.reduce(reduce, None)

    def _permute(self, x: ArrayLike, perm: Sequence[tuple[int, int]]) -> jax.Array:
        source, has_source = np.zeros(self.num_replicas, int), np.zeros(self.num_replicas, bool)
        for sender, receiver in perm:
            source[receiver], has_source[receiver] = sender, True
        row = lax.all_gather(x, self.axis_name)[self.own_row(source)]
        return jnp.where(self.own_row(has_source), row, jnp.zeros_like(row))

    def _as_function(self, closed: ClosedJaxpr) -> Callable[..., list[Any]]:
        """Returns a function that evaluates the code as separate devices would."""
        jaxpr, consts = jax_compat.open_jaxpr(closed)
        return lambda *args: self.evaluate(jaxpr, consts, args)


class _Group:
    """The values of the replicas in this replica's group.

    Attributes:
      rows: [k, ...], in group order; k is the size of the largest group.
    """

    def __init__(self, device: OneDevice, x: ArrayLike, groups: Sequence[Sequence[int]]):
        self.size = max(map(len, groups))
        members = np.zeros((device.num_replicas, self.size), int)
        position, sizes = np.zeros(device.num_replicas, int), np.zeros(device.num_replicas, int)
        for group in groups:
            for place, replica in enumerate(group):
                members[replica] = [*group, *[group[0]] * (self.size - len(group))]
                position[replica], sizes[replica] = place, len(group)
        self.rows = lax.all_gather(x, device.axis_name)[device.own_row(members)]
        self._position, self._num_members = device.own_row(position), device.own_row(sizes)

    def reduce(self, reduce: Callable[..., Any], missing: int | None) -> jax.Array:
        """Reduces the rows; `missing` pads groups smaller than the largest."""
        rows = self.rows
        if missing is not None:
            is_row = jnp.arange(self.size) < self._num_members
            is_row = is_row.reshape(-1, *[1] * (rows.ndim - 1))
            rows = jnp.where(is_row, rows, jnp.asarray(missing, rows.dtype))
        return reduce(rows, axis=0).astype(rows.dtype)

    def part(self, value: jax.Array, axis: int, tiled: bool) -> jax.Array:
        """Returns the part of `value` for this replica's position in the group."""
        if not tiled:
            return lax.dynamic_index_in_dim(value, self._position, axis, keepdims=False)
        size = value.shape[axis] // self.size
        return lax.dynamic_slice_in_dim(value, self._position * size, size, axis)


def _join(rows: jax.Array, axis: int, tiled: bool) -> jax.Array:
    """Moves the first axis of rows [k, ...] to `axis`, merging it there if tiled."""
    moved = jnp.moveaxis(rows, 0, axis)
    if not tiled:
        return moved
    shape = moved.shape
    return moved.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _refuse_derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    raise NotImplementedError(
        message(
            "a derivative around run, on replicas that share a device, needs functions without a "
            "custom derivative rule around grouped collectives or partial permutations",
            got="one with such a rule",
            why="the rule is for jax.vmap, which knows no groups of replicas",
            fix="jax.grad inside the replica function; or a MirroredStrategy",
        )
    )
