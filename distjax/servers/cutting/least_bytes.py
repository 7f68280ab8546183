"""Least bytes: which part of an update runs at the worker, so that the fewest bytes are sent.

An equation of a merge that depends on no variable can run on either side. Which ones run at the
worker is a minimum cut of the graph of the update: its edges are values, weighted by their bytes,
once for each server that needs them. Among cuts of equal weight, the latest one leaves the least to
the servers: there are many workers, and all of them wait for a server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from distjax.jax_compat import Literal, Var
from distjax.servers.cutting.code import NamedCode, aval_of_atom, open_code
from distjax.servers.cutting.update import Update, results_by_server
from distjax.servers.storage import num_bytes

#: The ends of the graph, and the capacity of an edge that no cut may cross.
WORKER, SERVERS = "worker", "servers"
ENDLESS = 1 << 30


def move_to_worker(update: Update, early: Collection[int]) -> tuple[NamedCode, Update]:
    """Returns the part of an update that the worker runs before it sends anything, and the rest.

    Args:
      update: the update.
      early: the numbers of the equations that the worker runs.
    """
    code, num_written = update.code, len(update.written)
    current, operands = _split_at(code.inputs, len(update.parts))
    written, answers = _split_at(code.jaxpr.outvars, num_written)
    eqns = list(enumerate(code.jaxpr.eqns))
    late = [e for i, e in eqns if i not in early]
    names: dict[Any, Any] = dict(zip(operands, update.operands, strict=True))
    at_worker = {v for i in early for v in code.jaxpr.eqns[i].outvars}.union(names)

    pairs = list(zip(update.answers, answers, strict=True))
    own = [(name, v) for name, v in pairs if not isinstance(v, Literal) and v in at_worker]
    asked = [pair for pair in pairs if pair not in own]
    ends = [*written, *(v for _, v in asked)]
    read = _values(v for e in late for v in e.invars) + _values(ends)
    crossing = [v for v in dict.fromkeys(read) if v in at_worker]
    computed = [v for v in crossing if v not in names]
    first = [e for i, e in eqns if i in early or not e.effects]  # effects of the rest stay there
    moved = code.between(operands, [*computed, *(v for _, v in own)], first)
    rest = code.between([*current, *crossing], ends, late)
    sent = tuple(names.get(v, v) for v in crossing)
    return (
        NamedCode(moved, update.operands, (*computed, *(name for name, _ in own))),
        Update(rest, update.parts, sent, update.written, tuple(name for name, _ in asked)),
    )


def opened(update: Update) -> Update:
    """Returns the update with its calls inlined, so that their equations can be cut too."""
    return dataclasses.replace(update, code=open_code(update.code))


def equations_at_worker(update: Update, num_servers: int) -> set[int]:
    """Returns the numbers of the equations of an update that its worker runs."""
    graph = _Graph(update)
    graph.hold_in_order()
    for server, numbers in results_by_server(update, num_servers).items():
        graph.send(server, numbers)
    graph.ask_for_answers()
    return graph.worker_side()


def slices_of_operands(update: Update) -> set[int]:
    """Returns the numbers of the equations that slice what a worker sends."""
    _, operands = _split_at(update.code.inputs, len(update.parts))
    eqns = enumerate(update.code.jaxpr.eqns)
    return {i for i, e in eqns if e.primitive.name == "slice" and e.invars[0] in operands}


class _Graph:
    """The graph of an update: a cut pays for each edge from the worker's side to the servers'.

    Its nodes are the two ends, the equations by number, and (server, value) for a value that is
    sent there. What depends on constants alone has no node: both sides compute it.
    """

    def __init__(self, update: Update):
        self._update, self._jaxpr = update, update.code.jaxpr
        current, operands = _split_at(update.code.inputs, len(update.parts))
        self._maker: dict[Var, Any] = dict.fromkeys(current, SERVERS)
        self._maker.update(dict.fromkeys(operands, WORKER))
        for number, eqn in enumerate(self._jaxpr.eqns):
            if eqn.effects or self._known(eqn.invars):
                self._maker.update(dict.fromkeys(eqn.outvars, number))
        self._edges: dict[tuple[Any, Any], int] = {}

    def _known(self, atoms: Iterable[Any]) -> list[Var]:
        """Returns the values among `atoms` that are not constants."""
        return [v for v in _values(atoms) if v in self._maker]

    def hold_in_order(self) -> None:
        """Lets the worker run an equation only if it runs those that compute its operands."""
        for number, eqn in enumerate(self._jaxpr.eqns):
            for value in self._known(eqn.invars):
                if self._maker[value] is not WORKER:
                    self._edges[number, self._maker[value]] = ENDLESS
            if eqn.effects:
                self._edges[number, SERVERS] = ENDLESS

    def send(self, server: int, numbers: Sequence[int]) -> None:
        """Makes a cut pay for each value that one server needs and does not compute."""
        code = self._update.code.cut_to(numbers)
        for eqn in code.jaxpr.eqns:
            made = self._known(eqn.outvars)
            for value in self._known(eqn.invars) if made else ():
                self._need(server, value, self._maker[made[0]])
        num_written = sum(number < len(self._update.written) for number in numbers)
        for value in self._known(code.jaxpr.outvars[:num_written]):
            self._need(server, value, SERVERS)

    def _need(self, server: int, value: Var, consumer: Hashable) -> None:
        maker = self._maker[value]
        if maker is not SERVERS:
            self._edges[maker, (server, value)] = _num_bytes(value)
            self._edges[(server, value), consumer] = ENDLESS

    def ask_for_answers(self) -> None:
        """Makes a cut pay for each answer that is computed at a server."""
        for value in self._known(self._jaxpr.outvars[len(self._update.written) :]):
            if isinstance(self._maker[value], int):
                self._edges[WORKER, self._maker[value]] = _num_bytes(value)

    def worker_side(self) -> set[int]:
        """Returns the equations on the worker's side of the latest minimum cut."""
        nodes = {WORKER: 0, SERVERS: 1}
        for edge in self._edges:
            for node in edge:
                nodes.setdefault(node, len(nodes))
        sizes = [size for size in self._edges.values() if size != ENDLESS]
        unit = 1 + sum(sizes) // (ENDLESS // 2)  # so that no sum of capacities is too large
        capacities = [x if x == ENDLESS else -(-x // unit) for x in self._edges.values()]
        ends = np.array([[nodes[a], nodes[b]] for a, b in self._edges]).reshape(-1, 2).T
        values = (np.array(capacities, np.int32), (ends[0], ends[1]))
        capacity = coo_matrix(values, (len(nodes), len(nodes))).tocsr()
        left = (capacity - maximum_flow(capacity, 0, 1).flow).maximum(0)
        left.eliminate_zeros()
        at_servers = set(breadth_first_order(left.T, 1, return_predecessors=False).tolist())
        return {n for n, i in nodes.items() if isinstance(n, int) and i not in at_servers}


def _split_at(items: Sequence[Any], number: int) -> tuple[Sequence[Any], Sequence[Any]]:
    return items[:number], items[number:]


def _values(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _num_bytes(value: Var) -> int:
    return max(1, num_bytes(aval_of_atom(value)))
