"""Variable: a handle on state that a strategy places and synchronizes."""

from __future__ import annotations

import copy
import itertools
import numbers
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from distjax import jax_compat
from distjax.context import frames
from distjax.errors import describe_value, message
from distjax.modes import VariableAggregation, VariableSynchronization
from distjax.placement.transfer import require_wholly_here
from distjax.typing import DTypeLike, PyTree, VariableModes
from distjax.variables import access
from distjax.variables.description import variable_html
from distjax.variables.layouts import Layout
from distjax.variables.policy import Policy, resolve_modes
from distjax.variables.stored_variable import OwningStrategy, StoredVariable

_serial_numbers = itertools.count()


class Variable(StoredVariable):
    """State of one shape and dtype, placed by the active strategy.

    Mirrored (ON_WRITE): one value, with a copy on each replica. Sync-on-read
    (ON_READ): one component per replica, combined when read in cross-replica
    context.

    Args:
      initial_value: array, number, or a function of no arguments that returns one
        (compiled, so that no single device ever holds the whole). Copied.
      trainable: whether to train it; defaults to True, or False for ON_READ.
      name: the name in messages and checkpoints; defaults to "Variable".
      dtype: dtype to convert the initial value to, of its kind or a higher one.
      synchronization: a VariableSynchronization.
      aggregation: a VariableAggregation: how values written by replicas are combined.

    Locality: V(variable): `P()` on the mesh, or [R, ...] over the replica axis.
    Context: any. In a replica function it is created once, with replica 0's initial
      value, and the function is traced again.

    Raises:
      ValueError: invalid modes, MEAN of a non-floating dtype, or no initial value of numbers.
      TypeError, OverflowError: an initial value of a higher kind than `dtype`, or out of its range.
      TraceLeakError: created inside an inner JAX trace.
      ContextError: created in another order when the function is traced again, or in
        a function passed to `dj.explain`.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     w = dj.Variable(10.0, name="w", aggregation=dj.VariableAggregation.SUM)
      >>> _ = strategy.run(lambda g: w.assign_add(g), args=(jnp.float32(1.5),))
      >>> float(w.value)
      13.0

    Source: tf.Variable under tf.distribute, "Mirrored variables" (TF 1.13).
    """

    def __new__(
        cls,
        initial_value: PyTree,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
    ) -> Any:
        """Creates the variable, or returns the one that the previous trace created here."""
        name = "Variable" if name is None else name
        modes = resolve_modes(synchronization, aggregation, name)
        frame = frames.current()
        return frame.strategy.extended.create_variable(
            initial_value, trainable=trainable, name=name, dtype=dtype, modes=modes
        )

    @classmethod
    def declared(
        cls,
        *,
        strategy: OwningStrategy,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        name: str,
        trainable: bool | None,
        modes: VariableModes,
        policy: Policy,
        layout: Layout,
    ) -> Variable:
        """Returns a variable without storage; for strategies."""
        self = object.__new__(cls)
        self.strategy = strategy
        self.shape = tuple(shape)
        self.dtype = dtype if jax_compat.is_key_dtype(dtype) else jnp.dtype(dtype)
        self.name = name
        self.synchronization, self.aggregation = modes
        on_read = self.synchronization is VariableSynchronization.ON_READ
        self.trainable = (not on_read) if trainable is None else bool(trainable)
        self.policy = policy
        self.layout = layout
        self.serial_number = next(_serial_numbers)
        self.stored = strategy.extended.make_storage(self)
        return self

    # -- values ---------------------------------------------------------------

    @property
    def value(self) -> jax.Array:
        """The array [...] that the current context sees.

        In a replica, its own component or its copy of the one value; in cross-replica
        context, the components combined by the aggregation.

        Locality: V(variable); M where components are combined. Context: any, including
          loops, branches and derivatives inside a traced function.
        Cost: in cross-replica context an all-reduce for ON_READ; in a replica a gather
          if the strategy partitions the variable.

        Raises:
          AggregationError: in cross-replica context, for ON_READ with aggregation NONE.
          StrategyMismatchError: the active strategy is not the variable's.
          TraceLeakError: in a user's own `jax.jit`, outside `run` and `dj.jit`.
        """
        return access.read(self)

    @value.setter
    def value(self, value: PyTree) -> None:
        text = _no_write_text(self, "v.value = x", value, "v.assign(x)")
        raise AttributeError(text, name="value")

    def assign(self, value: PyTree) -> jax.Array:
        """Sets the variable to `value`; returns the new value as the context sees it.

        Args:
          value: an array [...], a number, or lists of these, with the variable's shape and
            a dtype of no higher kind (bool < int < float < complex); cast within a kind.

        Locality: T or M in a replica, where ON_WRITE combines the replicas' values by
          the aggregation; M in cross-replica context. Context: any.
        Cost: in a replica, an all-reduce for ON_WRITE with an aggregation.

        Raises:
          AggregationError: ON_WRITE with NONE in a replica; ON_READ with NONE in
            cross-replica context.
          LocalityError: `value` is a PerReplica.
          OverflowError: a number or numpy array out of the range of the dtype.
          TypeError: a dtype of a higher kind, or another object.
          ValueError: another shape, or a Python number that SUM would add up.
          StrategyMismatchError: the active strategy is not the variable's.
          TraceLeakError: in an inner trace (`jax.jit`, a `jax.lax` loop, `grad`); for
            loops and branches use `dj.lax`.
        """
        self.write(value)
        return access.read_assigned(self) if self.policy.stacked else self.value

    def write(self, value: PyTree) -> None:
        """Sets the variable to `value` as `assign` does, without reading back the new value."""
        access.write(self, value, "assign")

    def assign_add(self, value: PyTree) -> jax.Array:
        """Adds `value` and returns the new value; otherwise like `assign`.

        Raises:
          AggregationError: also for ON_READ with SUM in cross-replica context.
          ContextError: ON_READ, in an update of another variable.
        """
        return self._change(value, "assign_add")

    def assign_sub(self, value: PyTree) -> jax.Array:
        """Subtracts `value` and returns the new value; otherwise like `assign_add`."""
        return self._change(value, "assign_sub")

    def _change(self, value: PyTree, method: str) -> jax.Array:
        if self.policy.stacked:
            access.require_readable(self)
        access.write(self, value, method)
        return self.value

    def local_results(self) -> tuple[jax.Array, ...]:
        """Returns the components [...] in replica order.

        R arrays for a mirrored or sync-on-read variable, one for a variable that is
        partitioned or in host memory; in a replica function, the replica's own.

        Context: any. Source: tf.distribute.Strategy.unwrap (TF 1.13).
        """
        return access.components(self)

    # -- views ----------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=int))

    def __repr__(self) -> str:
        modes = f"{self.synchronization.name}, {self.aggregation.name}"
        what = f"{self.name!r}, {self.dtype}{list(self.shape)}, {modes}"
        return f"Variable({what}, of {self.strategy!r})"

    def _repr_html_(self) -> str:
        return variable_html(self)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        value = self.value
        if not isinstance(value, jax_compat.Tracer):
            require_wholly_here(value, f"variable {self.name!r}")
        return np.array(value, dtype=dtype, copy=copy)

    def __getitem__(self, key: PyTree) -> jax.Array:
        return self.value[key]

    def __setitem__(self, key: PyTree, value: PyTree) -> NoReturn:
        whole = "v.assign(x); of a part: v.assign(v.value.at[index].set(x))"
        raise TypeError(_no_write_text(self, "v[...] = x", value, whole))

    def __iter__(self) -> Any:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else repr(self)

    def __eq__(self, other: object) -> Any:
        """Compares the value to numbers and arrays; a variable equals no other variable."""
        return self.value == other if _is_of_numbers(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return self.value != other if _is_of_numbers(other) else NotImplemented

    __hash__ = object.__hash__

    #: Makes numpy arrays and scalars defer to the variable's own operators.
    __array_priority__ = 100

    def __copy__(self) -> Variable:
        return self.strategy.extended.copy_variable(self)  # copies the value, as arrays do

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            message(
                f"variable {self.name!r} needs to stay in its process",
                got="pickle of a variable, or of what holds one",
                why="its value lies on the devices of this process, as its strategy says",
                fix="dj.checkpoint.Checkpointer(directory).save(step, tree), and restore(tree) "
                f"there; or pickle {self._host_code()}",
            )
        )

    def _host_code(self) -> str:
        """Returns code for the whole value on the host."""
        if self.strategy.extended.topology.spans_processes:
            return "jax.device_get(strategy.extended.broadcast_to(v.value)), read on every process"
        return "jax.device_get(v.value)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        memo[id(self)] = made = copy.copy(self)
        return made


def _no_write_text(variable: Variable, written: str, value: PyTree, fix: str) -> str:
    return message(
        f"variable {variable.name!r} needs {fix.split(';')[0]} in place of {written}",
        got=describe_value(value),
        why="a write is a call that returns the new value: in a replica, the values of all "
        "replicas are combined as the aggregation of the variable says",
        fix=f"{fix}; v.assign_add(x), v.assign_sub(x)",
    )


def _is_of_numbers(value: object) -> bool:
    return isinstance(value, (numbers.Number, jax.Array, np.ndarray, np.generic))


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Variable, *others: PyTree) -> Any:
        others = tuple(o.value if isinstance(o, Variable) else o for o in others)
        return getattr(self.value, name)(*others)

    apply.__name__ = name
    apply.__doc__ = f"Returns ``value.{name}(...)``."
    return apply


for _name in "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split():
    setattr(Variable, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Variable, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in "neg pos abs invert lt le gt ge round".split():
    setattr(Variable, f"__{_name}__", _operator(f"__{_name}__"))


def _in_place(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Variable, other: object) -> NoReturn:
        raise TypeError(
            message(
                f"an in-place operator needs an array, not variable {self.name!r}",
                got=f"`v {name}= ...`",
                why="it would bind the name to a new array and leave the variable as it was",
                fix=f"v.assign_add(x), v.assign_sub(x), or v.assign(v.value {name} x)",
            )
        )

    return refuse


_SYMBOLS = (
    "add + sub - mul * truediv / floordiv // mod % pow ** matmul @ and & or | xor ^ lshift << "
    "rshift >>"
).split()
for _name, _symbol in zip(_SYMBOLS[::2], _SYMBOLS[1::2], strict=True):
    setattr(Variable, f"__i{_name}__", _in_place(_symbol))
