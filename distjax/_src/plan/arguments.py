"""What each argument of a lowered step is: its name as the user writes it, its cause, its place.

A program takes the variables that it writes, those that it reads, what keyword arguments and
captured objects hold, and the user's arguments; the compiler names each by its path in that tree.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.tree_util import keystr

from distjax._src import jax_compat
from distjax._src.diagnostics.explain_step import Notes
from distjax._src.objects.stateful import ObjectKeywords, is_placeholder
from distjax._src.placement import PerReplica, is_host_memory
from distjax._src.program.jit import LoweredProgram
from distjax._src.replica.arguments import positional_names, user_path
from distjax._src.typing import DTypeLike, PyTree
from distjax._src.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array that a step takes.

    Attributes:
      path: its path in the program's operands, as in the compiler's text.
      name: the user's name of it.
      cause: "parameters", "optimizer", "state" or "batch".
      shape: its shape over all chips.
      dtype: its dtype.
      sharding: where it lives; None: unknown.
      is_kept: whether a strategy decides where it lives: a variable, or part of a module.
      donated: whether its memory may be reused.
    """

    path: str
    name: str
    cause: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    is_kept: bool
    donated: bool

    @property
    def bytes_per_chip(self) -> int:
        """Its bytes on one chip, without padding; 0 in host memory."""
        if self.sharding is not None and is_host_memory(self.sharding):
            return 0
        own = self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)
        return int(np.prod(own, dtype=np.int64)) * _itemsize(self.dtype)

    @property
    def split(self) -> str:
        """How it is split over the chips; "": each has all of it."""
        if self.sharding is None:
            return ""
        own = self.sharding.shard_shape(self.shape)
        pairs = enumerate(zip(self.shape, own, strict=True))
        parts = [f"axis {i} by {n // m}" for i, (n, m) in pairs if m and n != m]
        host = ["host memory"] if is_host_memory(self.sharding) else []
        return ", ".join([*host, *parts])


def _itemsize(dtype: DTypeLike) -> int:
    if jax_compat.is_key_dtype(dtype):
        return 4 * int(np.prod(jax.eval_shape(jax.random.key_data, jax.random.key(0)).shape))
    return np.dtype(dtype).itemsize


def arguments_of(
    lowered: LoweredProgram, notes: Notes, fn: Callable[..., Any], args: Sequence[PyTree]
) -> list[Argument]:
    """Returns the arguments of a lowered step.

    Args:
      lowered: the step.
      notes: what its trace proved.
      fn: the user's function.
      args: its positional arguments.
    """
    writes = list(notes.writes)
    variables = writes, [v for v in notes.reads if v not in set(writes)]
    operands = lowered.args_info[0]
    pairs = jax.tree_util.tree_leaves_with_path(operands, is_leaf=is_placeholder)
    objects = _names_of_objects(jax.tree.structure(operands[2], is_leaf=is_placeholder))
    given = _given(args)
    names = positional_names(fn)
    found: list[Argument] = []
    seen: collections.Counter[str] = collections.Counter()
    for path, info in pairs:
        if is_placeholder(info):
            own = objects.get(info.index, [])
            for i, (leaf, (name, cause, sharding)) in enumerate(
                zip(info.leaves, own, strict=False)
            ):
                where = f"{_operand(path)}.<state {i}>"
                found.append(_argument(where, name, cause, sharding, True, leaf))
            continue
        where, index = _operand(path), path[0].idx
        if index < 2:
            variable = variables[index][path[1].idx]
            cause = _cause_of_variable(variable, [*variables[0], *variables[1]])
            own = _unlike(variable.name, seen), cause, variable.sharding
            found.append(_argument(where, *own, True, info))
            continue
        own_path = f"[0][{index - 3}]{keystr(path[1:])}" if index > 2 else f"[1]{keystr(path[1:])}"
        sharding, cause = given.get(own_path, (None, "state"))
        name = _INDEX.sub("", user_path(own_path, names))
        found.append(_argument(where, name, cause, sharding, False, info))
    return found


#: How JAX spells the only array of a node of ours, here and in the compiler's text.
_INDEX = re.compile(r"\[<flat index (\d+)>\]")


def _operand(path: Sequence[Any]) -> str:
    return "operands" + _INDEX.sub(r"[\1]", keystr(tuple(path)))


def _argument(
    where: str, name: str, cause: str, sharding: Sharding | None, kept: bool, info: PyTree
) -> Argument:
    aval = info._aval if hasattr(info, "_aval") else info  # as of JAX 0.10, and as of 0.12
    return Argument(
        where, name, cause, tuple(aval.shape), aval.dtype, sharding, kept, bool(info.donated)
    )


#: What optax calls its slots, and layers their statistics, where users keep them in variables.
_SLOTS = {"mu", "nu", "trace", "momentum", "accumulator"}
_STATISTICS = {"mean", "var", "batch_stats", "right", "total", "ema"}


def _unlike(name: str, seen: collections.Counter[str]) -> str:
    """Returns a name unlike those seen: variables without a name of their own are numbered."""
    seen[name] += 1
    return name if seen[name] == 1 else f"{name} ({seen[name]})"


def _cause_of_variable(variable: Variable, others: Sequence[Variable]) -> str:
    parts = set(re.split(r"[/.]", variable.name.lower()))
    if parts & _SLOTS:
        return "optimizer"
    if variable.trainable:
        is_float = jax.numpy.issubdtype(variable.dtype, np.inexact)
        return "parameters" if is_float and not parts & _STATISTICS else "state"
    owners = {v.name for v in others if v.trainable}
    owner = variable.name.rpartition("/")[0]
    return "optimizer" if owner in owners else "state"


def _names_of_objects(treedef: jax.tree_util.PyTreeDef) -> dict[int, list[tuple[str, str, Any]]]:
    """Returns the name, cause and sharding of each array of each object, by its number."""
    node = treedef.node_data()
    if node is None or node[0] is not ObjectKeywords:
        return {}
    plan = node[1][1]
    named = [
        (entry.path, _cause_of_kind(entry.kind), getattr(layout, "sharding", None))
        for entry in plan.entries
        for layout in entry.layouts
    ]
    found: dict[int, list[tuple[str, str, Any]]] = {}
    for owner, each in zip(plan.owners, named, strict=True):
        found.setdefault(owner, []).append(each)
    return found


def _cause_of_kind(kind: str) -> str:
    if kind.startswith("Opt"):
        return "optimizer"
    return "parameters" if kind in ("Param", "LoRAParam") else "state"


# -- arguments of functional steps ---------------------------------------------

_STATE = ("batch_stats", "stats", "state", "model_state", "metrics", "rngs", "key", "step")


def _given(args: Sequence[PyTree]) -> dict[str, tuple[Any, str]]:
    """Returns the sharding and the cause of each array among positional arguments, by path."""
    found: dict[str, tuple[Any, str]] = {}
    pairs = jax.tree_util.tree_leaves_with_path(
        (tuple(args),), is_leaf=lambda x: isinstance(x, PerReplica)
    )
    optimizer = set(_optax_paths((tuple(args),), ()))
    for path, leaf in pairs:
        if isinstance(leaf, PerReplica):
            for inner, stacked in jax.tree_util.tree_leaves_with_path(leaf):
                found[keystr((*path, *inner))] = stacked.sharding, "batch"
        else:
            cause = _cause_of_path(path, leaf, optimizer)
            found[keystr(path)] = getattr(leaf, "sharding", None), cause
    return found


def _cause_of_path(path: Sequence[Any], leaf: PyTree, optimizer: set[str]) -> str:
    """Returns what an array of a functional step is for, by its path and its type."""
    if any(keystr(tuple(path[:n])) in optimizer for n in range(1, len(path) + 1)):
        return "optimizer"
    keys = [str(getattr(k, "key", getattr(k, "name", ""))).lower() for k in path]
    if any(key.startswith("opt") for key in keys):
        return "optimizer"
    if any(key.startswith("param") for key in keys):
        return "parameters"
    is_float = jax.numpy.issubdtype(getattr(leaf, "dtype", np.int32), np.inexact)
    return "parameters" if is_float and np.ndim(leaf) and not {*keys} & {*_STATE} else "state"


def _optax_paths(tree: PyTree, path: tuple[Any, ...]) -> Iterator[str]:
    """Yields the paths of optax states, whose classes are optax's own."""
    if type(tree).__module__.split(".")[0] == "optax":
        yield keystr(path)
        return
    children, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if treedef.node_data() is not None:
        for key, child in children:
            yield from _optax_paths(child, (*path, *key))
