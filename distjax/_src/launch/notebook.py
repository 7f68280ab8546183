"""`notebook_launcher`: a function run by the processes of a job, from a notebook.

The function goes to fresh processes in a file of a private folder, pickled by value; results and
errors come back in others. Nothing is forked, so that what the notebook has done with JAX is no
obstacle; and nothing is unpickled that another user could have written.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from distjax._src.launch.launcher import Launcher, Options
from distjax.errors import describe_value, message, require, require_int

_CALL, _RESULT = "call.pickle", "result-{}.pickle"


def notebook_launcher(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    processes: int = 2,
    *,
    devices_per_process: int = 1,
    timeout: float | None = None,
) -> list[Any]:
    """Returns ``fn(*args)`` of each of several processes, by process id.

    The processes are fresh ones that have joined a job of their own. What they print appears here,
    with their numbers. Ctrl-C, or the notebook's interrupt, ends all of them.

    Args:
      fn: a function, which may be one of the notebook or have a closure; it imports what it needs.
        It and `args` are pickled by cloudpickle, results by pickle: host values, not `jax.Array`
        that other processes hold a part of.
      args: its arguments.
      processes: how many.
      devices_per_process: CPU devices, or GPUs, of each.
      timeout: seconds after which all are ended.

    Raises:
      Exception: the first error of a process, of its own class, with a note that has its traceback.
      RuntimeError: a process ended otherwise; with what it said.
      TimeoutError: it took longer than `timeout`.
      ImportError: cloudpickle is not installed.
      TypeError, ValueError: `fn` is no function, or a number is not positive.
    """
    require(
        callable(fn),
        "notebook_launcher needs a function",
        got=describe_value(fn),
        why="each process calls it",
        fix="dj.launch.notebook_launcher(train, processes=2), without the parentheses of a call",
        error=TypeError,
    )
    why, name = "so many are started", "notebook_launcher: devices_per_process"
    require_int("notebook_launcher: processes", processes, 1, why=why, fix="processes=2")
    require_int(name, devices_per_process, 1, why=why, fix="devices_per_process=1")
    with tempfile.TemporaryDirectory(prefix="distjax-notebook-") as folder:  # for this user alone
        _dump(os.path.join(folder, _CALL), (fn, tuple(args)))
        start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import answer; answer()"
        launcher = Launcher(
            Options(("-c", start), processes, devices_per_process), folder, _show, lambda _: None
        )
        try:
            launcher.run(timeout)
        except TimeoutError:
            raise TimeoutError(
                message(
                    f"{getattr(fn, '__name__', fn)} needs to return within {timeout:g} s",
                    got=f"{processes} processes that run on; they are ended",
                    why="timeout of notebook_launcher says so",
                    fix="notebook_launcher(..., timeout=600), or None",
                )
            ) from None
        if (cause := launcher.failure) is None:
            return [_load(os.path.join(folder, _RESULT.format(i))) for i in range(processes)]
        try:
            error = _load(os.path.join(folder, _RESULT.format(cause.process)))
        except Exception:  # it has left none, or none that can be pickled
            error = None
    trace = (cause.traceback or cause.error).strip()
    if isinstance(error, BaseException):
        error.add_note(f"raised in process {cause.process}:\n{trace}")
        raise error
    raise RuntimeError(
        message(
            f"process {cause.process} of notebook_launcher needs to return",
            got=f"exit code {cause.code}",
            why=trace,
            fix="look at what it said, above",
        )
    )


def _show(index: int, line: bytes) -> None:
    if not (line.startswith(b"[Gloo] ") or b" peer ranks. Expected number of " in line):
        print(f"[{index}] {line.decode(errors='replace')}", flush=True)


def _dump(path: str, value: object) -> None:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            message(
                "notebook_launcher needs cloudpickle",
                got=str(error),
                why="functions of a notebook are in no module that another process could import",
                fix="pip install 'distjax[launch]'",
            )
        ) from error
    content = cloudpickle.dumps(value)
    with open(path, "wb") as file:
        file.write(content)


def _load(path: str) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file)


def answer() -> None:
    """Calls the function, and leaves its result or error; what each process runs."""
    import distjax

    folder = os.environ["DISTJAX_RESULT_DIR"]
    path = os.path.join(folder, _RESULT.format(os.environ["DISTJAX_PROCESS_ID"]))
    distjax.initialize()
    try:
        fn, args = _load(os.path.join(folder, _CALL))
        _dump(path, fn(*args))
    except Exception as error:
        with contextlib.suppress(Exception):  # its text is in the log
            _dump(path, error)
        raise
