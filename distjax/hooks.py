"""What layers hear from the kernel, and may do there: the kernel knows none of them by name.

A layer (jobs of several processes, parameter servers, Flax) appends its functions to these lists
when it is imported, from `distjax/__init__.py`. Empty, the kernel trains on the devices of one
process. A function that does not apply to what it is told returns at once, or None.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Watcher:
    """What a layer does around each launch of one program.

    Attributes:
      compiled: ``compiled(build, lowered, args, kwargs)`` before the first launch with such
        arguments, without any lock.
      begin: ``begin(build, args, kwargs)`` before each launch, with the lock of its variables.
      end: ``end(returned)`` after it; None: the launch raised.
      after: ``after(returned)`` when the lock is free: the place to wait.
    """

    compiled: Callable[..., None] | None = None
    begin: Callable[..., None] | None = None
    end: Callable[[tuple[Any, ...] | None], None] | None = None
    after: Callable[[tuple[Any, ...]], None] | None = None


#: ``watch(build)`` returns the `Watcher` of a new `program.launch.Build`, or None.
watchers: list[Callable[[Any], Watcher | None]] = []

#: ``launch(build)`` returns what launches a program in place of `Build.launch`, or None: for
#: variables that are kept elsewhere.
launchers: list[Callable[[Any], Callable[..., Any] | None]] = []

#: ``told(name)``: a program is about to be compiled for the first time.
on_new_program: list[Callable[[str], None]] = []

#: ``told(variables, initial)``: variables are about to get their initial values; ``initial()``
#: returns the program that computes them, lowered, or the one value.
on_created: list[Callable[[Any, Callable[[], Any]], None]] = []

#: ``told(what, value)``: a value on the host was written where every process has to write the same.
on_host_write: list[Callable[[str, Any], None]] = []

#: ``begin(name, fn, arrays, static)``: ``fn(arrays, *static)`` is about to be launched outside of
#: programs. Returns what is called with an output that is ready when it is done, or with None if it
#: was not launched; or None.
on_operation: list[Callable[..., Callable[[Any], None] | None]] = []

#: ``told(strategy, devices)``: a strategy of this name is made for `devices`, or for all (None).
on_all_devices: list[Callable[[str, Any], None]] = []

#: ``told(call, meant)``: a call takes this process's devices, by default; the code `meant` says so.
on_local_devices: list[Callable[[str, str], None]] = []

#: ``told(topology, devices_per_host)``: a strategy is about to reduce over these replicas.
on_topology: list[Callable[[Any, int], None]] = []

#: ``told(topology, copies)``: values that have to be equal on all replicas are compared. `copies`
#: are those that this process holds: by name of the value, a list with `slices` and `data` each.
on_compared: list[Callable[[Any, Any], None]] = []

#: ``join(layout, partial)`` returns the `data.iterator.Together` of a new iterator, or None.
readers: list[Callable[[Any, Any], Any]] = []

#: ``work(what)`` returns a context in which this process is at slow work, such as a compilation.
at_work: list[Callable[[str], contextlib.AbstractContextManager[Any]]] = []

#: Library -> the module of distjax whose `LAYER` takes its objects into programs (see
#: `objects.stateful`); that is imported once the library has been.
object_layers: dict[str, str] = {}


def working(what: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for slow work of this process, described for people."""
    if not at_work:
        return contextlib.nullcontext()
    entered = contextlib.ExitStack()
    for work in at_work:
        entered.enter_context(work(what))
    return entered


def watchers_of(build: object) -> list[Watcher]:
    """Returns the watchers of a new build."""
    made = [watch(build) for watch in watchers]
    return [watcher for watcher in made if watcher is not None]
