"""What a plan is made of: a function of the user's that returns a step and its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np

from distjax._src import jax_compat
from distjax._src.objects.stateful import is_stateful
from distjax._src.placement import PerReplica, Topology, transfer
from distjax._src.replica.arguments import function_name, is_array_or_struct
from distjax._src.strategies.strategy import Strategy
from distjax._src.traces import struct
from distjax._src.typing import PyTree
from distjax._src.variables.variable import Variable
from distjax.errors import BatchError, describe_value, message

Target = Callable[[Strategy], tuple[Callable[..., Any], Any]]
#: A function, and its arguments with `GlobalBatch`es among them.
Step = tuple[Callable[..., Any], tuple[Any, ...]]
_FORM = "def plan(strategy): return step, (dj.plan.batch(images), ...)"


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """A batch for all replicas, as among a target's arguments: see `batch`."""

    tree: PyTree


def batch(tree: PyTree) -> Any:
    """Returns a global batch, which a plan splits over the replicas as a dataset would.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s [B, ...] for all replicas together.

    Example:
      >>> def target(strategy):
      ...     rows = 32 * strategy.num_replicas_in_sync
      ...     step = lambda x: strategy.run(lambda x: x.sum(), args=(x,))
      ...     return step, (dj.plan.batch(jax.ShapeDtypeStruct((rows, 8), jnp.float32)),)
    """
    return GlobalBatch(tree)


def load(target: str) -> Target:
    """Returns the function that a "module:function" or "file.py:function" names.

    Raises:
      ValueError: there is no such module, file or function.
    """
    where, _, name = target.rpartition(":")
    folder, module, got = os.getcwd(), where, f"nothing called {name} in {where}"
    if where.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(where))
        module = file.removesuffix(".py")
        sys.modules.pop(module, None)  # of another folder
    sys.path.insert(0, folder)  # as if it were run from there
    try:
        if module and hasattr(found := importlib.import_module(module), name):
            return getattr(found, name)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        got = f"no file {where}" if where.endswith(".py") else f"no module {error.name!r}"
    raise ValueError(
        message(
            f"target {target!r} needs to be module:function or file.py:function",
            got=got,
            why="the plan is made of what that function returns: a step and its arguments",
            fix=f"train.py:plan, with {_FORM} in train.py",
        )
    )


def take_step(target: Target, strategy: Strategy) -> Step:
    """Calls a target and returns its step and the arguments, with `GlobalBatch`es among them.

    Raises:
      TypeError: it is no function of one strategy, or returned something else.
    """
    got = describe_value(target)
    try:
        signature = inspect.signature(target)  # a TypeError, too, if it cannot be called
        got = f"{function_name(target)}{signature}"
        signature.bind(strategy)
    except (TypeError, ValueError) as error:
        raise TypeError(
            message(
                "a target needs to be a function of a strategy",
                got=got,
                why="it is called once for each strategy that is planned",
                fix=_FORM,
            )
        ) from error
    with _optimizers_described():
        found: Any = target(strategy)
    is_pair = isinstance(found, tuple) and len(found) == 2 and callable(found[0])
    if is_pair and isinstance(found[1], (tuple, list)):
        return found[0], tuple(found[1])
    raise TypeError(
        message(
            f"{function_name(target)} needs to return (function, arguments)",
            got=f"arguments {found[1]!r}" if is_pair else describe_value(found),
            why="a plan compiles the function for the arguments, as a call of the loop would",
            fix=f"{_FORM}: note the comma behind a single argument",
        )
    )


def batch_size(args: PyTree) -> int | None:
    """Returns the examples of the global batches among arguments; None: there is no batch."""
    flat = jax.tree.leaves(args, is_leaf=_is_one)
    trees = (x.tree for x in flat if isinstance(x, GlobalBatch))
    sizes = {np.shape(leaf)[:1] for tree in trees for leaf in jax.tree.leaves(tree)}
    return next(iter(sizes))[0] if len(sizes) == 1 and () not in sizes else None


def place(args: PyTree, strategy: Strategy, per_replica: int | None = None) -> Any:
    """Returns arguments as a loop passes them, described only.

    A replica has `per_replica` examples, in place of those of the target.
    """
    topology = strategy.extended.topology

    def place_one(value: PyTree) -> Any:
        if isinstance(value, GlobalBatch):
            return jax.tree.map(lambda x: _rows(x, topology, per_replica), value.tree)
        devices = getattr(getattr(value, "sharding", None), "device_set", None)
        if not is_array_or_struct(value) or devices == {*topology.devices}:
            return value
        return transfer(value, topology.mirrored)

    return jax.tree.map(place_one, args, is_leaf=_is_one)


@contextlib.contextmanager
def _optimizers_described() -> Generator[None]:
    """A context in which an `nnx.Optimizer` of a described module makes no arrays.

    Its slots are made eagerly, each like a parameter and where that is: nothing can be there.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        yield
        return
    plain = nnx.Optimizer.__init__

    @functools.wraps(plain)
    def describe(self: Any, model: PyTree, tx: PyTree, *args: PyTree, **kwargs: PyTree) -> None:
        if jax_compat.tracing():  # in `dj.flax.create`, which makes no arrays either
            return plain(self, model, tx, *args, **kwargs)
        described = tx._replace(init=functools.partial(jax.eval_shape, tx.init))
        plain(self, model, described, *args, **kwargs)
        self.tx = tx

    nnx.Optimizer.__init__ = describe
    try:
        yield
    finally:
        nnx.Optimizer.__init__ = plain


def _is_one(value: object) -> bool:
    return isinstance(value, (GlobalBatch, PerReplica, Variable)) or is_stateful(value)


def _rows(leaf: PyTree, topology: Topology, per_replica: int | None) -> PerReplica:
    """Returns the rows of each replica of one array [B, ...] of a global batch."""
    count, shape = topology.num_replicas, np.shape(leaf)
    if per_replica is None and (not shape or shape[0] % count or not shape[0]):
        raise BatchError(
            message(
                f"a global batch needs a number of examples that {count} replicas divide",
                got=f"an array of shape {shape}",
                why="all replicas run one program, so their batches have one shape",
                fix=f"dj.plan.batch of {-(-max(shape[:1], default=1) // count) * count} examples, "
                "or of 8 * strategy.num_replicas_in_sync",
            )
        )
    rows = (count, per_replica or shape[0] // count, *shape[1:])
    dtype = jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", np.asarray(leaf).dtype))
    return PerReplica(struct(rows, dtype, topology.per_replica), topology)
