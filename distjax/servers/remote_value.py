"""RemoteValue: the result of a closure, possibly not yet available."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np

from distjax import jax_compat
from distjax.context import frames
from distjax.errors import ContextError, message
from distjax.servers.closure import Closure
from distjax.servers.pauses import Pauses
from distjax.servers.per_worker import refuse_pickle
from distjax.typing import PyTree
from distjax.uninterrupted import Waiters


class RemoteValue:
    """The result of a closure, once a worker has run it.

    Source: tf.distribute.experimental.coordinator.RemoteValue.

    Args:
      closure: the closure.
      waiters: rung when it is over.
      pauses: those in which it does not run.
    """

    def __init__(self, closure: Closure, waiters: Waiters, pauses: Pauses):
        self._closure = closure
        self._waiters = waiters
        self._pauses = pauses

    @property
    def version(self) -> tuple[int, ...]:
        """The version of each server: after its push, else as pulled.

        Waits as `get` does.
        """
        self._wait("version", None)
        if self._closure.versions is None:
            self._closure.result()  # raises
        assert self._closure.versions is not None
        return self._closure.versions

    def done(self) -> bool:
        """Returns whether `fetch` would return without waiting."""
        return self._closure.is_over

    def get(self) -> Any:
        """Waits as `fetch` does; returns the result as arrays on the worker's device."""
        self._wait("get", None)
        return self._closure.result()

    def fetch(self, timeout: float | None = None) -> Any:
        """Returns the step's result as numpy arrays.

        Args:
          timeout: maximum wait in seconds.

        Context: not in a replica function.

        Raises:
          ContextError: in a replica function; if it is not done, in ``with coordinator.paused()``
            or per-worker data.
          TimeoutError: it is not available by then.
          CancelledError: of `concurrent.futures`: the closure was cancelled.
          EndOfDataError: no worker has an element for it.
          ServerLostError: its pushes were lost with a server.
          Exception: the error of the closure.
        """
        self._wait("fetch", timeout)
        return to_numpy(self._closure.result())

    def _wait(self, method: str, timeout: float | None) -> None:
        require_outside_of_steps(method)
        if not self.done():
            self._pauses.require_going(method)
        if not self._waiters.wait_until(lambda: self._closure.is_over, timeout):
            raise TimeoutError(
                message(
                    f"{method} needs {self._closure!r} to end within {timeout} s",
                    got=f"one that is {self._closure.state.value}",
                    why="its worker has not got that far yet",
                    fix="wait longer; coordinator.stats() says what workers do",
                )
            )

    def __repr__(self) -> str:
        return f"RemoteValue({self._closure!r}, {self._closure.state.value})"

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "pickle what it stands for: value.fetch()")


def require_outside_of_steps(method: str) -> None:
    """Raises a ContextError in a replica function.

    Args:
      method: the method that may not be called there.
    """
    if not frames.current().is_replica:
        return
    raise ContextError(
        message(
            f"{method} needs to be called outside of a replica function",
            got=f"a call in {frames.current().name}",
            why="a step is traced, and then runs at workers, which have no coordinator",
            fix="call it in the code that schedules the step; give the step values as arguments: "
            "args=(value.get(),)",
        )
    )


def to_numpy(tree: PyTree) -> Any:
    """Returns a tree with JAX arrays converted to numpy; PRNG keys stay as they are."""
    return jax.tree.map(_leaf_to_numpy, tree)


def _leaf_to_numpy(leaf: object) -> Any:
    if isinstance(leaf, jax.Array) and not jax_compat.is_key_dtype(leaf.dtype):
        return np.asarray(leaf)
    return leaf
