"""Graph cache: flattens NNX objects again only if their graph may have changed.

Flattening visits every attribute of every module, and looking up a plan hashes the graph;
together they would dominate the call of a small step. So a flat graph is cached while its
objects live, with a fingerprint that is cheap to check.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from distjax import jax_compat
from distjax.flax.object_types import is_variable
from distjax.typing import PyTree


class FlatGraph:
    """The result of `nnx.graph.flatten` for some objects.

    Variables alone, as those of an `nnx.State`, are new objects at each call and no graph is
    cached for them: theirs is only built if it is asked for.

    Attributes:
      key: equal for equal graphs; hashable if their metadata are.
      graphdef: their graph.
      paths: the path of each variable.
      variables: their variables and bare arrays, in graph order.
      has_modules: whether there are other objects than variables.
      last_lookup: the key and the result of the last plan lookup with this graph.
    """

    def __init__(self, objects: Sequence[Any]):
        self.has_modules = not all(map(is_variable, objects))
        self.variables: list[Any] = list(objects)
        if self.has_modules:
            self.graphdef, flat = nnx.graph.flatten(tuple(objects), graph=True)
            self.key: Any = self.graphdef
            self.paths: Sequence[tuple[Any, ...]] = flat.paths
            self.variables = list(flat.leaves)
        else:
            self.key = tuple((type(v), *sorted(v.get_metadata().items())) for v in objects)
            self.paths = [(i,) for i in range(len(objects))]
        self.last_lookup: tuple[Any, Any] = (None, None)

    @functools.cached_property
    def graphdef(self) -> Any:
        """The graph; built when it is asked for if there are only variables."""
        return nnx.graph.flatten(tuple(self.variables), graph=True)[0]


def path_of(objects: Sequence[Any], path: Sequence[Any]) -> str:
    """Returns a path in the graph of `objects` as users write it: "Model.linear.kernel"."""
    return ".".join([type(objects[path[0]]).__name__, *map(str, path[1:])])


def flatten_graph(objects: Sequence[Any]) -> FlatGraph:
    """Returns the flat graph of objects, from the cache if it is still valid."""
    key = tuple(map(id, objects))
    known = _graphs.get(key)
    if known is not None and known[1].holds():
        return known[0]
    found = FlatGraph(objects)
    is_cached = found.has_modules and not jax_compat.tracing()
    fingerprint = _take_fingerprint(objects, found) if is_cached else None
    if fingerprint is None:
        _graphs.pop(key, None)
    else:
        forget = [weakref.ref(o, lambda _: _graphs.pop(key, None)) for o in objects]
        _graphs[key] = found, fingerprint, forget
    return found


def references(objects: Sequence[Any]) -> Any:
    """Returns the graph indices of objects and their variables, for writing back."""
    numbers = nnx.graph.RefMap()
    nnx.graph.flatten(tuple(objects), ref_index=numbers, graph=True)
    return numbers


# Keyed by the ids of the objects; an entry is removed when one of its objects dies.
_graphs: dict[tuple[int, ...], tuple[FlatGraph, _GraphFingerprint, Any]] = {}


def _take_fingerprint(objects: Sequence[Any], found: FlatGraph) -> _GraphFingerprint | None:
    """Returns a fingerprint of the graph, or None if it cannot be cached."""
    graph = [node for _, node in nnx.iter_graph(tuple(objects), graph=True)]
    nodes = [n for n in graph if nnx.graph.is_graph_node(n) and not isinstance(n, nnx.Variable)]
    is_of_modules = all(isinstance(node, nnx.Pytree) for node in (*objects, *nodes))
    if not is_of_modules or not all(isinstance(v, nnx.Variable) for v in found.variables):
        return None
    try:
        hash(found.graphdef)
    except TypeError:  # looking up the plan raises an error that names the attribute
        return None
    return _GraphFingerprint(nodes, found.variables)


class _GraphFingerprint:
    """Detects whether a graph has changed.

    It has not if each module has the same attributes, each the same object; mutable values
    (a dict, the state of an optimizer) hold the same parts; and the metadata and the hashes
    of static values are equal.

    Args:
      nodes: the modules of the graph; held weakly, so that the cache does not keep them alive.
      variables: its variables.
    """

    def __init__(self, nodes: Sequence[Any], variables: Sequence[Any]):
        self._variables = variables
        self._metadata = [v.get_metadata() for v in variables]
        self._types = {type(part) for part in (*nodes, *variables)}
        self._nodes = [self._attributes(node) for node in nodes]
        structure, parts = self._parts_now()
        self._structure, self._parts = structure, [*map(id, parts)]
        # References to the values compared by id, so that no other object reuses the id.
        self._static = [x for x in parts if type(x) not in self._types]
        self._static += [x for metadata in self._metadata for x in metadata.values()]
        for node in nodes:
            self._static += filter(self._is_static, vars(node).values())
        self._hashed = [x for x in self._static if type(x) not in _IMMUTABLE]
        self._hashes = [*map(hash, self._hashed)]

    def holds(self) -> bool:
        """Returns whether the graph is still what it was when the fingerprint was taken."""
        for weak, names, ids, _ in self._nodes:
            node = weak()
            if node is None or [*vars(node)] != names or [*map(id, vars(node).values())] != ids:
                return False
        structure, parts = self._parts_now()
        return (
            structure == self._structure
            and [*map(id, parts)] == self._parts
            and [v.get_metadata() for v in self._variables] == self._metadata
            and [*map(hash, self._hashed)] == self._hashes
        )

    def _attributes(self, node: PyTree) -> tuple[weakref.ref[Any], list[str], list[int], list[str]]:
        """Returns a reference to the module, its attributes' names and ids, its trees' names."""
        own = vars(node)
        trees = [k for k, x in own.items() if not (self._is_part(x) or self._is_static(x))]
        return weakref.ref(node), [*own], [*map(id, own.values())], trees

    def _parts_now(self) -> tuple[Any, list[Any]]:
        """Returns the structure and leaves of all attributes that are trees."""
        trees = [vars(node())[name] for node, _, _, names in self._nodes for name in names]
        parts, structure = jax.tree.flatten(trees, is_leaf=self._is_part)
        return structure, parts

    def _is_part(self, value: object) -> bool:
        return type(value) in self._types

    def _is_static(self, value: object) -> bool:
        """Returns whether `value` holds no parts and cannot gain any in place."""
        if self._is_part(value):
            return False
        if isinstance(value, tuple):
            return all(map(self._is_static, value))
        parts, structure = jax.tree.flatten(value, is_leaf=self._is_part)
        is_one = bool(parts) and jax.tree_util.treedef_is_leaf(structure)  # not so an empty list
        return value is None or is_one


#: Types of static values that cannot change in place and so need no hash.
_IMMUTABLE = {
    bool,
    int,
    float,
    str,
    type,
    type(None),
    type(flatten_graph),
    nnx.graph.HashableMapping,
}
