"""Checkpoints on orbax: saved while training runs, restored onto any strategy."""

try:
    import orbax.checkpoint as _orbax
except ImportError as error:
    from distjax.errors import message as _message

    raise ImportError(
        _message(
            "dj.checkpoint needs the package orbax-checkpoint",
            got=f"{type(error).__name__}: {error}",
            why="it writes and reads through orbax, which distjax does not install by itself",
            fix="pip install 'distjax[checkpoint]'",
        )
    ) from error

from distjax._src.checkpoint.checkpointer import Checkpointer, DelayedRestore

__all__ = ["Checkpointer", "DelayedRestore"]

del _orbax
