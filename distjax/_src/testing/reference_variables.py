"""Variables of the reference interpreter: a list of R components, changed in place.

The rules are stated independently, from the tables of tf.distribute. Of `distjax._src.variables`
they use only the class `Variable`, for its operators and `isinstance`, and the checks of what is
written. A variable has the policy and the layout of its kind only because metrics, optimizers and
checkpoints ask for them; the rules here do not use them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import jax_compat
from distjax._src.context import Frame, frames
from distjax._src.testing.reference_replicas import all_equal, combine
from distjax._src.typing import (
    PyTree,
    ReduceOp,
    VariableAggregation,
    VariableModes,
    VariableSynchronization,
)
from distjax._src.variables.conversion import convert, is_number
from distjax._src.variables.description import VariableDescription
from distjax._src.variables.layouts import MirroredLayout, StackedLayout
from distjax._src.variables.policy import policy_for
from distjax._src.variables.variable import (
    OwningStrategy,
    Variable,
    no_aggregation_text,
    require_arithmetic,
    require_one_value,
)
from distjax.errors import (
    AggregationError,
    LocalityError,
    StrategyMismatchError,
    TraceLeakError,
    UnsupportedError,
    message,
)

_SUM, _MEAN = VariableAggregation.SUM, VariableAggregation.MEAN
_NONE, _FIRST = VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA


@dataclasses.dataclass(frozen=True, eq=False)
class ComponentFrame(Frame):
    """The frame of an update function, which runs once for each component, of this number."""

    component: int = 0


class ReferenceVariable(Variable):
    """R components, whatever the synchronization; created by `dj.Variable` in scope."""

    is_on_read: bool

    @classmethod
    def make(
        cls,
        strategy: OwningStrategy,
        initial: PyTree,
        *,
        name: str,
        trainable: bool | None,
        modes: VariableModes,
    ) -> ReferenceVariable:
        """Returns a new variable; a call of `Variable` would ask the strategy for one."""
        self = object.__new__(cls)
        self.strategy, self.name = strategy, name
        self.synchronization, self.aggregation = modes
        self.is_on_read = self.synchronization is VariableSynchronization.ON_READ
        self.trainable = (not self.is_on_read) if trainable is None else bool(trainable)
        initial = _strong(initial)
        self.shape, self.dtype = initial.shape, initial.dtype
        self.policy = policy_for(modes, self.dtype, name)
        layout = StackedLayout if self.is_on_read else MirroredLayout
        self._layout = layout(strategy.extended.topology)
        self.components = [initial] * strategy.num_replicas_in_sync
        inside: Any = strategy.extended
        inside.created[self] = None
        return self

    @Variable.value.getter
    def value(self) -> jax.Array:
        """The array [...] that the current context sees."""
        number = self._own_component("read")
        if number is not None:
            return self.components[number]
        if not self.is_on_read or self.aggregation is _FIRST:
            return self.components[0]
        if self.aggregation is _NONE:
            raise AggregationError(_across_text(self, "a read"))
        return combine(ReduceOp[self.aggregation.name], self.components)

    def local_results(self) -> tuple[jax.Array, ...]:
        """Returns the components; in a replica context, only this replica's."""
        number = self._own_component("read")
        return tuple(self.components) if number is None else (self.components[number],)

    def assign(self, value: PyTree) -> jax.Array:
        """Sets the variable to `value` and returns the new value."""
        return self._write("assign", value, lambda old, new: new)

    def write(self, value: PyTree) -> None:
        """Sets the variable to `value`."""
        self.assign(value)

    def assign_add(self, value: PyTree) -> jax.Array:
        """Adds `value` and returns the new value."""
        return self._write("assign_add", value, lambda old, new: old + new)

    def assign_sub(self, value: PyTree) -> jax.Array:
        """Subtracts `value` and returns the new value."""
        return self._write("assign_sub", value, lambda old, new: old - new)

    def _write(self, method: str, value: PyTree, apply: Callable[[Any, Any], Any]) -> jax.Array:
        number = self._own_component(method)
        array = self._convert(method, value)
        if number is not None and (frames.current().in_update or self.is_on_read):
            self.components[number] = apply(self.components[number], array)
        elif number is not None:
            self._write_together(method, value, array, apply)
        else:
            new = self._shares(method, array)
            self.components = [apply(c, x) for c, x in zip(self.components, new, strict=True)]
        return self.value

    def _write_together(
        self, method: str, value: PyTree, array: jax.Array, apply: Callable[[Any, Any], Any]
    ) -> None:
        """Writes a mirrored variable in a replica: all replicas meet, and all copies change."""
        if self.aggregation is _NONE:
            raise AggregationError(no_aggregation_text(self, method))
        if self.aggregation is _SUM and is_number(value):
            raise ValueError(_python_number_text(self, method, value))

        def hold(values: list[Any]) -> list[None]:
            if self.aggregation is _FIRST:
                new = values[0]
            else:
                new = combine(ReduceOp[self.aggregation.name], values).astype(self.dtype)
            self.components = [apply(old, new) for old in self.components]
            return [None] * len(values)

        what = f"{method} of variable {self.name!r}"
        frames.current().replica_context.meet(what, array, hold)

    def _shares(self, method: str, array: jax.Array) -> list[jax.Array]:
        """Returns each component's share of one value written in cross-replica context."""
        count = len(self.components)
        if not self.is_on_read or self.aggregation in (_MEAN, _FIRST):
            return [array] * count
        if self.aggregation is _NONE or method != "assign":
            raise AggregationError(_across_text(self, method))
        if jnp.issubdtype(self.dtype, jnp.inexact):
            return [(array / count).astype(self.dtype)] * count
        share, rest = array // count, array % count
        more = [(i < rest).astype(share.dtype) for i in range(count)]
        return [(share + one).astype(self.dtype) for one in more]

    def describe(self) -> VariableDescription:
        """Returns a description; the bytes of components that share an array count once."""
        return VariableDescription(
            name=self.name,
            shape=self.shape,
            dtype=str(self.dtype),
            synchronization=self.synchronization.name,
            aggregation=self.aggregation.name,
            trainable=self.trainable,
            placement="per replica" if self.is_on_read else "mirrored",
            bytes_per_device=sum({id(c): c.nbytes for c in self.components}.values()),
            host_bytes=0,
        )

    def require_equal_components(self) -> None:
        """Raises a LocalityError if an update made the copies diverge."""
        if all_equal(self.components):
            return
        raise LocalityError(
            f"an update of variable {self.name!r} needs to leave its components equal",
            got="components that differ",
            why="it is mirrored: the function has read what differs per replica",
            fix="pass a reduced value as an argument: update(v, fn, args=(x,))",
        )

    def _own_component(self, action: str) -> int | None:
        """Returns the number of the context's component; None in cross-replica context."""
        frame = frames.current()
        if frame.has_strategy and frame.strategy is not self.strategy:
            raise StrategyMismatchError(frames.mixing_text(self.strategy, frame, action))
        _require_no_trace(self, action, frame)
        if not frame.has_strategy:
            return None
        if frame.in_update:
            updates = [f for f in frames.stack() if isinstance(f, ComponentFrame)]
            return updates[-1].component
        return None if frame.replica_context is None else frame.replica_context.number

    def _convert(self, method: str, value: PyTree) -> jax.Array:
        value = value.value if isinstance(value, Variable) else value
        require_one_value(self, value, method, frames.current())
        require_arithmetic(self, method)
        return jnp.asarray(convert(self, value, method))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReferenceVariable:
        modes = (self.synchronization, self.aggregation)
        options: dict[str, Any] = {"name": self.name, "trainable": self.trainable, "modes": modes}
        made = self.make(self.strategy, self.components[0], **options)
        made.components = list(self.components)
        memo[id(self)] = made
        return made

    def __copy__(self) -> ReferenceVariable:
        return copy.deepcopy(self)

    def __getattr__(self, name: str) -> NoReturn:
        if name != "stored":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise UnsupportedError(
            f"variable {self.name!r} of a reference strategy needs reading by components",
            got="a call for compiled strategies, which reads the one array that they store",
            why="the reference interpreter keeps a list of components",
            fix="v.local_results(), or v.value; or dj.VirtualStrategy(R) in its place",
        )


def _strong(value: PyTree) -> jax.Array:
    """Returns a strongly typed array, to which Python numbers promote."""
    if jax_compat.is_key_dtype(getattr(value, "dtype", None)):
        return value
    return jnp.asarray(np.asarray(value))


# -- errors ---------------------------------------------------------------------


def _require_no_trace(variable: ReferenceVariable, action: str, frame: Frame) -> None:
    is_write = action != "read"
    if frame.state is None and not (jax_compat.tracing() if is_write else jax_compat.staging()):
        return
    raise TraceLeakError(
        f"{action} of variable {variable.name!r} of a reference strategy needs concrete values",
        got="a call inside a JAX trace (jit outside of run, dj.jit, grad, vmap)",
        why="the reference interpreter reads and writes at once, nothing is traced",
        fix="call the function without jit: step.__wrapped__(...) for a dj.jit function; "
        "return the new value from a function under grad and write it outside",
    )


def _python_number_text(variable: ReferenceVariable, method: str, value: object) -> str:
    return message(
        f"{method} of variable {variable.name!r} with aggregation SUM needs an array",
        got=f"the Python number {value!r}",
        why="it is the same object on every replica: unclear whether it is to be summed",
        fix="aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA for a count of steps; "
        f"{method}(jnp.asarray({value!r})) to add it once for each replica",
    )


def _across_text(variable: ReferenceVariable, what: str) -> str:
    return message(
        f"{what} of sync-on-read variable {variable.name!r} in cross-replica context needs another "
        "aggregation",
        got=f"aggregation {variable.aggregation.name}",
        why="nothing says how its components make one value, or share one",
        fix="do it in a replica context or by strategy.extended.update; v.local_results() reads "
        "the components",
    )
