"""Optimizer: applies an optax transformation to variables of a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from distjax.collectives.ops import as_reduce_op
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.errors import ContextError, StrategyMismatchError, describe_value, message, require
from distjax.integers import require_int
from distjax.lint.between_runs import report_unfit_between_runs
from distjax.modes import ReduceOp, VariableAggregation, VariableSynchronization
from distjax.optim import gradient_pairs
from distjax.optim.slots import OptimizerState, make_state, update_variables
from distjax.program.jit import jit
from distjax.replica import lax
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.reducing import reduction_layout
from distjax.strategies.strategy import Strategy
from distjax.typing import ArrayLike, DTypeLike, PyTree, ReduceOpLike
from distjax.variables.variable import Variable


class Accumulation:
    """Averages gradients over k steps.

    Each replica sums its own gradients in sync-on-read variables, which needs no
    communication. The counter is equal on every replica, so all replicas take the
    branch that communicates in the same step. Strategies that split gradients (ZeRO 2
    and 3) have no room for a whole one per replica: they reduce at each step, and the
    sum is kept split, beside its variable. A parameter server, which keeps one sum for
    all, also reduces at each step.

    Sums of float16 would overflow, and sums of bfloat16 stagnate: floats are summed in
    float32 or wider. The mean has the dtype of the gradient.

    Args:
      extended: the strategy.
      variables: the variables to optimize.
      num_steps: k, the number of gradients per update.
      op: how the replicas' gradients are reduced. A checkpoint holds the reduced sum, so it can be
        restored with another number of replicas, or where each step reduces, but not with another
        `op`. With a smaller k it may hold k gradients or more: the next step completes them.

    Context: a distjax trace.
    """

    def __init__(
        self,
        extended: StrategyExtended,
        variables: Sequence[Variable],
        num_steps: int,
        op: ReduceOp,
    ):
        self._extended, self._num_steps, self._variables = extended, num_steps, variables
        # Without synchronization there is one sum, of gradients that are already reduced.
        is_mean = op is ReduceOp.MEAN and extended.placement.synchronizes
        self._aggregation = VariableAggregation.MEAN if is_mean else VariableAggregation.SUM
        self._devices = extended.non_slot_devices(variables)
        split = [reduction_layout(extended, v).local_form.is_split for v in variables]
        self.accumulators = [
            self._make_accumulator(v, is_split)
            for v, is_split in zip(variables, split, strict=True)
        ]
        has_one = [extended.num_replicas > 1 and not a.policy.stacked for a in self.accumulators]
        self._reduces_first = [a or b for a, b in zip(split, has_one, strict=True)]
        with extended.colocate_vars_with(self._devices):
            self.counter = Variable(jnp.int32(0), name="accumulated_steps", trainable=False)

    def _make_accumulator(self, variable: Variable, split: bool) -> Variable:
        sync = VariableSynchronization
        with self._extended.colocate_vars_with(variable):
            return Variable(
                jnp.zeros(variable.shape, _sum_dtype(variable.dtype)),
                name=f"{variable.name}/accumulator",
                trainable=False,
                synchronization=sync.ON_WRITE if split else sync.ON_READ,
                aggregation=VariableAggregation.NONE if split else self._aggregation,
            )

    def step(
        self,
        grads: Sequence[Any],
        reduce: Callable[[Sequence[tuple[Any, Variable]]], Sequence[Any]],
        apply: Callable[[list[Any]], None],
    ) -> None:
        """Adds `grads`; every k-th call applies the mean of the accumulated gradients.

        Args:
          grads: a gradient for each variable, in the global view.
          reduce: reduces (value, variable) pairs over the replicas.
          apply: updates the variables with reduced gradients.

        Context: cross-replica, in a trace. Cost: collectives only in the branch of
          the k-th call, except for gradients that are kept split.
        """
        for accumulator, gradient in zip(
            self.accumulators, self._reduce_some(grads, reduce, first=True), strict=True
        ):
            self._extended.update(accumulator, _add, args=(gradient,))
        count = self.counter.value + 1
        is_last = count >= self._num_steps

        def flush() -> None:
            sums = self._reduce_some(self.accumulators, reduce, first=False)
            means = (total / count.astype(total.dtype) for total in sums)
            apply([x.astype(_mean_dtype(g, s)) for x, g, s in zip(means, grads, sums, strict=True)])
            for accumulator in self.accumulators:
                accumulator.assign(jnp.zeros(accumulator.shape, accumulator.dtype))

        lax.cond(is_last, flush, lambda: None)
        count = jnp.where(is_last, 0, count)
        self._extended.update_non_slot(self._devices, self.counter.assign, args=(count,))

    def _reduce_some(
        self, values: Sequence[Any], reduce: Callable[..., Any], *, first: bool
    ) -> list[Any]:
        """Reduces those of `values` that are due before (`first`) or after summation."""
        out = list(values)
        chosen = [i for i, is_first in enumerate(self._reduces_first) if is_first == first]
        pairs = [(out[i], self._variables[i]) for i in chosen]
        for i, value in zip(chosen, reduce(pairs), strict=True):
            out[i] = value
        return out


def _sum_dtype(dtype: DTypeLike) -> DTypeLike:
    is_narrow = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_narrow else dtype


def _mean_dtype(gradient: PyTree, total: jax.Array) -> DTypeLike:
    """Returns the dtype of the gradient, or of the sum for a gradient without fractions."""
    dtype = getattr(gradient, "dtype", total.dtype)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else total.dtype


def _add(accumulator: Variable, gradient: ArrayLike) -> None:
    accumulator.assign_add(jnp.asarray(gradient, accumulator.dtype))


class Optimizer:
    """Applies an optax transformation to variables, under any strategy.

    ``v <- v + tx(reduce(op, g))``: the gradients are reduced over the replicas, then
    the transformation runs once, in the global view. Norms, clipping and moments are
    therefore those of the global gradient, as on one device.

    Args:
      tx: an optax transformation, which may take extra arguments.
      reduce_op: how the replicas' gradients are combined: "sum" as in tf.distribute,
        or "mean".
      accumulate_steps: k; only every k-th call communicates and updates, with
        the mean gradient of k calls, summed in float32 or wider. If the strategy
        splits gradients (ZeRO 2 and 3), every call reduce-scatters and the sum is
        kept split.

    Example:
      >>> import optax
      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     w = dj.Variable(10.0, name="w")
      >>> optimizer = dj.optim.Optimizer(optax.sgd(0.5))
      >>> optimizer.init([w])
      >>> def step():
      ...     r = dj.get_replica_context().replica_id_in_sync_group
      ...     g = jax.grad(lambda w: w * (r + 1))(w.value)
      ...     optimizer.apply_gradients([(g, w)])
      >>> strategy.run(step)
      >>> float(w.value)
      8.5

    Source: tf.keras.optimizers.Optimizer; tf.distribute.StrategyExtended,
      "How to update a variable" (TF 1.13, 1.15).
    """

    #: Which argument of the merge holds the gradients: see `UserMerge.reduces`.
    reduced_argument = 0
    #: What shows that another optimizer, or other variables, took its place: see `objects/reached`.
    reached_parts = ("_state",)

    def __init__(
        self,
        tx: optax.GradientTransformation,
        reduce_op: ReduceOpLike = "sum",
        *,
        accumulate_steps: int = 1,
    ):
        _require_transformation(tx)
        require_int(
            "Optimizer: accumulate_steps",
            accumulate_steps,
            1,
            why="it counts the calls of apply_gradients per update",
            fix="dj.optim.Optimizer(tx, accumulate_steps=4)",
        )
        self._tx = optax.with_extra_args_support(tx)
        self._op = as_reduce_op(reduce_op, "Optimizer: reduce_op")
        self._accumulate_steps = accumulate_steps
        self._tree: Any = None
        self._variables: list[Variable] = []
        self._state: OptimizerState | None = None
        self._accumulation: Accumulation | None = None
        self._step: Callable[..., None] = self._step_in_trace

    @property
    def reduce_op(self) -> ReduceOp:
        """How the replicas' gradients are combined."""
        return self._op

    @property
    def variables(self) -> Any:
        """The tree of variables passed to `init`; None before."""
        return self._tree

    @property
    def state(self) -> Any:
        """The optax state with variables as leaves (for checkpoints); None before `init`."""
        return None if self._state is None else self._state.tree

    @property
    def accumulators(self) -> tuple[Variable, ...]:
        """The variables of gradient accumulation: the sums, then the counter."""
        kept = self._accumulation
        return () if kept is None else (*kept.accumulators, kept.counter)

    def kept_variables(self) -> dict[str, Any]:
        """Returns the variables to checkpoint: state and accumulators, not parameters.

        Raises:
          ContextError: before `init`.
        """
        state = self._require_state("a checkpoint")
        return {"state": state.tree, "accumulators": self.accumulators}

    def kept_settings(self) -> dict[str, str]:
        """Returns what a checkpoint's values depend on: half a sum does not fit a mean."""
        return {"accumulators": f"reduce_op={self._op.name.lower()!r}"}

    def init(self, variables: PyTree) -> None:
        """Creates the state of the transformation, as variables.

        Slots (as identified by optax) are created where their variable lives, the
        rest on the non-slot devices. One compiled program computes the initial values
        from the variables' values. A second call starts afresh.

        Args:
          variables: a list or any tree of variables of one strategy; the
            transformation sees a tree of arrays of that structure (for masks and labels).

        Locality: V(v) in; V(v) and N out. Context: any; guard it in a replica
          function, like any creation: `if optimizer.state is None`.

        Raises:
          TypeError, ValueError, LocalityError: not a tree of distinct mirrored
            variables.
          StrategyMismatchError: variables of several strategies.
        """
        self._variables = gradient_pairs.require_variables(variables)
        self._tree = variables
        compiles = self._strategy.extended.compiles
        # Anew: old programs hold the old state.
        self._step = jit(self._step_in_trace) if compiles else self._step_in_trace
        with _active(self._strategy):
            if compiles and frames.current().state is None:
                jit(self._make).lower()  # a trace makes the variables: there is nothing to run
            else:
                self._make()

    def _make(self) -> None:
        extended = self._strategy.extended
        self._state = make_state(self._tx, extended, self._tree)
        if self._accumulate_steps > 1:
            steps, op = self._accumulate_steps, self._op
            self._accumulation = Accumulation(extended, self._variables, steps, op)

    @property
    def _strategy(self) -> Any:
        return self._variables[0].strategy

    # -- one step -------------------------------------------------------------

    def apply_gradients(self, grads_and_vars: Iterable[Any], **extra: PyTree) -> None:
        """Reduces the gradients over the replicas and updates the variables.

        In a replica context it makes a merge_call, which reduces to the variables and
        updates them, as TensorFlow requires of an optimizer. In cross-replica context it
        does what `distributed_apply` does.

        Args:
          grads_and_vars: (gradient, variable) pairs, one for each variable passed
            to `init`, in any order; or pairs of trees.
          **extra: arguments of the transformation's update, equal on every
            replica (e.g. the all-reduced loss as `value=`).

        Locality: T or M in; V(v) written. Context: any.
        Cost: one all-reduce per gradient (or per bucket of the strategy's
          CommunicationOptions); none in a call that only accumulates, unless the
          strategy keeps gradients split (ZeRO 2 and 3).

        Raises:
          ContextError: before `init`.
          ValueError: gradients that do not fit the variables; a sum of values that
            are not on the replicas.
          LocalityError: a PerReplica in a replica function, or as an extra
            argument.

        Source: tf.keras Optimizer.apply_gradients.
        """
        grads = self._in_order(grads_and_vars)
        frame = frames.current()
        context = frame.replica_context
        if context is None or (frame.allows_both and frame.strategy is not self._strategy):
            report_unfit_between_runs(self._op.name, grads, self._strategy.extended.topology)
            self._apply_across(self._strategy, grads, extra)
            return
        gradient_pairs.require_no_per_replica((grads, extra))
        grads = [jnp.asarray(g) for g in grads]
        context.merge_call(self._apply_across, args=(grads, extra))

    def distributed_apply(
        self, strategy: StrategyLike, grads_and_vars: Iterable[Any], **extra: PyTree
    ) -> None:
        """Updates the variables in cross-replica context.

        Args:
          strategy: the active strategy, or its `dj.compat` adapter, as passed to a
            merge function.
          grads_and_vars: as for `apply_gradients`, PerReplica or Mirrored (which
            counts as R equal gradients).
          **extra: as for `apply_gradients`.

        Locality: T or M in; V(v) written. Context: cross-replica or default.

        Source: `Optimizer._distributed_apply` (TF 1.12, 1.13).
        """
        extended = getattr(strategy, "extended", None)  # an adapter has its strategy's
        current = getattr(extended, "strategy", strategy)
        self._apply_across(current, self._in_order(grads_and_vars), extra)

    def _in_order(self, grads_and_vars: Iterable[Any]) -> list[Any]:
        self._require_state()
        return gradient_pairs.in_order(grads_and_vars, self._variables)

    def _require_state(self, what: str = "apply_gradients") -> OptimizerState:
        if self._state is not None:
            return self._state
        raise ContextError(
            message(
                f"{what} needs an optimizer that has its state",
                got="an optimizer whose init was not called",
                why="moments and counts are variables that init makes",
                fix="optimizer.init(variables), once, before the first step",
            )
        )

    def _apply_across(
        self, strategy: StrategyLike, grads: Sequence[Any], extra: dict[str, Any]
    ) -> None:
        own = self._strategy
        require(
            strategy is own,
            StrategyMismatchError,
            f"apply_gradients needs {own!r} to be active, where its variables live",
            got=f"{strategy!r}",
            why="an update runs on the devices of its variables",
            fix="create the variables under `with strategy.scope():` of the strategy that "
            "runs the step",
        )
        frames.require_cross_replica(own, "distributed_apply")
        gradient_pairs.require_one_value(extra)
        if self._op is ReduceOp.SUM and own.num_replicas_in_sync > 1:
            gradient_pairs.require_placed(own.extended, grads, self._variables)
        with _active(own):
            self._step(list(grads), extra)

    def _step_in_trace(self, grads: list[Any], extra: dict[str, Any]) -> None:
        def reduce(pairs: Sequence[tuple[Any, Variable]]) -> list[Any]:
            return self._strategy.extended.batch_reduce_to(self._op, pairs)

        def apply(reduced: list[Any]) -> None:
            update_variables(self._tx, self._require_state(), self._tree, reduced, extra)

        if self._accumulation is None:
            apply(reduce(list(zip(grads, self._variables, strict=True))))
        else:
            self._accumulation.step(grads, reduce, apply)

    def __repr__(self) -> str:
        names = [v.name for v in self._variables]
        return f"Optimizer({self._op.name}, accumulate_steps={self._accumulate_steps}, of {names})"


def _active(strategy: Strategy) -> Any:
    """Returns a context in which `strategy` is active."""
    is_now = frames.current().strategy is strategy
    return contextlib.nullcontext() if is_now else strategy.scope()


def _require_transformation(tx: object) -> None:
    require(
        callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)),
        TypeError,
        "Optimizer needs an optax transformation",
        got=describe_value(tx),
        why="it has init(params) and update(grads, state, params)",
        fix="dj.optim.Optimizer(optax.adam(1e-3))",
    )
