"""Agreement of a job's processes on what they are about to save or restore."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distjax.checkpoint.leaves import Leaf
from distjax.cluster.agreement import agree
from distjax.cluster.facts import ComparedFact
from distjax.cluster.job import Job


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
