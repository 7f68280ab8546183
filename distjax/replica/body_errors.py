"""Clear messages for errors in replica functions that JAX reports badly or late."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from distjax import jax_compat, user_lines
from distjax.context import frames
from distjax.errors import MergeError, message
from distjax.jax_compat import Jaxpr, JaxprEqn
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.replica.analysis import Analysis
from distjax.replica.emit import holds_merge
from distjax.traced_types import type_of
from distjax.typing import PyTree

_TRACED_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
#: JAX's messages for a traced value as a shape, a length or an index.
_AS_NUMBER = re.compile("Shapes must be 1D|`length`|__index__")
#: Messages for a traced value whose number is needed, that of `f"{x:.3f}"` among them.
_AS_VALUE = re.compile("of concrete values.*Trace|unsupported format string passed to .*Tracer")
#: JAX's message for several PRNG keys in the place of one, with their shape.
_SEVERAL_KEYS = re.compile(r"accepts a single key, but was given a key array of shape (\(.*?\)) ")
#: Messages for a PerReplica in the place of an array: those of `PerReplica`, and of `jax.lax`.
_OF_PER_REPLICA = re.compile(
    r"one value per replica.*\s.*a PerReplica of|as a JAX value.*\.PerReplica'"
)
_CAPTURED = "The PerReplica is not an argument"
_START = "Python needs the value of a traced array"


def add_value_note(
    error: Exception,
    name: str = "",
    paths: Sequence[str] = (),
    leaves: Sequence[Any] = (),
) -> None:
    """Adds a note to an error of JAX about a traced value; at most one, by the innermost trace.

    Args:
      error: the error.
      name: the user's name for the function that was traced.
      paths: the user's paths to the arrays that it was traced with.
      leaves: these arrays.
    """
    text = str(error)
    if not isinstance(error, _TRACED_VALUE) and not _AS_VALUE.search(text):
        return
    if any(note.startswith(_START) for note in getattr(error, "__notes__", ())):
        return
    named = [int(i) for i in re.findall(r"(?:leaves|arrays)\[(\d+)\]", text) if int(i) < len(paths)]
    if named and all(_is_number(leaves[i]) for i in named):
        numbers = " and ".join(dict.fromkeys(paths[i] for i in named))
        first = paths[named[0]]
        fix = f"dj.static({first}) in place of {first}, where the step is called"
        why = f"argument {numbers} of {name} may change from call to call"
    elif isinstance(error, jax.errors.TracerBoolConversionError):
        why = "`if`, `while`, `and` decide once, and one trace serves all calls and replicas"
        fix = "jnp.where(condition, a, b), or jax.lax.cond (dj.lax.cond where it writes variables)"
    elif _AS_NUMBER.search(text):
        why = "shapes, lengths and indices of lists are part of the program"
        fix = "a number from x.shape; jax.lax.fori_loop for a loop, jnp.take for an index"
    else:
        why = "it is known only when the program runs, after float(x), x.item() or NumPy asked"
        fix = "return it, and read it outside of the step; jax.debug.print('{}', x) to print it"
    error.add_note(f"{_START}: {why}.\n  Fix: {fix}")


def add_captured_note(error: Exception, name: str) -> None:
    """Adds a note to the error of a PerReplica that replica function `name` captured."""
    if not _OF_PER_REPLICA.search(str(error)):
        return
    if not any(note.startswith(_CAPTURED) for note in getattr(error, "__notes__", ())):
        error.add_note(
            f"{_CAPTURED} of {name}: it has the values of all replicas there.\n"
            "  Fix: pass it as an argument: strategy.run(fn, args=(x,))"
        )


def add_keys_note(
    error: Exception, name: str, paths: Sequence[str], leaves: Sequence[Any], num_replicas: int
) -> None:
    """Adds a note to an error of JAX about several keys if they are those of an argument.

    Args:
      error: the error.
      name: the user's name for the function that was traced.
      paths: the user's paths to its arrays.
      leaves: these arrays.
      num_replicas: R; a loop of `jax.pmap` splits its key into as many.
    """
    found = _SEVERAL_KEYS.search(str(error))
    if found is None:
        return
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, PerReplica):
            continue
        shape = jax.typeof(leaf).shape
        if str(shape) == found[1] and shape[0] == num_replicas:
            error.add_note(
                f"Argument {path} of {name} holds {num_replicas} keys, as many as there are "
                "replicas, and each replica sees all of them.\n"
                f"  Fix: strategy.per_replica({path}) where the step is called; or one key there, "
                "and dj.get_replica_context().fold_in(key) in the step"
            )
            return


def _is_number(leaf: PyTree) -> bool:
    """Returns whether an argument came in as a Python number or bool, as far as its type shows."""
    if isinstance(leaf, PerReplica):
        return False
    aval: Any = type_of(leaf)
    return aval.shape == () and (aval.weak_type or aval.dtype == bool)


def require_no_other_mesh(name: str, jaxpr: Jaxpr, topology: Topology) -> None:
    """Raises if a replica function has a `shard_map` or `pmap` over devices of its strategy.

    Only one over model axes may stay: XLA rejects a second one over the replica axis, or aborts.

    Raises:
      MergeError: naming the axes and the line.
    """
    own = topology.mesh.axis_names if topology.mesh is not None else ()
    for outer, eqn in ((e, s) for e in jaxpr.eqns for s in _shard_maps(e)):
        axes = tuple(eqn.params["mesh"].axis_names)
        mapped = eqn.params["newly_manual_axes"]
        maps_replicas = topology.axis_name in mapped and topology.num_replicas > 1
        # The emitter reports merges.
        if (set(axes) <= set(own) and not maps_replicas) or holds_merge(eqn):
            continue
        raise MergeError(
            message(
                f"{name} needs to leave devices to its strategy",
                got=f"a jax.pmap or jax.shard_map over axes {axes}, at "
                f"{user_lines.source_line(outer)}",
                why="a replica function already runs on every device, and has no further devices "
                "to map over",
                fix="jax.vmap in its place; model_axes={...} of dj.MirroredStrategy for axes "
                "inside a replica; or the call outside of run",
            )
        )


def require_own_axis(name: str, jaxpr: Jaxpr, topology: Topology) -> None:
    """Raises if the collectives of `jaxpr` would bind to an enclosing `jax.vmap`.

    JAX gives them the vmap's axis if the mesh has an axis of the same name.
    """
    axis_name = topology.axis_name
    in_replica = any(frame.is_replica for frame in frames.stack())
    if topology.mesh is None or in_replica or not _is_bound(axis_name):
        return
    if next(Analysis(axis_name).collectives(jaxpr), None) is None:
        return
    raise ValueError(
        message(
            f"{name} needs an axis_name that no jax.vmap around it has",
            got=f"{axis_name!r}, for both",
            why="JAX would run its collectives over the vmap's axis, as it does under jax.pmap",
            fix=f"jax.vmap(fn, axis_name='rows'), or any name but {axis_name!r}",
        )
    )


def _is_bound(name: str) -> bool:
    """Returns whether an axis of this name is bound here."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def _shard_maps(eqn: JaxprEqn) -> list[JaxprEqn]:
    if eqn.primitive.name == "shard_map":
        return [eqn]
    return [e for sub in jax_compat.sub_jaxprs(eqn) for s in sub.eqns for e in _shard_maps(s)]
