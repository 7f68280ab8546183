"""Exceptions of a worker's process, sent to the coordinator as data."""

# Ray raises an exception of the other process where its answer is asked for. One that cannot be
# unpickled there looks like the loss of the process.

from __future__ import annotations

import dataclasses
import traceback

from distjax.errors import ClosureError, message
from distjax.user_lines import is_library_file


@dataclasses.dataclass(frozen=True)
class Failed:
    """A call to a worker raised an exception.

    Attributes:
      pickled: the exception; empty if it cannot be pickled.
      text: its type and text.
      lines: the user's lines of its traceback.
    """

    pickled: bytes
    text: str
    lines: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Returns an exception that is being handled, as data."""
        from ray import cloudpickle

        text = "".join(traceback.format_exception_only(error)).strip()
        entries = traceback.extract_tb(error.__traceback__)
        own = [entry for entry in entries if not is_library_file(entry.filename, entry.name)]
        lines = "".join(traceback.format_list(own))
        try:
            return cls(cloudpickle.dumps(error), text, lines)
        except Exception:
            return cls(b"", text, lines)

    @property
    def error(self) -> BaseException:
        """The exception; a ClosureError that quotes it, if it cannot be unpickled."""
        from ray import cloudpickle

        try:
            error: BaseException = cloudpickle.loads(self.pickled)
        except Exception:
            error = ClosureError(_not_portable(self.text))
        if self.lines:
            error.add_note(f"It was raised in the process of a worker:\n{self.lines}")
        return error


def _not_portable(text: str) -> str:
    return message(
        "an exception needs to be pickled to be raised here",
        got=f"one that cannot be, or cannot be read again: {text}",
        why="it was raised in the process of a worker",
        fix="hand all of its arguments on, and nothing else: "
        "def __init__(self, path, line): super().__init__(path, line)",
    )
