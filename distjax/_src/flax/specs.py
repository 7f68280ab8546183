"""How the devices of a replica split Flax variables: read from their metadata, and kept there.

A split comes from rules by path (`place`), from Flax's partitioning metadata with its logical axis
rules, or from arrays that are already split when their module is placed. All of these end up in the
metadata of the variable, since a trace, a later optimizer and a copy of the module see only that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax.sharding import PartitionSpec

from distjax._src import jax_compat
from distjax._src.context import StrategyLike
from distjax._src.flax.graphs import strategy_of
from distjax._src.placement import Spec, Topology, adopted_spec, fits, require_spec
from distjax._src.placement.model_axes import names_in
from distjax._src.typing import PyTree
from distjax.errors import message

#: Pattern of a path -> what is split of the variables found by it.
Rules = Mapping[str, PartitionSpec]

_METADATA = "distjax_sharding"
_RULES_FIX = "with nnx.logical_axis_rules([('mlp', 'model'), ('embed', None)]): around the call"


def spec_of_variable(
    variable: nnx.Variable[Any] | jax.Array,
    shape: tuple[int, ...],
    topology: Topology,
    path: str = "",
) -> Spec:
    """Returns what is split of a variable within a replica; None: what the program makes of it.

    State of an optimizer has the metadata of its parameter, if perhaps another shape: then it is
    left to the program. An error names the path.
    """
    if not topology.model_axes or not isinstance(variable, nnx.Variable):
        return None
    metadata = variable.get_metadata()
    spec = metadata.get(_METADATA)
    if spec is None and metadata.get("out_sharding"):
        spec = nnx.spmd.get_var_pspec(variable)
    if spec is None or (isinstance(variable, nnx.OptState) and not fits(spec, shape, topology)):
        return None
    what = f"{type(variable).__name__} {path or f'of shape {list(shape)}'}"
    is_unknown = not set(names_in(spec)) <= dict(topology.model_axes).keys()
    is_logical = is_unknown and _METADATA not in metadata
    fix, by_path = _RULES_FIX if is_logical else "", _as_rule(path or "kernel")
    return require_spec(spec, shape, topology, what, fix, by_path)


def _as_rule(pattern: str) -> Callable[[str], str]:
    """Returns what writes a spec as the rule of a pattern: rules are before any metadata."""
    return lambda spec: f"rules={{{pattern!r}: {spec}}}"


def write(objects: Sequence[Any], rules: Rules | None, topology: Topology | None) -> None:
    """Writes what rules by path say to the variables of objects; or raises, and writes nothing.

    Without a topology nothing is checked.
    """
    if not rules:
        return
    found = [(path, v) for o in objects for path, v in _named_variables(o)]
    unused, chosen = dict.fromkeys(rules), list[tuple[nnx.Variable[Any], PartitionSpec]]()
    for path, variable in found:
        pattern = next((p for p in rules if re.search(p, path)), None)
        if pattern is None:
            continue
        unused.pop(pattern, None)
        shape, spec = tuple(variable.shape), rules[pattern]
        if topology is None or (isinstance(variable, nnx.Param) or fits(spec, shape, topology)):
            if topology is not None:
                what = f"{path}, by the rule {pattern!r},"
                require_spec(spec, shape, topology, what, written=_as_rule(pattern))
            chosen.append((variable, spec))
    if unused:
        raise ValueError(_unused_text(next(iter(unused)), [path for path, _ in found]))
    for variable, spec in chosen:
        variable.set_metadata(_METADATA, spec)


def _unused_text(pattern: str, paths: Sequence[str]) -> str:
    return message(
        f"rules needs patterns that find a variable, and {pattern!r} finds none",
        got=f"variables {', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''}",
        why="what was meant to be split would be whole on each device",
        fix=f"rules={{{re.escape(paths[0]) if paths else 'kernel'!r}: P(None, 'model')}}; the "
        "first pattern that re.search finds in a path counts",
    )


def learn(objects: Sequence[Any], strategy: StrategyLike) -> None:
    """Writes to variables that are new to a strategy what only this moment tells of them.

    That is the logical axis rules in force, and how arrays without metadata are split. Warns of an
    array that is split over axes that the strategy does not have.
    """
    modules = [x for x in objects if isinstance(x, nnx.Pytree)]
    if jax_compat.tracing() or all(strategy_of(x) is strategy for x in modules):
        return
    keep_logical_rules(modules)
    topology = strategy.extended.topology
    require_fitting([x for module in modules for x in _named_variables(module)], topology)
    for module in modules:
        for path, variable in _named_variables(module):
            metadata, value = variable.get_metadata(), variable.get_raw_value()
            if metadata.get("out_sharding") or _METADATA in metadata:
                continue
            spec = adopted_spec(value, topology, path)
            if spec is not None:
                variable.set_metadata(_METADATA, spec)


def require_fitting(named: Sequence[tuple[str, nnx.Variable[Any]]], topology: Topology) -> None:
    """Raises a ValueError that names the parameter, if what its metadata split does not fit."""
    for path, variable in named:
        if isinstance(variable, nnx.Param):
            for x in jax.tree.leaves(variable.get_raw_value()):
                spec_of_variable(variable, jnp.shape(x), topology, path)


def keep_logical_rules(objects: Sequence[Any]) -> None:
    """Makes the logical axis rules in force those of the variables, which outlive the block."""
    in_force = spmd.get_logical_axis_rules()
    if not in_force:
        return
    for module in objects:
        for _, variable in _named_variables(module):
            metadata = variable.get_metadata()
            if metadata.get("out_sharding"):
                both = spmd.composite_rules(in_force, metadata.get("sharding_rules", ()))
                variable.set_metadata("sharding_rules", tuple(map(tuple, both)))


def _named_variables(module: PyTree) -> list[tuple[str, nnx.Variable[Any]]]:
    """Returns the variables in an object with their paths: "up.kernel"."""
    return [
        (".".join(map(str, path)), v)
        for path, v in nnx.iter_graph(module)
        if isinstance(v, nnx.Variable)
    ]
