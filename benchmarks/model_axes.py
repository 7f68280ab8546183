"""A replica of several devices: models whose columns and rows they share, by hand and as ours.

By hand it is `jax.jit` with a `NamedSharding` for each array, as Megatron lays out an MLP: each
device holds some columns of the first matrix and the same rows of the second one, and one
all-reduce over the model axis adds up the products. The devices share the heads of attention in the
same way. Adam's moments lie like their parameters. For ZeRO by hand some arrays are split over the
replicas, too, along an axis that is free, and XLA does the rest.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from benchmarks.split_models import MLP, ROWS, RULES, Task, transformer
from distjax.testing.hlo import CollectiveCount, count_by_axis

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
#: Replicas and devices of each, on eight devices.
SIZES = ((4, 2), (2, 4), (1, 8), (8, 1))
#: An `nnx.Optimizer` counts its steps, too.
COUNTER_BYTES = 4
TEMP_TOLERANCE = 0.05
PARTITIONS = ("optimizer", "gradients", "parameters")


class AxesCost(NamedTuple):
    """The costs of a compiled step, on one device.

    Attributes:
      collectives: By kind and axis of the mesh.
      state_bytes: Of parameters and optimizer state.
      temp_bytes: Scratch memory.
      donated_bytes: Outputs that reuse the memory of inputs.
    """

    collectives: dict[tuple[str, str], CollectiveCount]
    state_bytes: int
    temp_bytes: int
    donated_bytes: int


class Training(NamedTuple):
    """A step to be measured and run.

    Attributes:
      compiled: Its program.
      step: Takes the batches, [R * ROWS, ...] each, and returns the loss.
      arrays: Returns the arrays of its state.
      mesh: R x M devices.
    """

    compiled: Any
    step: Callable[[np.ndarray, np.ndarray], Any]
    arrays: Callable[[], list[jax.Array]]
    mesh: Any

    def cost(self) -> AxesCost:
        """What the program costs."""
        memory = self.compiled.memory_analysis()
        held = [np.prod(x.sharding.shard_shape(x.shape), dtype=int) for x in self.arrays()]
        return AxesCost(
            count_by_axis(self.compiled.as_text(), self.mesh.shape),
            sum(int(n) * x.dtype.itemsize for n, x in zip(held, self.arrays(), strict=True)),
            memory.temp_size_in_bytes,
            memory.alias_size_in_bytes,
        )


def on_one_device(
    steps: int, num_replicas: int, tx: Any = OPTIMIZER, task: Task = MLP
) -> list[float]:
    """The losses of the same steps without a strategy."""
    params, losses = jax.tree.map(jax.numpy.asarray, task.initial()), []

    @jax.jit
    def step(params, state, *batch):
        value, grads = jax.value_and_grad(task.loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        value, params, state = step(params, state, *task.batch(num_replicas))
        losses.append(float(value))
    return losses


def by_hand(
    num_replicas: int, size: int, task: Task = MLP, partition: str | None = None
) -> Training:
    """`jax.jit` and a `NamedSharding` for each array.

    Args:
      num_replicas: R.
      size: The devices of a replica.
      task: The model.
      partition: What ZeRO splits over the replicas, one of `PARTITIONS`; None: nothing.
    """
    devices = np.array(jax.devices()).reshape(num_replicas, size)
    mesh = Mesh(devices, ("replica", "model"), axis_types=(AxisType.Auto,) * 2)
    initial = task.initial()
    taken = task.specs if size > 1 else dict.fromkeys(task.specs, P())
    split = {k: _over_replicas(taken[k], v.shape, num_replicas) for k, v in initial.items()}
    stage = 0 if partition is None else 1 + PARTITIONS.index(partition)
    of_state, of_grads, of_params = (
        {k: NamedSharding(mesh, spec) for k, spec in (split if over else task.specs).items()}
        for over in (stage >= 1, stage >= 2, stage >= 3)
    )
    place = lambda tree, shardings: {k: jax.device_put(v, shardings[k]) for k, v in tree.items()}
    params = place(initial, of_params)
    whole = NamedSharding(mesh, P())
    state = jax.tree.map(
        lambda x: place(x, of_state) if isinstance(x, dict) else jax.device_put(x, whole),
        OPTIMIZER.init(params),
        is_leaf=lambda x: isinstance(x, dict),
    )
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))

    def update(both: Any, x: jax.Array, y: jax.Array) -> Any:
        params, state = both
        value, grads = jax.value_and_grad(task.loss)(params, x, y)
        if stage >= 2:
            grads = jax.lax.with_sharding_constraint(grads, of_grads)
        updates, state = OPTIMIZER.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    jitted = jax.jit(update, donate_argnums=0, out_shardings=(shardings, whole))
    held = [(params, state)]
    rows = lambda x: jax.device_put(x, NamedSharding(mesh, P("replica")))

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        held[0], value = jitted(held[0], rows(x), rows(y))
        return value

    compiled = jitted.lower(held[0], *map(rows, task.batch(num_replicas))).compile()
    return Training(compiled, step, lambda: jax.tree.leaves(held[0]), mesh)


def _over_replicas(spec: P, shape: Sequence[int], num_replicas: int) -> P:
    """The spec with the replica axis at the first axis that is free and that R divides."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    free = [i for i, n in enumerate(shape) if entries[i] is None and n % num_replicas == 0]
    if free:
        entries[free[0]] = "replica"
    return P(*entries)


def _rows(strategy: dj.Strategy, x: np.ndarray) -> Any:
    """Each replica's part of a batch."""
    count = strategy.num_replicas_in_sync
    return strategy.per_replica(x.reshape(count, ROWS, *x.shape[1:]))


def _own(
    strategy: dj.Strategy, task: Task, call: Any, arrays: Callable[[], Any], arguments: Any = ()
) -> Training:
    """The training of a function ``call(*arguments, x, y)`` compiled by `dj.jit`."""
    rows = functools.partial(_rows, strategy)
    batch = task.batch(strategy.num_replicas_in_sync)
    compiled = call.lower(*arguments, *map(rows, batch)).compile()
    step = lambda x, y: call(*arguments, rows(x), rows(y))
    return Training(compiled, step, arrays, strategy.mesh)


def variables(strategy: dj.Strategy, tx: Any = OPTIMIZER, task: Task = MLP) -> Training:
    """`dj.Variable(sharding=)` and `dj.optim.Optimizer`."""
    with strategy.scope():
        own = {k: dj.Variable(v, name=k, sharding=task.specs[k]) for k, v in task.initial().items()}
        optimizer = dj.optim.Optimizer(tx, "mean")
        optimizer.init(own)

    def replica_step(x: jax.Array, y: jax.Array) -> Any:
        params = {k: v.value for k, v in own.items()}
        value, grads = jax.value_and_grad(task.loss)(params, x, y)
        optimizer.apply_gradients([(grads[k], own[k]) for k in own])
        return dj.get_replica_context().all_reduce("mean", value)

    call = dj.jit(lambda x, y: strategy.run(replica_step, args=(x, y)))
    every = lambda: [v.value for v in jax.tree.leaves((own, optimizer.state))]
    return _own(strategy, task, call, every)


def modules(
    strategy: dj.Strategy,
    tx: Any = OPTIMIZER,
    by_path: bool = False,
    optimizer_first: bool = False,
    task: Task = MLP,
) -> Training:
    """An NNX module with logical axes, or with rules by path."""
    with strategy.scope():
        if by_path:
            model = task.module()
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param) if optimizer_first else None
            dj.flax.place((model, optimizer) if optimizer_first else model, rules=task.paths)
        else:
            with nnx.logical_axis_rules(RULES):
                model = dj.flax.create(functools.partial(task.module, annotated=True))
            optimizer = None
        optimizer = optimizer or nnx.Optimizer(model, tx, wrt=nnx.Param)
        dj.flax.place(optimizer)

    def replica_step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> Any:
        loss = lambda model: task.error(model(x), y)
        value, grads = dj.flax.value_and_grad(loss)(model)
        dj.flax.apply_gradients(optimizer, model, grads)
        return dj.get_replica_context().all_reduce("mean", value)

    @functools.partial(dj.jit, donate_argnums=(0, 1))
    def call(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return strategy.run(replica_step, args=(model, optimizer, x, y))

    of = lambda x: [v.get_raw_value() for v in jax.tree.leaves(nnx.state(x), is_leaf=_is_variable)]
    every = lambda: [*of(model), *of(nnx.state(optimizer, nnx.OptState))]
    return _own(strategy, task, call, every, arguments=(model, optimizer))


def _is_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable)


def arguments(strategy: dj.Strategy, tx: Any = OPTIMIZER, task: Task = MLP) -> Training:
    """Plain JAX: trees of placed arrays that go in and come out, as with Equinox and linen."""
    place = lambda x, k: jax.device_put(x, NamedSharding(strategy.mesh, task.specs[k]))
    params = {k: place(v, k) for k, v in task.initial().items()}
    whole = NamedSharding(strategy.mesh, P())
    state = jax.tree.map(
        lambda x: (
            {k: place(v, k) for k, v in x.items()}
            if isinstance(x, dict)
            else jax.device_put(x, whole)
        ),
        tx.init(params),
        is_leaf=lambda x: isinstance(x, dict),
    )

    def replica_step(both: Any, x: jax.Array, y: jax.Array) -> Any:
        params, state = both
        value, grads = jax.value_and_grad(task.loss)(params, x, y)
        value, grads = dj.get_replica_context().all_reduce("mean", (value, grads))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    @functools.partial(dj.jit, donate_argnums=0)
    def call(both: Any, x: Any, y: Any) -> Any:
        return strategy.run(replica_step, args=(both, x, y))

    held = [(params, state)]
    rows = functools.partial(_rows, strategy)

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        held[0], value = call(held[0], rows(x), rows(y))
        return value

    batch = task.batch(strategy.num_replicas_in_sync)
    compiled = call.lower(held[0], *map(rows, batch)).compile()
    return Training(compiled, step, lambda: jax.tree.leaves(held[0]), strategy.mesh)


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yields rows by hand and one for each form, for R x M devices."""
    sizes, tasks = (SIZES[:1], [MLP]) if quick else (SIZES, [MLP, transformer()])
    for task, (num_replicas, size) in itertools.product(tasks, sizes):
        whole = by_hand(num_replicas, size, task).cost()
        for part in (None, *PARTITIONS) if num_replicas > 1 else (None,):
            yield from _rows_of(task, num_replicas, size, part, whole)


def _rows_of(
    task: Task, num_replicas: int, size: int, part: str | None, whole: AxesCost
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one partition; `whole` is what the step costs by hand without ZeRO."""
    forms = {"Variable": variables, "NNX, by path": functools.partial(modules, by_path=True)}
    if part is None:
        forms |= {"plain arrays": arguments}
        forms |= {"NNX, logical axes": modules} if task is MLP else {}
    elif part != "parameters":
        del forms["NNX, by path"]
    options: dict[str, Any] = {"partition": part, "min_split_bytes": 0} if part else {}
    make = dj.ShardedStrategy if part else dj.MirroredStrategy
    zero = f", ZeRO {part}" if part else ""
    row = {"model": f"{task.name}, {num_replicas} x {size}"}
    expected = whole if part is None else by_hand(num_replicas, size, task, part).cost()
    yield {**row, "state": f"hand-written{zero}", **_totals(expected)}
    for form, train in forms.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dj.errors.RecompilationWarning)
            cost = train(make(model_axes={"model": size}, **options), task=task).cost()
        bars = {"within bars": _is_within(cost, expected, whole)}
        yield {**row, "state": f"{form}{zero}", **_totals(cost), **bars}


def _totals(cost: AxesCost) -> dict[str, Any]:
    of = lambda kind: [c for (k, _), c in cost.collectives.items() if (k == "all-reduce") is kind]
    by_axis = [(axis, kind, *count) for (kind, axis), count in sorted(cost.collectives.items())]
    return {
        "all-reduce": sum(c.num_ops for c in of(True)),
        "all-reduce bytes": sum(c.result_bytes for c in of(True)),
        "others": sum(c.num_ops for c in of(False)),
        "others bytes": sum(c.result_bytes for c in of(False)),
        "temp bytes": cost.temp_bytes,
        "donated bytes": cost.donated_bytes,
        "state bytes": cost.state_bytes,
        "by axis": "; ".join(f"{axis} {kind} {n}/{size}" for axis, kind, n, size in by_axis),
    }


def _is_within(cost: AxesCost, expected: AxesCost, whole: AxesCost) -> bool:
    """Whether bytes over each axis, state and scratch memory are within those by hand.

    Scratch memory may be that of the step without ZeRO and what is gathered.
    """
    over = lambda c, axis: sum(n.result_bytes for (_, a), n in c.items() if a == axis)
    axes = {axis for _, axis in (*cost.collectives, *expected.collectives)}
    fits = all(over(cost.collectives, a) <= over(expected.collectives, a) for a in axes)
    is_held = cost.state_bytes <= expected.state_bytes + COUNTER_BYTES
    gathered = sum(n.result_bytes for (kind, _), n in cost.collectives.items() if "gather" in kind)
    scratch = max(expected.temp_bytes, whole.temp_bytes + gathered) * (1 + TEMP_TOLERANCE)
    return (
        fits and is_held and cost.donated_bytes == cost.state_bytes and cost.temp_bytes <= scratch
    )
