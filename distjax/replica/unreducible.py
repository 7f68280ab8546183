"""Values whose sum or mean over the replicas is meaningless, by the tag of their facts."""

from __future__ import annotations

from distjax.context.reporting import LOCAL_VARIANCES

_MEAN_FIX = "grads = dj.get_replica_context().all_reduce('mean', grads)"

#: Tags of functions of several examples; of a single one, they are a measurement of it.
OF_EXAMPLES = frozenset(("ratio", "curved", "variance"))

#: By tag: the rule's name, what a reduction needs, what came, why, and the fix.
UNREDUCIBLE = {
    "scattered": (
        "shards reduced again",
        "the same elements on every replica",
        "a second reduction of shards (each replica holds another, already reduced),",
        "rows of different replicas are mixed",
        "dj.flax.apply_gradients(optimizer, model, grads) of the gradients as they are: it "
        "reduces what is not reduced yet",
    ),
    "chosen": (
        "one replica's part alone",
        "what every replica found",
        "a reduction that keeps one replica's value and drops the others,",
        "the other replicas' examples do not count",
        "ctx.all_reduce('sum', total) / ctx.all_reduce('sum', count), of every replica's own",
    ),
    "clipped": (
        "clipped before the reduction",
        "gradients as they are, to clip or normalize afterwards",
        "a reduction of clipped or normalized gradients (Adam's updates are)",
        "each replica clips by its own gradient, and the mean of clipped gradients is not the "
        "clipped mean",
        f"{_MEAN_FIX}, then clip or update; in an optax chain dj.optim.reduce_gradients() comes "
        "first",
    ),
    "norm": (
        "the norm of local gradients",
        "values that add up",
        "a reduction of norms of local gradients",
        "the mean of the replicas' norms is larger than the norm of the mean gradient",
        f"{_MEAN_FIX}; norm = optax.global_norm(grads)",
    ),
    "ratio": (
        "averaged over local counts",
        "a sum, and the count to divide it by",
        "a reduction of quotients by a local count",
        "replicas that count fewer examples weigh as much as others",
        "ctx = dj.get_replica_context(); ctx.all_reduce('sum', total) / ctx.all_reduce('sum', "
        "count); for a loss dj.losses.average_loss(losses, mask)",
    ),
    "curved": (
        "a function of local means averaged",
        "the mean itself",
        "a reduction of a function (exp, log, sqrt, a quotient) of local means",
        "the mean of the replicas' perplexities is not the perplexity of the mean loss",
        "loss = ctx.all_reduce('mean', loss); perplexity = jnp.exp(loss)",
    ),
    "variance": (
        LOCAL_VARIANCES,
        "moments about zero",
        "a reduction of variances about local means",
        "the spread between the replicas' means is lost",
        "mean, square = ctx.all_reduce('mean', (jnp.mean(x, 0), jnp.mean(x**2, 0))); "
        "variance = square - mean**2",
    ),
}
