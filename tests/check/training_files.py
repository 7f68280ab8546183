"""Five training steps, written for R replicas after the form of published ones.

Each function returns a right step and its arguments, but for the batch, which comes first. With
`slip` the step has a mistake that a port makes easily.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

AXIS = "replica"


def digits_with_batch_norm(slip=False):
    """Images, a convolution, a batch norm over all replicas, a TrainState; label smoothing."""
    from flax import linen as nn
    from flax.training import train_state

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Conv(2, (3, 3), use_bias=False)(x)
            name = None if slip else AXIS
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=name)
            x = nn.relu(norm(x)).mean((1, 2))
            x = nn.Dropout(0.25, deterministic=not train)(x)
            return nn.Dense(3)(x)

    class State(train_state.TrainState):
        batch_stats: dict

    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(8, 4, 4, 1)).astype(np.float32), np.arange(8) % 3
    net = Net()
    variables = net.init(jax.random.key(0), images[:1], train=False)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    state = State.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
    )

    def step(images, labels, state, key):
        key = jax.random.fold_in(jax.random.fold_in(key, state.step), lax.axis_index(AXIS))

        def loss_of(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                images,
                train=True,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            targets = optax.smooth_labels(jax.nn.one_hot(labels, 3), 0.1)
            return optax.softmax_cross_entropy(logits, targets).mean(), (logits, updates)

        (loss, (logits, updates)), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        grads, loss = lax.pmean((grads, loss), AXIS)
        statistics = updates["batch_stats"]
        if slip:
            statistics = lax.pmean(statistics, AXIS)
        accuracy = lax.pmean((logits.argmax(-1) == labels).mean(), AXIS)
        state = state.apply_gradients(grads=grads, batch_stats=statistics)
        return state, {"loss": loss, "accuracy": accuracy}

    return step, (images, labels), (state, jax.random.key(1))


def variational_autoencoder(slip=False):
    """An ELBO with noise of each replica's own; free bits of the batch's KL; averaged weights."""
    rng = np.random.default_rng(1)
    images = (rng.random((8, 6)) > 0.5).astype(np.float32)
    draw = lambda *shape: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)
    params = {"encode": draw(6, 4), "decode": draw(2, 6), "bias": draw(6)}
    tx = optax.adamw(1e-2, weight_decay=1e-3)

    def step(images, params, opt_state, average, key):
        key = jax.random.fold_in(key, lax.axis_index(AXIS))

        def loss_of(params):
            mean, log_variance = jnp.split(images @ params["encode"], 2, axis=-1)
            z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
            logits = z @ params["decode"] + params["bias"]
            likelihood = -optax.sigmoid_binary_cross_entropy(logits, images).sum(-1).mean()
            kl = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).mean(0)
            kl = kl if slip else lax.pmean(kl, AXIS)
            return -likelihood + jnp.maximum(kl, 0.05).sum(), likelihood

        (loss, likelihood), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        grads, loss, likelihood = lax.pmean((grads, loss, likelihood), AXIS)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.05)
        return params, opt_state, average, {"loss": loss, "likelihood": likelihood}

    return step, (images,), (params, tx.init(params), params, jax.random.key(2))


def policy_optimization(slip=False):
    """Trajectories, advantages normalized over all replicas, epochs of clipped updates in scans."""
    rng = np.random.default_rng(2)
    observations = rng.normal(size=(8, 5, 3)).astype(np.float32)
    actions = rng.integers(0, 2, (8, 5))
    rewards = rng.normal(size=(8, 5)).astype(np.float32)
    dones = (rng.random((8, 5)) < 0.2).astype(np.float32)
    draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)
    params = {"policy": draw(3, 2), "value": draw(3)}
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))

    def advantages_of(params, observations, rewards, dones):
        values = observations @ params["value"]
        following = jnp.concatenate([values[:, 1:], jnp.zeros_like(values[:, :1])], 1)

        def back(carry, now):
            reward, done, value, after = now
            delta = reward + 0.99 * after * (1 - done) - value
            carry = delta + 0.99 * 0.95 * (1 - done) * carry
            return carry, carry

        by_time = jax.tree.map(jnp.transpose, (rewards, dones, values, following))
        _, found = lax.scan(back, jnp.zeros(len(rewards)), by_time, reverse=True)
        return found.T, found.T + values

    def step(observations, actions, rewards, dones, params, opt_state):
        advantages, targets = advantages_of(params, observations, rewards, dones)
        over_all = (lambda x: x) if slip else lambda x: lax.pmean(x, AXIS)
        mean = over_all(advantages.mean())
        variance = over_all(((advantages - mean) ** 2).mean())
        advantages = (advantages - mean) * lax.rsqrt(variance + 1e-8)
        log_probs = lambda params: jnp.take_along_axis(
            jax.nn.log_softmax(observations @ params["policy"]), actions[..., None], -1
        )[..., 0]
        old = lax.stop_gradient(log_probs(params))

        def loss_of(params):
            ratio = jnp.exp(log_probs(params) - old)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            gain = jnp.minimum(ratio * advantages, clipped * advantages).mean()
            error = ((observations @ params["value"] - targets) ** 2).mean()
            probs = jax.nn.softmax(observations @ params["policy"])
            entropy = -(probs * jnp.log(probs)).sum(-1).mean()
            return -gain + 0.5 * error - 0.01 * entropy

        def epoch(carry, _):
            params, opt_state = carry
            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, opt_state = tx.update(lax.pmean(grads, AXIS), opt_state)
            return (optax.apply_updates(params, updates), opt_state), lax.pmean(loss, AXIS)

        (params, opt_state), losses = lax.scan(epoch, (params, opt_state), None, length=2)
        return params, opt_state, losses

    return step, (observations, actions, rewards, dones), (params, tx.init(params))


def language_model(slip=False):
    """A causal attention block, a mask of tokens, smoothed labels, accumulation in a scan."""
    rng = np.random.default_rng(3)
    words, width, length = 7, 4, 5
    tokens = rng.integers(1, words, (16, length + 1))
    for row, used in enumerate(rng.integers(2, length + 2, 16)):
        tokens[row, used:] = 0
    draw = lambda *shape: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)
    params = {
        "embed": draw(words, width),
        "position": draw(length, width),
        "qkv": draw(width, 3 * width),
        "out": draw(width, width),
        "scale": jnp.ones(width),
    }
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def apply(params, tokens):
        x = params["embed"][tokens] + params["position"]
        normed = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        q, k, v = jnp.split(normed * params["scale"] @ params["qkv"], 3, -1)
        weights = jnp.einsum("btd,bsd->bts", q, k) / jnp.sqrt(1.0 * width)
        weights = jnp.where(jnp.tril(jnp.ones((length, length), bool)), weights, -1e9)
        x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(weights), v) @ params["out"]
        return x @ params["embed"].T

    def step(tokens, params, opt_state):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = (targets != 0).astype(jnp.float32)
        count = mask.sum() if slip else lax.psum(mask.sum(), AXIS)

        def loss_of(params, inputs, targets, mask):
            labels = optax.smooth_labels(jax.nn.one_hot(targets, words), 0.1)
            losses = optax.softmax_cross_entropy(apply(params, inputs), labels)
            return (losses * mask).sum() / count

        halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), (inputs, targets, mask))

        def accumulate(total, half):
            found = jax.value_and_grad(loss_of)(params, *half)
            return jax.tree.map(jnp.add, total, found), None

        zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = lax.scan(accumulate, zero, halves)
        reduce = lax.pmean if slip else lax.psum
        loss, grads = reduce((loss, grads), AXIS)
        updates, opt_state = tx.update(grads, opt_state, params)
        perplexity = jnp.exp(loss)
        return optax.apply_updates(params, updates), opt_state, {"perplexity": perplexity}

    return step, (tokens,), (params, tx.init(params))


def adversarial_networks(slip=False):
    """Two networks in turn, noise of each replica's own, a gradient penalty, spectral power."""
    rng = np.random.default_rng(4)
    images = rng.normal(size=(8, 5)).astype(np.float32)
    draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)
    generator, critic = {"w": draw(3, 5), "b": draw(5)}, {"w": draw(5, 4), "v": draw(4)}
    tx = optax.adam(1e-2, b1=0.5)

    def judge(critic, x):
        return jax.nn.leaky_relu(x @ critic["w"]) @ critic["v"]

    def generate(generator, z):
        return jnp.tanh(z @ generator["w"] + generator["b"])

    def step(images, generator, critic, states, key):
        own = jax.random.fold_in(key, lax.axis_index(AXIS))
        for_critic, mixing, for_generator = jax.random.split(own, 3)
        fake = generate(generator, jax.random.normal(for_critic, (len(images), 3)))
        part = jax.random.uniform(mixing, (len(images), 1))

        def critic_loss(critic):
            mixed = part * images + (1 - part) * fake
            slopes = jax.vmap(jax.grad(judge, 1), (None, 0))(critic, mixed)
            norms = jnp.sqrt((slopes**2).sum(-1) + 1e-8)
            gap = judge(critic, fake).mean() - judge(critic, images).mean()
            return gap + 10 * ((norms - 1) ** 2).mean()

        loss_c, grads = jax.value_and_grad(critic_loss)(critic)
        grads = lax.psum(grads, AXIS) if slip else lax.pmean(grads, AXIS)
        updates, state_c = optax.sgd(1e-2).update(grads, states[0])
        critic = optax.apply_updates(critic, updates)
        z = jax.random.normal(for_generator, (len(images), 3))
        generator_loss = lambda g: -judge(critic, generate(g, z)).mean()
        loss_g, grads = jax.value_and_grad(generator_loss)(generator)
        updates, state_g = tx.update(lax.pmean(grads, AXIS), states[1])
        generator = optax.apply_updates(generator, updates)
        losses = lax.pmean({"critic": loss_c, "generator": loss_g}, AXIS)
        return generator, critic, (state_c, state_g), losses

    states = optax.sgd(1e-2).init(critic), tx.init(generator)
    return step, (images,), (generator, critic, states, jax.random.key(5))


FILES = [
    digits_with_batch_norm,
    variational_autoencoder,
    policy_optimization,
    language_model,
    adversarial_networks,
]
