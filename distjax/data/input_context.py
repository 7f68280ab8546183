"""InputContext: the argument of a function that makes a dataset."""

from __future__ import annotations

import dataclasses

from distjax.errors import BatchError, message
from distjax.integers import require_int


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
                message(
                    f"get_per_replica_batch_size needs a global batch size that "
                    f"{self.num_replicas_in_sync} replicas divide",
                    got=f"global_batch_size={global_batch_size}",
                    why="every replica gets the same number of examples",
                    fix="use " + " or ".join(map(str, sizes)),
                )
            )
        return size

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )
