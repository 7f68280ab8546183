"""A user's script: variables, one function with many modes, and calls of it in any order.

A sequence of items is run by two scripts, one under the strategy that is tested and one under the
reference interpreter, and the two are compared after each item. An item is a `Call` of the one
function, or something `Between` two calls. What the function reads and writes depends on its
arguments: on a mode (a string), on names of variables, on the shape of `x`, on a static value. So
a program that follows the variables of another call's trace shows it.

Numbers are small integers, and quarters and thirds of them: sums are exact, means nearly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distjax as dj
from tests.laws.modes import MODES, ramp

SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
FIRST = dj.VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = dj.VariableSynchronization.ON_READ

#: The variables that a script has from the start.
VARIABLES: Mapping[str, dict[str, Any]] = {
    "mean": dict(aggregation=MEAN),
    "sum": dict(aggregation=SUM),
    "first": dict(aggregation=FIRST),
    "count": dict(aggregation=SUM, dtype=jnp.int32),
    "seen": dict(aggregation=SUM, synchronization=ON_READ),
    "average": dict(aggregation=MEAN, synchronization=ON_READ),
}
SHAPE = (6,)  # two and three replicas can split it


@dataclasses.dataclass(frozen=True)
class Twist:
    """A static value: a hashable object of the user's own, no array and no number."""

    factor: int


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the function.

    Attributes:
      road: "run", or through a cross-replica function: "jit" compiled, "eager" not.
      mode: what it does, a key of MODES; None: nothing but `x` is passed.
      names: of the variables that it touches.
      kind: what `x` is: "int", "float", "numpy", "array" or "per_replica".
      size: of `x` [size], where it is an array.
      amount: the number in `x`; replica r has amount + r if that is "per_replica".
      factor: the static value.
      by_keyword: whether the arguments after `x` are passed by keyword.
      across: names of the variables that the cross-replica function updates.
      error: the type of what a mode raises that raises.
    """

    road: str = "run"
    mode: str | None = "eval"
    names: tuple[str, ...] = ("mean",)
    kind: str = "array"
    size: int = 1
    amount: int = 1
    factor: int = 1
    by_keyword: bool = False
    across: tuple[str, ...] = ()
    error: type[Exception] = ValueError

    @property
    def raises(self) -> bool:
        """Whether the user's function raises."""
        return self.mode is not None and self.mode.startswith("raise")


@dataclasses.dataclass(frozen=True)
class Between:
    """What a script does between two calls.

    Attributes:
      what: a method of variables; "value", which is then held; or another function.
      name: of the variable.
      amount: the number that is written.
    """

    what: str
    name: str = "mean"
    amount: int = 1
    raises = False


class Script:
    """The variables and functions of one script, under one strategy.

    Args:
      strategy: a strategy.
      by_size: the names of the variables that mode "shape" writes, for each size of `x`.
      jit: what compiles the cross-replica function; None leaves it as it is.
    """

    def __init__(self, strategy: dj.Strategy, by_size: Mapping[int, Sequence[str]], jit: Any):
        self.strategy, self.by_size = strategy, by_size
        self.late: dict[str, dj.Variable] = {}
        self._held: list[tuple[jax.Array, np.ndarray]] = []
        self.variables: dict[str, dj.Variable] = {}
        with strategy.scope():
            for i, (name, options) in enumerate(VARIABLES.items()):
                options = {"dtype": jnp.float32, **options}
                self.variables[name] = dj.Variable(np.full(SHAPE, 1 + i), name=name, **options)
        self._compiled = jit(self.cross, static_argnames="twist") if jit else self.cross

    # -- the user's functions -------------------------------------------------------

    def step(
        self,
        x: Any,
        mode: str = "eval",
        names: Any = ("mean",),
        twist: Any = None,
        error: Any = None,
    ) -> Any:
        """The one function, as each replica runs it."""
        total = jnp.float32(jnp.sum(x)) * (1 if twist is None else twist.factor)
        if mode == "shape":
            names = self.by_size[jnp.size(x)]
        found = MODES[mode](self, names, total, error)
        return {"found": found, "total": total, mode: np.shape(x)}

    def cross(
        self, x: Any, mode: str = "eval", names: Any = (), twist: Any = None, rest: Any = ((), None)
    ) -> Any:
        """The one function among other things, in cross-replica context."""
        across, error = rest
        result = self.strategy.run(self.step, (x, mode, names), {"twist": twist, "error": error})
        total = self.strategy.reduce("sum", result["total"], axis=None)
        for name in across:
            v = self.variables[name]
            subtract = lambda v, g: v.assign_sub(g)
            self.strategy.extended.update(v, subtract, args=(ramp(v, total),))
        if mode == "raise_across":
            raise error(mode)
        return result, total, [self.variables[name].value for name in across]

    def evaluate(self, x: Any) -> Any:
        """Another function of the same variables: reads all."""
        return {name: jnp.sum(v.value) * x for name, v in self.variables.items()}

    def train(self, x: Any) -> None:
        """A third one: writes all."""
        for v in self.variables.values():
            v.assign_add(ramp(v, x))

    # -- running an item ------------------------------------------------------------

    def do(self, item: Call | Between) -> Any:
        """Runs one item; returns its result, which the script holds from then on."""
        result = self._call(item) if isinstance(item, Call) else self._between(item)
        self._hold(result)
        return result

    def _call(self, call: Call) -> Any:
        x = self._argument(call)
        self._hold(x)
        rest: dict[str, Any] = {}
        if call.mode is not None:
            rest = dict(mode=call.mode, names=call.names, twist=Twist(call.factor))
            last = (
                ("error", call.error) if call.road == "run" else ("rest", (call.across, call.error))
            )
            rest.update([last])
        args, kwargs = ((x,), rest) if call.by_keyword else ((x, *rest.values()), {})
        if call.road == "run":
            return self.strategy.run(self.step, args, kwargs)
        return (self._compiled if call.road == "jit" else self.cross)(*args, **kwargs)

    def _argument(self, call: Call) -> Any:
        if call.kind in ("int", "float"):
            return {"int": int, "float": float}[call.kind](call.amount)
        array = np.full(call.size, call.amount, np.float32)
        if call.kind == "per_replica":
            each = lambda context: array + context.replica_id_in_sync_group
            return self.strategy.distribute_values_from_function(each)
        return jnp.asarray(array) if call.kind == "array" else array

    def _between(self, item: Between) -> Any:
        if item.what in ("evaluate", "train"):
            return self.strategy.run(getattr(self, item.what), (jnp.float32(item.amount),))
        v = self.variables[item.name]
        if item.what == "value":
            return v.value
        given = ramp(v, item.amount)
        self._hold(given)
        return getattr(v, item.what)(given)

    # -- looking --------------------------------------------------------------------

    def look(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """Returns value and components of each variable, or of these, as numpy arrays."""
        found = self.variables | self.late
        return {
            name: (
                np.asarray(found[name].value),
                list(map(np.asarray, found[name].local_results())),
            )
            for name in names or found
        }

    def _hold(self, value: Any) -> None:
        """Keeps the arrays of `value`, and copies of what is in them."""
        arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
        self._held += [(x, np.array(x)) for x in arrays]

    def look_at_held(self) -> None:
        """Asserts that no array that the script holds changed or died."""
        for array, before in self._held:
            np.testing.assert_array_equal(array, before, "an array that the script holds")
