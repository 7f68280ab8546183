"""What the processes of a job compare and record at the kernel's events, which call this module.

Before a program first runs, before variables get their values, and before an operation outside of
programs is run for the first time, the processes compare it and what it is given. Each launch is
recorded in the ledger, with a checksum of the numbers and small host arrays among its arguments:
each process passes its own, so they may differ at any call. So are writes of host values, of which
each process does its own part: nothing is exchanged then.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import jax
import numpy as np
from jax.sharding import Sharding

from distjax._src import hooks, jax_compat
from distjax._src.cluster.job import Job, job, on_joined
from distjax._src.cluster.ledger import Launch, Token, ledger, phase
from distjax._src.cluster.meeting import (
    ComparedFact,
    agree,
    describe_on_host,
    describe_program,
    describe_structure,
    exchange,
)
from distjax._src.hooks import Watcher
from distjax._src.interrupts import interrupts
from distjax._src.placement.per_replica import is_per_replica
from distjax._src.placement.topology import Topology
from distjax._src.program.discovery import completion_of, signature_of
from distjax._src.program.launch import Build
from distjax._src.replica.arguments import user_path
from distjax._src.typing import PyTree
from distjax._src.variables.variable import Variable
from distjax.errors import LocalityError, message

#: The largest array that every call checks; larger ones are compared at a signature's first call.
_MAX_BYTES = 4096

_ARRAYS: Any = (np.ndarray, np.generic)
_pack = struct.Struct("d").pack


# -- programs --------------------------------------------------------------------


class _Recorder:
    """Agrees on a program before its first launch, and records each launch in the ledger."""

    def __init__(self) -> None:
        self._agreed: dict[Any, int] = {}
        self._launch: Launch | None = None

    def compiled(
        self, build: Build, lowered: jax.stages.Lowered, args: PyTree, kwargs: PyTree
    ) -> None:
        """Waits until every process is about to run this program with these arguments."""
        agreed = agree_on_program(build, lowered, build.step.argument_names, args, kwargs)
        self._agreed[signature_of((args, kwargs))] = agreed

    def begin(self, build: Build, args: PyTree, kwargs: PyTree) -> None:
        """Records that the program is about to run."""
        if not jax_compat.tracing():
            given = args, kwargs
            launch = Launch(build.name, self._agreed.get(signature_of(given), 0), checksum(given))
            ledger.begin_launch(launch)
            self._launch = launch

    def end(self, returned: tuple[Any, ...] | None) -> None:
        """Records that it runs, and what is ready when it completes."""
        launch, self._launch = self._launch, None
        if launch is not None:
            ledger.end_launch(launch, None if returned is None else completion_of(returned))


def watch_launches(build: Build) -> Watcher | None:
    """Lets the ledger know of each launch of a program over several processes."""
    meshes = [mesh for mesh in build.meshes if isinstance(mesh, jax.sharding.Mesh)]
    is_shared = any(mesh.is_multi_process for mesh in meshes)
    if not is_shared and not any(_spans_processes(v.sharding) for v in build.variables):
        return None
    recorder = _Recorder()
    return Watcher(recorder.compiled, recorder.begin, recorder.end)


def _spans_processes(sharding: Sharding | None) -> bool:
    return sharding is not None and not sharding.is_fully_addressable


def checksum(given: PyTree) -> int:
    """Returns a checksum of the numbers and small host arrays in a tree; 0 if there are none."""
    found = 0
    for leaf in jax.tree.leaves(given):
        if type(leaf) is float:
            found = crc32(_pack(leaf), found)
        elif isinstance(leaf, _ARRAYS):
            if leaf.nbytes <= _MAX_BYTES:
                try:
                    found = crc32(leaf, found)
                except (TypeError, ValueError):  # not contiguous, or of a dtype like bfloat16
                    found = crc32(leaf.tobytes(), found)
        elif isinstance(leaf, (int, complex)):
            found = crc32(b"%a," % leaf, found)  # a comma: 1 and 11 are not 11 and 1
    return found


def agree_on_program(
    build: Build,
    lowered: jax.stages.Lowered,
    argument_names: Sequence[str],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> int:
    """Waits until every process is about to run this program with these arguments.

    Returns a checksum of the program and its variables, the same on every process. Raises as
    `agree` does; nothing has changed then.
    """
    program = [
        *(
            ComparedFact(f"variable {v.name!r}", _describe_variable(build, v))
            for v in build.variables
        ),
        ComparedFact(f"the program of {build.name}", describe_program(lowered)),
    ]
    arguments = _describe_arguments(build.name, argument_names, args, kwargs)
    # Not keyed by the arguments: a process that alone compiles again may now pass other numbers.
    agree(f"the first call of {build.name}", [*arguments, *program], known_by=program)
    return functools.reduce(lambda found, fact: crc32(str(fact).encode(), found), program, 0)


def _describe_variable(build: Build, variable: Variable) -> str:
    use = "written" if variable in build.writes else "read"
    return f"{variable.dtype}{list(variable.shape)}, {use}"


def _describe_arguments(
    name: str, argument_names: Sequence[str], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> Iterator[ComparedFact]:
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_per_replica):
        where = user_path(jax.tree_util.keystr(path), argument_names)
        yield ComparedFact(f"argument {where} of {name}", _describe(leaf))


def _describe(leaf: PyTree) -> str:
    if is_per_replica(leaf):
        return f"PerReplica {leaf.dtype}{list(leaf.shape)}"
    return describe_on_host(leaf)


# -- variables, operations and values outside of programs ------------------------


def agree_on_creation(variables: Sequence[Variable], initial: Callable[[], Any]) -> None:
    """Waits until every process creates these variables with equal initial values.

    Nothing is broadcast from one process: if seeds differed, a value that is split over the
    replicas would be a mixture that no comparison of copies could detect. `initial` returns the
    value, or the program that computes it.
    """
    if not any(_spans_processes(v.sharding) for v in variables):
        return
    value, names = initial(), ", ".join(repr(v.name) for v in variables)
    is_program = isinstance(value, jax.stages.Lowered)
    facts = [
        ComparedFact(f"variable {i}, {v.name!r}", _describe_created(v))
        for i, v in enumerate(variables)
    ]
    text = describe_program(value) if is_program else describe_on_host(value)
    facts.append(ComparedFact(f"the initial value of {names}", text))
    agree(f"the creation of {names}", facts)


def _describe_created(variable: Variable) -> str:
    modes = f"{variable.synchronization.name}, {variable.aggregation.name}"
    return f"{variable.dtype}{list(variable.shape)}, {modes}, {variable.layout}"


def begin_operation(
    name: str, fn: Callable[..., Any], arrays: PyTree, static: tuple[object, ...]
) -> Callable[[Any], None] | None:
    """Has the processes compare an operation that spans them, the first time each kind is run.

    This catches, say, a read or reduction under ``if jax.process_index() == 0``, which would
    otherwise pair up with a different collective of the other processes. Each one is recorded.
    """
    leaves, treedef = jax.tree.flatten(arrays)
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return None
    shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    shown = ", ".join(map(str, static))  # topologies, modes, axes: none prints a memory address
    what = f"{fn.__name__}({shown}) of {shapes} in {describe_structure(treedef)}"
    known_by = [ComparedFact("an operation over the replicas", what)]
    agree(name, [ComparedFact(name, what)], known_by=known_by)
    launch, waits = Launch(name, crc32(what.encode())), interrupts.hold()
    ledger.begin_launch(launch)

    def end(token: Token | None) -> None:
        ledger.end_launch(launch, token)
        if waits:
            interrupts.let_go()  # Ctrl-C raises here

    return end


def record_write(name: str, value: PyTree) -> None:
    """Records a write of a value that must be the same on every process, if there are several.

    Of an array that spans processes only shape and dtype count, since each process has a part.
    """
    if job() is not None:
        ledger.add_write(name, crc32(describe_on_host(value).encode()))


def compare_copies(topology: Topology, copies: Mapping[str, Sequence[Any]]) -> None:
    """Raises on every process if any part of an array, by name, differs between processes."""
    joined = job()
    if joined is None or not topology.spans_processes:
        return
    own = [
        (name, str(copy.slices), crc32(copy.data.tobytes()))
        for name, parts in copies.items()
        for copy in parts
    ]
    first: dict[tuple[str, str], tuple[int, int]] = {}
    for process, said in enumerate(exchange(joined, "assert_mirrored", json.dumps(own))):
        for name, part, found in json.loads(said):
            other, expected = first.setdefault((name, part), (process, found))
            if found != expected:
                raise LocalityError(_copies_text(joined, name, (other, process)))


def _copies_text(joined: Job, name: str, pair: tuple[int, int]) -> str:
    first, second = map(joined.name_process, pair)
    return message(
        f"{name} needs to be equal on every replica, and {second} drifted",
        got=f"other values than on {first}",
        why="a program wrote values that were never reduced, or the processes ran different ones",
        fix="reduce before writing: ctx.all_reduce('mean', x); strategy.describe() on each process "
        "says where the value lives",
    )


def _listen() -> None:
    hooks.watchers.append(watch_launches)
    hooks.on_created.append(agree_on_creation)
    hooks.on_operation.append(begin_operation)
    hooks.on_host_write.append(record_write)
    hooks.on_compared.append(compare_copies)
    hooks.at_work.append(phase)


on_joined.append(_listen)
