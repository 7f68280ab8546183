"""DelayedRestore: a checkpoint for variables that do not exist yet."""

from __future__ import annotations

from typing import Any

from distjax.checkpoint.restoring import Saved
from distjax.checkpoint.trees import as_tree
from distjax.errors import CheckpointError, message
from distjax.typing import PyTree


class DelayedRestore:
    """Restores each key of a checkpoint once, when a tree containing it is passed.

    For state that is created late, such as variables made on a first call, or the slots of
    an optimizer. Returned by `Checkpointer.delayed`, which chooses the step.

    Example:
      >>> import tempfile
      >>> with dj.checkpoint.Checkpointer(tempfile.mkdtemp()) as checkpointer:
      ...     checkpointer.save(1, {"w": jnp.float32(5.0), "b": jnp.float32(7.0)})
      ...     later = checkpointer.delayed()
      ...     w = dj.Variable(0.0)  # created after the restore was requested
      ...     _ = later.restore({"w": w})
      ...     print(float(w.value), later.remaining)
      ...     _ = w.assign(1.0)
      ...     b = dj.Variable(0.0)
      ...     _ = later.restore({"w": w, "b": b})  # w has had its value
      ...     print(float(w.value), float(b.value), later.remaining)
      5.0 ('b',)
      1.0 7.0 ()

    Source: tf.train.Checkpoint.restore, deferred restoration.
    """

    def __init__(self, saved: Saved):
        self._saved = saved
        self._left = dict(saved.names)

    @property
    def remaining(self) -> tuple[str, ...]:
        """The keys not yet restored, under their names in the tree."""
        return tuple(self._left)

    def restore(self, tree: PyTree) -> Any:
        """Returns `tree` with saved values for those of its keys not yet restored.

        Other keys of `tree` are left alone.

        Locality, Context: as for `Checkpointer.restore`.

        Raises:
          CheckpointError: a value of the wrong shape; nothing is changed, and the key
            remains.
          AgreementError: in a job, processes restore different keys or shapes.
        """
        wanted = as_tree(tree, "restore")
        names = {key: self._left[key] for key in wanted.leaves if key in self._left}
        self._saved.agree("a delayed restoration", [wanted.leaves[key] for key in names])
        if not names:
            return tree
        restored = self._saved.restore(wanted, names, partial=True)
        for key in names:
            del self._left[key]
        return restored

    def require_all(self) -> None:
        """Raises a CheckpointError listing the keys that remain, if any."""
        if not self._left:
            return
        raise CheckpointError(
            message(
                "a delayed restore needs trees that take all that was saved",
                got=f"no place yet for {', '.join(self._left)}",
                why="state that was saved but is never restored silently starts from scratch",
                fix="later.restore(tree) with these keys in it, or do without require_all()",
            )
        )
