"""A replica of several devices: an MLP whose columns and rows they share, by hand and as ours.

By hand it is `jax.jit` with a `NamedSharding` for each array, as Megatron lays out an MLP: each
device holds some columns of the first matrix and the same rows of the second one, and one
all-reduce over the model axis adds up the products. Adam's moments lie like their parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from distjax.testing.hlo import CollectiveCount, count_by_axis

WIDTH, HIDDEN, ROWS = 16, 64, 8
SPECS = {"up": P(None, "model"), "b": P("model"), "down": P("model"), "c": P()}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
#: Replicas and devices of each, on eight devices.
SIZES = ((4, 2), (2, 4), (1, 8), (8, 1))
#: An `nnx.Optimizer` counts its steps, too.
COUNTER_BYTES = 4
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
      step: Takes the batches, [R * ROWS, WIDTH] each, and returns the loss.
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


def initial() -> dict[str, np.ndarray]:
    """The parameters at the start."""
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "b": HIDDEN, "down": (HIDDEN, WIDTH), "c": WIDTH}
    return {k: rng.normal(size=n).astype(np.float32) / 10 for k, n in shapes.items()}


def batch(num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets for all replicas."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, num_replicas * ROWS, WIDTH)).astype(np.float32)
    return x, y


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of the MLP."""
    hidden = jax.nn.gelu(x @ params["up"] + params["b"])
    return jnp.mean((hidden @ params["down"] + params["c"] - y) ** 2)


def on_one_device(steps: int, num_replicas: int, tx: Any = OPTIMIZER) -> list[float]:
    """The losses of the same steps without a strategy."""
    params, losses = jax.tree.map(jnp.asarray, initial()), []
    state = tx.init(params)
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params, *batch(num_replicas))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


def by_hand(num_replicas: int, size: int) -> Training:
    """`jax.jit` and a `NamedSharding` for each array."""
    devices = np.array(jax.devices()).reshape(num_replicas, size)
    mesh = Mesh(devices, ("replica", "model"), axis_types=(AxisType.Auto,) * 2)
    place = lambda tree: {
        k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in tree.items()
    }
    params = place(initial())
    whole = NamedSharding(mesh, P())
    state = jax.tree.map(
        lambda x: place(x) if isinstance(x, dict) else jax.device_put(x, whole),
        OPTIMIZER.init(params),
        is_leaf=lambda x: isinstance(x, dict),
    )
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))

    def update(both: Any, x: jax.Array, y: jax.Array) -> Any:
        params, state = both
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = OPTIMIZER.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    jitted = jax.jit(update, donate_argnums=0, out_shardings=(shardings, whole))
    held = [(params, state)]
    rows = lambda x: jax.device_put(x, NamedSharding(mesh, P("replica")))

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        held[0], value = jitted(held[0], rows(x), rows(y))
        return value

    compiled = jitted.lower(held[0], *map(rows, batch(num_replicas))).compile()
    return Training(compiled, step, lambda: jax.tree.leaves(held[0]), mesh)


def _own(strategy: dj.Strategy, call: Any, *arrays_of: Any, arguments: Any = ()) -> Training:
    """The training of a function ``call(*arguments, x, y)`` compiled by `dj.jit`."""
    count = strategy.num_replicas_in_sync
    rows = lambda x: strategy.per_replica(x.reshape(count, ROWS, WIDTH))
    compiled = call.lower(*arguments, *map(rows, batch(count))).compile()
    step = lambda x, y: call(*arguments, rows(x), rows(y))
    return Training(compiled, step, arrays_of[0], strategy.mesh)


def variables(strategy: dj.Strategy, tx: Any = OPTIMIZER, specs: Any = SPECS) -> Training:
    """`dj.Variable(sharding=)` and `dj.optim.Optimizer`."""
    with strategy.scope():
        own = {k: dj.Variable(v, name=k, sharding=specs.get(k)) for k, v in initial().items()}
        optimizer = dj.optim.Optimizer(tx, "mean")
        optimizer.init(own)

    def replica_step(x: jax.Array, y: jax.Array) -> Any:
        params = {k: v.value for k, v in own.items()}
        value, grads = jax.value_and_grad(loss)(params, x, y)
        optimizer.apply_gradients([(grads[k], own[k]) for k in own])
        return dj.get_replica_context().all_reduce("mean", value)

    call = dj.jit(lambda x, y: strategy.run(replica_step, args=(x, y)))
    every = lambda: [v.value for v in jax.tree.leaves((own, optimizer.state))]
    return _own(strategy, call, every)


class Layers(nnx.Module):
    """The MLP in NNX; the names of its axes are logical."""

    def __init__(self, annotated: bool = True):
        named = nnx.with_partitioning if annotated else lambda init, _: init
        given = {k: functools.partial(_given, v) for k, v in initial().items()}
        rngs, split = nnx.Rngs(0), ("embed", "mlp")
        self.up = nnx.Linear(
            WIDTH,
            HIDDEN,
            kernel_init=named(given["up"], split),
            bias_init=named(given["b"], split[1:]),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            HIDDEN,
            WIDTH,
            kernel_init=named(given["down"], split[::-1]),
            bias_init=named(given["c"], split[:1]),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


def _given(value: np.ndarray, key: Any, shape: Any, dtype: Any, **_: Any) -> jax.Array:
    return jnp.asarray(value, dtype).reshape(shape)


RULES = (("mlp", "model"), ("embed", None))
PATHS = {r"up\.kernel": P(None, "model"), r"up\.bias|down\.kernel": P("model"), "down": P()}


def modules(
    strategy: dj.Strategy, tx: Any = OPTIMIZER, by_path: bool = False, optimizer_first: bool = False
) -> Training:
    """An NNX module with logical axes, or with rules by path."""
    with strategy.scope():
        if by_path:
            model = Layers(annotated=False)
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param) if optimizer_first else None
            dj.flax.place((model, optimizer) if optimizer_first else model, rules=PATHS)
        else:
            with nnx.logical_axis_rules(RULES):
                model = dj.flax.create(Layers)
            optimizer = None
        optimizer = optimizer or nnx.Optimizer(model, tx, wrt=nnx.Param)
        dj.flax.place(optimizer)

    def replica_step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> Any:
        error = lambda model: jnp.mean((model(x) - y) ** 2)
        value, grads = dj.flax.value_and_grad(error)(model)
        dj.flax.apply_gradients(optimizer, model, grads)
        return dj.get_replica_context().all_reduce("mean", value)

    @functools.partial(dj.jit, donate_argnums=(0, 1))
    def call(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return strategy.run(replica_step, args=(model, optimizer, x, y))

    of = lambda x: [v.get_raw_value() for v in jax.tree.leaves(nnx.state(x), is_leaf=_is_variable)]
    every = lambda: [*of(model), *of(nnx.state(optimizer, nnx.OptState))]
    return _own(strategy, call, every, arguments=(model, optimizer))


def _is_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable)


def arguments(strategy: dj.Strategy, tx: Any = OPTIMIZER) -> Training:
    """Plain JAX: trees of placed arrays that go in and come out, as with Equinox and linen."""
    place = lambda x, k: jax.device_put(x, NamedSharding(strategy.mesh, SPECS[k]))
    params = {k: place(v, k) for k, v in initial().items()}
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
        value, grads = jax.value_and_grad(loss)(params, x, y)
        value, grads = dj.get_replica_context().all_reduce("mean", (value, grads))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    @functools.partial(dj.jit, donate_argnums=0)
    def call(both: Any, x: Any, y: Any) -> Any:
        return strategy.run(replica_step, args=(both, x, y))

    held = [(params, state)]
    count = strategy.num_replicas_in_sync
    rows = lambda x: strategy.per_replica(x.reshape(count, ROWS, WIDTH))

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        held[0], value = call(held[0], rows(x), rows(y))
        return value

    compiled = call.lower(held[0], *map(rows, batch(count))).compile()
    return Training(compiled, step, lambda: jax.tree.leaves(held[0]), strategy.mesh)


def rows(quick: bool) -> list[dict[str, Any]]:
    """A row by hand and one for each form, for R x M devices."""
    found = []
    for num_replicas, size in SIZES[:1] if quick else SIZES:
        expected = by_hand(num_replicas, size).cost()
        name = f"mlp, {num_replicas} x {size}"
        found.append({"model": name, "state": "hand-written", **_totals(expected)})
        axes = {"model_axes": {"model": size}}
        forms: dict[str, Callable[[], Training]] = {
            "Variable": lambda axes=axes: variables(dj.MirroredStrategy(**axes)),
            "NNX, logical axes": lambda axes=axes: modules(dj.MirroredStrategy(**axes)),
            "NNX, by path": lambda axes=axes: modules(dj.MirroredStrategy(**axes), by_path=True),
            "plain arrays": lambda axes=axes: arguments(dj.MirroredStrategy(**axes)),
        }
        for part in PARTITIONS if num_replicas > 1 else ():
            forms[f"Variable, ZeRO {part}"] = lambda axes=axes, part=part: variables(
                dj.ShardedStrategy(partition=part, min_split_bytes=0, **axes)
            )
        for form, make in forms.items():
            cost = make().cost()
            found.append({"model": name, "state": form, **_totals(cost), **_within(cost, expected)})
    return found


def _totals(cost: AxesCost) -> dict[str, Any]:
    of = lambda kind: [c for (k, _), c in cost.collectives.items() if (k == "all-reduce") is kind]
    return {
        "all-reduce": sum(c.num_ops for c in of(True)),
        "all-reduce bytes": sum(c.result_bytes for c in of(True)),
        "others": sum(c.num_ops for c in of(False)),
        "others bytes": sum(c.result_bytes for c in of(False)),
        "temp bytes": cost.temp_bytes,
        "donated bytes": cost.donated_bytes,
        "state bytes": cost.state_bytes,
        "by axis": {" over ".join(k): c._asdict() for k, c in sorted(cost.collectives.items())},
    }


def _within(cost: AxesCost, expected: AxesCost) -> dict[str, bool]:
    """Whether nothing is larger than by hand; ZeRO gathers parameters, and holds less state."""
    is_split = cost.state_bytes < expected.state_bytes
    same = cost.collectives == expected.collectives
    model = lambda c: sum(n.result_bytes for (_, axis), n in c.items() if axis == "model")
    fits = same or (is_split and model(cost.collectives) <= model(expected.collectives))
    is_held = cost.state_bytes <= expected.state_bytes + COUNTER_BYTES
    return {"within bars": fits and is_held and cost.donated_bytes == cost.state_bytes}
