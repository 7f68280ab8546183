"""Where the arrays of Flax variables live between steps, by strategy and variable type."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distjax.cluster.agreement import agree
from distjax.cluster.facts import ComparedFact, describe_on_host
from distjax.cluster.job import job
from distjax.cluster.writes import record_write
from distjax.context.contracts import StrategyLike
from distjax.flax import rules
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.placement.transfer import transfer, without_alias
from distjax.replica.global_value import AlreadyPlaced
from distjax.strategies.contracts import ExtendedContract
from distjax.strategies.destinations import reduction_layout
from distjax.typing import DTypeLike, PyTree
from distjax.variables.layouts.layout import Layout
from distjax.variables.layouts.local_form import LocalForm
from distjax.variables.layouts.mirrored import MirroredLayout
from distjax.variables.variable_placement import VariablePlacement


def layout_of(
    strategy: StrategyLike,
    variable: nnx.Variable[Any] | jax.Array,
    shape: Sequence[int],
    dtype: DTypeLike,
) -> Layout:
    """Returns where an array of a variable lives under `strategy`.

    Parameters live where the strategy puts variables, optimizer state where it puts
    variables colocated with others, and everything else on each replica. The arrays are
    stored unencoded, since code other than distjax reads them too.
    """
    shape, extended = tuple(shape), strategy.extended
    placement: VariablePlacement = extended.placement  # pyright: ignore[reportAttributeAccessIssue]
    if rules.is_parameter(variable) or not placement.synchronizes:
        return placement.layout(shape, dtype).unencoded(shape)
    if isinstance(variable, nnx.OptState):
        beside = _Parameter(shape, dtype, placement.layout(shape, dtype))
        return placement.layout(shape, dtype, beside).unencoded(shape)
    return MirroredLayout(extended.topology)


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """Stands in for a `dj.Variable` where a placement is asked about a parameter."""

    shape: tuple[int, ...]
    dtype: Any
    layout: Layout


def gradient_form(extended: ExtendedContract, parameter: jax.Array) -> LocalForm:
    """Returns the local form of a gradient that is reduced to a parameter."""
    shape, dtype = tuple(parameter.shape), parameter.dtype
    target = _Parameter(shape, dtype, extended.placement.layout(shape, dtype))
    return reduction_layout(extended, target).local_form


def place_arrays(
    values: Sequence[PyTree], layouts: Sequence[Layout | None], paths: Sequence[str]
) -> list[Any]:
    """Moves arrays to where they live; returns those already there unchanged. Not for traces.

    Args:
      values: the arrays of objects.
      layouts: where each lives; None: anywhere.
      paths: their names as users write them, such as "Model.linear.kernel".

    Raises:
      AgreementError: objects that span processes differ between them at their first use.
    """
    pairs = list(zip(values, layouts, strict=True))
    if job() is not None:
        shared = [i for i, layout in enumerate(layouts) if _spans_processes(layout)]
        moved = [(paths[i], values[i]) for i in shared if not _is_there(*pairs[i])]
        _compare(moved, are_new=len(moved) == len(shared))
    return [place_array(value, layout) for value, layout in pairs]


def _compare(moved: Sequence[tuple[str, PyTree]], are_new: bool) -> None:
    """Compares values that are about to be moved to arrays that span processes.

    New objects are compared at once, in a meeting of all processes. A value that the user puts
    into an object later, perhaps at each step, is only noted for the comparison in the background.
    """
    if are_new and moved:
        values = [
            ComparedFact(f"value {i}, {path}", describe_on_host(value))
            for i, (path, value) in enumerate(moved)
        ]
        agree("the first use of NNX objects", values, known_by=values)
    else:
        for path, value in moved:
            record_write(f"a write of {path}", value)


def _spans_processes(layout: Layout | None) -> bool:
    sharding = layout.sharding if layout is not None else None
    return sharding is not None and not sharding.is_fully_addressable


def place_array(value: PyTree, layout: Layout | None) -> Any:
    """Moves an array to where it lives; returns it unchanged if it is there. Not for traces."""
    if layout is None or layout.sharding is None or _is_there(value, layout):
        return value
    return transfer(jnp.asarray(without_alias(value)), layout.sharding)


def _is_there(value: PyTree, layout: Layout | None) -> bool:
    if layout is None or isinstance(value, PerReplica):
        return True
    is_there = isinstance(value, jax.Array) and value.sharding == layout.sharding
    return is_there and value.committed  # an uncommitted one would cost a second compilation


def as_value(stored: PyTree, layout: Layout | None) -> Any:
    """Returns the global value of a stored array, in a trace."""
    if layout is None or isinstance(stored, PerReplica):
        return stored
    return layout.from_stored(stored, stored.shape)


def as_argument(stored: PyTree, layout: Layout | None, topology: Topology) -> Any:
    """Returns a stored array as an argument of `run`: the shards if it is split."""
    value = as_value(stored, layout)
    if layout is None or isinstance(value, PerReplica) or not layout.local_form.is_split:
        return value
    return PerReplica(layout.local_form.to_replicas(value), topology)


def as_stored_output(value: PyTree, layout: Layout | None) -> Any:
    """Returns a global value in its stored form, in a trace."""
    if isinstance(value, PerReplica):
        return value
    return AlreadyPlaced(value if layout is None else layout.constrain(layout.to_stored(value)))
