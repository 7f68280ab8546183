"""Arguments of a mapped function: turns rows into per-replica values by `in_axes`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distjax.errors import LocalityError, describe_value, message
from distjax.integers import is_int
from distjax.jax_compat import Tracer
from distjax.objects.program_form import ObjectKeywords
from distjax.objects.stateful import active_bridge, is_placeholder
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.placement.transfer import is_elsewhere, require_held, transfer
from distjax.replica.arguments import Static, is_array_or_struct, is_one_leaf, user_path
from distjax.replica.axis_prefix import broadcast_axes
from distjax.trees import first_leaf
from distjax.typing import PyTree


def as_axes(axes: PyTree, argument: str) -> Any:
    """Returns `in_axes` or `out_axes`, checked; a list of `in_axes` becomes a tuple.

    Raises:
      TypeError: a leaf that is neither an int nor None.
      ValueError: a negative int.
    """
    leaves = jax.tree.leaves(axes)
    wrong = [x for x in leaves if not is_int(x)]
    negative = [x for x in leaves if is_int(x) and x < 0]
    if not wrong and not negative:
        return tuple(axes) if type(axes) is list and argument == "in_axes" else axes
    raise (TypeError if wrong else ValueError)(
        message(
            f"pmap: {argument} needs ints of 0 or more, None, or a container of these",
            got=f"{wrong or negative} in {axes!r}",
            why="an axis is counted from the front; None stands for a value that all share",
            fix=f"dj.pmap(fn, {argument}=0)",
        )
    )


@dataclasses.dataclass(frozen=True)
class MappedArguments:
    """How a function's arguments are mapped.

    Attributes:
      function: the function's name, for errors.
      names: the names of its positional arguments, for errors.
      in_axes: a prefix of the positional arguments; keywords use axis 0.
      axis_size: R as the user gave it, or None.
      static: numbers of the positional arguments that are Python values.
    """

    function: str
    names: Sequence[str]
    in_axes: PyTree
    axis_size: int | None = None
    static: frozenset[int] = frozenset()

    def num_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Returns R, the size of the first mapped axis.

        Raises:
          ValueError: nothing is mapped.
        """
        if self.in_axes == 0:  # the common case; a PerReplica exposes its stacked array here
            for arg in args:
                rows = _rows_of(arg)
                if rows is not None:
                    return rows
        for path, leaf, axis in self._leaves(args, kwargs)[1]:
            if axis is not None:
                return _size(leaf, axis, path, self.function)
        raise ValueError(
            message(
                f"pmap of {self.function} requires at least one argument with a mapped axis",
                got=f"in_axes={self.in_axes!r} and {len(args) + len(kwargs)} arguments",
                why="the size of the mapped axes is the number of replicas"
                + ("; axis_size does not stand for it" if self.axis_size is not None else ""),
                fix="map at least one argument, even just jnp.arange(R); or strategy.run(fn, args)",
            )
        )

    def as_values(
        self, args: tuple[Any, ...], kwargs: dict[str, PyTree] | ObjectKeywords, topology: Topology
    ) -> tuple[tuple[Any, ...], Any]:
        """Returns the arguments for `run`, with a PerReplica where rows are mapped.

        Raises:
          ValueError: the number of rows is not that of replicas, or nothing is mapped.
          LocalityError: a PerReplica where the axis is None.
        """
        treedef, leaves = self._leaves(args, kwargs)
        values = [self._as_value(path, leaf, axis, topology) for path, leaf, axis in leaves]
        return jax.tree_util.tree_unflatten(treedef, values)

    def placed(
        self, args: tuple[Any, ...], kwargs: dict[str, PyTree] | ObjectKeywords, topology: Topology
    ) -> Any:
        """Returns the arguments with arrays from elsewhere moved to the replicas' devices."""
        treedef, leaves = self._leaves(args, kwargs)
        devices = set(topology.devices)

        def place(leaf: PyTree, axis: int | None) -> Any:
            if not is_elsewhere(leaf, devices):
                return leaf
            sharding = topology.mirrored if axis is None else topology.split_along(axis)
            return transfer(leaf, sharding)

        return jax.tree_util.tree_unflatten(treedef, [place(x, axis) for _, x, axis in leaves])

    def _leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, PyTree] | ObjectKeywords
    ) -> tuple[Any, list[tuple[str, Any, int | None]]]:
        """Returns the tree of (args, kwargs), and each leaf with its path and axis."""
        pairs, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_leaf)
        positional, keywords = treedef.children()
        for_keywords = [0] * keywords.num_leaves
        if isinstance(kwargs, ObjectKeywords):  # captured objects are not mapped
            count = len(jax.tree.leaves(kwargs.kwargs, is_leaf=_is_leaf))
            for_keywords = [0] * count + [None] * (keywords.num_leaves - count)
        try:
            axes = [*broadcast_axes(self._axes_of(len(args)), positional), *for_keywords]
        except ValueError as error:
            raise ValueError(self._prefix_text(error)) from None
        paths = [user_path(jax.tree_util.keystr(path), self.names) for path, _ in pairs]
        return treedef, [
            (path, leaf, axis) for path, (_, leaf), axis in zip(paths, pairs, axes, strict=True)
        ]

    def _axes_of(self, count: int) -> Any:
        """Returns `in_axes` with None for the static arguments."""
        axes = self.in_axes
        if not self.static:
            return axes
        axes = axes if isinstance(axes, tuple) else (axes,) * count
        mapped = [i for i in range(count) if i not in self.static]
        if mapped and mapped[-1] >= len(axes):  # trailing static arguments need no axis
            return axes
        return tuple(None if i in self.static else axes[i] for i in range(count))

    def _as_value(self, path: str, leaf: PyTree, axis: int | None, topology: Topology) -> Any:
        require_held(leaf, f"{path} of {self.function}")
        if axis is None:
            if isinstance(leaf, PerReplica):
                raise LocalityError(_per_replica_text(path, self.function, leaf))
            return leaf
        size = _size(leaf, axis, path, self.function)
        if size != topology.num_replicas:
            raise ValueError(self._rows_text(path, size, axis, topology))
        if isinstance(leaf, PerReplica):
            return leaf
        return PerReplica(jnp.moveaxis(jnp.asarray(leaf), axis, 0), topology)

    def _rows_text(self, path: str, size: int, axis: int, topology: Topology) -> str:
        return message(
            f"pmap of {self.function} needs {topology.num_replicas} rows in each mapped argument, "
            "one for each replica",
            got=f"{size} rows along axis {axis} of argument {path}",
            why="replica r takes row r of every mapped argument",
            fix="x.reshape(num_replicas, -1, *x.shape[1:]) for a batch; in_axes=None for what all "
            "replicas share",
        )

    def _prefix_text(self, error: ValueError) -> str:
        return message(
            f"pmap: in_axes={self.in_axes!r} needs to be a prefix of the positional arguments of "
            f"{self.function}",
            got=str(error),
            why="each axis in it stands for all arrays below it; each argument passed by keyword "
            "is mapped over its axis 0 and not counted",
            fix="in_axes=0, or a tuple with an axis for each positional argument",
        )


def _rows_of(tree: PyTree) -> int | None:
    """Returns the leading size of an array in `tree`, or None if it has none."""
    shape = getattr(first_leaf(tree), "shape", ())
    return shape[0] if shape else None


def _is_leaf(value: object) -> bool:
    return is_one_leaf(value) or _is_object(value)


def _is_object(value: object) -> bool:
    bridge = active_bridge()
    return is_placeholder(value) or (bridge is not None and bridge.is_stateful(value))


def _size(leaf: PyTree, axis: int, path: str, function: str) -> int:
    """Returns the number of rows of an argument.

    Raises:
      ValueError: it has no rows.
    """
    if isinstance(leaf, PerReplica):
        return leaf.num_replicas
    if is_array_or_struct(leaf) and len(leaf.shape) > axis:
        return leaf.shape[axis]
    got = describe_value(leaf.value if isinstance(leaf, Static) else leaf)
    if isinstance(leaf, Tracer):  # numbers are traced too
        got = f"an array or a number of shape {leaf.shape}"
    fix = "in_axes=None for what all replicas share; static_broadcasted_argnums for a Python object"
    if _is_object(leaf):
        got = "an object whose state the program writes back: a module or a variable"
        fix = "in_axes=None, as all replicas share it; for rows of an nnx.State: nnx.as_pure(state)"
    raise ValueError(
        message(
            f"pmap of {function} needs an array with rows along axis {axis} as argument {path}",
            got=got,
            why="in_axes says that each replica takes a row of it",
            fix=fix,
        )
    )


def _per_replica_text(path: str, function: str, value: PerReplica) -> str:
    return message(
        f"argument {path} of {function} needs one value for all replicas: its axis is None",
        got=f"a PerReplica of {value.num_replicas} values",
        why="it has a value for each replica",
        fix="in_axes=0 for it; or strategy.reduce('mean', x) for one value",
    )
