"""WriteBarrier: where the processes of a job wait for each other while they write a step.

Orbax's own barriers do not know of failures: a process that cannot write goes on to a later barrier
than the one at which the others wait, and all of them wait until they time out. Here all come to
the next barrier, whichever it is, and one that has failed says so.
"""

from __future__ import annotations

import itertools
import json
import sys

from distjax.cluster.job import Job
from distjax.cluster.lines import as_plain
from distjax.cluster.meeting import come_and_hear

_PLACE = "distjax/writing"
_MAX_TEXT = 300
_numbers = itertools.count()


class WriteBarrier:
    """The barriers of one writer, called by orbax, one at a time, in the same order everywhere.

    Args:
      joined: the job, whose processes make as many writers, in the same order.
    """

    def __init__(self, joined: Job):
        self._job, self._place = joined, f"{_PLACE}/{next(_numbers)}"
        self._count = 0

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes are here; in a process that has failed, tells them.

        Args:
          key: orbax's name for the barrier; unused.
          timeout_ms: how long to wait for the last one, unless it is at slow work.

        Raises:
          RuntimeError: another process has failed; with its error's text.
          jax.errors.JaxRuntimeError: one did not come in time, or is gone.
        """
        del key
        self._count += 1
        place = f"{self._place}/{self._count}"
        error = sys.exc_info()[1]  # orbax calls this in a `finally`, too
        if error is not None:
            self._tell(place, f"{type(error).__name__}: {as_plain(error, _MAX_TEXT)}")
            return
        said = come_and_hear(self._job, place, "", timeout_ms / 1000)
        if self._job.process_id == 0:  # all are here, so all have left the last one
            self._job.client.key_value_delete(f"{self._place}/{self._count - 1}")
        for process, text in enumerate(said):
            if text:
                raise RuntimeError(f"{self._job.name_process(process)} failed: {text}")

    def _tell(self, place: str, text: str) -> None:
        """Says that this process has failed, and waits for nobody."""
        client, own = self._job.client, self._job.process_id
        client.key_value_set(f"{place}/came/{own}", text, allow_overwrite=True)
        if own == 0:  # which forwards what all have said
            all_said = [text, *[""] * (self._job.num_processes - 1)]
            client.key_value_set(f"{place}/said", json.dumps(all_said))
