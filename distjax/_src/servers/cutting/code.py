"""Code: a traced function of flat arrays, which can be cut further, described and run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import jax_compat, traces
from distjax._src.jax_compat import Jaxpr, JaxprEqn, Literal, ShapedArray, Var
from distjax._src.jaxprs import CALLS
from distjax._src.servers.plan import Program, Stage
from distjax._src.servers.storage import Part, num_bytes
from distjax.errors import message

#: Primitives that place a value. They are dropped: a program runs wherever its worker or server is.
PLACEMENTS = frozenset(("device_put", "sharding_constraint"))


@dataclass(frozen=True, eq=False)
class Code:
    """A traced function of flat arrays, and callable like one; the jaxpr takes constants first."""

    jaxpr: Jaxpr
    consts: Sequence[Any]

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Returns its results, a tuple."""
        return tuple(jax_compat.eval_jaxpr(self.jaxpr, (), (*self.consts, *arrays)))

    @property
    def inputs(self) -> Sequence[Var]:
        """The jaxpr's variables for the arrays, without those for the constants."""
        return self.jaxpr.invars[len(self.consts) :]

    @property
    def outputs(self) -> Sequence[Any]:
        """The jaxpr's atoms for the results; a constant result is a literal."""
        return self.jaxpr.outvars

    @functools.cached_property
    def used(self) -> list[bool]:
        """For each array that it takes, whether it reads it."""
        return [v in self._read for v in self.inputs]

    @functools.cached_property
    def _read(self) -> set[Var]:
        return {*values_of(v for e in self.jaxpr.eqns for v in e.invars), *values_of(self.outputs)}

    def cut_to(self, results: Iterable[int]) -> Code:
        """Returns the code of only some of the results, by number; it takes the same arrays."""
        like, ends = self.jaxpr, [self.jaxpr.outvars[i] for i in results]
        whole = jax_compat.new_jaxpr(like, (), like.invars, ends, like.eqns)
        # This also prunes inside of loops, branches and calls.
        needed, _ = jax_compat.dce_jaxpr(whole, [True] * len(ends), instantiate=True)
        return Code(needed, self.consts)

    def taking(self, numbers: Sequence[int]) -> Code:
        """Returns the code as a function of only some of its arrays: those that it uses."""
        like, read = self.jaxpr, self._read
        constants = [i for i in range(len(self.consts)) if like.invars[i] in read]
        invars = [*(like.invars[i] for i in constants), *(self.inputs[i] for i in numbers)]
        cut = jax_compat.new_jaxpr(like, (), invars, like.outvars, like.eqns)
        return Code(cut, [self.consts[i] for i in constants])

    def as_program(self, name: str) -> Program:
        """Returns it as a program of a plan."""
        return Program(name, self, tuple(map(aval_of_atom, self.inputs)))


@dataclass(frozen=True)
class NamedCode:
    """Code whose arrays have names: of values in the trace, or the parts of variables.

    Attributes:
      code: (*operands) -> (*results).
      operands: names of what it takes, parts of variables first: their current values.
      results: names of what it computes, parts of variables first: their new values.
    """

    code: Code
    operands: tuple[Any, ...]
    results: tuple[Any, ...]

    @property
    def parts(self) -> list[Part]:
        """The parts that it reads or writes."""
        return [name for name in self.operands if isinstance(name, Part)]

    @property
    def written(self) -> list[Part]:
        """The parts that it writes."""
        return [name for name in self.results if isinstance(name, Part)]

    def pairs(self) -> list[tuple[Any, Any]]:
        """Returns the name of each result, and its atom in the code."""
        return list(zip(self.results, self.code.outputs, strict=True))

    def part(
        self, results: Sequence[tuple[Any, Any]], eqns: Sequence[JaxprEqn] | None = None
    ) -> NamedCode:
        """Returns the code of some values, by name, by means of some equations, which are pruned.

        It takes what these need, and what it writes. A value that is neither computed nor an
        operand is its own name.
        """
        code = self.code
        eqns = code.jaxpr.eqns if eqns is None else eqns
        fixed = list(code.jaxpr.invars[: len(code.consts)])
        ends = [atom for _, atom in results]
        atoms = (*code.inputs, *(v for e in eqns for v in e.invars), *ends)
        made = {*fixed, *(v for e in eqns for v in e.outvars)}
        free = list(dict.fromkeys(v for v in values_of(atoms) if v not in made))
        names = dict(zip(code.inputs, self.operands, strict=True))
        operands, named = [names.get(v, v) for v in free], tuple(name for name, _ in results)
        like = jax_compat.new_jaxpr(code.jaxpr, (), [*fixed, *free], ends, eqns)
        cut = Code(like, code.consts).cut_to(range(len(ends)))
        taken = [i for i, used in enumerate(cut.used) if used or operands[i] in named]
        return NamedCode(cut.taking(taken), tuple(operands[i] for i in taken), named)


def values_of(atoms: Iterable[Any]) -> list[Any]:
    """Returns the atoms that are no literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def code_of(program: Program) -> Code:
    """Returns the code of a program of a plan that was cut here."""
    assert isinstance(program.fn, Code), "as the cut makes it"
    return program.fn


def aval_of_atom(atom: Var | Literal) -> ShapedArray:
    """Returns shape, dtype and weak type of an atom, without its sharding."""
    aval: Any = atom.aval
    return ShapedArray(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def trace_code(
    fn: Callable[..., Sequence[Any]], avals: Sequence[Any], *, is_opened: bool = False
) -> Code:
    """Returns the code of a function of flat arrays; nothing in it names a device.

    If it is opened, its calls are inlined, so that their equations can be cut too.
    """
    jaxpr, consts = traces.trace_jaxpr(lambda *arrays: list(fn(*arrays)), avals)
    opens = opens_call if is_opened else _places
    if any(_places(eqn) or opens(eqn) for eqn in jaxpr.eqns):
        anywhere = lambda *arrays: eval_opened(jaxpr, consts, arrays, opens)
        return trace_code(anywhere, avals, is_opened=is_opened)
    invars = [*jaxpr.constvars, *jaxpr.invars]
    whole = jax_compat.new_jaxpr(jaxpr, (), invars, jaxpr.outvars, jaxpr.eqns)
    return Code(whole, [off_devices(c) for c in consts])


def eval_equation(like: Jaxpr, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of the jaxpr `like` under whatever trace is current.

    It takes a value for each operand, also for literals. Where one variable is an operand twice,
    the two may get different values.
    """
    names: list[Any] = [Var(aval_of_atom(atom)) for atom in eqn.invars]
    named = eqn.replace(invars=names)
    return jax_compat.eval_jaxpr(
        jax_compat.new_jaxpr(like, (), names, eqn.outvars, [named]), (), args
    )


def eval_opened(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    opens: Callable[[JaxprEqn], bool],
    evaluate: Callable[[Jaxpr, JaxprEqn, Sequence[Any]], Sequence[Any]] | None = None,
) -> list[Any]:
    """Evaluates a jaxpr without placements, and with those calls inlined for which `opens`.

    All other equations are evaluated by `evaluate`: see `eval_equation`.
    """
    otherwise = evaluate or eval_equation

    def bind(eqn: JaxprEqn, ins: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive.name in PLACEMENTS:
            return ins
        if opens(eqn):
            return eval_opened(*jax_compat.called_jaxpr(eqn), ins, opens, evaluate)
        return otherwise(jaxpr, eqn, ins)

    return jax_compat.eval_jaxpr(jaxpr, consts, args, bind)


def opens_call(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a call that can be inlined."""
    return eqn.primitive.name in CALLS and not {"jaxpr", "call_jaxpr"}.isdisjoint(eqn.params)


def _places(eqn: JaxprEqn) -> bool:
    """Returns whether an equation, or a call in it, puts a value on a device."""
    name = eqn.primitive.name
    if name in PLACEMENTS or name not in CALLS:
        return name in PLACEMENTS
    return any(_places(e) for sub in jax_compat.sub_jaxprs(eqn) for e in sub.eqns)


def in_own_buffers(code: Code) -> Code:
    """Returns the code with results that share no buffer with an input or with each other.

    New values of variables are donated later, while others still hold what they were computed from.
    """
    ends = values_of(code.outputs)
    if not {*ends}.intersection(code.jaxpr.invars) and len({*ends}) == len(ends):
        return code
    avals = [aval_of_atom(v) for v in code.inputs]
    return trace_code(lambda *arrays: _copied(code(*arrays), arrays), avals)


def _copied(results: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    seen, own = {id(x) for x in inputs}, []
    for result in results:
        own.append(jnp.copy(result) if id(result) in seen else result)
        seen.add(id(result))
    return own


def off_devices(array: object) -> Any:
    """Returns an array that is not committed: programs that hold it run on other devices."""
    if not isinstance(array, jax.Array):
        return array
    is_key = jax_compat.is_key_dtype(array.dtype)
    return jax_compat.as_uncommitted(array) if is_key else np.asarray(array)


NOTHING_RUN = NamedCode(trace_code(lambda: [], ()), (), ())


# -- how much programs may close over -----------------------------------------


#: How many bytes of arrays the programs of one step may close over.
MOST_BYTES = 16 << 20


def require_small(name: str, stages: Iterable[Stage]) -> None:
    """Raises a ValueError if the programs of a step hold large arrays."""
    programs = (p.program for stage in stages for p in (stage, *stage.pushes))
    held = {id(c): c for program in programs for c in code_of(program).consts}
    arrays: list[Any] = sorted(held.values(), key=num_bytes, reverse=True)
    total = sum(map(num_bytes, arrays))
    if total <= MOST_BYTES:
        return
    largest = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays[:3])
    raise ValueError(
        message(
            f"{name} needs to close over at most {MOST_BYTES >> 20} MiB of arrays",
            got=f"{total / (1 << 20):.1f} MiB, the largest {largest}",
            why="they are constants of its programs, which every worker and server is sent",
            fix="pass them as arguments, or make them variables: with strategy.scope(): "
            "table = dj.Variable(table)",
        )
    )
