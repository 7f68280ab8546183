"""The cart and pole of Barto, Sutton and Anderson (1983), in JAX."""

import jax
import jax.numpy as jnp

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH = 9.8, 1.0, 0.1, 0.5  # m/s^2, kg, kg, m
FORCE, SECONDS_PER_STEP = 10.0, 0.02  # N
POSITION_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * jnp.pi / 360  # m, rad
MAX_STEPS = 200


def reset(key: jax.Array, count: int) -> jax.Array:
    """States `[count, 4]` near balance: position, velocity, angle, angular velocity."""
    return jax.random.uniform(key, (count, 4), minval=-0.05, maxval=0.05)


def step(states: jax.Array, pushes_right: jax.Array) -> jax.Array:
    """States `[n, 4]` one time step later, after pushes `[n]` (bool) to the right or the left."""
    position, velocity, angle, spin = states.T
    force = jnp.where(pushes_right, FORCE, -FORCE)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    total_mass = CART_MASS + POLE_MASS
    push = (force + POLE_MASS * HALF_LENGTH * spin**2 * sine) / total_mass
    inertia = HALF_LENGTH * (4 / 3 - POLE_MASS * cosine**2 / total_mass)
    angular_acceleration = (GRAVITY * sine - cosine * push) / inertia
    acceleration = push - POLE_MASS * HALF_LENGTH * angular_acceleration * cosine / total_mass
    changes = jnp.stack([velocity, acceleration, spin, angular_acceleration], axis=1)
    return states + SECONDS_PER_STEP * changes


def is_up(states: jax.Array) -> jax.Array:
    """Whether `[n]` each pole stands and its cart is on the track."""
    return (abs(states[:, 0]) < POSITION_LIMIT) & (abs(states[:, 2]) < ANGLE_LIMIT)
