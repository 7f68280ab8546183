"""The update of a stage: its merges as one function of the variables' current values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from distjax.jax_compat import Literal, ShapedArray, Var
from distjax.replica.global_value import GlobalValue
from distjax.servers.cutting.code import Code, trace_code
from distjax.servers.cutting.localities import Localities
from distjax.servers.cutting.rows import in_shards
from distjax.servers.cutting.staging import ServerMerge
from distjax.servers.server_storage import Part, parts_of, sizes_of
from distjax.variables.variable import Variable


@dataclass(frozen=True)
class Update:
    """The merges of one stage, as one function.

    Attributes:
      code: (*current values of `parts`, *operands) -> (*new values of `written`, *answers).
      parts: the parts of the variables that a merge reads or writes.
      operands: the names, in the trace, of what the worker sends.
      written: the parts of variables that get new values.
      answers: the names, in the trace, of the results that the worker needs.
    """

    code: Code
    parts: tuple[Part, ...]
    operands: tuple[Var, ...]
    written: tuple[Part, ...]
    answers: tuple[Var, ...]


def trace_update(
    merges: Sequence[ServerMerge],
    constants: dict[Var, Any],
    needed: set[Var],
    localities: Localities,
) -> Update:
    """Returns the merges of one stage as one function.

    Args:
      merges: in the order of the program: each sees what the one before has written.
      constants: the constants of the trace, by name; they are not sent.
      needed: the names of what the worker needs afterwards.
      localities: how the values of the trace are held.
    """
    read = (v for m in merges for v in (*m.read, *m.written) if v is not None)
    variables = tuple(dict.fromkeys(read))
    atoms = (a for m in merges for a in m.arguments if not isinstance(a, Literal))
    operands = tuple(dict.fromkeys(a for a in atoms if a not in constants))
    written = tuple(dict.fromkeys(v for m in merges for v in m.written))
    answers = tuple(v for m in merges for v in m.eqn.outvars if v in needed)

    def update(*arrays: jax.Array) -> list[Any]:
        now = dict(zip(variables, arrays, strict=False))
        env = {**constants, **dict(zip(operands, arrays[len(variables) :], strict=True))}
        for merge in merges:
            _run_merge(merge, now, env, localities)
        return [*(now[v] for v in written), *(env[v] for v in answers)]

    avals = [ShapedArray(v.shape, v.dtype) for v in variables]
    avals += map(localities.aval, operands)
    code, parts = trace_code(update, avals), _parts_of_all(variables)
    if len(parts) > len(variables):
        taken = [*map(sizes_of, variables), *(() for _ in operands)]
        given = [*map(sizes_of, written), *(() for _ in answers)]
        code = in_shards(code, taken, given)
    return Update(code, parts, operands, _parts_of_all(written), answers)


def _parts_of_all(variables: Sequence[Variable]) -> tuple[Part, ...]:
    return tuple(part for v in variables for part in parts_of(v))


def _run_merge(
    merge: ServerMerge, now: dict[Variable, Any], env: dict[Any, Any], localities: Localities
) -> None:
    """Runs a merge on the current values of its variables."""
    values = []
    for atom, variable in zip(merge.eqn.invars, merge.read, strict=True):
        if variable is not None:
            values.append(GlobalValue(now[variable], False))
        else:
            value = atom.val if isinstance(atom, Literal) else env[atom]
            values.append(localities.value(atom, value))
    outs = merge.eqn.params["merge"].emit(values, localities.topology)
    results = list(map(localities.array, outs))
    env.update(zip(merge.eqn.outvars, results, strict=True))
    num_results = len(results) - len(merge.written)
    now.update(zip(merge.written, results[num_results:], strict=True))
