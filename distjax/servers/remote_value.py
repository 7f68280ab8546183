"""RemoteValue: the result of a closure, which may not be there yet."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from distjax import jax_compat
from distjax.errors import message
from distjax.servers.closure import Closure
from distjax.servers.waiting import Waiters
from distjax.typing import PyTree


class RemoteValue:
    """What a closure returns, once a worker has run it.

    Source: tf.distribute.experimental.coordinator.RemoteValue.

    Args:
      closure: whose result it is.
      waiters: where it is told of.
    """

    def __init__(self, closure: Closure, waiters: Waiters):
        self._closure = closure
        self._waiters = waiters

    @property
    def version(self) -> tuple[int, ...]:
        """The versions of the servers, one each: after its pushes, else as it pulled them.

        Waits as `get`.
        """
        self._wait(None)
        if self._closure.versions is None:
            self._closure.result()  # raises
        assert self._closure.versions is not None
        return self._closure.versions

    def done(self) -> bool:
        """Returns whether `fetch` would not wait."""
        return self._closure.is_over

    def get(self) -> Any:
        """Returns what the step returned, as arrays on the worker's device. Waits as `fetch`."""
        self._wait(None)
        return self._closure.result()

    def fetch(self, timeout: float | None = None) -> Any:
        """Returns what the step returned, as numpy arrays.

        Args:
          timeout: seconds to wait at most.

        Raises:
          TimeoutError: it is not there by then.
          CancelledError: of `concurrent.futures`: the closure was cancelled.
          EndOfDataError: no worker has an element for it.
          ServerLostError: its pushes were lost with a server.
          Exception: what the closure raised.
        """
        self._wait(timeout)
        return to_numpy(self._closure.result())

    def _wait(self, timeout: float | None) -> None:
        if not self._waiters.wait_until(lambda: self._closure.is_over, timeout):
            raise TimeoutError(
                message(
                    f"fetch needs {self._closure!r} to end within {timeout} s",
                    got=f"one that is {self._closure.state.value}",
                    why="its worker has not come so far",
                    fix="wait longer; coordinator.stats() says what workers do",
                )
            )

    def __repr__(self) -> str:
        return f"RemoteValue({self._closure!r}, {self._closure.state.value})"


def to_numpy(tree: PyTree) -> Any:
    """Returns a tree with numpy arrays for those of JAX; keys stay as they are."""
    return jax.tree.map(_leaf_to_numpy, tree)


def _leaf_to_numpy(leaf: object) -> Any:
    if isinstance(leaf, jax.Array) and not jax_compat.is_key_dtype(leaf.dtype):
        return np.asarray(leaf)
    return leaf
