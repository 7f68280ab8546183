"""What a job of several processes does at the kernel's events: compare, record, and report work.

Before a program first runs, the processes compare it and its arguments; each launch is recorded in
the ledger, with a checksum of the numbers and small host arrays among its arguments: each process
passes its own, so they may differ at any call. The paths to these are found when a signature is
compiled, so that a call visits only those leaves, not a whole tree of arrays.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import jax
import numpy as np

from distjax import hooks, jax_compat
from distjax.cluster.agreement import agree
from distjax.cluster.alone import warn_unless_joined
from distjax.cluster.facts import ComparedFact, describe_on_host, describe_program
from distjax.cluster.job import job
from distjax.cluster.ledger import Launch, ledger
from distjax.cluster.phases import lone_programs, phase
from distjax.cluster.writes import record_write
from distjax.hooks import Watcher
from distjax.placement.per_replica import is_per_replica
from distjax.program.discovery import completion_of, signature_of
from distjax.program.launch import Build
from distjax.replica.arguments import user_path
from distjax.typing import PyTree
from distjax.variables.variable import Variable

#: The largest array that every call checks; larger ones are compared at a signature's first call.
_MAX_BYTES = 4096

#: The path to a leaf from (args, kwargs): each step is a function of a container and a key.
LeafPath = tuple[tuple[Callable[[Any, Any], Any], Any], ...]

_ARRAYS: Any = (np.ndarray, np.generic)
_pack = struct.Struct("d").pack


def find_host_leaves(
    args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> tuple[LeafPath, ...]:
    """Returns the paths to host numbers and arrays among the arguments."""
    given = (args, *_user_kwargs(kwargs))
    leaves = jax.tree_util.tree_leaves_with_path(given)
    on_host = [(i, *found) for i, found in enumerate(leaves) if _is_on_host(found[1])]
    try:
        return tuple(_find_leaf_path(given, path, leaf) for _, path, leaf in on_host)
    except (AttributeError, LookupError, TypeError):
        return tuple(((_leaf, i),) for i, _, _ in on_host)


def checksum(
    paths: tuple[LeafPath, ...], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> int:
    """Returns a checksum of the small values at these paths, in under 1 us each."""
    found = 0
    leaf: Any
    given = (args, *_user_kwargs(kwargs)) if kwargs else (args,)
    for path in paths:
        leaf = given
        for get, key in path:
            leaf = get(leaf, key)
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


def _is_on_host(leaf: PyTree) -> bool:
    return isinstance(leaf, (*_ARRAYS, int, float, complex))


def _user_kwargs(kwargs: Mapping[str, PyTree]) -> tuple[Any, ...]:
    """Returns the user's keyword arguments, without stateful objects among them."""
    return (getattr(kwargs, "kwargs", kwargs),) if kwargs else ()


def _find_leaf_path(tree: PyTree, keys: tuple[object, ...], leaf: PyTree) -> LeafPath:
    """Returns the path to `leaf` if JAX's keys lead there without running user code."""
    path = tuple(map(_step, keys))
    for get, key in path:
        if get is getattr and isinstance(getattr(type(tree), key, None), property):
            raise LookupError(key)
        tree = get(tree, key)
    if tree is not leaf:
        raise LookupError(path)
    return path


def _step(key: object) -> tuple[Callable[[Any, Any], Any], Any]:
    """Returns the accessor and key for one of JAX's tree keys."""
    match key:
        case jax.tree_util.SequenceKey(idx=where) | jax.tree_util.DictKey(key=where):
            return operator.getitem, where
        case jax.tree_util.GetAttrKey(name=where):
            return getattr, where
        case _:  # of a class that gives JAX its leaves without their names
            raise LookupError(key)


def _leaf(tree: PyTree, number: int) -> Any:
    return jax.tree.leaves(tree)[number]


# -- what processes compare before a program first runs ------------------------


def agree_on_program(
    build: Build,
    lowered: jax.stages.Lowered,
    argument_names: Sequence[str],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> int:
    """Waits until every process is about to run this program with these arguments.

    Args:
      build: the program.
      lowered: the program, lowered for this signature.
      argument_names: the names of its positional arguments.
      args: positional arguments.
      kwargs: keyword arguments.

    Returns:
      A checksum of the program and its variables, the same on every process.

    Raises:
      AgreementError: processes differ; nothing has changed.
      StuckError, PeerLostError: a process does not arrive.
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


# -- what is registered ---------------------------------------------------------


class _Recorder:
    """Agrees on a program before its first launch, and records each launch in the ledger."""

    def __init__(self) -> None:
        self._agreed: dict[Any, tuple[int, tuple[LeafPath, ...]]] = {}
        self._launch: Launch | None = None

    def compiled(
        self, build: Build, lowered: jax.stages.Lowered, args: PyTree, kwargs: PyTree
    ) -> None:
        """Waits until every process is about to run this program with these arguments."""
        agreed = agree_on_program(build, lowered, build.step.argument_names, args, kwargs)
        paths = find_host_leaves(args, kwargs)
        self._agreed[signature_of((args, kwargs))] = agreed, paths

    def begin(self, build: Build, args: PyTree, kwargs: PyTree) -> None:
        """Records that the program is about to run."""
        if not jax_compat.tracing():
            agreed, paths = self._agreed.get(signature_of((args, kwargs)), (0, ()))
            arguments = checksum(paths, args, kwargs) if paths else 0
            self._launch = ledger.begin_launch(Launch(build.name, agreed, arguments))

    def end(self, returned: tuple[Any, ...] | None) -> None:
        """Records that it runs, and what is ready when it completes."""
        launch, self._launch = self._launch, None
        if launch is None:
            return
        if returned is None:
            ledger.abandon_launch(launch)
        else:
            ledger.end_launch(launch, completion_of(returned))


def _watch(build: Build) -> Watcher | None:
    """Lets the ledger of a job know of each launch."""
    if job() is None:
        return None
    spans = any(map(jax_compat.spans_processes, build.meshes))
    if not (spans or any(v.spans_processes for v in build.variables)):
        return Watcher(begin=lambda build, *_: lone_programs.record(build.name, ledger.count))
    recorder = _Recorder()
    return Watcher(recorder.compiled, recorder.begin, recorder.end)


def _agree_on_created(variables: Sequence[Variable], initial: Callable[[], Any]) -> None:
    """Waits until every process creates these variables with equal initial values.

    Nothing is broadcast from one process: if seeds differed, a value that is split over the
    replicas would be a mixture that no comparison of copies could detect.

    Args:
      variables: the variables being created.
      initial: returns their one initial value, or the program that computes them.

    Raises:
      AgreementError: the processes differ; no variable gets a value.
      StuckError, PeerLostError: a process does not arrive.
    """
    if job() is None or not any(v.spans_processes for v in variables):
        return
    found = initial()
    is_program = isinstance(found, jax.stages.Lowered)
    text = describe_program(found) if is_program else describe_on_host(found)
    names = ", ".join(repr(v.name) for v in variables)
    facts = [
        ComparedFact(
            f"variable {i}, {v.name!r}",
            f"{v.dtype}{list(v.shape)}, {v.synchronization.name}, {v.aggregation.name}, {v.layout}",
        )
        for i, v in enumerate(variables)
    ]
    facts.append(ComparedFact(f"the initial value of {names}", text))
    agree(f"the creation of {names}", facts)


hooks.watchers.append(_watch)
hooks.on_new_program.append(warn_unless_joined)
hooks.on_created.append(_agree_on_created)
hooks.on_host_write.append(record_write)
hooks.at_work.append(phase)
