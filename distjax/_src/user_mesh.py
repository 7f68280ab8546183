"""The mesh that code runs under: that of a `shard_map`, or one set by the user.

JAX checks arrays against that mesh, while distjax uses its own meshes: its code runs without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import jax

from distjax._src.jax_compat import Tracer, as_uncommitted, outside_traces
from distjax._src.typing import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")


#: What JAX returns if no mesh is set. Equal abstract meshes are one object, so `is` can compare.
NO_MESH = jax.sharding.AbstractMesh((), ())
#: What JAX says of code of a strategy under another mesh.
_REFUSALS = "`set_mesh` can only be used outside", "mesh passed to shard_map", "context mesh"


def manual_axis(mesh: jax.sharding.Mesh, axis_name: str) -> AbstractContextManager[Any]:
    """Returns the mesh context of a `shard_map` over `axis_name`, other axes Auto."""
    abstract = mesh.abstract_mesh.update_axis_types({axis_name: jax.sharding.AxisType.Manual})
    return jax.sharding.use_abstract_mesh(abstract)


def outside_manual_axes() -> AbstractContextManager[Any]:
    """Returns a context for code that is not part of the enclosing `shard_map`.

    Code inside chooses its own mesh; a mesh set by the user stays in effect.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(NO_MESH)


def has_user_mesh() -> bool:
    """Returns whether the user set a mesh (`jax.set_mesh`); False in `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh is not NO_MESH and not (mesh.empty or mesh.manual_axes)


def ignores_user_mesh(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps ``fn`` to run without the user's mesh.

    Arguments on Explicit meshes are moved off them, because JAX combines such arrays only with
    arrays on the same mesh.
    """

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not has_user_mesh():
            return fn(*args, **kwargs)
        with outside_traces():  # JAX refuses to set a mesh in a trace, but this only removes one
            no_mesh = jax.set_mesh(None)
        with no_mesh:
            args, kwargs = off_explicit_meshes((args, kwargs))
            return fn(*args, **kwargs)

    return call


def is_refusal(error: ValueError) -> bool:
    """Returns whether JAX refuses a strategy's code since the user has set a mesh."""
    return any(text in str(error) for text in _REFUSALS)


def off_explicit_meshes(tree: PyTree) -> Any:
    """Returns `tree` with arrays on Explicit meshes replaced by uncommitted copies."""
    off_mesh = lambda leaf: as_uncommitted(leaf) if _is_explicit(leaf) else leaf
    is_iterator = lambda x: isinstance(x, Iterator)  # JAX warns about iterators as leaves
    return jax.tree.map(off_mesh, tree, is_leaf=is_iterator)


def has_explicit_mesh(tree: PyTree) -> bool:
    """Returns whether any array in `tree` lives on a mesh with Explicit axes."""
    return any(map(_is_explicit, jax.tree.leaves(tree)))


def _is_explicit(leaf: object) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return False
    axis_types = getattr(getattr(leaf.sharding, "mesh", None), "axis_types", ())
    return jax.sharding.AxisType.Explicit in axis_types
