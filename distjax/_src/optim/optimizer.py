"""Optimizer: applies an optax transformation to variables of a strategy; and `reduce_gradients`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from distjax._src.collectives.ops import as_reduce_op
from distjax._src.context import StrategyLike, frames
from distjax._src.optim.slots import OptimizerState, make_state, update_variables
from distjax._src.placement import is_per_replica
from distjax._src.program.jit import jit
from distjax._src.replica import lax
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.reducing import reduction_layout
from distjax._src.strategies.strategy import Strategy
from distjax._src.strategies.values import is_mirrored
from distjax._src.typing import (
    ArrayLike,
    DTypeLike,
    PyTree,
    ReduceOp,
    ReduceOpLike,
    VariableAggregation,
    VariableSynchronization,
)
from distjax._src.user_lines import calling_line
from distjax._src.variables.variable import Variable
from distjax.errors import (
    ContextError,
    LocalityError,
    StrategyMismatchError,
    describe_value,
    message,
    require,
    require_int,
)


class Accumulation:
    """Averages gradients over k steps.

    Each replica sums its own gradients in sync-on-read variables, which needs no communication. The
    counter is equal on every replica, so all replicas take the branch that communicates in the same
    step. Strategies that split gradients (ZeRO 2 and 3) have no room for a whole one per replica:
    they reduce at each step, and the sum is kept split, beside its variable. A parameter server,
    which keeps one sum for all, also reduces at each step.

    Sums of float16 would overflow, and sums of bfloat16 stagnate: floats are summed in float32 or
    wider. The mean has the dtype of the gradient. If they are `weighted`, gradients come multiplied
    by weights, whose sum is kept beside theirs.

    A checkpoint holds the reduced sum, so it can be restored with another number of replicas, or
    where each step reduces, but not with another `op`. With a smaller k it may hold k gradients or
    more: the next step completes them.
    """

    def __init__(
        self,
        extended: StrategyExtended,
        variables: Sequence[Variable],
        num_steps: int,
        op: ReduceOp,
        weighted: bool,
    ):
        self._extended, self._num_steps, self._variables = extended, num_steps, variables
        # Without synchronization there is one sum, of gradients that are already reduced.
        # Weighted means are quotients of sums, which do not depend on the number of replicas.
        is_mean = op is ReduceOp.MEAN and extended.placement.synchronizes and not weighted
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
        self.weight = None
        if weighted:
            self.weight = Variable(
                jnp.float32(0),
                name="accumulated_weight",
                trainable=False,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation[("MEAN", "SUM")[op is ReduceOp.MEAN]],
            )

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
        weight: PyTree,
        reduce: Callable[[Sequence[tuple[Any, Variable]]], Sequence[Any]],
        apply: Callable[[list[Any]], None],
    ) -> None:
        """Adds `grads`; every k-th call applies the mean of the accumulated gradients.

        They are in the global view, and multiplied by their weight, if they have one. Collectives
        are in the branch of the k-th call only, except for gradients that are kept split.
        """
        for accumulator, gradient in zip(
            self.accumulators, self._reduce_some(grads, reduce, first=True), strict=True
        ):
            self._extended.update(accumulator, _add, args=(gradient,))
        if self.weight is not None:
            self._extended.update(self.weight, _add, args=(weight,))
        count = self.counter.value + 1
        dtypes = [getattr(g, "dtype", None) for g in grads]
        self._apply_if(count >= self._num_steps, count, dtypes, reduce, apply)

    def flush(
        self,
        reduce: Callable[[Sequence[tuple[Any, Variable]]], Sequence[Any]],
        apply: Callable[[list[Any]], None],
    ) -> None:
        """Applies the mean of the gradients accumulated since the last update, if any."""
        count = self.counter.value
        self._apply_if(count > 0, count, [v.dtype for v in self._variables], reduce, apply)

    def _apply_if(
        self,
        is_due: jax.Array,
        count: jax.Array,
        dtypes: Sequence[Any],
        reduce: Callable[[Sequence[tuple[Any, Variable]]], Sequence[Any]],
        apply: Callable[[list[Any]], None],
    ) -> None:
        """Applies the mean of `count` gradients of these dtypes, and starts anew, if it is due."""

        def apply_mean() -> None:
            sums = self._reduce_some(self.accumulators, reduce, first=False)
            divisor = count
            if self.weight is not None:  # without any weight, the gradients are zeros: 0 / 1
                own = self.weight.value
                if self.weight.aggregation is VariableAggregation.SUM:
                    own = own / self._extended.num_replicas  # as the gradients are reduced
                divisor = jnp.where(own == 0, 1, own)
                self.weight.assign(jnp.float32(0))
            means = (total / divisor.astype(total.dtype) for total in sums)
            of_grads = (_mean_dtype(d, s) for d, s in zip(dtypes, sums, strict=True))
            apply([x.astype(dtype) for x, dtype in zip(means, of_grads, strict=True)])
            for accumulator in self.accumulators:
                accumulator.assign(jnp.zeros(accumulator.shape, accumulator.dtype))

        lax.cond(is_due, apply_mean, lambda: None)
        count = jnp.where(is_due, 0, count)
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


def _mean_dtype(dtype: DTypeLike | None, total: jax.Array) -> DTypeLike:
    """Returns the dtype of the gradient, or of the sum for a gradient without fractions."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return total.dtype
    return dtype


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
      weighted: whether each call of `apply_gradients` has a weight, such as its number of
        tokens: the update's gradient is then the weighted mean over all calls and replicas,
        ``sum of weight * gradient / sum of weight``. Needs reduce_op "mean".

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
        weighted: bool = False,
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
        require(
            not weighted or self._op is ReduceOp.MEAN,
            "Optimizer: weighted=True needs reduce_op='mean'",
            got=f"reduce_op={self._op.name.lower()!r}",
            why="gradients with weights are averaged, over replicas and calls",
            fix="dj.optim.Optimizer(tx, 'mean', weighted=True)",
        )
        self._accumulate_steps, self._weighted = accumulate_steps, weighted
        self.made_at = calling_line()  # what `dj.check` names where `reduce_op` is wrong
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
        """The variables of gradient accumulation: the sums, the counter, the sum of weights."""
        kept = self._accumulation
        if kept is None:
            return ()
        weight = () if kept.weight is None else (kept.weight,)
        return (*kept.accumulators, kept.counter, *weight)

    def kept_variables(self) -> dict[str, Any]:
        """Returns the variables to checkpoint: state and accumulators, not parameters.

        Raises:
          ContextError: before `init`.
        """
        state = self._require_state("a checkpoint")
        return {"state": state.tree, "accumulators": self.accumulators}

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
        self._variables = require_variables(variables)
        self._tree = variables
        compiles = self._strategy.extended.compiles
        # Anew: old programs hold the old state.
        self._step = jit(self._step_in_trace) if compiles else self._step_in_trace
        with active(self._strategy):
            if compiles and frames.current().state is None:
                jit(self._make).lower()  # a trace makes the variables: there is nothing to run
            else:
                self._make()

    def _make(self) -> None:
        extended = self._strategy.extended
        self._state = make_state(self._tx, extended, self._tree)
        if self._accumulate_steps > 1 or self._weighted:
            steps, op = self._accumulate_steps, self._op
            self._accumulation = Accumulation(extended, self._variables, steps, op, self._weighted)

    @property
    def _strategy(self) -> Any:
        return self._variables[0].strategy

    # -- one step -------------------------------------------------------------

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], *, weight: PyTree = None, **extra: PyTree
    ) -> None:
        """Reduces the gradients over the replicas and updates the variables.

        In a replica context it makes a merge_call, which reduces to the variables and
        updates them, as TensorFlow requires of an optimizer. In cross-replica context it
        does what `distributed_apply` does.

        Args:
          grads_and_vars: (gradient, variable) pairs, one for each variable passed
            to `init`, in any order; or pairs of trees.
          weight: of a weighted optimizer, the weight [] of this replica's gradients: they are
            means over so many tokens or examples.
          **extra: arguments of the transformation's update, equal on every
            replica (e.g. the all-reduced loss as `value=`).

        Locality: T or M in; V(v) written. Context: any.
        Cost: one all-reduce per gradient (or per bucket of the strategy's
          CommunicationOptions); none in a call that only accumulates, unless the
          strategy keeps gradients split (ZeRO 2 and 3).

        Raises:
          ContextError: before `init`.
          ValueError: gradients that do not fit the variables; a sum of values that
            are not on the replicas; a weight too many or missing.
          LocalityError: a PerReplica in a replica function, or as an extra
            argument.

        Source: tf.keras Optimizer.apply_gradients.
        """
        grads = self._in_order(grads_and_vars)
        self._require_weight(weight)
        frame = frames.current()
        context = frame.replica_context
        if context is None or (frame.allows_both and frame.strategy is not self._strategy):
            if weight is not None:
                with active(self._strategy):
                    grads = self._strategy.run(_weigh, args=(grads, weight))
            self._apply_across(self._strategy, grads, extra, weight)
            return
        _require_no_per_replica((grads, extra, weight))
        grads = [jnp.asarray(g) for g in grads]
        if weight is not None:
            weight = jnp.asarray(weight, jnp.float32)
            grads = _weigh(grads, weight)
        context.merge_call(self._apply_across, args=(grads, extra, weight))

    def flush(self) -> None:
        """Updates the variables with the gradients accumulated since the last update, if any.

        For the end of an epoch or a run whose number of steps `accumulate_steps` does not divide:
        the mean is over the calls since the last update. Only for transformations without extra
        arguments.

        Locality: V(v) written. Context: any. Cost: as of a call that updates.

        Raises:
          ContextError: before `init`.
        """
        self._require_state("flush")
        if self._accumulation is None:
            return
        context = frames.current().replica_context
        if context is not None and frames.current().strategy is self._strategy:
            context.merge_call(self._flush_across)
        else:
            self._flush_across(self._strategy)

    def _flush_across(self, strategy: StrategyLike) -> None:
        with active(self._strategy):
            if frames.current().state is None and self._strategy.extended.compiles:
                jit(self._flush_in_trace)()
            else:
                self._flush_in_trace()

    def _flush_in_trace(self) -> None:
        assert self._accumulation is not None
        reduce = functools.partial(self._strategy.extended.batch_reduce_to, self._op)
        self._accumulation.flush(reduce, self._make_update({}))

    def _require_weight(self, weight: PyTree) -> None:
        require(
            self._weighted == (weight is not None),
            "apply_gradients needs a weight of a weighted optimizer, and of no other",
            got=f"an optimizer with weighted={self._weighted}, and "
            + ("no weight" if weight is None else "a weight"),
            why="the gradient of an update is a mean, weighted or not",
            fix="optimizer.apply_gradients(pairs, weight=num_tokens), with "
            "dj.optim.Optimizer(tx, 'mean', weighted=True)",
        )

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
        self._require_weight(None)
        extended = getattr(strategy, "extended", None)  # an adapter has its strategy's
        current = getattr(extended, "strategy", strategy)
        self._apply_across(current, self._in_order(grads_and_vars), extra)

    def _in_order(self, grads_and_vars: Iterable[Any]) -> list[Any]:
        self._require_state()
        return _in_order(grads_and_vars, self._variables)

    def _require_state(self, what: str = "apply_gradients") -> OptimizerState:
        if self._state is not None:
            return self._state
        raise ContextError(
            f"{what} needs an optimizer that has its state",
            got="an optimizer whose init was not called",
            why="moments and counts are variables that init makes",
            fix="optimizer.init(variables), once, before the first step",
        )

    def _apply_across(
        self,
        strategy: StrategyLike,
        grads: Sequence[Any],
        extra: dict[str, Any],
        weight: PyTree = None,
    ) -> None:
        own = self._strategy
        if strategy is not own:
            raise StrategyMismatchError(
                f"apply_gradients needs {own!r} to be active, where its variables live",
                got=f"{strategy!r}",
                why="an update runs on the devices of its variables",
                fix="create the variables under `with strategy.scope():` of the strategy that "
                "runs the step",
            )
        frames.require_cross_replica(own, "distributed_apply")
        _require_one_value(extra)
        if self._op is ReduceOp.SUM and own.num_replicas_in_sync > 1:
            _require_placed(own.extended, grads, self._variables)
        with active(own):
            if frames.current().state is None:
                self._step(list(grads), extra, weight)
            else:
                self._step_in_trace(list(grads), extra, weight)

    def _step_in_trace(self, grads: list[Any], extra: dict[str, Any], weight: PyTree) -> None:
        reduce = functools.partial(self._strategy.extended.batch_reduce_to, self._op)
        update = self._make_update(extra)
        if self._accumulation is None:
            update(list(reduce(list(zip(grads, self._variables, strict=True)))))
        else:
            self._accumulation.step(grads, weight, reduce, update)

    def _make_update(self, extra: dict[str, Any]) -> Callable[[list[Any]], None]:
        """Returns what takes reduced gradients and updates variables and state."""
        state = self._require_state()
        return functools.partial(update_variables, self._tx, state, self._tree, extra=extra)

    def __repr__(self) -> str:
        names = [v.name for v in self._variables]
        return f"Optimizer({self._op.name}, accumulate_steps={self._accumulate_steps}, of {names})"


def _weigh(grads: Sequence[Any], weight: ArrayLike) -> list[Any]:
    """Returns gradients multiplied by their weight, of a dtype that holds the product."""
    scale = jnp.asarray(weight, jnp.float32)
    return [jnp.asarray(g).astype(_sum_dtype(jnp.asarray(g).dtype)) * scale for g in grads]


def active(strategy: Strategy) -> Any:
    """Returns a context in which `strategy` is active."""
    is_now = frames.current().strategy is strategy
    return contextlib.nullcontext() if is_now else strategy.scope()


def _require_transformation(tx: object) -> None:
    require(
        callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)),
        "Optimizer needs an optax transformation",
        got=describe_value(tx),
        why="it has init(params) and update(grads, state, params)",
        fix="dj.optim.Optimizer(optax.adam(1e-3))",
        error=TypeError,
    )


# -- the gradients and variables that users pass: checked, and put in order ---------------


def require_variables(variables: PyTree, method: str = "Optimizer.init") -> list[Variable]:
    """Returns the leaves of a tree of variables to optimize, or to average; or raises."""

    def wrong(error: type[Exception], needs: str, got: str, why: str) -> Exception:
        fix = f"{method}(variables), of a list or any tree of the variables to train"
        return error(message(f"{method} needs {needs}", got=got, why=why, fix=fix))

    leaves = jax.tree.leaves(variables)
    if not leaves:
        why = "what it keeps lives where its variables live"
        raise wrong(ValueError, "at least one variable", "none", why)
    seen: set[Variable] = set()
    for leaf in leaves:
        if not isinstance(leaf, Variable):
            why, got = "variables are updated in place", describe_value(leaf)
            raise wrong(TypeError, "distjax.Variables only", got, why)
        if leaf.synchronization is VariableSynchronization.ON_READ:
            why = "its components differ: no one value can be optimized"
            raise wrong(LocalityError, "ON_WRITE variables", repr(leaf), why)
        if leaf in seen:
            why = "each variable is updated once"
            raise wrong(ValueError, "each variable once", f"{leaf!r} twice", why)
        if leaf.strategy is not leaves[0].strategy:
            why, got = "one update runs under one strategy", f"{leaf!r} beside {leaves[0]!r}"
            raise wrong(StrategyMismatchError, "variables of one strategy", got, why)
        seen.add(leaf)
    return leaves


def _in_order(grads_and_vars: Iterable[Any], variables: Sequence[Variable]) -> list[Any]:
    """Returns one gradient for each of `variables`, in their order; or raises."""
    grads: dict[Variable, Any] = {}
    known = set(variables)
    for gradient, variable in _flat_pairs(grads_and_vars):
        if variable in grads or variable not in known:
            raise ValueError(_misplaced_text(variable, variable in grads, variables))
        _require_shape(gradient, variable)
        grads[variable] = gradient
    missing = [v.name for v in variables if v not in grads]
    require(
        not missing,
        "apply_gradients needs a gradient for every variable of the optimizer",
        got=f"none for {missing}",
        why="the transformation sees all gradients at once (a global norm, for one)",
        fix="pass zeros for it, or leave it out of init (or optax.masked)",
    )
    return [grads[v] for v in variables]


def _flat_pairs(grads_and_vars: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    for pair in grads_and_vars:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise ValueError(_pair_text(describe_value(pair)))
        grads, variables = pair
        leaves, treedef = jax.tree.flatten(variables)
        if not all(isinstance(v, Variable) for v in leaves):
            raise ValueError(_pair_text(f"({describe_value(grads)}, {describe_value(variables)})"))
        try:
            flat = treedef.flatten_up_to(grads)
        except ValueError as error:
            raise ValueError(_pair_text("a tree of gradients unlike that of variables")) from error
        yield from zip(flat, leaves, strict=True)


def _pair_text(got: str) -> str:
    return message(
        "apply_gradients needs pairs (gradient, variable)",
        got=got,
        why="each variable is updated by its own gradient",
        fix="optimizer.apply_gradients(zip(grads, variables)); or for trees: "
        "optimizer.apply_gradients([(grads, variables)])",
    )


def _misplaced_text(variable: Variable, is_twice: bool, known: Sequence[Variable]) -> str:
    names = [v.name for v in known[:8]]
    return message(
        "apply_gradients needs each variable that init was called with, once",
        got=f"{variable!r}, {'a second time' if is_twice else 'which init did not have'}",
        why="the variable's slots were made by init, and it is updated once per step",
        fix="add up its gradients first" if is_twice else f"pass it to init (which has {names})",
    )


def _require_shape(gradient: PyTree, variable: Variable) -> None:
    if gradient is None:
        got, why = "None", "the loss does not depend on it, or it was filtered out"
    elif not is_per_replica(gradient) and isinstance(gradient, (dict, list, tuple, str)):
        got, why = describe_value(gradient), "a gradient is an array"
    elif tuple(getattr(gradient, "shape", np.shape(gradient))) != variable.shape:
        got, why = describe_value(gradient), "a gradient has its variable's shape"
    else:
        return
    raise ValueError(
        message(
            f"apply_gradients needs a gradient of shape {variable.shape} for variable "
            f"{variable.name!r}",
            got=got,
            why=why,
            fix="grads = jax.grad(loss)(variable.value), one for each variable",
        )
    )


def _require_no_per_replica(values: PyTree) -> None:
    """Raises a LocalityError for a PerReplica passed in a replica function."""
    found = [x for x in jax.tree.leaves(values, is_leaf=is_per_replica) if is_per_replica(x)]
    if not found:
        return
    raise LocalityError(
        "apply_gradients in a replica context needs this replica's values",
        got=f"a PerReplica of {found[0].num_replicas} values",
        why="a replica sees its own value of an argument of run, but a PerReplica that the "
        "function closes over keeps all of them",
        fix="pass it: strategy.run(step, args=(x,)); or call apply_gradients outside of run",
    )


def _require_one_value(extra: dict[str, Any]) -> None:
    """Raises a LocalityError if an extra argument of an update differs per replica."""
    for name, value in extra.items():
        require(
            not any(is_per_replica(x) for x in jax.tree.leaves(value, is_leaf=is_per_replica)),
            f"apply_gradients needs argument {name} to be one value",
            got="a value that differs per replica",
            why="the update is computed once, for all replicas",
            fix=f"{name}=dj.get_replica_context().all_reduce('mean', {name})",
            error=LocalityError,
        )


def _require_placed(
    extended: StrategyExtended, grads: Sequence[Any], variables: Sequence[Variable]
) -> None:
    """Raises a ValueError if a gradient to be summed over replicas is not on them."""
    for gradient, variable in zip(grads, variables, strict=True):
        if is_per_replica(gradient) or is_mirrored(extended.topology, gradient):
            continue
        raise ValueError(
            message(
                f"apply_gradients needs the gradient of {variable.name!r} on the replicas, to sum "
                "it over them",
                got=f"{describe_value(gradient)}, which lives elsewhere",
                why="it is unclear whether it stands for one gradient or for R equal ones",
                fix="return it from strategy.run, or place it: strategy.broadcast(g); "
                "or average: Optimizer(tx, 'mean')",
            )
        )


# -- a reduction by itself -----------------------------------------------------------------


def reduce_gradients(op: ReduceOpLike = "mean") -> optax.GradientTransformation:
    """Returns an optax transformation that reduces gradients over the replicas.

    ``update(g) = all_reduce(op, g)``. Put it first in a chain, so that later links see
    the global gradient and norms are those of the global batch.

    Args:
      op: a ReduceOp or its name.

    Locality: T or M in, M out. Context: replica; without an active strategy it is the
      identity.
    Cost: one all-reduce per leaf. State: none.

    Raises:
      ContextError: `update` in cross-replica context.

    Example:
      >>> import optax
      >>> tx = optax.chain(dj.optim.reduce_gradients("mean"), optax.sgd(0.5))
      >>> def step(w):
      ...     x = dj.get_replica_context().replica_id_in_sync_group
      ...     g = jax.grad(lambda w: w * x)(w)
      ...     updates, _ = tx.update(g, tx.init(w))
      ...     return optax.apply_updates(w, updates)
      >>> dj.VirtualStrategy(3).run(step, args=(jnp.float32(1),))
      Array(0.5, dtype=float32)
    """
    op = as_reduce_op(op)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
        frame = frames.current()
        require(
            frame.replica_context is not None,
            "reduce_gradients needs a replica context",
            got=frame.name,
            why="in cross-replica context there is one gradient for all replicas, not one "
            "per replica",
            fix="strategy.reduce(op, grads) before tx.update; dj.optim.Optimizer reduces by itself",
            error=ContextError,
        )
        return frame.replica_context.all_reduce(op, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)
