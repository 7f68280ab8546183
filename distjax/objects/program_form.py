"""How a call with stateful objects enters and leaves a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from distjax.objects.captures import Place
from distjax.objects.stateful import Placeholder
from distjax.replica.arguments import is_one_leaf
from distjax.typing import PyTree


@dataclasses.dataclass(frozen=True)
class StaticPart:
    """The static part of the objects that one call takes or captures.

    Attributes:
      plan: from the bridge.
      captured: for each reference to an object in the function, the index of that object and
        the place of the reference.
      kept: indices of leaves that are returned even if unchanged, because they are donated.
    """

    plan: Any
    captured: tuple[tuple[int, Place], ...]
    kept: frozenset[int]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCall:
    """The static part of what a call with objects returns.

    Attributes:
      outcome: from `TracedObjects.collect`.
      returns_objects: whether placeholders of objects are among the user's results.
    """

    outcome: Any
    returns_objects: bool


class ResultTree:
    """The user's results, taken apart: the classes in them are called after the write-back.

    They are the user's code, which may raise, and the objects have to be written whole by then.

    Args:
      paths: of the leaves.
      leaves: the leaves.
      treedef: the user's tree.
    """

    __slots__ = ("leaves", "paths", "treedef")

    def __init__(
        self, paths: Sequence[str], leaves: Sequence[Any], treedef: jax.tree_util.PyTreeDef
    ):
        self.paths, self.leaves, self.treedef = paths, leaves, treedef

    def build(self) -> Any:
        """Returns the results."""
        return self.treedef.unflatten(self.leaves)


def take_apart(results: PyTree) -> ResultTree:
    """Returns the results of a step as a tree that is built without the user's code."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(results, is_leaf=is_one_leaf)
    paths = [jax.tree_util.keystr(path) for path, _ in pairs]
    return ResultTree(paths, [leaf for _, leaf in pairs], treedef)


@dataclasses.dataclass(frozen=True)
class _UserPath:
    """A path in the user's results, as one key."""

    text: str

    def __str__(self) -> str:
        return self.text


jax.tree_util.register_pytree_with_keys(
    ResultTree,
    lambda t: (
        [(_UserPath(path), leaf) for path, leaf in zip(t.paths, t.leaves, strict=True)],
        (tuple(t.paths), t.treedef),
    ),
    lambda aux, leaves: ResultTree(aux[0], tuple(leaves), aux[1]),
    lambda t: (t.leaves, (tuple(t.paths), t.treedef)),
)


@dataclasses.dataclass(frozen=True)
class ObjectKeywords:
    """The keyword arguments of a call with objects, plus what is in no argument.

    Attributes:
      kwargs: the user's keyword arguments.
      captured: the leaves of objects that are only captured by the function.
      static: the static part of the objects.
    """

    kwargs: dict[str, Any]
    captured: list[Placeholder]
    static: StaticPart


def _flatten_keywords(node: ObjectKeywords) -> tuple[Any, Any]:
    names = sorted(node.kwargs)
    values = [(jax.tree_util.DictKey(name), node.kwargs[name]) for name in names]
    captured = (jax.tree_util.DictKey("captured objects"), node.captured)
    return (*values, captured), (node.static, tuple(names))


def _unflatten_keywords(
    aux: tuple[StaticPart, tuple[str, ...]], children: Iterable[PyTree]
) -> ObjectKeywords:
    *values, captured = children
    return ObjectKeywords(dict(zip(aux[1], values, strict=True)), captured, aux[0])


jax.tree_util.register_pytree_with_keys(ObjectKeywords, _flatten_keywords, _unflatten_keywords)
