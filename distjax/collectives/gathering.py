"""The axis that values of replicas are put end to end along."""

from __future__ import annotations

from distjax.errors import describe_value, message


def require_gather_axis(ndim: int, axis: object, method: str) -> None:
    """Raises a ValueError unless a value of `ndim` axes has the axis `axis`."""
    if isinstance(axis, int) and 0 <= axis < ndim:
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
