"""Fuses consecutive replica maps into one.

In a trace, what the replicas compute is one `shard_map`, and its reduction is another. Between the
two, XLA puts each array together and takes it apart again. The compiled program does neither, but
to find that out takes XLA a time that grows with the square of the number of arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from distjax import jax_compat
from distjax.collectives.mapping import is_replica_map
from distjax.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

#: Primitives whose code is in the global view where they are, and the parameters that hold it.
_HOLDERS = frozenset(("cond", "jit", "scan", "while"))
_CODE = frozenset(("jaxpr", "cond_jaxpr", "body_jaxpr", "branches"))
#: The parameters of a map that tell of its operands, its results and its code.
_OWN_PARAMS = frozenset(("jaxpr", "in_specs", "out_specs"))


def join_maps(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a global-view jaxpr in which a map that continues another one is part of it.

    A map continues another one if it takes results of it unchanged, a row for each replica, and
    if everything else that it takes is available there. (Results that are equal on all replicas
    keep maps apart: their derivative is the mean of the replicas' own.)
    """
    return _Joiner().join(jaxpr)


class _Joiner:
    """Joins the maps of code and of what it calls."""

    def __init__(self):
        #: By id: code and its joined form, held so that ids stay theirs.
        self._joined: dict[int, tuple[Any, Any]] = {}

    def join(self, jaxpr: Jaxpr) -> Jaxpr:
        """Returns the code with its maps joined: itself if there are none to join."""
        eqns = self._join_equations(jaxpr)
        return jaxpr if eqns == jaxpr.eqns else jaxpr.replace(eqns=eqns)

    def _join_equations(self, jaxpr: Jaxpr) -> list[JaxprEqn]:
        joined: list[JaxprEqn | _Maps] = []
        made_at: dict[Any, int] = {}
        for eqn in jaxpr.eqns:
            index = max((made_at.get(v, -1) for v in _variables(eqn.invars)), default=-1)
            last = joined[index] if index >= 0 else None
            if isinstance(last, _Maps) and last.is_continued_by(eqn):
                last.add(eqn)
            else:
                index = len(joined)
                joined.append(_Maps(eqn) if is_replica_map(eqn) else self._join_inside(eqn))
            made_at.update((v, index) for v in eqn.outvars)
        used = _variables([v for e in joined for v in e.invars] + list(jaxpr.outvars))
        return [e.as_one(used) if isinstance(e, _Maps) else e for e in joined]

    def _join_inside(self, eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name not in _HOLDERS:
            return eqn
        code = {key: eqn.params[key] for key in _CODE.intersection(eqn.params)}
        joined = {key: self._join_code(held) for key, held in code.items()}
        return eqn if joined == code else eqn.replace(params={**eqn.params, **joined})

    def _join_code(self, code: Jaxpr | ClosedJaxpr | tuple[ClosedJaxpr, ...]) -> Any:
        if isinstance(code, tuple):  # branches
            return tuple(map(self._join_code, code))
        if id(code) not in self._joined:  # JAX lowers code once, however often it is called
            jaxpr, consts = jax_compat.open_jaxpr(code)
            joined = self.join(jaxpr)
            self._joined[id(code)] = code, code if joined is jaxpr else ClosedJaxpr(joined, consts)
        return self._joined[id(code)][1]


class _Maps:
    """A map over the replicas, and those that continue it.

    Attributes:
      invars: what the maps take and none of them makes.
    """

    def __init__(self, first: JaxprEqn):
        self._maps: list[JaxprEqn] = []
        self._out_specs: dict[Any, Any] = {}
        self.invars: list[Any] = []
        self.add(first)

    def is_continued_by(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation is a map that can be part of this one."""
        first = self._maps[0]
        # One that has effects stays behind those of the equations before it.
        if not is_replica_map(eqn) or eqn.effects or eqn.ctx is not first.ctx:
            return False
        pairs = zip(eqn.invars, eqn.params["in_specs"], strict=True)
        taken = [(self._out_specs[v], spec) for v, spec in pairs if not self._is_given(v)]
        return _shared_params(eqn) == _shared_params(first) and all(
            made == spec != PartitionSpec() for made, spec in taken
        )

    def add(self, eqn: JaxprEqn) -> None:
        """Makes a map that continues this one part of it."""
        self._maps.append(eqn)
        self.invars += (v for v in eqn.invars if self._is_given(v))
        self._out_specs.update(zip(eqn.outvars, eqn.params["out_specs"], strict=True))

    def as_one(self, used: set[Any]) -> JaxprEqn:
        """Returns one map, with those results that are in `used`."""
        first = self._maps[0]
        if len(self._maps) == 1:
            return first
        # A scope around all of them stays around the map; else each equation has its own.
        scopes = [eqn.source_info.name_stack for eqn in self._maps]
        scope = scopes[0] if scopes.count(scopes[0]) == len(scopes) else scopes[0][:0]
        made: dict[Any, Any] = {}  # the maps' results -> what they are inside of the map
        operands, in_specs, eqns = list[Var](), list[Any](), list[JaxprEqn]()
        for eqn in self._maps:
            code, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
            names: dict[Any, Any] = {}  # variables of the code -> those of the joined code
            for v, spec, inner in zip(eqn.invars, eqn.params["in_specs"], code.invars, strict=True):
                if self._is_given(v):
                    operands.append(Var(inner.aval))
                    in_specs.append(spec)
                names[inner] = operands[-1] if self._is_given(v) else made[v]
            eqns += (_renamed(e, names, eqn, len(scope)) for e in code.eqns)
            made.update(zip(eqn.outvars, _replaced(code.outvars, names), strict=True))
        outvars = [v for v in made if v in used]
        results = [made[v] for v in outvars]
        code, _ = jax_compat.open_jaxpr(first.params["jaxpr"])
        eqns = jax_compat.live_equations(eqns, results)
        params = {
            **first.params,
            "jaxpr": jax_compat.new_jaxpr(code, (), operands, results, eqns),
            "in_specs": tuple(in_specs),
            "out_specs": tuple(self._out_specs[v] for v in outvars),
        }
        place = first.source_info.replace(name_stack=scope)
        return first.replace(invars=self.invars, outvars=outvars, params=params, source_info=place)

    def _is_given(self, v: Var | Literal) -> bool:
        return isinstance(v, Literal) or v not in self._out_specs


def _shared_params(eqn: JaxprEqn) -> dict[str, Any]:
    return {key: value for key, value in eqn.params.items() if key not in _OWN_PARAMS}


def _renamed(eqn: JaxprEqn, names: dict[Any, Any], holder: JaxprEqn, depth: int) -> JaxprEqn:
    """Returns an equation of the code of a map, as if it stood where the map does.

    Args:
      eqn: the equation.
      names: variables of the code -> those of the joined code; those of the equation are added.
      holder: the map.
      depth: how many of the names of the map's scope the joined map has.
    """
    invars, outvars = _replaced(eqn.invars, names), [Var(v.aval) for v in eqn.outvars]
    names.update(zip(eqn.outvars, outvars, strict=True))
    place = holder.source_info
    place = place.replace(name_stack=place.name_stack[depth:] + eqn.source_info.name_stack)
    return eqn.replace(invars=invars, outvars=outvars, source_info=place)


def _replaced(atoms: Sequence[Any], names: dict[Any, Any]) -> list[Any]:
    return [v if isinstance(v, Literal) else names[v] for v in atoms]


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {v for v in atoms if not isinstance(v, Literal)}
