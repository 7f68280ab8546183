"""A moving average of variables, placed like them, and swapped in for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp

from distjax._src.context import StrategyLike, frames
from distjax._src.interrupts import interrupts
from distjax._src.optim.optimizer import active, require_variables
from distjax._src.program.jit import jit
from distjax._src.typing import PyTree
from distjax._src.variables.conversion import is_number
from distjax._src.variables.variable import Variable
from distjax.errors import ContextError, describe_value, require


class ExponentialMovingAverage:
    """The moving average of variables: ``average <- decay * average + (1 - decay) * v``.

    It starts with the values at `init`, as is usual for parameters. Each average is laid out like
    its variable, split if that is split. To save it, add it to the tree that a
    `dj.checkpoint.Checkpointer` saves. For parameters that are arguments, use
    `optax.incremental_update`.

    Args:
      decay: the weight of the old average in an update, between 0 and 1.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     w = dj.Variable(0.0, name="w")
      >>> ema = dj.optim.ExponentialMovingAverage(0.5)
      >>> ema.init([w])
      >>> w.write(1.0)
      >>> ema.update()
      >>> with ema.swapped():
      ...     print(w.value)
      0.5
      >>> print(w.value)
      1.0

    Source: tf.train.ExponentialMovingAverage.
    """

    #: What shows that another average took its place: see `objects/reached`.
    reached_parts = ("_averages",)

    def __init__(self, decay: float):
        require(
            is_number(decay) and 0 <= decay <= 1,
            "ExponentialMovingAverage needs a decay between 0 and 1",
            got=describe_value(decay),
            why="it is the weight of the old average in an update",
            fix="dj.optim.ExponentialMovingAverage(0.999)",
        )
        self._decay = float(decay)
        self._variables: list[Variable] = []
        self._averages: list[Variable] = []
        self._tree: Any = None

    @property
    def averages(self) -> Any:
        """The averages, as a tree of variables like the one passed to `init`; None before."""
        return self._tree

    def kept_variables(self) -> dict[str, Any]:
        """Returns the variables to checkpoint: the averages, not the variables averaged."""
        self._require_made("a checkpoint")
        return {"averages": self._tree}

    def init(self, variables: PyTree) -> None:
        """Creates an average for each variable, with its value. A second call starts afresh.

        Args:
          variables: a list or any tree of variables of one strategy, as for an `Optimizer`.

        Locality: V(v) in and out. Context: any; guarded in a step, like any creation.

        Raises:
          TypeError: variables narrower than float32.
          TypeError, ValueError, LocalityError, StrategyMismatchError: as `Optimizer.init`.
        """
        self._variables = require_variables(variables, "ExponentialMovingAverage.init")
        for variable in self._variables:
            is_wide = (
                jnp.issubdtype(variable.dtype, jnp.inexact) and jnp.finfo(variable.dtype).bits >= 32
            )
            require(
                is_wide,
                "ExponentialMovingAverage.init needs variables of float32 or wider",
                got=f"{variable.name!r} of {variable.dtype}",
                why="in a lower precision the updates of an average are rounded away",
                fix="keep the parameters in float32, and cast them to bfloat16 in the step",
                error=TypeError,
            )
        strategy = self._strategy
        with active(strategy):
            if strategy.extended.compiles and frames.current().state is None:
                jit(self._make).lower()  # a trace makes the variables: there is nothing to run
            else:
                self._make()
        self._tree = jax.tree.unflatten(jax.tree.structure(variables), self._averages)
        compiles = strategy.extended.compiles
        self._move = jit(self._move_in_trace) if compiles else self._move_in_trace
        self._swap = jit(self._swap_in_trace) if compiles else self._swap_in_trace

    def update(self) -> None:
        """Moves the averages towards the variables; after `Optimizer.apply_gradients`.

        Locality: V(v) read and written. Context: any. Cost: no collective.

        Raises:
          ContextError: before `init`.
        """
        self._require_made("update")
        frame = frames.current()
        if frame.replica_context is not None and frame.strategy is self._strategy:
            frame.replica_context.merge_call(self._update_across)
        else:
            self._update_across(self._strategy)

    @contextlib.contextmanager
    def swapped(self) -> Generator[None]:
        """Returns a context in which variables and averages are swapped, for evaluation.

        Context: cross-replica or default, outside a step. Cost: a copy of all of them.

        Raises:
          ContextError: before `init`; in a step.
        """
        self._require_made("swapped")
        require(
            frames.current().state is None,
            "swapped needs to be outside a step",
            got="a call in a step",
            why="it changes the variables before and after the code in its block",
            fix="with ema.swapped(): evaluate(...)",
            error=ContextError,
        )
        are_swapped = False
        try:
            with interrupts.held(), active(self._strategy):
                self._swap()
                are_swapped = True  # Ctrl-C, which has waited for the swap, comes after this
            yield
        finally:
            if are_swapped:
                with interrupts.held(), active(self._strategy):
                    self._swap()

    @property
    def _strategy(self) -> Any:
        return self._variables[0].strategy

    def _make(self) -> None:
        self._averages = []
        for variable in self._variables:
            with self._strategy.extended.colocate_vars_with(variable):
                name = f"{variable.name}/average"
                self._averages.append(Variable(variable.value, name=name, trainable=False))

    def _update_across(self, strategy: StrategyLike) -> None:
        with active(self._strategy):
            if frames.current().state is None:
                self._move()
            else:
                self._move_in_trace()

    def _move_in_trace(self) -> None:
        for variable, average in zip(self._variables, self._averages, strict=True):
            self._strategy.extended.update(average, self._approach, args=(variable.value,))

    def _approach(self, average: Variable, value: jax.Array) -> None:
        rest = jnp.asarray(1 - self._decay, average.dtype)
        average.assign_add(rest * (value - average.value))

    def _swap_in_trace(self) -> None:
        for variable, average in zip(self._variables, self._averages, strict=True):
            value, other = variable.value, average.value
            variable.assign(other)
            average.assign(value)

    def _require_made(self, what: str) -> None:
        if self._tree is not None:
            return
        raise ContextError(
            f"{what} needs a moving average that has its variables",
            got="one whose init was not called",
            why="init makes the averages, beside the variables",
            fix="ema.init(variables), once, before the first step",
        )
