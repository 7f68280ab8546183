"""Training files as they are published for `jit` over a mesh, and what their ports change.

The files are written anew, each after the form of a public program; they are whole and know nothing
of distjax. Their `main` returns what they computed, the step, and its arguments for one more call,
so that the memory of a step can be asked for. Run as a program, this prints a table.
"""

import difflib
import pathlib
import types

import equinox as eqx
import jax
import numpy as np

import distjax as dj

PUBLISHED = pathlib.Path(__file__).parent / "sharded"
_IMPORT = ("import jax\n", "import distjax as dj\nimport jax\n")

#: Per file: (what stands there, what it becomes).
CHANGES = {
    "nnx_fsdp": [
        _IMPORT,
        (
            'mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))\n',
            'strategy = dj.MirroredStrategy(axis_name="data", model_axes={"model": 4})\n',
        ),
        (  # one output: as published it cannot be split, and Flax leaves it whole
            '(dmid, dout)), out_sharding=mesh_rules("embed", "mlp")',
            '(dmid, dout)), out_sharding=mesh_rules("mlp", "embed")',
        ),
        ("@nnx.jit\ndef create_model", "def create_model"),
        (
            "    optimizer.update(grads)\n    return loss",
            '    loss, grads = dj.get_replica_context().all_reduce("mean", (loss, grads))\n'
            "    optimizer.update(grads)\n    return loss",
        ),
        (
            "    with jax.set_mesh(mesh):\n        model, optimizer = create_model()",
            "    with strategy.scope():\n        model, optimizer = dj.flax.create(create_model)",
        ),
        (
            "in dataset(batch_size=32, num_steps=num_steps):\n"
            '        x, y = jax.device_put((x, y), NamedSharding(mesh, P("data")))\n'
            "        losses.append(train_step(model, optimizer, x, y))\n",
            "in strategy.distribute_dataset(dataset(32, num_steps)):\n"
            "        losses.append(strategy.run(train_step, args=(model, optimizer, x, y)))\n",
        ),
    ],
    "nnx_gemma": [
        _IMPORT,
        (
            'mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 2), ("data", "fsdp", "tensor"))\n'
            'data_sharding = NamedSharding(mesh, P(("data", "fsdp")))\n',
            'strategy = dj.ShardedStrategy(partition="parameters", min_split_bytes=0, '
            'model_axes={"tensor": 2})\n',
        ),
        ('MeshRules(embed="fsdp", ', "MeshRules("),
        ("class TrainState(train_state.TrainState):\n    graphdef: nnx.GraphDef\n\n\n", ""),
        ("train_step(state, batch)", "train_step(model, optimizer, batch)"),
        (
            """    def loss_fn(params):
        logits = nnx.merge(state.graphdef, params)(inputs, positions, mask)
        loss, weight_sum = compute_weighted_cross_entropy(logits, targets, weights)
        return loss / weight_sum, logits

    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, compute_metrics(logits, targets, weights)
""",
            """    def loss_fn(model):
        logits = model(inputs, positions, mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return dj.losses.average_loss(losses, weights, "mean"), logits

    (_, logits), grads = dj.flax.value_and_grad(loss_fn, has_aux=True)(model)
    dj.flax.apply_gradients(optimizer, model, grads)
    metrics = compute_metrics(logits, targets, weights)
    return dj.get_replica_context().all_reduce("sum", metrics)
""",
        ),
        (
            """    @jax.jit
    def sharded_init():
        model = Transformer(config, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(model, nnx.Param)
        state = TrainState.create(apply_fn=None, params=params, tx=tx, graphdef=graphdef)
        state = jax.tree.map(jnp.asarray, state)
        return jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))

    with jax.set_mesh(mesh):
        state = sharded_init()
    return state, nnx.get_named_sharding(state, mesh)
""",
            """    def sharded_init():
        model = Transformer(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    with strategy.scope():
        return dj.flax.create(sharded_init)
""",
        ),
        (
            """    state, state_sharding = setup_initial_state(config, tx)
    step = jax.jit(
        train_step,
        in_shardings=(state_sharding, data_sharding),
        out_shardings=(state_sharding, None),
        donate_argnums=0,
    )
""",
            """    model, optimizer = setup_initial_state(config, tx)
    step = strategy.jit(train_step, donate_argnums=(0, 1))
""",
        ),
        (
            """    for batch in batches(config, num_steps):
        batch = jax.device_put(batch, data_sharding)
        state, metrics = step(state, batch)
""",
            """    for batch in strategy.distribute_dataset(batches(config, num_steps)):
        metrics = step(model, optimizer, batch)
""",
        ),
        (
            "nnx.to_pure_dict(state.params)), step, (state, batch)",
            "nnx.to_pure_dict(nnx.state(model))), step, (model, optimizer, batch)",
        ),
    ],
    "linen_lm": [
        _IMPORT,
        (
            'mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))\n'
            'data_sharding = NamedSharding(mesh, P("data"))\n',
            'strategy = dj.MirroredStrategy(axis_name="data", model_axes={"tensor": 2})\n'
            "mesh = strategy.mesh\n",
        ),
        ('("activation_batch", "data")', '("activation_batch", None)'),
        (
            "        return loss / weight_sum, logits\n",
            '        weight_sum = dj.get_replica_context().all_reduce("sum", weight_sum)\n'
            "        return loss / weight_sum, logits\n",
        ),
        (
            """    new_state = state.apply_gradients(grads=grads)
    return new_state, compute_metrics(logits, inputs, weights, label_smoothing)
""",
            """    context = dj.get_replica_context()
    new_state = state.apply_gradients(grads=context.all_reduce("sum", grads))
    metrics = compute_metrics(logits, inputs, weights, label_smoothing)
    return new_state, context.all_reduce("sum", metrics)
""",
        ),
        ("    state, state_sharding = setup", "    state, _ = setup"),
        (
            """    step = jax.jit(
        functools.partial(train_step, label_smoothing=config.label_smoothing),
        in_shardings=(state_sharding, data_sharding),
        out_shardings=(state_sharding, None),
        donate_argnums=0,
    )
""",
            """    step = strategy.jit(
        functools.partial(train_step, label_smoothing=config.label_smoothing),
        donate_argnums=0,
    )
""",
        ),
        (
            """    with jax.set_mesh(mesh), nn.logical_axis_rules(logical_axis_rules):
        for batch in batches(config, num_steps):
            state, metrics = step(state, jax.device_put(batch, data_sharding))
            history.append(jax.device_get(metrics))
    return (history, state.params), step, (state, jax.device_put(batch, data_sharding))
""",
            """    with nn.logical_axis_rules(logical_axis_rules):
        for batch in strategy.distribute_dataset(batches(config, num_steps)):
            state, metrics = step(state, batch)
            history.append(jax.device_get(metrics))
    return (history, state.params), step, (state, batch)
""",
        ),
    ],
    "equinox_gpt": [
        ("import equinox as eqx\n", "import distjax as dj\nimport equinox as eqx\n"),
        (
            'mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))\n',
            'strategy = dj.MirroredStrategy(axis_name="data", model_axes={"model": 2})\n'
            "mesh = strategy.mesh\n",
        ),
        (
            """    @functools.partial(eqx.filter_jit, donate="all")
    def step(model, opt_state, x, y):
""",
            """    @functools.partial(strategy.jit, donate_argnums=(0, 1))
    def step(model, opt_state, x, y):
        x, y = jnp.moveaxis(x, 1, 0), jnp.moveaxis(y, 1, 0)
""",
        ),
        (
            "        updates, opt_state = optimizer.update(grad, opt_state, params)\n",
            '        grad, losses = dj.get_replica_context().all_reduce("mean", (grad, losses))\n'
            "        updates, opt_state = optimizer.update(grad, opt_state, params)\n",
        ),
        (  # rows first, so that the batch is split over the replicas
            "        yield data[ix], data[ix + 1]\n",
            "        yield data[ix].swapaxes(0, 1), data[ix + 1].swapaxes(0, 1)\n",
        ),
        (
            """    data_sharding = NamedSharding(mesh, P(None, "data"))
    losses = []
    for x, y in batches(config, num_steps):
        x, y = jax.device_put((x, y), data_sharding)
""",
            """    losses = []
    for x, y in strategy.distribute_dataset(batches(config, num_steps)):
""",
        ),
    ],
}


def source_of(name: str) -> str:
    """Returns the published file."""
    return (PUBLISHED / f"{name}.py").read_text()


def port_of(name: str) -> str:
    """Returns the file with its lines exchanged."""
    text = source_of(name)
    for old, new in CHANGES[name]:
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new, 1)
    return text


def changed_lines(name: str) -> int:
    """Returns how many lines the port removes, adds or changes."""
    texts = source_of(name).splitlines(), port_of(name).splitlines()
    opcodes = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    return sum(max(j - i, n - m) for tag, i, j, m, n in opcodes if tag != "equal")


def load(text: str) -> types.ModuleType:
    """Returns the module of a file."""
    module = types.ModuleType("published")
    exec(compile(text, "published", "exec"), module.__dict__)
    return module


def memory_of(step, args, strategy=None) -> tuple[int, int]:
    """Returns the bytes of arguments on one device, and the temporary bytes of a step there."""
    if strategy is None:
        compiled = step.lower(*args).compile()
        found = getattr(compiled, "compiled", compiled).memory_analysis()  # of Equinox
        temporary = found.temp_size_in_bytes
    else:
        is_compiled = isinstance(step, type(dj.jit(len)))
        found = dj.explain(step, *args, strategy=None if is_compiled else strategy).memory
        temporary = found.temporary_bytes
    leaves = [x for x in jax.tree.leaves(args) if eqx.is_array(x)]
    first = jax.devices()[0]
    held = (s.data.nbytes for x in leaves for s in x.addressable_shards if s.device == first)
    return sum(held), temporary


def main() -> None:
    """Prints file, lines, changed lines, the largest difference, and memory on a device."""
    print("| file | lines | changed | largest difference | arguments, temporary | published |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in CHANGES:
        module = load(port_of(name))
        found, *of_port = module.main(3)
        expected, *of_source = load(source_of(name)).main(3)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        worst = max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in pairs)
        memory = memory_of(*of_port, module.strategy), memory_of(*of_source)
        print(
            f"| {name} | {len(source_of(name).splitlines())} | {changed_lines(name)} | "
            f"{worst:.1e} | {memory[0]} | {memory[1]} |",
            flush=True,
        )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
