"""Agreement of a job's processes on what they are about to save or restore, and have read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from distjax.checkpoint.leaves import Leaf
from distjax.cluster.agreement import agree
from distjax.cluster.facts import ComparedFact
from distjax.cluster.job import Job
from distjax.cluster.lines import as_plain
from distjax.cluster.meeting import exchange
from distjax.cluster.phases import phase

_MAX_TEXT = 300
T = TypeVar("T")


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


def done_by_all(joined: Job | None, occasion: str, do: Callable[[], T]) -> T:
    """Returns ``do()`` once every process has done it, each without the others.

    Args:
      joined: the job whose processes do it; None: this process alone.
      occasion: what they do, for errors.
      do: has no collectives, so that a process may fail alone.

    Raises:
      RuntimeError: another process failed; with its error's text. Who failed raises its own.
      ClusterError: a process does not arrive, or does something else.
    """
    if joined is None:
        return do()
    done: list[T] = []
    raised: Exception | None = None
    try:
        with phase(occasion):
            done.append(do())
    except Exception as error:
        raised = error
    text = "" if raised is None else f"{type(raised).__name__}: {as_plain(raised, _MAX_TEXT)}"
    said = exchange(joined, occasion, text, joined.timeouts.step_deadline)
    if raised is not None:
        raise raised
    for process, failure in enumerate(said):
        if failure:
            raise RuntimeError(f"{joined.name_process(process)} failed: {failure}")
    return done[0]
