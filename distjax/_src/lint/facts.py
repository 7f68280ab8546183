"""Facts: what a value of replica code is to that of one replica; used only for findings.

A lattice separate from equal / differs, which is proved elsewhere: a fact may add a finding but
never proves anything. A fact survives only while every rule along the way keeps it; anything
unknown drops it, so silence is the default.

The heart of a fact is its `Scale`: to how many times the value of one replica with the whole batch,
as a power of R, the values of all replicas add up (or what an equal value is). A sum over the
replicas keeps the power of values that differ and adds one to that of equal ones; a division by R
takes one off. State, or a result, needs the power 0.

A walk visits the equations in order, those of inner functions and loops included. The rule of each
primitive turns the facts of the operands into those of the results, and reports mistakes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distjax._src import jax_compat, user_lines
from distjax._src.context import report
from distjax._src.jax_compat import Jaxpr, JaxprEqn, Literal, Var
from distjax._src.jaxprs import Flow
from distjax._src.replica.analysis import MERGE_NAME


class Site:
    """An equation, as the place where a fact originated.

    Args:
      eqn: the equation.
      calls: the equations of the inner functions that contain it, outermost first.
    """

    __slots__ = ("_eqns", "_key")

    def __init__(self, eqn: JaxprEqn, calls: Sequence[JaxprEqn]):
        self._eqns = (*calls, eqn)
        self._key = tuple(map(id, self._eqns))

    def __eq__(self, other: object) -> bool:
        """Returns whether it is the same place: what is known of a loop has to come to rest."""
        return isinstance(other, Site) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def source(self) -> str:
        """The user's line."""
        return user_lines.source_line(*reversed(self._eqns))

    @property
    def is_mean(self) -> bool:
        """Whether jnp.mean, or a method of that name, made the equation."""
        frames = user_lines.frames_of(self._eqns[-1])
        inside = itertools.takewhile(lambda frame: frame.is_library, frames)
        return any(frame.function in ("mean", "_mean") for frame in inside)

    @property
    def names(self) -> str:
        """The named scopes around the operation."""
        return "/".join(str(eqn.source_info.name_stack) for eqn in self._eqns)


class Scale(NamedTuple):
    """What a value is to that of one replica with the whole batch.

    Attributes:
      kind: how it came to be. Of values that differ, and of their sums: TOTAL (a sum over rows),
        SHARE (a total over the count of all rows), MEAN (over this replica's rows), DERIVATIVE (of
        a mean that was summed before the gradient was taken), PART (linear in such, its power not
        known). Of reduced values of which no more is known: "summed", "averaged", "gathered".
        Of values that no sum or mean makes those of one replica: see `findings.UNREDUCIBLE`.
      power: it is R to this power too large.
      made: where.
      reduced: where it was reduced; None: it is not.
      rows: of a total, how many rows it is the sum of, and over how many axes.
    """

    kind: str
    power: int
    made: Site
    reduced: Site | None = None
    rows: tuple[int, int] = (0, 0)

    @property
    def is_like(self) -> tuple[str, int, bool]:
        """What two scales have in common whose values may be added."""
        return self.kind, self.power, self.reduced is not None


TOTAL, SHARE, MEAN, DERIVATIVE, PART = "total", "share", "mean", "derivative", "part"
#: What sums over the replicas, and quotients by R, are followed for.
LINEAR = (TOTAL, SHARE, MEAN, DERIVATIVE)


class Fact(NamedTuple):
    """What is known about a value.

    Attributes:
      differs: whether it may differ per replica.
      number: the number that all its elements equal, or None.
      tags: what else, by name; see `rules`.
    """

    differs: bool = False
    number: float | None = None
    tags: frozenset[tuple[str, Any]] = frozenset()

    def find(self, name: str) -> Any:
        """Returns the content of a tag, or None."""
        for key, held in self.tags:
            if key == name:
                return held
        return None

    @property
    def scale(self) -> Any:
        """What it is to the value of one replica, a `Scale`; None: not known."""
        return self.find("scale")

    def is_kind(self, *kinds: str) -> bool:
        """Returns whether its scale is one of these."""
        return self.scale is not None and self.scale.kind in kinds

    @property
    def reduced(self) -> Site | None:
        """Where it was reduced over the replicas, if it was."""
        return self.scale and self.scale.reduced

    def having(self, **tags: object) -> Fact:
        """Returns the fact with these tags added or replaced; None takes one away."""
        kept = {pair for pair in self.tags if pair[0] not in tags}
        new = {pair for pair in tags.items() if pair[1] is not None}
        return self._replace(tags=frozenset(kept | new))

    def only(self, *names: str) -> Fact:
        """Returns the fact with only these tags, and no number."""
        return Fact(self.differs, None, frozenset(p for p in self.tags if p[0] in names))

    def without(self, *names: str) -> Fact:
        """Returns the fact without these tags, and with no number."""
        return Fact(self.differs, None, frozenset(p for p in self.tags if p[0] not in names))


EQUAL, DIFFERS = Fact(), Fact(differs=True)


def common_scale(facts: Sequence[Fact]) -> Scale | None:
    """Returns the scale that all of some values have; None: they have none in common."""
    scales = [x.scale for x in facts]
    first = scales[0] if scales else None
    is_common = first is not None and all(s and s.is_like == first.is_like for s in scales)
    return first if is_common else None


def join(a: Fact, b: Fact) -> Fact:
    """Returns the fact of a value that is either of two."""
    if a == b:
        return a
    for zeros, other in ((a, b), (b, a)):
        if zeros.number == 0 and not zeros.tags and other.number is None:
            # An accumulator at its start, an update that is skipped.
            is_kept = other.reduced or other.is_kind(SHARE, MEAN, DERIVATIVE)
            return other.only("grad", *(["scale"] if is_kept else []))
    number = a.number if a.number == b.number else None
    out = Fact(a.differs or b.differs, number, a.tags & b.tags)
    grads = [x.find("grad") for x in (a, b)]
    is_reduced = any(x.reduced and x.find("grad") for x in (a, b))
    return out.having(grad=grads[0] or grads[1]) if is_reduced else out


def of_literal(value: object) -> Fact:
    """Returns the fact of a constant."""
    if isinstance(value, (bool, int, float, np.generic, np.ndarray)) and np.size(value) == 1:
        number = np.asarray(value).reshape(()).item()
        if isinstance(number, (bool, int, float)):
            return Fact(number=float(number))
    return EQUAL


class FactWalk(Flow[Fact]):
    """One walk over a replica function.

    Args:
      rules: by primitive, ``rule(walk, eqn, ins) -> outs``; see `rules`.
      axis_name: the name of the replica axis.
      num_replicas: R.
      leading: the leading dimension sizes of arguments that differ: of local batches.
      sizes: of these the sizes of batches that are known to be such.

    Attributes:
      is_alone: whether R = 1: the code is judged as for more replicas, but a division by R is one
        by 1, and the global batch is as large as the local one. What may be either is silent.
      across: whether a reduction of cross-replica code is being tracked.
      mixes: whether values of all replicas are put together before the gradients.
      on_merge: returns the facts of a merge's results.
      found: the findings, by (rule, the user's line).
      written: the variables that the function writes, by serial number.
      combines: whether the function reduces or merges anything over the replicas.
      equal_gradients: sites where gradients that are equal are reduced, and where they were made.
      gradients_differ: whether gradients that differ are reduced: not every replica has the same
        batch, though a parameter that only a penalty depends on has the same gradient.
    """

    def __init__(
        self,
        rules: Mapping[str, Any],
        axis_name: str,
        num_replicas: int,
        leading: frozenset[int],
        sizes: frozenset[int] = frozenset(),
    ):
        super().__init__()
        self._rules, self.axis_name, self.num_replicas = rules, axis_name, num_replicas
        self.is_alone = num_replicas == 1
        self.leading, self.sizes = leading, sizes
        self.in_transpose = self.across = self.mixes = False
        self.on_merge: Callable[[JaxprEqn, list[Fact]], Sequence[Fact]] = lambda eqn, ins: ins
        self.found: dict[tuple[str, str], Any] = {}
        self.written: Mapping[int, Any] = {}
        self.combines = self.gradients_differ = False
        self.equal_gradients: list[tuple[Site, Site]] = []
        self._calls: list[JaxprEqn] = []

    def may_be_batch(self, shape: Sequence[int]) -> bool:
        """Returns whether axes of these lengths may hold a local batch, or a part of one."""
        sizes = [size for size in self.leading if size > 1]
        lengths = [length for length in shape if length > 1]
        return not sizes or any(a % b == 0 or b % a == 0 for a in sizes for b in lengths)

    def are_rows(self, shape: Sequence[int], axes: Sequence[int]) -> bool:
        """Returns whether an axis among these is known to be that of the batch.

        Not in a loop, where what is left of a row may have any size.
        """
        is_loop = any(eqn.primitive.name in ("scan", "while") for eqn in self._calls)
        return not is_loop and 0 in axes and shape[0] in self.sizes

    def site(self, eqn: JaxprEqn) -> Site:
        """Returns the location of an equation."""
        return Site(eqn, self._calls)

    def report(self) -> None:
        """Reports what was found."""
        for finding in self.found.values():
            report(finding)

    def values(self, jaxpr: Jaxpr, ins: Sequence[Fact]) -> dict[Any, Fact]:
        """Returns the facts of the values of `jaxpr` that reach a result, or an effect."""
        eqns = jax_compat.live_equations(jaxpr.eqns, jaxpr.outvars)
        known = dict(zip(jaxpr.invars, ins, strict=True))
        known.update((v, EQUAL) for v in jaxpr.constvars)
        self.run(eqns, known)
        return known

    def of_constant(self, value: object) -> Fact:
        """Returns the fact of a literal: its number, if it has one."""
        return of_literal(value)

    def join(self, a: Fact, b: Fact) -> Fact:
        """Returns the fact of a value that is either of two."""
        return join(a, b)

    def of_equation(self, eqn: JaxprEqn, ins: list[Fact]) -> Sequence[Fact] | None:
        """Returns the facts by the rule of the primitive."""
        if eqn.primitive.name == MERGE_NAME:
            return self.on_merge(eqn, ins)
        rule = self._rules.get(eqn.primitive.name)
        return None if rule is None else rule(self, eqn, ins)

    def of_unknown(self, eqn: JaxprEqn, ins: list[Fact]) -> Sequence[Fact]:
        """Returns only what differs, and of a backward pass what is linear."""
        out = _of_cotangents(ins) if self.is_transposed(eqn) else unknown(ins)
        return [out] * len(eqn.outvars)

    def of_predicate(self, eqn: JaxprEqn, predicate: Fact, outs: list[Fact]) -> list[Fact]:
        """Returns facts of values that differ if the predicate does."""
        return [o._replace(differs=True) for o in outs] if predicate.differs else outs

    def of_slice(self, xs: Fact) -> Fact:
        """Returns the fact without a number: slices may differ."""
        return xs._replace(number=None)

    def is_transposed(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation is part of a backward pass."""
        return self.in_transpose or "transpose(" in str(eqn.source_info.name_stack)

    def is_within_replica(self, eqn: JaxprEqn) -> bool:
        """Returns whether a `shard_map` leaves the replica axis alone."""
        return self.axis_name not in eqn.params["newly_manual_axes"]

    @contextlib.contextmanager
    def within(self, eqn: JaxprEqn) -> Generator[None]:
        """Knows in the code of an equation by which calls it is reached."""
        before = self.in_transpose
        self.in_transpose = self.is_transposed(eqn)
        self._calls.append(eqn)
        try:
            yield
        finally:
            self.in_transpose = before
            self._calls.pop()

    def key(self, jaxpr: Jaxpr) -> Any:
        """Returns whether it is a backward pass; of small code, such as jnp's, also the call.

        So what is found in it is reported at the line of each call.
        """
        call = id(self._calls[-1]) if self._calls and len(jaxpr.eqns) < _SMALL else None
        return self.in_transpose, call


#: Number of equations below which an inner function is walked again for each call.
_SMALL = 30


def _of_cotangents(ins: Sequence[Fact]) -> Fact:
    """Returns the fact of a result in a backward pass, which is linear in the cotangents."""
    parts = [x for x in ins if x.find("grad")]
    out = unknown(ins)
    scale = common_scale(parts)
    kept = scale if scale is not None and scale.kind in (SHARE, MEAN, DERIVATIVE) else None
    return out.having(grad=parts[0].find("grad"), scale=kept) if parts else out


def unknown(ins: Sequence[Fact]) -> Fact:
    """Returns the fact of a result if nothing is known about the operation."""
    return DIFFERS if any(x.differs for x in ins) else EQUAL


def shape_of(atom: Var | Literal) -> tuple[int, ...]:
    """Returns the shape of a variable or literal."""
    return tuple(getattr(atom.aval, "shape", ()))


def size_of(atom: Var | Literal) -> int:
    """Returns the number of elements of a variable or literal."""
    return math.prod(shape_of(atom))
