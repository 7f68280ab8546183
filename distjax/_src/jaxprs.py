"""Walks over jaxprs, into the calls, loops and branches that they hold.

`Flow` follows what is known of each value from the inputs to the outputs; a loop is walked until
what is known of its carry no longer changes. `evaluate_inside` evaluates a loop or branch with
another evaluation of the code in it.

A loop or branch has three rules: what is known of its results (`Flow._inside`), its evaluation
where `vmap` alone will not do (`evaluate_inside`), and its emission with merges in it (`_RULES` in
`replica/emit.py`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from jax import lax

from distjax._src import jax_compat
from distjax._src.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

T = TypeVar("T")

#: Primitives that run one inner jaxpr on their operands.
CALLS = frozenset(
    "jit closed_call eval_jaxpr remat2 custom_jvp_call custom_vjp_call composite compute_on".split()
)


class Flow(ABC, Generic[T]):
    """Follows what is known of the values of a jaxpr."""

    def __init__(self):
        self._remembered: dict[Any, tuple[Jaxpr, list[T]]] = {}

    # -- what is known --------------------------------------------------------

    @abstractmethod
    def of_constant(self, value: object) -> T:
        """Returns what is known of a literal, or, for None, of a constant of unknown value."""

    @abstractmethod
    def join(self, a: T, b: T) -> T:
        """Returns what is known of a value that is either of two."""

    @abstractmethod
    def of_equation(self, eqn: JaxprEqn, ins: list[T]) -> Sequence[T] | None:
        """Returns what is known of the results; None: that is found by the code that `eqn` runs."""

    @abstractmethod
    def of_unknown(self, eqn: JaxprEqn, ins: list[T]) -> Sequence[T]:
        """Returns the same where neither a rule nor the code of the equation tells anything."""

    def of_predicate(self, eqn: JaxprEqn, predicate: T, outs: list[T]) -> list[T]:
        """Returns what is known of values that a predicate decides on."""
        return outs

    def of_slice(self, xs: T) -> T:
        """Returns what is known of a slice of what a scan runs over."""
        return xs

    def of_stack(self, y: T) -> T:
        """Returns what is known of the results of a scan, stacked."""
        return y

    def is_within_replica(self, eqn: JaxprEqn) -> bool:
        """Returns whether a `shard_map` is code of one replica, over its own devices."""
        return False

    def within(self, eqn: JaxprEqn) -> AbstractContextManager[Any]:
        """Returns the context for a walk over code that an equation runs."""
        return contextlib.nullcontext()

    def key(self, jaxpr: Jaxpr) -> Hashable:
        """Returns what a walk over `jaxpr` depends on beside its inputs."""
        return None

    # -- walking --------------------------------------------------------------

    def read(self, known: Mapping[Any, T], atom: Var | Literal) -> T:
        """Returns what is known of a variable or literal."""
        return self.of_constant(atom.val) if isinstance(atom, Literal) else known[atom]

    def run(self, eqns: Sequence[JaxprEqn], known: dict[Any, T]) -> None:
        """Adds what is known of the results of `eqns`, in order."""
        for eqn in eqns:
            ins = [self.read(known, v) for v in eqn.invars]
            known.update(zip(eqn.outvars, self.outputs_of(eqn, ins), strict=True))

    def values(self, jaxpr: Jaxpr, ins: Sequence[T]) -> dict[Any, T]:
        """Returns what is known of all values of `jaxpr`, given what is known of its inputs."""
        known = dict(zip(jaxpr.invars, ins, strict=True))
        known.update((v, self.of_constant(None)) for v in jaxpr.constvars)
        self.run(jaxpr.eqns, known)
        return known

    def outputs(self, jaxpr: Jaxpr, ins: Sequence[T]) -> list[T]:
        """Returns what is known of the outputs of `jaxpr`.

        Remembered, since the rounds of nested loops multiply.
        """
        key = id(jaxpr), tuple(ins), self.key(jaxpr)
        if key not in self._remembered:
            known = self.values(jaxpr, ins)
            outs = [self.read(known, v) for v in jaxpr.outvars]
            self._remembered[key] = jaxpr, outs  # keeps the jaxpr alive, so its id stays valid
        return list(self._remembered[key][1])

    def outputs_of(self, eqn: JaxprEqn, ins: list[T]) -> Sequence[T]:
        """Returns what is known of the results of an equation."""
        outs = self.of_equation(eqn, ins)
        outs = self._inside(eqn, ins) if outs is None else outs
        return self.of_unknown(eqn, ins) if outs is None else outs

    def call(self, eqn: JaxprEqn, code: Jaxpr | ClosedJaxpr, ins: Sequence[T]) -> list[T]:
        """Returns what is known of the outputs of code that an equation runs."""
        with self.within(eqn):
            return self.outputs(jax_compat.open_jaxpr(code)[0], ins)

    def _inside(self, eqn: JaxprEqn, ins: list[T]) -> Sequence[T] | None:
        name = eqn.primitive.name
        if name in CALLS:
            return self.call(eqn, jax_compat.called_jaxpr(eqn)[0], ins)
        if name == "scan":
            return self._scan(eqn, ins)
        if name == "while":
            return self._while(eqn, ins)
        if name == "cond":
            return self._cond(eqn, ins)
        if name == "shard_map" and self.is_within_replica(eqn):
            return self.call(eqn, eqn.params["jaxpr"], ins)
        solver = jax_compat.solver_call(eqn)
        return None if solver is None else self.call(eqn, solver[0], [ins[i] for i in solver[1]])

    def _scan(self, eqn: JaxprEqn, ins: list[T]) -> list[T]:
        consts, carry, xs = jax_compat.split_scan_inputs(eqn, ins)
        slices = list(map(self.of_slice, xs))
        while True:
            outs = self.call(eqn, eqn.params["jaxpr"], [*consts, *carry, *slices])
            joined = self._join_all(carry, outs[: len(carry)])
            if joined == carry:
                return [*carry, *map(self.of_stack, outs[len(carry) :])]
            carry = joined

    def _while(self, eqn: JaxprEqn, ins: list[T]) -> list[T]:
        of_cond, of_body, carry = jax_compat.split_while_inputs(eqn, ins)
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        while True:
            predicate = self.call(eqn, cond, [*of_cond, *carry])[0]
            carry = self.of_predicate(eqn, predicate, carry)
            joined = self._join_all(carry, self.call(eqn, body, [*of_body, *carry]))
            if joined == carry:
                return carry
            carry = joined

    def _cond(self, eqn: JaxprEqn, ins: list[T]) -> list[T]:
        first, *others = (self.call(eqn, code, ins[1:]) for code in eqn.params["branches"])
        for outs in others:
            first = self._join_all(first, outs)
        return self.of_predicate(eqn, ins[0], first)

    def _join_all(self, a: Sequence[T], b: Sequence[T]) -> list[T]:
        return [self.join(x, y) for x, y in zip(a, b, strict=True)]


#: Evaluates a jaxpr with these constants on these arguments.
Evaluate = Callable[[Jaxpr, Sequence[Any], Sequence[Any]], Sequence[Any]]


def evaluate_inside(eqn: JaxprEqn, ins: list[Any], evaluate: Evaluate) -> Sequence[Any] | None:
    """Returns the results of a loop or branch whose code is evaluated by `evaluate`.

    None: the equation is neither.
    """

    def function(code: Jaxpr | ClosedJaxpr) -> Callable[..., Sequence[Any]]:
        jaxpr, consts = jax_compat.open_jaxpr(code)
        return lambda *args: evaluate(jaxpr, consts, args)

    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        shared, start, xs = jax_compat.split_scan_inputs(eqn, ins)
        run = function(params["jaxpr"])

        def body(carry: Sequence[Any], x: Sequence[Any]) -> Any:
            outs = run(*shared, *carry, *x)
            return list(outs[: len(carry)]), list(outs[len(carry) :])

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(body, start, xs, **options)
        return [*carry, *ys]
    if name == "while":
        of_cond, of_body, carry = jax_compat.split_while_inputs(eqn, ins)
        holds, step = function(params["cond_jaxpr"]), function(params["body_jaxpr"])
        return lax.while_loop(
            lambda values: holds(*of_cond, *values)[0],
            lambda values: list(step(*of_body, *values)),
            carry,
        )
    if name == "cond":
        return lax.switch(ins[0], list(map(function, params["branches"])), *ins[1:])
    return None
