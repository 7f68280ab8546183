"""Which values of a replica function differ, asked while it is still being traced.

The emitter proves localities from the finished jaxpr. A merge asks earlier, so that its function
can be traced with the arguments that it will have. The same rules are applied to the equations so
far. Where these do not tell, there is no answer, and the function is traced again at emission.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import core

from distjax import jax_compat
from distjax.errors import DivergenceError
from distjax.jax_compat import JaxprEqn
from distjax.replica.analysis import Analysis
from distjax.replica.emit import holds_merge
from distjax.replica.merge import Merge
from distjax.typing import ArrayLike
from distjax.variables.state import variable_p


class TracerLocalities:
    """The localities of the values of one trace.

    Attributes:
      has_merges: whether an equation may be or hold a merge.

    Args:
      axis_name: the name of the replica axis.
      trace: the trace of the replica function.
      arguments: its array arguments, as tracers.
      varying: which of them differ.
    """

    has_merges = False

    def __init__(
        self,
        axis_name: str,
        trace: core.Trace,
        arguments: Sequence[Any],
        varying: Sequence[bool],
    ):
        self._analysis, self._trace = Analysis(axis_name), trace
        self._arguments = {id(x): v for x, v in zip(arguments, varying, strict=True)}
        #: By `id`: an equation, and which of its results differ.
        self._known: dict[int, tuple[Any, Sequence[bool]]] = {}

    def of(self, values: Sequence[Any]) -> list[bool] | None:
        """Returns which values differ; None where that is not known yet, as inside of `grad`."""
        if jax_compat.current_trace() is not self._trace:
            return None
        is_own = lambda value: jax_compat.is_of_trace(value, self._trace)  # others are constants
        try:
            return [is_own(value) and self._differs(value) for value in values]
        except (_NotKnown, DivergenceError):  # the emitter raises the latter where it holds
            return None

    def forget(self) -> None:
        """Drops what is known once the trace has ended; its context may live on."""
        self._arguments, self._known = {}, {}

    def _differs(self, value: ArrayLike) -> bool:
        pending: list[Any] = [jax_compat.equation_of(value)]
        while pending:  # without recursion: a trace may be long
            eqn = pending[-1]
            if eqn is None or id(eqn) in self._known:
                pending.pop()
                continue
            before = [e for e in map(jax_compat.equation_of, eqn.invars) if e is not None]
            needed = [e for e in before if id(e) not in self._known]
            if needed:
                pending += needed
            else:
                self._known[id(eqn)] = eqn, self._outputs(eqn)
        return self._read(value)

    def _read(self, value: ArrayLike) -> bool:
        eqn = jax_compat.equation_of(value)
        if eqn is None:  # an argument, or a constant
            return self._arguments.get(id(value), False)
        return self._known[id(eqn)][1][jax_compat.output_number(value, eqn)]

    def _outputs(self, eqn: JaxprEqn) -> Sequence[bool]:
        if eqn.primitive is variable_p:
            return [eqn.params["variable"]().layout.local_form.varying]
        if self.has_merges and holds_merge(eqn):
            merge: Merge | None = eqn.params.get("merge")
            if merge is None or merge.out_varying is None:
                raise _NotKnown
            return merge.out_varying
        operands: list[Any] = eqn.invars  # tracers, while the equation is being traced
        return self._analysis.outputs_of(eqn, list(map(self._read, operands)))


class _NotKnown(Exception):
    """A value depends on a merge whose results may differ or not."""
