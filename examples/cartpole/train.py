"""Learns to balance a pole by REINFORCE: many training steps in one compiled loop.

    python examples/cartpole/train.py --strategy mirrored --replicas 8

The data of a step is a seed; each replica plays its own episodes with it, and the gradients of all
replicas are averaged. `run_steps_on_iterator` compiles `--steps-per-call` steps of playing and
learning into one program: Python makes one call for all of them.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cartpole
import distjax as dj

GLOBAL_EPISODES = 64
STRATEGIES = {
    "mirrored": lambda replicas: dj.MirroredStrategy(jax.devices()[:replicas]),
    "virtual": dj.VirtualStrategy,
    "one_device": lambda _: dj.OneDeviceStrategy(),
}


class Policy:
    """Which way to push: a small network in variables, and its optimizer."""

    def __init__(self, seed: int, hidden: int = 32):
        first, second = jax.random.split(jax.random.key(seed))
        kernel = jax.nn.initializers.lecun_normal()
        self.variables = [
            dj.Variable(kernel(first, (4, hidden)), name="hidden/kernel"),
            dj.Variable(jnp.zeros(hidden), name="hidden/bias"),
            dj.Variable(0.01 * kernel(second, (hidden, 1)), name="output/kernel"),
            dj.Variable(jnp.zeros(1), name="output/bias"),
        ]
        self.optimizer = dj.optim.Optimizer(optax.adam(1e-2), "mean")
        self.optimizer.init(self.variables)

    def values(self) -> list[jax.Array]:
        """The parameters as the current context sees them."""
        return [variable.value for variable in self.variables]


def push_right_logits(parameters: list[jax.Array], states: jax.Array) -> jax.Array:
    """Log odds `[...]` of pushing to the right in states `[..., 4]`."""
    hidden_kernel, hidden_bias, kernel, bias = parameters
    hidden = jnp.tanh(states @ hidden_kernel + hidden_bias)
    return (hidden @ kernel + bias)[..., 0]


def play(parameters: list[jax.Array], key: jax.Array, count: int):
    """Plays `count` episodes at once: states `[T, n, 4]`, actions and alive `[T, n]`."""
    start_key, play_key = jax.random.split(key)
    start = cartpole.reset(start_key, count)

    def advance(carry, step_key):
        states, alive = carry
        probability = jax.nn.sigmoid(push_right_logits(parameters, states))
        actions = jax.random.bernoulli(step_key, probability)
        after = cartpole.step(states, actions)
        return (after, alive & cartpole.is_up(after)), (states, actions, alive)

    keys = jax.random.split(play_key, cartpole.MAX_STEPS)
    return jax.lax.scan(advance, (start, jnp.ones(count, bool)), keys)[1]


def surrogate_loss(parameters, states, actions, alive) -> jax.Array:
    """Minus the log probability of each action, times its advantage over the mean episode."""
    steps_to_go = jnp.cumsum(alive[::-1], axis=0)[::-1].astype(jnp.float32)
    usual = steps_to_go.sum(1, keepdims=True) / jnp.maximum(alive.sum(1, keepdims=True), 1)
    advantages = jnp.where(alive, steps_to_go - usual, 0.0)
    signs = jnp.where(actions, 1.0, -1.0)
    log_probabilities = jax.nn.log_sigmoid(signs * push_right_logits(parameters, states))
    return -(advantages * log_probabilities).sum(0).mean()


class Trainer:
    """The policy, and one replica's part of a training step."""

    def __init__(self, strategy: dj.Strategy, seed: int):
        self.strategy = strategy
        self.num_episodes = GLOBAL_EPISODES // strategy.num_replicas_in_sync
        self.policy = Policy(seed)

    def replica_step(self, seed: jax.Array) -> jax.Array:
        """In replica context: plays and learns; returns the mean length of its episodes."""
        key = dj.get_replica_context().fold_in(jax.random.key(seed[0]))
        parameters = self.policy.values()
        states, actions, alive = play(parameters, key, self.num_episodes)
        gradients = jax.grad(surrogate_loss)(parameters, states, actions, alive)
        self.policy.optimizer.apply_gradients(zip(gradients, self.policy.variables, strict=True))
        return alive.sum(0).mean()

    def step(self, context: dj.MultiStepContext, seed) -> None:
        """In cross-replica context: one step of the compiled loop."""
        length = self.strategy.run(self.replica_step, args=(seed,))
        context.set_last_step_output("length", length, "mean")


def seeds(num_steps: int):
    """The data: the seed of each step, repeated as a batch that is split over the replicas."""
    for step in range(num_steps):
        yield np.full(GLOBAL_EPISODES, step, np.uint32)


def main() -> None:
    """Trains; prints the mean length of episodes after each call."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="mirrored")
    parser.add_argument("--replicas", type=int, default=8, help="must divide 64 (8)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (100)")
    parser.add_argument("--steps-per-call", type=int, default=10, help="K (10)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.replicas < 1 or GLOBAL_EPISODES % options.replicas:
        parser.error(f"--replicas {options.replicas} does not divide {GLOBAL_EPISODES} episodes")
    if options.steps < 1:
        parser.error("--steps needs to be 1 or more")
    jax.config.update("jax_num_cpu_devices", options.replicas)  # no effect on other platforms
    strategy = STRATEGIES[options.strategy](options.replicas)
    with strategy.scope():
        trainer = Trainer(strategy, options.seed)
        data = iter(strategy.distribute_dataset(list(seeds(options.steps))))
        steps = 0
        while steps < options.steps:
            done = strategy.extended.run_steps_on_iterator(
                trainer.step, data, options.steps_per_call
            )
            steps += done.iterations  # may be fewer at the end of the data
            length = float(done.last_step_outputs["length"])
            print(f"step {steps}: the pole stays up for {length:.1f} time steps")
    print(f"{options.strategy}: {length:.1f} of {cartpole.MAX_STEPS} time steps")


if __name__ == "__main__":
    main()
