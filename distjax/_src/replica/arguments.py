"""A user's function, its arguments and its result.

Pytrees of the user are partitioned into arrays, which are inputs of a program, and Python objects,
which are part of it (`dj.static`), and recombined; errors name all of it as the user does.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from distjax._src.placement import PerReplica, require_held
from distjax._src.traces import is_struct
from distjax._src.typing import PyTree
from distjax._src.variables.conversion import is_number
from distjax.errors import describe_value, message

# -- names ----------------------------------------------------------------------


def function_name(fn: object) -> str:
    """Returns a function's name as the user wrote it, looking through partials."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__


def positional_names(fn: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that accept positional arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def user_path(path: str, names: Sequence[str]) -> str:
    """Returns "x['a']" for the path "[0][0]['a']", a `keystr`, in (args, kwargs)."""
    where, _, rest = path.removeprefix("[").partition("][")
    key, _, inner = rest.partition("]")
    if where == "1":
        return key.strip("'") + inner
    index = int(key) if key.isdigit() else len(names)
    return (names[index] if index < len(names) else f"args[{key}]") + inner


# -- what can be called ---------------------------------------------------------


def require_callable(fn: object, method: str) -> None:
    """Raises a TypeError unless `fn` is callable."""
    if callable(fn):
        return
    raise TypeError(
        message(
            f"{method} needs a function",
            got=describe_value(fn),
            why="it is what is called or compiled",
            fix=f"{method}(fn, ...): the function itself, not the result of calling it",
        )
    )


def require_call(
    fn: object, args: object, kwargs: object, method: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns args as a tuple and kwargs as a dict, or raises."""
    require_callable(fn, method)
    if not isinstance(args, (tuple, list)):
        raise ValueError(
            message(
                f"{method}: positional args must be a list or tuple",
                got=describe_value(args),
                why="each item is one positional argument of the function",
                fix=f"{method}(fn, args=(x,)): note the comma",
            )
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ValueError(
            message(
                f"{method}: kwargs must be a dict",
                got=describe_value(kwargs),
                why="each item is one keyword argument of the function",
                fix=f"{method}(fn, kwargs={{'x': x}})",
            )
        )
    return tuple(args), dict(kwargs or {})


def add_merge_note(
    error: Exception, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to the error of a merge function that takes its arguments, but no strategy."""
    if not isinstance(error, TypeError) or _takes(merge_fn, (None, *args), kwargs):
        return
    if _takes(merge_fn, args, kwargs):
        error.add_note(
            "merge_call passes the strategy first, then args.\n"
            "  Fix: merge_call(lambda strategy, x: ..., args=(x,))"
        )


def _takes(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def require_finished(result: PyTree, fn: Callable[..., Any]) -> Any:
    """Returns what ``fn`` returned; raises for a generator or coroutine, whose body has not run."""
    if not (inspect.isgenerator(result) or inspect.iscoroutine(result)):
        return result
    result.close()
    raise TypeError(
        message(
            f"{function_name(fn)} needs to return values",
            got="a coroutine (`async def`)" if inspect.iscoroutine(result) else "a generator",
            why="its body has not run: it would run after the step, outside of it",
            fix="a function without `yield` and `async`, that returns a tuple or list",
        )
    )


# -- arrays and objects ---------------------------------------------------------


def is_array(value: object) -> bool:
    """Returns whether `value` is an array that a program can take directly."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_array_or_struct(value: object) -> bool:
    """Returns whether `value` is an array, or a struct that a program can be lowered for."""
    return is_array(value) or is_struct(value)


class Static:
    """A Python object among array leaves; part of the treedef, not a leaf.

    If it `is_implied`, it is static only since it is no array: the user did not say so.
    """

    __slots__ = ("is_implied", "value")

    def __init__(self, value: object, is_implied: bool = False):
        self.value, self.is_implied = value, is_implied

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(self.value == other.value)


jax.tree_util.register_pytree_node(Static, lambda s: ((), s), lambda s, _: s)


class ObjectStateKey:
    """The key, in a tree path, of an array of a stateful object: its index there."""

    def __init__(self, index: int):
        self._index = index

    def __str__(self) -> str:
        return f".{_OBJECT_STATE}{self._index}>"


_OBJECT_STATE = "<state "


def is_object_state(path: str) -> bool:
    """Returns whether a path leads to an array of a stateful object."""
    return _OBJECT_STATE in path


class PartitionedTree:
    """A pytree partitioned into arrays (what `takes` accepts, PerReplica leaves) and objects."""

    def __init__(self, tree: PyTree, takes: Callable[[Any], bool]):
        pairs, self.treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_one_leaf)
        self._all: list[Any] = [
            leaf.value if isinstance(leaf, Static) else leaf for _, leaf in pairs
        ]
        taken = [isinstance(leaf, PerReplica) or takes(leaf) for _, leaf in pairs]
        self._where = [i for i, t in enumerate(taken) if t]
        self.leaves: list[Any] = [self._all[i] for i in self._where]
        self.paths = [jax.tree_util.keystr(pairs[i][0]) for i in self._where]
        for i in self._where:
            self._all[i] = None

    @property
    def is_of_arrays(self) -> bool:
        """Whether every leaf of the tree is data."""
        return len(self._where) == len(self._all)

    @property
    def objects(self) -> list[Any]:
        """The leaves that are not data."""
        taken = {*self._where}
        return [leaf for i, leaf in enumerate(self._all) if i not in taken]

    def take_leaves(self) -> list[Any]:
        """Returns the data leaves and drops them, so no tracer outlives its trace."""
        leaves, self.leaves = self.leaves, [None] * len(self.leaves)
        return leaves

    def combine(self, leaves: Sequence[Any]) -> Any:
        """Returns the tree with `leaves` in place of the data leaves."""
        return jax.tree_util.tree_unflatten(self.treedef, self.combine_leaves(leaves))

    def combine_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Returns all leaves of the tree, with `leaves` in place of the data leaves."""
        if self.is_of_arrays:
            return leaves
        combined = list(self._all)
        for i, leaf in zip(self._where, leaves, strict=True):
            combined[i] = leaf
        return combined


def partition_result(result: PyTree, name: str) -> PartitionedTree:
    """Returns the result of the function called `name`, partitioned into arrays and objects."""
    partitioned = PartitionedTree(result, is_array)
    for leaf in partitioned.leaves:
        require_held(leaf, f"a result of {name}")
    return partitioned


def is_static(value: object) -> bool:
    """Returns whether `value` is a Static; for use as ``is_leaf=``."""
    return isinstance(value, Static)


def is_one_leaf(value: object) -> bool:
    """Returns whether `value` counts as one leaf of a tree: a Static or a PerReplica."""
    return isinstance(value, (Static, PerReplica))


#: What to write in place of a static argument that is not hashable.
FIX_OF_UNHASHABLE = (
    "@jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays; without "
    "arrays: make it hashable"
)


def as_static(
    value: object, name: str, is_implied: bool = False, fix: str = FIX_OF_UNHASHABLE
) -> Static:
    """Returns an argument wrapped as part of a program's cache key; raises if it has no hash."""
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            message(
                f"argument {name} needs an array, a number or a hashable object",
                got=describe_value(value),
                why="a Python object is part of the key under which a compiled program is cached",
                fix=fix,
            )
        ) from None
    return Static(value, is_implied)


def mark_static(
    tree: PyTree, names: Sequence[str] = (), is_data: Callable[[Any], bool] = is_array
) -> Any:
    """Returns (args, kwargs) with all leaves other than arrays and numbers made Static."""

    def hide(path: tuple[Any, ...], leaf: PyTree) -> Any:
        if is_data(leaf) or is_number(leaf) or is_one_leaf(leaf):
            return leaf
        return as_static(leaf, user_path(jax.tree_util.keystr(path), names), is_implied=True)

    return jax.tree_util.tree_map_with_path(hide, tree, is_leaf=is_one_leaf)


def nodes_of(treedef: jax.tree_util.PyTreeDef) -> Iterator[tuple[type, Any]]:
    """Yields the class and the aux data of each node of a tree that is not a leaf."""
    ahead = [treedef]  # no recursion: trees may be deep
    while ahead:
        part = ahead.pop()
        node = part.node_data()
        if node is not None:
            yield node
        ahead.extend(part.children())


# -- static arguments -----------------------------------------------------------


_T = TypeVar("_T")


def static(value: object) -> Static:
    """Marks `value` as static, for an argument of `run` or `dj.jit`.

    Numbers and bools in arguments are inputs of the program: new values do not recompile
    it, and Python code (``if``, ``range``, a shape) cannot see them. A static value is
    passed to the function as it is, and each new value, compared by ``==``, recompiles it.

    Args:
      value: a number, a bool or another hashable object, anywhere in an argument.

    Raises:
      ValueError: `value` is not hashable.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> def step(x, length, train):
      ...     return jnp.zeros(length) + x if train else x
      >>> strategy.run(step, args=(1.0, dj.static(3), dj.static(True)))
      Array([1., 1., 1.], dtype=float32)
    """
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            message(
                "dj.static needs a hashable value",
                got=describe_value(value),
                why="it is part of the key under which a compiled program is cached",
                fix="pass arrays as they are: they are inputs of the program; a list as a tuple: "
                "dj.static(tuple(x))",
            )
        ) from None
    return value if isinstance(value, Static) else Static(value)


def unmark(tree: _T) -> _T:
    """Returns `tree` with static values unwrapped; the same object if there are none."""
    if not any(map(is_static, jax.tree.leaves(tree, is_leaf=is_static))):
        return tree
    return jax.tree.map(lambda x: x.value if is_static(x) else x, tree, is_leaf=is_static)


def keep_marks(tree: PyTree) -> Any:
    """Returns `tree` with static values marked twice, so that one `unmark` leaves them static."""
    return jax.tree.map(lambda x: Static(x) if is_static(x) else x, tree, is_leaf=is_static)


# -- Equinox ------------------------------------------------------------------
# By Equinox's own rule (`eqx.filter_jit`), the leaves of a module that are not arrays (rates,
# flags, activation functions) are static. So numbers in a module are static, not inputs.


def is_module(value: object) -> bool:
    """Returns whether `value` is an `eqx.Module`, without importing Equinox."""
    return isinstance(value, getattr(sys.modules.get("equinox"), "Module", ()))


def mark_modules(
    tree: PyTree, names: tuple[str, ...] = (), is_data: Callable[[Any], bool] = is_array
) -> Any:
    """Returns (args, kwargs) with non-array leaves of Equinox modules made Static."""
    if "equinox" not in sys.modules:
        return tree

    def mark(path: tuple[Any, ...], value: PyTree) -> Any:
        return _mark_module(path, value, names, is_data) if is_module(value) else value

    return jax.tree_util.tree_map_with_path(mark, tree, is_leaf=_is_one_value)


def _is_one_value(value: object) -> bool:
    return is_module(value) or is_one_leaf(value)


def _mark_module(
    path: tuple[Any, ...], module: PyTree, names: tuple[str, ...], is_data: Callable[[Any], bool]
) -> Any:
    def mark(inner: tuple[Any, ...], leaf: PyTree) -> Any:
        if is_data(leaf) or is_one_leaf(leaf):
            return leaf
        return as_static(
            leaf, user_path(jax.tree_util.keystr((*path, *inner)), names), is_implied=True
        )

    return jax.tree_util.tree_map_with_path(mark, module, is_leaf=is_one_leaf)
