"""InputOptions: partial batches, prefetch depth, sharding and copying of input."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal, get_args

from distjax.errors import describe_value, message
from distjax.integers import require_int

Partial = Literal["error", "drop", "pad"]
Shard = Literal["rows", "own"]

ERROR: Final = "error"
DROP: Final = "drop"
PAD: Final = "pad"
ROWS: Final = "rows"
OWN: Final = "own"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a dataset is split over the replicas and moved to them.

    Attributes:
      partial: what to do with a batch smaller than the first one. "error": pass it
        on if R divides it, else raise a BatchError. "drop": skip it. "pad": make
        every element a `Batch` of the full size, with a mask.
      prefetch: how many elements a background thread moves to the devices ahead of
        the loop; 0: no thread.
      shard: which part of the data a process of a job reads. "rows": all read the same
        global batches, and each keeps the rows of its own replicas. "own": each reads
        its own batches, with B examples for each of its replicas.
      copy: whether to copy each batch before it is moved. False asserts that the source
        never rewrites an array it has yielded, as with a loader that allocates each
        batch: a batch then costs only its `jax.device_put`. On CPU the device arrays
        may keep its memory.

    Raises:
      ValueError: an unknown `partial` or `shard`, a prefetch that is not an int >= 0, or a
        copy that is not a bool.

    Example:
      >>> dj.InputOptions(partial="pad")
      InputOptions(partial='pad', prefetch=2, shard='rows', copy=True)
    """

    partial: Partial = ERROR
    prefetch: int = 2
    shard: Shard = ROWS
    copy: bool = True

    def __post_init__(self) -> None:
        if self.partial not in get_args(Partial):
            raise ValueError(
                message(
                    "InputOptions(partial=...) needs 'error', 'drop' or 'pad'",
                    got=describe_value(self.partial),
                    why="it says what happens to a batch smaller than the first one",
                    fix="dj.InputOptions(partial='pad')",
                )
            )
        require_int(
            "InputOptions(prefetch=...)",
            self.prefetch,
            0,
            why="it counts the elements that are moved to the devices ahead of the loop",
            fix="dj.InputOptions(prefetch=2); prefetch=0 for no background thread",
        )
        if self.shard not in get_args(Shard):
            raise ValueError(
                message(
                    "InputOptions(shard=...) needs 'rows' or 'own'",
                    got=describe_value(self.shard),
                    why="it says whether the processes of a job read the same batches",
                    fix="dj.InputOptions(shard='own') where each process reads files of its own",
                )
            )
        if type(self.copy) is not bool:
            raise ValueError(
                message(
                    "InputOptions(copy=...) needs True or False",
                    got=describe_value(self.copy),
                    why="it says whether the source may write again to the arrays it has given",
                    fix="dj.InputOptions(copy=False) where every batch is a new array",
                )
            )


def as_input_options(options: object, method: str) -> InputOptions:
    """Returns `options`, or the defaults for None."""
    if options is None:
        return InputOptions()
    if isinstance(options, InputOptions):
        return options
    raise TypeError(
        message(
            f"{method} needs options=dj.InputOptions(...) or None",
            got=describe_value(options),
            why="the options are checked together, where they are written",
            fix=f"strategy.{method}(..., dj.InputOptions(partial='drop'))",
        )
    )
