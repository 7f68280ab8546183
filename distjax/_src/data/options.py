"""What users say of their input and get with it: `InputOptions`, `InputContext` and `Batch`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final, Literal, get_args

import jax

from distjax.errors import BatchError, describe_value, message, require_int

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
            why="the options are one object, which is checked when it is created",
            fix=f"strategy.{method}(..., dj.InputOptions(partial='drop'))",
        )
    )


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Describes the input pipeline that a dataset is made for.

    Attributes:
      num_input_pipelines: the number of pipelines, one per process.
      input_pipeline_id: the number of this one, 0 to num_input_pipelines - 1.
      num_replicas_in_sync: R, over all pipelines.

    Source: tf.distribute.InputContext.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns B = G / R for a global batch size G.

        Raises:
          BatchError: G is not a number of examples, or R does not divide it.

        Example:
          >>> dj.InputContext(num_replicas_in_sync=6).get_per_replica_batch_size(12)
          2
        """
        require_int(
            "get_per_replica_batch_size: global_batch_size",
            global_batch_size,
            0,
            why="it is a number of examples",
            fix="context.get_per_replica_batch_size(64)",
            error=BatchError,
        )
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            sizes = [n * self.num_replicas_in_sync for n in (size, size + 1) if n]
            raise BatchError(
                f"get_per_replica_batch_size needs a global batch size that "
                f"{self.num_replicas_in_sync} replicas divide",
                got=f"global_batch_size={global_batch_size}",
                why="every replica gets the same number of examples",
                fix="use " + " or ".join(map(str, sizes)),
            )
        return size

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """An element under ``InputOptions(partial="pad")``; a pytree.

    Padding consists of copies of real examples, so that their losses and gradients
    are never NaN; weighted by the mask, results equal the unpadded ones.

    Attributes:
      data: the user's structure, leaves [B, ...] per replica.
      mask: bool [B] per replica: True for the examples that count. A single bool []
        if elements of `distribute_datasets_from_function` have no common leading
        dimension.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> batches = [np.arange(4.0), np.arange(3.0)]
      >>> dataset = strategy.distribute_dataset(batches, dj.InputOptions(partial="pad"))
      >>> for batch in dataset:
      ...     squares = strategy.run(lambda x: x * x, args=(batch.data,))
      ...     print(strategy.reduce("sum", squares, axis=0, mask=batch.mask))
      14.0
      5.0
    """

    #: Lets the trace check that a step using a batch reads its mask.
    masks_examples: ClassVar[bool] = True

    data: Any
    mask: Any
