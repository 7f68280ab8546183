"""Gradients and updates that keep split parameters split.

Under ZeRO a replica reads parameters gathered from shards, and the trace remembers the shard
behind each gathered array (`shard_of`). `value_and_grad` differentiates with respect to the
shards and gathers inside the differentiated function, so a gradient is reduce-scattered by the
transpose of the gather. `apply_gradients` reduces and updates in one merge, on the shards; the
gathered copies are then dead code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from distjax.collectives.ops import as_reduce_op, from_total
from distjax.collectives.reductions import reduce_arrays
from distjax.context import frames
from distjax.errors import LocalityError, UnsupportedError, describe_value, message
from distjax.flax.layouts import gradient_form
from distjax.modes import ReduceOp
from distjax.placement.per_replica import PerReplica, is_per_replica
from distjax.replica.global_value import from_user_value, replica_aval, stack_replicas
from distjax.strategies.contracts import ExtendedContract
from distjax.strategies.strategy import Strategy
from distjax.typing import PyTree, ReduceOpLike
from distjax.variables.layouts import LocalForm


def value_and_grad(
    fn: Callable[..., Any], *, wrt: nnx.filterlib.Filter = nnx.Param, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns `nnx.value_and_grad` of ``fn`` that keeps split parameters split.

    If the strategy splits parameters over the replicas, ``fn`` is differentiated with
    respect to this replica's shards. It still sees whole values, gathered at its start
    (by `scan_layers`, layer by layer), and their gradients arrive reduced and split.
    Under other strategies this is `nnx.value_and_grad`.

    Args:
      fn: takes a module first; returns a scalar loss, or (loss, aux).
      wrt: an NNX filter that selects what to differentiate.
      has_aux: whether ``fn`` returns (loss, aux).

    Returns:
      A function that returns (value of ``fn``, gradients). Gradients of whole parameters
      are local; those of split parameters are this replica's shard of the sum.
      `apply_gradients` takes both.

    Context: replica. Cost: an all-gather and a reduce-scatter per split parameter.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss, grads = dj.flax.value_and_grad(lambda m: m(jnp.ones((1, 2))).sum())(model)
      >>> grads["kernel"][...].ravel()
      Array([1., 1.], dtype=float32)
    """

    @functools.wraps(fn)
    def wrapped(model: PyTree, *args: PyTree, **kwargs: PyTree) -> Any:
        split = _find_split_parameters(model, wrt)

        def on_shards(model: PyTree, *args: PyTree, **kwargs: PyTree) -> Any:
            own = [(v, split[path]) for path, v in _variables(model) if path in split]
            shards = [v.get_raw_value() for v, _ in own]
            for (variable, parameter), shard in zip(own, shards, strict=True):
                variable.set_raw_value(parameter.state.whole(shard, parameter.form))
            out = fn(model, *args, **kwargs)
            for (variable, _), shard in zip(own, shards, strict=True):
                variable.set_raw_value(shard)
            return out

        diff = nnx.DiffState(0, wrt)
        differentiate = nnx.value_and_grad(on_shards, argnums=diff, has_aux=has_aux)
        for parameter in split.values():
            parameter.variable.set_raw_value(parameter.shard)
        try:
            return differentiate(model, *args, **kwargs)
        finally:
            for parameter in split.values():
                parameter.variable.set_raw_value(parameter.whole)

    return wrapped


class _SplitParameter(NamedTuple):
    """A parameter whose value was gathered, and the shard that this replica holds."""

    variable: Any
    whole: Any
    shard: Any
    form: LocalForm
    state: Any


def _find_split_parameters(model: PyTree, wrt: nnx.filterlib.Filter) -> dict[Any, _SplitParameter]:
    """Returns the split parameters of `model` that match the filter, by path."""
    state, matches = frames.current().state, nnx.filterlib.to_predicate(wrt)
    found: dict[Any, _SplitParameter] = {}
    if state is None:
        return found
    for path, variable in _variables(model):
        whole = variable.get_raw_value()
        held = state.shard_of(whole)
        if held is not None and matches(path, variable):
            found[path] = _SplitParameter(variable, whole, held[0], held[1], state)
    return found


def _variables(module: PyTree) -> list[tuple[Any, Any]]:
    _, flat = nnx.graph.flatten(module, graph=True)
    pairs = zip(flat.paths, flat.leaves, strict=True)
    return [(path, v) for path, v in pairs if isinstance(v, nnx.Variable)]


def apply_gradients(
    optimizer: nnx.Optimizer[Any],
    model: PyTree,
    grads: PyTree,
    op: ReduceOpLike = "mean",
    **kwargs: PyTree,
) -> None:
    """Reduces gradients over the replicas, then updates `model` with `optimizer` once.

    Computes `optimizer.update(model, all_reduce(op, grads), **kwargs)` in the global view:
    norms are those of the whole gradient, and parameters and optimizer state that the
    strategy splits are updated without being gathered.

    Args:
      optimizer: an `nnx.Optimizer`.
      model: its model.
      grads: from `value_and_grad` or `nnx.value_and_grad`.
      op: "mean" or "sum" over the replicas.
      **kwargs: what the optimizer's transformation takes besides, such as `value=loss` of
        `optax.contrib.reduce_on_plateau`; equal on every replica.

    If the optimizer's class overrides `update`, that method is called with the reduced
    gradients.

    Locality: gradients T in; parameters and optimizer state keep theirs.
    Context: replica; in cross-replica context, reduces and applies PerReplica gradients.
    Cost: one reduce-scatter per split gradient, one all-reduce per other gradient.

    Raises:
      LocalityError: a keyword argument differs per replica.
      UnsupportedError: `update` is overridden and the strategy splits something.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> def step(model, optimizer, x):
      ...     grads = nnx.grad(lambda m: m(x).sum())(model)
      ...     dj.flax.apply_gradients(optimizer, model, grads)
      >>> dj.VirtualStrategy(2).run(step, args=(model, optimizer, jnp.ones((1, 2))))
      >>> int(optimizer.step[...])
      1
    """
    op = as_reduce_op(op)
    frame = frames.current()
    if frame.replica_context is None:
        _require_equal(kwargs)
        _call_update(optimizer, model, frame.strategy.reduce(op, grads), kwargs)
        return
    if frame.strategy.extended.is_default:
        _call_update(optimizer, model, grads, kwargs)
        return
    update = _Update(optimizer, model, grads, frame.state, op)
    if type(optimizer).update not in _UPDATES_OF_FLAX:
        update.require_whole()
        _call_update(optimizer, model, frame.replica_context.all_reduce(op, grads), kwargs)
        return
    new = frame.replica_context.merge_call(update, args=(*update.arguments, kwargs))
    update.write(new, frame.state)


_UPDATES_OF_FLAX = (nnx.Optimizer.update, nnx.ModelAndOptimizer.update)


def _call_update(
    optimizer: nnx.Optimizer[Any], model: PyTree, grads: PyTree, kwargs: dict[str, PyTree]
) -> None:
    if isinstance(optimizer, nnx.ModelAndOptimizer):  # has its model
        optimizer.update(grads, **kwargs)
    else:
        optimizer.update(model, grads, **kwargs)


def _require_equal(kwargs: dict[str, PyTree]) -> None:
    """Raises a LocalityError if an argument of the update differs per replica."""
    for name, value in kwargs.items():
        if any(map(is_per_replica, jax.tree.leaves(value, is_leaf=is_per_replica))):
            raise LocalityError(
                message(
                    f"apply_gradients needs {name} to be equal on every replica",
                    got=f"{name}={describe_value(value)}, which differs per replica",
                    why="one update is made of the reduced gradients, and the state that it makes "
                    f"of {name} is one for all replicas",
                    fix=f"{name}=dj.get_replica_context().all_reduce('mean', {name}) in a replica "
                    f"context; {name}=strategy.reduce('mean', {name}) outside",
                )
            )


class _Update:
    """One optimizer update, as a merge function on flat lists of values.

    `arguments` are this replica's inputs of the merge, with shards in place of gathered values;
    `write` stores the results in the model and the optimizer.
    """

    #: Which argument of the merge holds the gradients: see `UserMerge.reduces`.
    reduced_argument = 1

    @property
    def reduce_op(self) -> ReduceOp:
        """How the replicas' gradients are combined."""
        return self._op

    def __init__(
        self,
        optimizer: nnx.Optimizer[Any],
        model: PyTree,
        grads: PyTree,
        state: PyTree,
        op: ReduceOp,
    ):
        self._optimizer, self._model, self._op = optimizer, model, op
        params = nnx.as_pure(nnx.state(model, optimizer.wrt, graph=optimizer.graph))
        grads = nnx.as_pure(nnx.state(grads, optimizer.wrt, graph=optimizer.graph))
        slots = nnx.as_pure(optimizer.opt_state)
        self._params, self._params_tree = jax.tree.flatten(params)
        self._slots, self._slots_tree = jax.tree.flatten(slots)
        self._grads_tree = jax.tree.structure(grads)
        held = [state.shard_of(x) for x in (*self._params, *self._slots)]
        values = [
            x if h is None else h[0]
            for x, h in zip((*self._params, *self._slots), held, strict=True)
        ]
        self._forms = [None if h is None else h[1] for h in held]
        self.arguments = (values, jax.tree.leaves(grads))

    def require_whole(self) -> None:
        """Raises an UnsupportedError if a parameter or a slot is split over the replicas."""
        if not any(self._forms):
            return
        name = type(self._optimizer).__name__
        raise UnsupportedError(
            message(
                f"apply_gradients needs the update of nnx.Optimizer, not that of {name}",
                got=f"{name}.update, and parameters or moments that are split over the replicas",
                why="its code sees one replica's gradients, and each replica holds different rows",
                fix="put what it does into the optax chain; or a strategy that splits nothing, "
                "dj.MirroredStrategy()",
            )
        )

    def __call__(
        self,
        strategy: Strategy,
        values: Sequence[Any],
        grads: Sequence[Any],
        kwargs: dict[str, PyTree],
    ) -> list[Any]:
        """Returns the new global values; shards for what was given as shards."""
        _require_equal(kwargs)
        extended, topology = strategy.extended, strategy.extended.topology
        whole = [
            x if form is None else form.from_replicas(stack_replicas(from_user_value(x), topology))
            for x, form in zip(values, self._forms, strict=True)
        ]
        count = len(self._params)
        params = self._params_tree.unflatten(whole[:count])
        slots = self._slots_tree.unflatten(whole[count:])
        reduced = _reduce_gradients(extended, self._op, grads, whole[:count], self._forms[:count])
        updates, slots = self._optimizer.tx.update(
            self._grads_tree.unflatten(reduced), slots, params, **kwargs
        )
        params = optax.apply_updates(params, updates)
        new = [*jax.tree.leaves(params), *jax.tree.leaves(slots)]
        return [
            x if form is None else PerReplica(form.to_replicas(form.spread(x)), topology)
            for x, form in zip(new, self._forms, strict=True)
        ]

    def write(self, new: Sequence[Any], state: PyTree) -> None:
        """Writes the merge's results to the variables of the model and the optimizer."""
        values = [
            x if form is None else state.whole(x, form)
            for x, form in zip(new, self._forms, strict=True)
        ]
        count, optimizer = len(self._params), self._optimizer
        nnx.update(self._model, self._params_tree.unflatten(values[:count]))
        slots = self._slots_tree.unflatten(values[count:])
        nnx.update(optimizer.opt_state, nnx.state(slots, graph=optimizer.graph))
        optimizer.step[...] += 1


def _reduce_gradients(
    extended: ExtendedContract,
    op: ReduceOp,
    grads: Sequence[Any],
    params: Sequence[Any],
    own_forms: Sequence[LocalForm | None],
) -> list[jax.Array]:
    """Returns gradients reduced over the replicas, split where the strategy splits them.

    Those that are equal on all replicas already, and not to be split, need no communication.

    Args:
      extended: the strategy.
      op: SUM or MEAN.
      grads: whole gradients, or the replicas' shards of a sum that is already reduced.
      params: the parameters, in the global view.
      own_forms: per parameter, the form that it was gathered from; None: it is whole.
    """
    topology = extended.topology
    values = list(map(from_user_value, grads))
    done = [
        own is not None and replica_aval(value).shape != p.shape
        for value, p, own in zip(values, params, own_forms, strict=True)
    ]
    forms = [
        own if own is not None and is_done else gradient_form(extended, p)
        for p, own, is_done in zip(params, own_forms, done, strict=True)
    ]
    varying = [v.varying or f.is_split for v, f in zip(values, forms, strict=True)]
    arrays = [
        stack_replicas(value, topology) if varies else value.array
        for value, varies in zip(values, varying, strict=True)
    ]
    left = [i for i, is_done in enumerate(done) if not is_done]
    reduced = iter(
        reduce_arrays(
            [arrays[i] for i in left],
            topology,
            op,
            tuple(varying[i] for i in left),
            (),
            extended.communication,
            tuple(forms[i] if forms[i].is_split else None for i in left),
        )
    )
    return [
        from_total(op, form.from_replicas(x), topology.num_replicas) if is_done else next(reduced)
        for x, form, is_done in zip(arrays, forms, done, strict=True)
    ]
