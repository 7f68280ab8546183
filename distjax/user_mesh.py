"""The mesh that code runs under: that of a `shard_map`, and one that the user has set.

It is drift of JAX too, and stands apart from `jax_compat` as one subject.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import jax

from distjax.jax_compat import Tracer, as_uncommitted, outside_traces
from distjax.typing import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")


def manual_axis(mesh: jax.sharding.Mesh, axis_name: str) -> AbstractContextManager[Any]:
    """Returns the mesh context of a `shard_map` over `axis_name`: other axes stay Auto."""
    abstract = mesh.abstract_mesh.update_axis_types({axis_name: jax.sharding.AxisType.Manual})
    return jax.sharding.use_abstract_mesh(abstract)


def outside_manual_axes() -> AbstractContextManager[Any]:
    """Returns a context for code that is not part of the `shard_map` around it.

    What is inside chooses its own mesh; a mesh that the user has set stays.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def has_user_mesh() -> bool:
    """Returns whether the user has set a mesh (`jax.set_mesh`); not inside a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return not (mesh.empty or mesh.manual_axes)


def ignores_user_mesh(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns ``fn``, called without the mesh that the user has set.

    JAX holds the devices of all that runs against that mesh, and ours have meshes of their
    own. Arguments of Explicit meshes are taken off them: JAX combines them with nothing else.
    """

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not has_user_mesh():
            return fn(*args, **kwargs)
        with outside_traces():  # JAX sets no mesh in a trace, but we only take one away
            no_mesh = jax.set_mesh(None)
        with no_mesh:
            args, kwargs = off_explicit_meshes((args, kwargs))
            return fn(*args, **kwargs)

    return call


def off_explicit_meshes(tree: PyTree) -> Any:
    """Returns `tree`, its arrays of Explicit meshes as arrays that JAX puts where they are used."""
    off_mesh = lambda leaf: as_uncommitted(leaf) if _is_explicit(leaf) else leaf
    is_iterator = lambda x: isinstance(x, Iterator)  # JAX warns of one as a leaf
    return jax.tree.map(off_mesh, tree, is_leaf=is_iterator)


def has_explicit_mesh(tree: PyTree) -> bool:
    """Returns whether an array of `tree` lives on a mesh with Explicit axes."""
    return any(map(_is_explicit, jax.tree.leaves(tree)))


def _is_explicit(leaf: object) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return False
    axis_types = getattr(getattr(leaf.sharding, "mesh", None), "axis_types", ())
    return jax.sharding.AxisType.Explicit in axis_types
