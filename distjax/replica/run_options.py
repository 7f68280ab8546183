"""How a call on the replicas departs from `run`."""

from __future__ import annotations

import dataclasses

from distjax.typing import PyTree


class AsValues:
    """The out axis that means: return what `run` returns."""


AS_VALUES = AsValues()


@dataclasses.dataclass(frozen=True, eq=False)
class RunOptions:
    """How one call on the replicas departs from `run`.

    Attributes:
      axis_name: the name of the replica axis in this call; None: the strategy's.
      out_axes: a prefix of the results' tree: the position of the replica axis, None for a
        single value, or AS_VALUES for what `run` returns.
      leaves_program: whether the results leave a compiled program, and so must be marked as
        already placed.
      returns_object_state: whether the user's results are the first of a tuple of trees. The
        others are state of objects, which rules later turn into single values.
    """

    axis_name: str | None = None
    out_axes: PyTree = AS_VALUES
    leaves_program: bool = False
    returns_object_state: bool = False

    def for_first_of(self, count: int) -> RunOptions:
        """Returns these options for results that are the first of `count` trees."""
        options = dataclasses.replace(self, returns_object_state=True)
        if self.out_axes is AS_VALUES:
            return options
        return dataclasses.replace(options, out_axes=(self.out_axes, *[AS_VALUES] * (count - 1)))


AS_RUN = RunOptions()
