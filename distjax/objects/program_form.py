"""How a call with stateful objects enters and leaves a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from distjax.objects.captures import Place
from distjax.objects.stateful import Placeholder
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
