"""Agreement of a job's processes before a program first runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from zlib import crc32

import jax

from distjax.cluster.agreement import agree
from distjax.cluster.facts import ComparedFact, describe_on_host, describe_program
from distjax.placement.per_replica import is_per_replica
from distjax.program.launch import Build
from distjax.replica.arguments import user_path
from distjax.typing import PyTree
from distjax.variables.variable import Variable


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
