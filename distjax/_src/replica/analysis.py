"""Locality analysis: which values of a replica function are equal everywhere.

A value *differs* (T) if it may be different on two
replicas; otherwise it is proved equal (M). The analysis may report T for a value that is
equal, but must never report M for one that may differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from distjax._src import jax_compat, user_lines
from distjax._src.context import says_equal
from distjax._src.jax_compat import JaxprEqn, equations_of, sub_jaxprs
from distjax._src.jaxprs import Flow
from distjax.errors import DivergenceError

#: Collectives whose result is equal on all replicas when run over the whole axis.
EQUALIZING = frozenset("psum psum_invariant pmax pmin all_gather all_gather_invariant".split())
#: Primitives with a predicate, and their names for users.
_CONSTRUCTS = {"while": "while_loop", "cond": "cond"}
#: Primitives that return each operand unchanged.
EACH = frozenset(("optimization_barrier", "device_put"))
#: Primitives whose value may not be a function of their operands: they draw random numbers, run
#: code that JAX does not see, leave memory uninitialized, or depend on the process index.
IMPURE = frozenset(
    "rng_uniform pure_callback io_callback buffer_callback ffi_call call_exported "
    "tpu_custom_call mosaic_gpu_p empty global_array_to_host_local_array "
    "host_local_array_to_global_array".split()
)
#: JAX classes behind a `call_hi_primitive` that are pure functions of arrays, without a jaxpr.
HI_PRIMITIVES = frozenset("SearchSorted Nonzero Einsum Ldexp Frexp CheckpointName".split())

MERGE_NAME = "distjax_merge_call"


class Analysis(Flow[bool]):
    """The rules, for one replica axis name: whether a value differs.

    A walk raises a DivergenceError for a collective under a predicate that differs.
    """

    def __init__(self, axis_name: str):
        super().__init__()
        self.axis_name = axis_name
        self._is_declared = False  # a `dj.expect` block is around a call; JAX drops names inside

    def of_constant(self, value: object) -> bool:
        """Returns False: constants are equal."""
        return False

    def join(self, a: bool, b: bool) -> bool:
        """Returns whether either value differs."""
        return a or b

    def of_equation(self, eqn: JaxprEqn, ins: list[bool]) -> Sequence[bool] | None:
        """Returns the operands' localities where each operand is returned, else None."""
        return ins if eqn.primitive.name in EACH else None

    def of_unknown(self, eqn: JaxprEqn, ins: list[bool]) -> Sequence[bool]:
        """Returns whether operands, or the equation itself, make the results differ."""
        if any(ins):
            self._require_no_loop(eqn)
        return [self._differs(eqn, ins) or is_ref(v) for v in eqn.outvars]

    def of_predicate(self, eqn: JaxprEqn, predicate: bool, outs: list[bool]) -> list[bool]:
        """Returns True for all that a differing predicate decides on."""
        if not predicate:
            return outs
        self.require_uniform(eqn)
        return [True] * len(outs)

    def is_within_replica(self, eqn: JaxprEqn) -> bool:
        """Returns whether a `shard_map` leaves the replica axis alone."""
        return self.axis_name not in eqn.params["newly_manual_axes"]

    @contextlib.contextmanager
    def within(self, eqn: JaxprEqn) -> Generator[None]:
        """Knows in the code of an equation that a block is around it."""
        outside, self._is_declared = self._is_declared, self._is_declared or _is_in_block(eqn)
        try:
            yield
        finally:
            self._is_declared = outside

    def key(self, jaxpr: jax_compat.Jaxpr) -> Any:
        """Returns whether a block is around the code, on which proofs depend."""
        return self._is_declared

    def _differs(self, eqn: JaxprEqn, ins: list[bool]) -> bool:
        if self.over_replicas(eqn):
            equal = eqn.primitive.name in EQUALIZING
            return not equal or eqn.params.get("axis_index_groups") is not None
        return any(ins) or self._is_source(eqn, self._is_declared)

    def over_replicas(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation names the replica axis."""
        return names_axis(eqn, self.axis_name)

    def _is_source(self, eqn: JaxprEqn, is_declared: bool) -> bool:
        """Returns whether an equation may turn equal operands into different values."""
        is_declared = is_declared or _is_in_block(eqn)
        is_exempt = is_declared and eqn.primitive.name == "pure_callback"
        impure = eqn.primitive.name in IMPURE and not is_exempt
        impure = impure or _hides_its_body(eqn)
        if impure or any(map(self._is_seen, eqn.effects)) or self.over_replicas(eqn):
            return True
        return any(self._is_source(e, is_declared) for sub in sub_jaxprs(eqn) for e in sub.eqns)

    def _is_seen(self, effect: object) -> bool:
        """Returns whether an effect is more than a collective over an axis within each replica."""
        is_collective = type(effect).__name__ == "NamedAxisEffect"
        return not is_collective or getattr(effect, "name", None) == self.axis_name

    def _require_no_loop(self, eqn: JaxprEqn) -> None:
        """Raises if an opaque equation contains a loop or branch with a collective.

        Its operands differ, and what the predicate inside depends on is unknown.
        """
        for sub in sub_jaxprs(eqn) if eqn.primitive.name != "shard_map" else ():
            for inner in sub.eqns:
                if inner.primitive.name in _CONSTRUCTS:
                    self.require_uniform(inner)
                self._require_no_loop(inner)

    def require_uniform(self, eqn: JaxprEqn) -> None:
        """Raises if a loop or branch whose predicate differs contains a collective."""
        found = next((c for sub in sub_jaxprs(eqn) for c in self.collectives(sub)), None)
        if found is None:
            return
        what = "merge_call" if found.primitive.name == MERGE_NAME else found.primitive.name
        is_switch = len(eqn.params.get("branches", ())) > 2
        construct = "switch" if is_switch else _CONSTRUCTS[eqn.primitive.name]
        raise DivergenceError(
            f"a lax.{construct} that holds {what} needs a predicate that is equal on every replica",
            got=f"a predicate that differs per replica, at {user_lines.source_line(eqn)}; "
            f"{what} at {user_lines.source_line(found)}",
            why="replicas that take another branch, or leave the loop earlier, never arrive "
            "at the collective, and the others wait forever",
            fix="make the predicate equal first: p = ctx.all_reduce('sum', p) > 0 (true on any "
            "replica), or ctx.all_reduce('sum', ~p) == 0 (on all, as for isfinite); or move "
            f"{what} out of the {construct} and select afterwards with jnp.where; or, for "
            f"a counter that dj.pmap takes, in_axes=None{_read_before(what, construct)}",
        )

    def collectives(self, jaxpr: jax_compat.Jaxpr) -> Iterator[Any]:
        """Yields the equations at which replicas wait for each other."""
        for eqn in equations_of(jaxpr, lambda eqn: eqn.primitive.name != "shard_map"):
            waits = self.over_replicas(eqn) and eqn.primitive.name != "axis_index"
            if waits or eqn.primitive.name == MERGE_NAME:
                yield eqn


def _read_before(collective: str, construct: str) -> str:
    """Returns the fix for a collective that a read of a variable may be, else nothing."""
    if collective != "all_gather":
        return ""
    return (
        "; a variable that is split over the replicas is gathered where it is read: "
        f"value = v.value before the {construct}"
    )


def names_axis(eqn: JaxprEqn, axis_name: str) -> bool:
    """Returns whether an equation names an axis, as collectives do."""
    given = (eqn.params.get(key, ()) for key in ("axes", "axis_name", "axis"))
    return any(axis_name in (x if isinstance(x, (tuple, list)) else (x,)) for x in given)


def holds_merge(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a merge or contains one, at any depth."""
    inside = (e for sub in sub_jaxprs(eqn) for e in equations_of(sub))
    return any(e.primitive.name == MERGE_NAME for e in (eqn, *inside))


def is_declared_equal(eqn: JaxprEqn) -> bool:
    """Returns whether `dj.expect` declares that a callback depends on its operands alone."""
    return eqn.primitive.name == "pure_callback" and _is_in_block(eqn)


def _is_in_block(eqn: JaxprEqn) -> bool:
    return says_equal(str(eqn.source_info.name_stack))


def is_ref(var: jax_compat.Var | jax_compat.Literal) -> bool:
    """Returns whether a variable of a jaxpr is a reference, as `jax.new_ref` makes them."""
    return "Ref" in type(var.aval).__name__


def _hides_its_body(eqn: JaxprEqn) -> bool:
    """Returns whether an equation runs a user's `HiPrim`, which may do anything."""
    kind = type(eqn.params.get("_prim"))
    if kind is type(None):
        return False
    is_known = kind.__name__ in HI_PRIMITIVES or next(sub_jaxprs(eqn), None) is not None
    return not (is_known and kind.__module__.startswith("jax."))
