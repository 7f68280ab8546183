"""Gradients and updates that keep split parameters split.

Under ZeRO a replica reads parameters gathered from shards, and the trace remembers the shard
behind each gathered array (`shard_of`). Their gradients are whole, as under any strategy.
`apply_gradients` reduces them to the shards and updates these, in one merge; the gathered copies
are then dead code. Gathers and reductions of stacks of layers are moved into the scans over them
by `collectives/stacks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from distjax._src.collectives.ops import as_reduce_op, sum_dtype
from distjax._src.collectives.reductions import reduce_arrays
from distjax._src.context import frames
from distjax._src.flax.graphs import is_object, is_variable, require_no_traced_values
from distjax._src.flax.plans import gradient_form, raw_value, write_entries
from distjax._src.flax.specs import spec_of_variable
from distjax._src.placement import PerReplica, Spec, is_per_replica
from distjax._src.replica.global_value import from_user_value, stack_replicas
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.strategy import Strategy
from distjax._src.typing import DTypeLike, PyTree, ReduceOp, ReduceOpLike
from distjax.errors import LocalityError, UnsupportedError, describe_value, message


def value_and_grad(
    fn: Callable[..., Any], *, wrt: nnx.filterlib.Filter = nnx.Param, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns `nnx.value_and_grad` of ``fn``, for what a filter selects of its first argument.

    Args:
      fn: takes a module first; returns a scalar loss, or (loss, aux).
      wrt: an NNX filter that selects what to differentiate.
      has_aux: whether ``fn`` returns (loss, aux).

    Returns:
      A function that returns (value of ``fn``, gradients). In a replica function these are the
      replica's own; `apply_gradients` reduces them.

    Context: any.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss, grads = dj.flax.value_and_grad(lambda m: m(jnp.ones((1, 2))).sum())(model)
      >>> grads["kernel"][...].ravel()
      Array([1., 1.], dtype=float32)
    """
    return nnx.value_and_grad(fn, argnums=nnx.DiffState(0, wrt), has_aux=has_aux)


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
      grads: this replica's own, from `nnx.value_and_grad`.
      op: "mean" or "sum" over the replicas.
      **kwargs: further arguments of the optimizer's transformation, such as `value=loss` for
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
                f"apply_gradients needs {name} to be equal on every replica",
                got=f"{name}={describe_value(value)}, which differs per replica",
                why="one update is made of the reduced gradients, and the state that it makes "
                f"of {name} is one for all replicas",
                fix=f"{name}=dj.get_replica_context().all_reduce('mean', {name}) in a replica "
                f"context; {name}=strategy.reduce('mean', {name}) outside",
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
        own = nnx.state(model, optimizer.wrt, graph=optimizer.graph)
        topology = frames.current().strategy.extended.topology
        self._specs = [
            spec_of_variable(v, jnp.shape(x), topology)
            for v in jax.tree.leaves(own, is_leaf=is_variable)
            for x in jax.tree.leaves(raw_value(v))
        ]
        params = nnx.as_pure(own)
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
            f"apply_gradients needs the update of nnx.Optimizer, not that of {name}",
            got=f"{name}.update, and parameters or moments that are split over the replicas",
            why="its code sees one replica's gradients, and each replica holds different rows",
            fix="put what it does into the optax chain; or a strategy that splits nothing, "
            "dj.MirroredStrategy()",
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
        reduced = _reduce_gradients(extended, self._op, grads, whole[:count], self._specs)
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
    extended: StrategyExtended,
    op: ReduceOp,
    grads: Sequence[Any],
    params: Sequence[Any],
    specs: Sequence[Spec],
) -> list[jax.Array]:
    """Returns gradients reduced over the replicas, split where the strategy splits them.

    Those that are equal on all replicas already, and not to be split, need no communication.
    `specs` says what each parameter splits within a replica.
    """
    topology = extended.topology
    values = list(map(from_user_value, grads))
    forms = [gradient_form(extended, p, spec) for p, spec in zip(params, specs, strict=True)]
    varying = [v.varying or f.is_split for v, f in zip(values, forms, strict=True)]
    arrays = [
        stack_replicas(value, topology) if varies else value.array
        for value, varies in zip(values, varying, strict=True)
    ]
    splits = tuple(form if form.is_split else None for form in forms)
    communication = extended.communication
    return reduce_arrays(
        arrays, topology, op, tuple(varying), (), communication, splits, tuple(specs)
    )


# -- stacks -------------------------------------------------------------------
# A scan over a stack of layers that gathers each layer only when it is read.


def scan_layers(
    fn: Callable[[Any, Any], Any], layers: PyTree, carry: PyTree, *, checkpoint: bool = True
) -> Any:
    """Returns `carry` passed through a stack of equal layers, one after the other.

    Equivalent to ``for layer in layers: carry = fn(layer, carry)``, as one compiled loop.
    If the strategy splits the parameters, each iteration gathers those of its own layer
    only, and again in the backward pass: gathered parameters take the memory of one layer,
    as in any scan over a stack.

    Args:
      fn: takes a layer and the carry, returns the carry.
      layers: a module whose variables are stacked, [L, ...], as made by `nnx.vmap` of a
        constructor over `nnx.Rngs.split(L)`.
      carry: a tree of arrays.
      checkpoint: whether to recompute a layer in the backward pass instead of keeping its
        residuals, which include its gathered parameters.

    Locality: that of ``fn``. Context: any. Cost: an all-gather per split variable and
      layer, twice with `checkpoint`, and a reduce-scatter in the backward pass.

    Raises:
      LocalityError: a variable that holds a PerReplica.
      UnsupportedError: ``fn`` adds a variable or an attribute to the layer, or removes one.
      ValueError: variables without a common leading dimension.

    Example:
      >>> from flax import nnx
      >>> make = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))
      >>> layers = make(nnx.Rngs(0).split(4))
      >>> x = dj.flax.scan_layers(lambda layer, x: jnp.tanh(layer(x)), layers, jnp.ones((2, 3)))
      >>> x.shape
      (2, 3)

    Source: ZeRO stage 3 (Rajbhandari et al., 2020).
    """
    graphdef, flat = nnx.graph.flatten(layers, graph=True)
    variables = list(flat.leaves)
    values = [raw_value(v) for v in variables]
    _require_stack(layers, values)
    changed: list[int] = []

    def body(carry: PyTree, slices: list[Any]) -> tuple[Any, list[Any]]:
        layer = nnx.graph.unflatten(graphdef, slices)
        graph_before, inner = nnx.graph.flatten(layer, graph=True)
        before = [raw_value(v) for v in inner.leaves]
        carry = fn(layer, carry)
        require_no_traced_values([layer])
        if nnx.graph.flatten(layer, graph=True)[0] != graph_before:
            raise UnsupportedError(_changed_graph_text(layer))
        after = [raw_value(v) for v in inner.leaves]
        changed[:] = [i for i, x in enumerate(before) if after[i] is not x]
        return carry, [after[i] for i in changed]

    if checkpoint:
        body = jax.checkpoint(body, prevent_cse=False)
    carry, ends = lax.scan(body, carry, values)
    write_entries(variables, dict(zip(changed, ends, strict=True)))
    return carry


def _changed_graph_text(layer: PyTree) -> str:
    name = type(layer).__name__
    return message(
        f"scan_layers needs a function that keeps the variables and attributes of {name} as they "
        "are",
        got="one that adds or removes some, as the first self.sow of a name does",
        why="a scanned layer is a view of one row of the stack, which exists during its call only",
        fix="self.h = nnx.Intermediate(jnp.zeros(shape)) in __init__, and self.h[...] = x in the "
        "layer",
    )


def _require_stack(layers: PyTree, values: Sequence[Any]) -> None:
    if any(map(is_per_replica, values)):
        raise LocalityError(
            f"scan_layers needs one value of each variable of {type(layers).__name__}",
            got="a variable that holds a PerReplica, a value for each replica",
            why="a layer would be given the values of all replicas",
            fix="call it in the function given to strategy.run, where each replica has its own",
        )
    lengths = {x.shape[0] if getattr(x, "ndim", 0) else None for x in values}
    if len(lengths) == 1 and None not in lengths:
        return
    raise ValueError(
        message(
            f"scan_layers needs variables of {type(layers).__name__} with one leading dimension, "
            "the number of layers",
            got=f"leading dimensions {', '.join(sorted(map(str, lengths))) or 'of no variable'}",
            why="layer i is made of element i of each variable",
            fix="layers = nnx.vmap(lambda rngs: Block(rngs=rngs))(nnx.Rngs(0).split(num_layers))",
        )
    )


# -- precision ----------------------------------------------------------------
# Mixed precision: computing in a short float type while variables stay in float32.


T = TypeVar("T")


def cast(tree: T, dtype: DTypeLike) -> T:
    """Returns `tree` with its floating-point arrays cast to `dtype`.

    A module becomes a view of it: parameters are cast copies, while every other variable
    (batch statistics, random streams) is shared with the original. A `dj.Variable` becomes its
    value. Gradients with respect to the original module have the dtype of its parameters.

    Args:
      tree: a module, arrays, variables, or a tree of these.
      dtype: e.g. `jnp.bfloat16`.

    What is added to the view (a new attribute, the first `sow` of a name) is not added to the
    original.

    Locality: that of `tree`. Context: any; for gradients, inside the loss function.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x):
      ...     model, x = dj.flax.cast((model, x), jnp.bfloat16)
      ...     return model(x).astype(jnp.float32).mean()
      >>> grads = nnx.grad(loss_fn)(model, jnp.ones((4, 2)))
      >>> grads["kernel"][...].dtype
      dtype('float32')
    """
    return jax.tree.map(lambda x: _cast(x, dtype), tree, is_leaf=is_object)


def _cast(value: PyTree, dtype: DTypeLike) -> Any:
    if not is_object(value):
        return jnp.asarray(value).astype(dtype) if _is_floating(value) else value
    graphdef, flat = nnx.graph.flatten(value, graph=True)
    leaves = [
        jax.tree.map(lambda x: _cast(x, dtype), raw_value(v)) if isinstance(v, nnx.Param) else v
        for v in flat.leaves
    ]
    return nnx.graph.unflatten(graphdef, leaves)


def _is_floating(value: PyTree) -> bool:
    return hasattr(value, "dtype") and bool(jnp.issubdtype(value.dtype, jnp.floating))


# -- loss scale ---------------------------------------------------------------
# Dynamic loss scaling for NNX; all replicas skip a step, or none does.


#: The least and the largest power of two that are normal in float32. An infinite scale would
#: stay infinite.
_BOUNDS = 2.0**-126, 2.0**127


class ScaleState(nnx.Variable[Any]):
    """State of a loss scale: equal on every replica."""


class LossScale(nnx.Pytree):
    """Scales the loss, so that small gradients do not underflow in short float types.

    If gradients overflow on any replica, all replicas skip the update and the scale is
    halved; after `interval` steps without overflow it is doubled.

    Args:
      scale: the initial factor.
      interval: the number of steps without overflow after which the scale grows.

    Batch statistics that the forward pass has written are kept, even if the step is skipped.

    Raises:
      ValueError: a scale that is not positive and finite, or an interval below 1.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> scale = dj.flax.LossScale(1024.0)
      >>> def step(model, optimizer, scale, x):
      ...     grads = nnx.grad(lambda m: scale.scaled(m(x).mean()))(model)
      ...     return scale.apply_gradients(optimizer, model, grads)
      >>> x = jnp.full((1, 2), jnp.inf)
      >>> bool(dj.VirtualStrategy(2).run(step, args=(model, optimizer, scale, x)))
      False
      >>> float(scale.scale[...]), int(optimizer.step[...])
      (512.0, 0)

    Source: Micikevicius et al., "Mixed precision training", 2018;
      flax.training.dynamic_scale.
    """

    def __init__(self, scale: float = 2.0**15, interval: int = 2000):
        if not (_BOUNDS[0] <= scale <= _BOUNDS[1]) or interval < 1:
            raise ValueError(
                message(
                    "LossScale needs a positive, finite scale and an interval of 1 or more",
                    got=f"scale={scale}, interval={interval}",
                    why="gradients are divided by the scale, which only halving and doubling "
                    "changes; it grows after that many steps",
                    fix="dj.flax.LossScale(2.0**15, interval=2000)",
                )
            )
        self.interval = interval
        self.scale = ScaleState(jnp.float32(scale))
        self.good_steps = ScaleState(jnp.int32(0))

    def scaled(self, loss: jax.Array) -> jax.Array:
        """Returns `loss` times the scale: differentiate this."""
        return loss * self.scale[...].astype(loss.dtype)

    def apply_gradients(
        self, optimizer: nnx.Optimizer[Any], model: PyTree, grads: PyTree, op: ReduceOpLike = "mean"
    ) -> Any:
        """Updates `model` unless a gradient overflowed; returns whether it was updated.

        Args:
          optimizer: an `nnx.Optimizer`.
          model: its model.
          grads: gradients of the scaled loss, local to this replica.
          op: how `apply_gradients` reduces them.

        Gradients are converted to float32 or wider, divided by the scale and passed on in
        that dtype: a shorter one might hold neither the scale nor a small gradient.

        Context: replica. Cost: one all-reduce of a number, and `apply_gradients`.
        """
        finite = _all_finite(grads)
        grads = jax.tree.map(self._divided, grads)
        variables = [
            v for _, v in nnx.iter_graph((optimizer, model)) if isinstance(v, nnx.Variable)
        ]
        before = [raw_value(v) for v in variables]
        apply_gradients(optimizer, model, grads, op)
        for variable, old in zip(variables, before, strict=True):
            new = raw_value(variable)
            if new is not old:
                variable.set_raw_value(_select(finite, new, old))
        self._adjust(finite)
        return finite

    def _divided(self, gradient: jax.Array) -> jax.Array:
        wide = sum_dtype(gradient.dtype)
        return gradient.astype(wide) / self.scale[...].astype(wide)

    def _adjust(self, finite: jax.Array) -> None:
        steps = jnp.where(finite, self.good_steps[...] + 1, 0)
        grows = steps >= self.interval
        factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
        self.scale[...] = jnp.clip(self.scale[...] * factor, *_BOUNDS)
        self.good_steps[...] = jnp.where(grows, 0, steps)


def _all_finite(grads: PyTree) -> jax.Array:
    """Returns whether the gradients of all replicas are finite; equal on every replica."""
    leaves = jax.tree.leaves(grads)
    bad = sum(jnp.sum(~jnp.isfinite(g)).astype(jnp.float32) for g in leaves)
    context = frames.current().replica_context
    return jnp.asarray(bad if context is None else context.all_reduce("sum", bad)) == 0


def _select(finite: jax.Array, new: PyTree, old: PyTree) -> Any:
    """Returns `new` if `finite`, else `old`; a split value is selected shard by shard."""
    state = frames.current().state
    held = None if state is None else state.shard_of(new)
    if state is None or held is None:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    shard, form = held
    return state.whole(jnp.where(finite, shard, state.shard_of(old)[0]), form)
