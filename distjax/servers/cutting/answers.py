"""Answers that need several servers: each sends its share, and the worker joins them."""

from __future__ import annotations

import dataclasses
from typing import Any

from distjax import jax_compat
from distjax.jax_compat import Jaxpr, JaxprEqn, Literal, Var
from distjax.servers.cutting.code import NOTHING_RUN, Code, NamedCode, open_code
from distjax.servers.cutting.update import Update


def join_answers(update: Update) -> tuple[Update, NamedCode]:
    """Returns an update whose answers need one server each, and code that joins the others of them.

    Args:
      update: an update, whose answers may need several servers.
    """
    code = open_code(update.code)
    homes = _Homes(update, code)
    num_written = len(update.written)
    outs = list(zip(update.answers, code.outputs[num_written:], strict=True))
    joint = [(name, v) for name, v in outs if homes.are_several(v)]
    if not joint:
        return update, NOTHING_RUN
    own = [pair for pair in outs if pair not in joint]
    at_worker = [e for e in homes.eqns if not e.effects and homes.leaves_to_worker(e)]
    asked = homes.shares_of([v for _, v in joint], at_worker)
    operands = code.inputs[len(update.parts) :]
    made = code.between([*asked, *operands], [v for _, v in joint], at_worker)
    ends = [*code.outputs[:num_written], *(v for _, v in own), *asked]
    names = (*(name for name, _ in own), *asked)
    rest = dataclasses.replace(
        update, code=code.between(code.inputs, ends, homes.eqns), answers=names
    )
    joined = NamedCode(made, (*asked, *update.operands), tuple(name for name, _ in joint))
    return rest, joined


class _Homes:
    """At which servers the values of an update can be computed.

    Args:
      update: the update.
      code: its code, opened.

    Attributes:
      eqns: the equations of the code; one with several results is split into one for each, as
        these may have different homes.
    """

    def __init__(self, update: Update, code: Code):
        self._homes: dict[Var, frozenset[int | None]] = {
            v: frozenset((part.server,)) for v, part in zip(code.inputs, update.parts, strict=False)
        }
        self.eqns: list[JaxprEqn] = []
        for eqn in code.jaxpr.eqns:
            each = [eqn]
            if len(eqn.outvars) > 1 and not eqn.effects:
                made = (e for out in eqn.outvars for e in _making(code.jaxpr, eqn, out))
                each = list(dict.fromkeys(made))  # once, if it cannot be split
            self.eqns += each
            for one in each:
                homes = frozenset[int | None]().union(*map(self._of, one.invars))
                self._homes.update(dict.fromkeys(one.outvars, homes))

    def _of(self, atom: Var | Literal) -> frozenset[int | None]:
        return frozenset() if isinstance(atom, Literal) else self._homes.get(atom, frozenset())

    def are_several(self, atom: Var | Literal) -> bool:
        """Returns whether a value depends on variables of several servers."""
        return len(self._of(atom) - {None}) > 1

    def leaves_to_worker(self, eqn: JaxprEqn) -> bool:
        """Returns whether the worker may run an equation: no single server can, or none has to."""
        out = eqn.outvars[0]
        return self.are_several(out) or not self._of(out)

    def shares_of(self, wanted: list[Any], eqns: list[JaxprEqn]) -> list[Var]:
        """Returns the operands of `eqns` that single servers compute, if `wanted` needs them."""
        needed, found = set(wanted), dict[Any, None]()
        for eqn in reversed(eqns):
            if needed.isdisjoint(eqn.outvars):
                continue
            for v in (v for v in eqn.invars if not isinstance(v, Literal)):
                if self._of(v) and not self.are_several(v):
                    found.setdefault(v)
                else:
                    needed.add(v)
        return list(found)


def _making(like: Jaxpr, eqn: JaxprEqn, out: Var) -> list[JaxprEqn]:
    """Returns `eqn` reduced to one of its results, and to the operands which that needs."""
    atoms = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
    alone = jax_compat.new_jaxpr(like, (), atoms, [out], [eqn])
    return jax_compat.dce_jaxpr(alone, [True], instantiate=True)[0].eqns
