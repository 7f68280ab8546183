"""A perceptron and an optimizer of its own, split over a mesh by metadata of NNX.

After the form of Flax's `examples/nnx_toy_examples/10_fsdp_and_optimizer.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


@dataclasses.dataclass(frozen=True)
class MeshRules:
    embed: str | None = None
    mlp: str | None = None

    def __call__(self, *keys):
        return tuple(getattr(self, key) for key in keys)


mesh_rules = MeshRules(mlp="model")


class MLP(nnx.Module):
    def __init__(self, din, dmid, dout, rngs):
        init = nnx.initializers.lecun_normal()
        self.w1 = nnx.Param(
            init(rngs.params(), (din, dmid)), out_sharding=mesh_rules("embed", "mlp")
        )
        self.b1 = nnx.Param(jnp.zeros((dmid,)), out_sharding=mesh_rules("mlp"))
        self.w2 = nnx.Param(
            init(rngs.params(), (dmid, dout)), out_sharding=mesh_rules("embed", "mlp")
        )

    def __call__(self, x):
        return nnx.relu(x @ self.w1 + self.b1) @ self.w2


class SGDState(nnx.Variable):
    pass


class SGD(nnx.Pytree):
    def __init__(self, params, lr, decay=0.9):
        def init_optimizer_state(variable):
            return SGDState(jnp.zeros_like(variable[...]), **variable.get_metadata())

        self.lr = lr
        self.params = nnx.data(params)
        self.momentum = nnx.data(
            jax.tree.map(
                init_optimizer_state, params, is_leaf=lambda x: isinstance(x, nnx.Variable)
            )
        )
        self.decay = decay

    def update(self, grads):
        def update_fn(params, momentum, grad):
            momentum[...] = self.decay * momentum[...] + (1 - self.decay) * grad[...]
            params[...] -= self.lr * momentum[...]

        is_variable = lambda x: isinstance(x, nnx.Variable)
        jax.tree.map(update_fn, self.params, self.momentum, grads, is_leaf=is_variable)


@nnx.jit
def create_model():
    model = MLP(1, 32, 1, rngs=nnx.Rngs(0))
    return model, SGD(nnx.variables(model, nnx.Param), 0.1, decay=0.9)


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((y - model(x)) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(grads)
    return loss


def dataset(batch_size, num_steps):
    random = np.random.default_rng(0)
    xs = np.linspace(-2, 2, 100, dtype=np.float32)[:, None]
    ys = 0.8 * xs**2 + 0.1 + random.normal(0, 0.1, xs.shape).astype(np.float32)
    for _ in range(num_steps):
        idx = random.choice(len(xs), size=batch_size)
        yield xs[idx], ys[idx]


def main(num_steps):
    with jax.set_mesh(mesh):
        model, optimizer = create_model()
    losses = []
    for x, y in dataset(batch_size=32, num_steps=num_steps):
        x, y = jax.device_put((x, y), NamedSharding(mesh, P("data")))
        losses.append(train_step(model, optimizer, x, y))
    found = losses, nnx.to_pure_dict(nnx.state((model, optimizer)))
    return found, train_step, (model, optimizer, x, y)
