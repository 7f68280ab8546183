"""Training files as they are published for one device, and what their ports change.

The files are written anew, each after the form of a public program; they are whole and know nothing
of distjax. `WRONG` has what a hasty port leaves out.
"""

import pathlib

PUBLISHED = pathlib.Path(__file__).parent / "single"
_IMPORT = ("import jax\n", "import distjax as dj\nimport jax\n")
_STEP = (
    "@jax.jit\ndef train_step",
    "strategy = dj.MirroredStrategy()\n\n\n@strategy.jit\ndef train_step",
)
_DATA = ("in batches(num_steps)", "in strategy.distribute_dataset(batches(num_steps))")

#: Per file: (what stands there, what it becomes).
CHANGES = {
    "vae": [
        _IMPORT,
        _STEP,
        (
            "    def loss_fn(params):",
            "    context = dj.get_replica_context()\n"
            "    z_rng = context.fold_in(z_rng)\n\n"
            "    def loss_fn(params):",
        ),
        (
            "    return state.apply_gradients(grads=grads), loss",
            '    loss, grads = context.all_reduce("mean", (loss, grads))\n'
            "    return state.apply_gradients(grads=grads), loss",
        ),
        _DATA,
    ],
    "dpsgd": [
        _IMPORT,
        _STEP,
        (  # each is clipped, so all are needed
            "    updates, opt_state = tx",
            "    grads = dj.get_replica_context().all_gather(grads, axis=0)\n"
            "    updates, opt_state = tx",
        ),
        _DATA,
        (
            "return test_step(params, batch)",
            'return strategy.reduce("mean", strategy.run(test_step, args=(params, batch)))',
        ),
    ],
    "adversarial": [
        _IMPORT,
        _STEP,
        (
            "    updates, opt_state = opt",
            '    grads = dj.get_replica_context().all_reduce("mean", grads)\n'
            "    updates, opt_state = opt",
        ),
        _DATA,
        (
            "return dataset_stats(params, batch)",
            'return strategy.reduce("mean", strategy.run(dataset_stats, args=(params, batch)))',
        ),
    ],
    "diffusion": [
        _IMPORT,
        (  # times are spread over the rows of all replicas
            "    batch_size = data.shape[0]\n    tkey, losskey = jr.split(key)",
            "    context, rows = dj.get_replica_context(), data.shape[0]\n"
            "    batch_size = context.num_replicas_in_sync * rows\n"
            "    tkey, losskey = jr.split(context.fold_in(key))",
        ),
        ("jr.split(losskey, batch_size)", "jr.split(losskey, rows)"),
        ("(batch_size,), minval", "(rows,), minval"),
        (
            "jnp.arange(batch_size)",
            "(context.replica_id_in_sync_group * rows + jnp.arange(rows))",
        ),
        ("@eqx.filter_jit\n", "strategy = dj.MirroredStrategy()\n\n\n@strategy.jit\n"),
        (
            "    updates, opt_state = opt",
            '    loss, grads = dj.get_replica_context().all_reduce("mean", (loss, grads))\n'
            "    updates, opt_state = opt",
        ),
        _DATA,
    ],
    "graphs": [
        _IMPORT,
        _STEP,
        (
            "jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask), logits",
            "dj.losses.average_loss(losses, mask), logits",
        ),
        (
            "    state = state.apply_gradients(grads=grads)\n",
            "    context = dj.get_replica_context()\n"
            '    state = state.apply_gradients(grads=context.all_reduce("sum", grads))\n',
        ),
        (
            '    return state, {"loss": loss, "hits": hits, "count": jnp.sum(mask)}',
            '    metrics = {"loss": loss, "hits": hits, "count": jnp.sum(mask)}\n'
            '    return state, context.all_reduce("sum", metrics)',
        ),
        _DATA,
    ],
}

#: Per file: in the port (what stands there, what a hasty port has). None of `diffusion`, where the
#: time of a row depends on its position: where the order of rows counts, differences do not.
WRONG = {
    "vae": ("    z_rng = context.fold_in(z_rng)\n", ""),
    "dpsgd": (
        "    grads = dj.get_replica_context().all_gather(grads, axis=0)\n",
        '    grads = dj.get_replica_context().all_reduce("mean", grads)\n',
    ),
    "graphs": (
        "dj.losses.average_loss(losses, mask)",
        "jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask) / context.num_replicas_in_sync",
    ),
}


def source_of(name: str) -> str:
    """Returns the published file."""
    return (PUBLISHED / f"{name}.py").read_text()


def port_of(name: str) -> str:
    """Returns the file with its lines exchanged."""
    return _exchanged(source_of(name), CHANGES[name])


def wrong_port_of(name: str) -> str:
    """Returns a port with a mistake."""
    text = port_of(name)
    if name == "graphs":  # the context is made before
        moved = "    context = dj.get_replica_context()\n"
        text = text.replace(moved, "", 1).replace("    def loss_fn", f"{moved}\n    def loss_fn", 1)
    return _exchanged(text, [WRONG[name]])


def _exchanged(text: str, changes: list[tuple[str, str]]) -> str:
    for old, new in changes:
        assert old in text, f"there is no {old!r}"
        text = text.replace(old, new, 1)
    return text
