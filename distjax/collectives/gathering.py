"""Checks the axis along which the replicas' values are concatenated."""

from __future__ import annotations

from distjax.errors import describe_value, message
from distjax.integers import is_int


def require_gather_axis(ndim: int, axis: object, method: str) -> None:
    """Raises a ValueError unless `axis` is an axis of a value with `ndim` axes."""
    if is_int(axis) and 0 <= axis < ndim:
        return
    raise ValueError(
        message(
            f"{method} needs an axis between 0 and {ndim - 1}"
            if ndim
            else f"{method} needs a value with at least one axis",
            got=f"axis {describe_value(axis)} of a value with {ndim} axes",
            why="the replicas' values are put end to end along an axis that they have",
            fix=f"{method}(value, axis=0); for scalars: x[None] first",
        )
    )
