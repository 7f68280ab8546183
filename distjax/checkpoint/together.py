"""How the processes of a job save and restore together: all do the same, and hear how it went.

One process's failure is an error on all. Orbax's save, restore and removal run programs over all
devices, in which the others would wait for a process that has raised. So each process first tries
to write, reads its own part without the others, and process 0 alone looks at the directory and
removes a step; then all hear how it went.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distjax.checkpoint.leaves import Leaf
from distjax.cluster.job import Job, as_plain
from distjax.cluster.ledger import phase
from distjax.cluster.meeting import ComparedFact, agree, come_and_hear, exchange
from distjax.errors import CheckpointError

_PLACE = "distjax/writing"
_MAX_TEXT = 300
_numbers = itertools.count()


def agree_on_step(
    joined: Job | None,
    occasion: str,
    step: int | None,
    leaves: Iterable[Leaf] = (),
    options: Mapping[str, object] | None = None,
) -> None:
    """Waits until every process is about to do the same with the same step.

    Values are not compared: numbers and host arrays are saved as process 0 has them.

    Args:
      joined: the job whose processes do it together; None: this process alone.
      occasion: what they are about to do, such as "the save of a checkpoint".
      step: the step's number; None: the latest.
      leaves: the leaves of the tree.
      options: other arguments that decide what happens, by name.

    Raises:
      AgreementError: the processes differ; nothing has been written or changed.
      StuckError, PeerLostError: a process does not arrive.
    """
    if joined is None:
        return
    facts = [ComparedFact(f"the step of {occasion}", "the latest" if step is None else str(step))]
    facts += [ComparedFact(f"{x.key!r} in {occasion}", str(x.spec.to_json())) for x in leaves]
    facts += [
        ComparedFact(f"{name} of {occasion}", str(value)) for name, value in (options or {}).items()
    ]
    agree(occasion, facts)


def hear_all(joined: Job | None, occasion: str, do: Callable[[], Any]) -> list[Any]:
    """Returns what ``do()`` returns on each process, by process id, once all have done it.

    Args:
      joined: the job whose processes do it; None: this process alone.
      occasion: what they do, for errors.
      do: returns a JSON value; has no collectives, so that a process may fail alone.

    Raises:
      CheckpointError: that of another process.
      RuntimeError: another process failed; with its error's text. Who failed raises its own.
      ClusterError: a process does not arrive, or does something else.
    """
    if joined is None:
        return [do()]
    value, own = None, None
    try:
        with phase(occasion):  # it looks at files: the others wait for as long as that takes
            value = do()
    except Exception as error:
        own = error
    is_ours = isinstance(own, CheckpointError)
    failure = "" if own is None else str(own) if is_ours else _as_line(own)
    text = json.dumps([value, failure, is_ours])
    seconds = joined.timeouts.step_deadline
    said = [json.loads(x) for x in exchange(joined, occasion, text, seconds)]
    if own is not None:
        raise own
    for _, failure, is_ours in said:
        if is_ours:
            raise CheckpointError(failure)
    _require_no_failure(joined, [failure for _, failure, _ in said])
    return [value for value, _, _ in said]


def hear_first(joined: Job | None, occasion: str, do: Callable[[], Any]) -> Any:
    """Returns process 0's ``do()`` on every process; arguments and errors as for `hear_all`.

    A file system may answer processes differently about a directory just created, or a step just
    removed, and with different answers they would not reach the same barriers.
    """
    is_first = joined is None or joined.process_id == 0
    return hear_all(joined, occasion, lambda: do() if is_first else None)[0]


def _require_no_failure(joined: Job, said: Sequence[str]) -> None:
    """Raises a RuntimeError with the text of the first process that has failed, if one has."""
    for process, text in enumerate(said):
        if text:
            raise RuntimeError(f"{joined.name_process(process)} failed: {text}")


def _as_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {as_plain(error, _MAX_TEXT)}"


class WriteBarrier:
    """Where the processes wait for each other while they write a step; called by orbax.

    Orbax's own barriers do not know of failures: a process that cannot write goes on to a later
    barrier than the one at which the others wait, and all of them wait until they time out. Here
    all come to the next barrier, whichever it is, and one that has failed says so. One writer's
    barriers come one at a time, in the same order everywhere.

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
            self._tell(place, _as_line(error))
            return
        said = come_and_hear(self._job, place, "", timeout_ms / 1000)
        if self._job.process_id == 0:  # all are here, so all have left the last one
            self._job.client.key_value_delete(f"{self._place}/{self._count - 1}")
        _require_no_failure(self._job, said)

    def _tell(self, place: str, text: str) -> None:
        """Says that this process has failed, and waits for nobody."""
        client, own = self._job.client, self._job.process_id
        client.key_value_set(f"{place}/came/{own}", text, allow_overwrite=True)
        if own == 0:  # which forwards what all have said
            all_said = [text, *[""] * (self._job.num_processes - 1)]
            client.key_value_set(f"{place}/said", json.dumps(all_said))
