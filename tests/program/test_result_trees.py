"""What a function returns comes back as the same tree, from the first call and from later ones."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import distjax as dj


class Pair(NamedTuple):
    first: jax.Array
    second: object


@jax.tree_util.register_pytree_node_class
class Box:
    """A node of its own class: JAX runs its Python to build it."""

    def __init__(self, inside):
        self.inside = inside

    def tree_flatten(self):
        return (self.inside,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def __eq__(self, other):
        return type(other) is Box and self.inside == other.inside


TREES = {
    "an array": lambda x: x,
    "None": lambda x: None,
    "nothing in it": lambda x: ((), [], {}, None),
    "built-in nodes": lambda x: {"b": [x, (x + 1, None)], "a": {"z": x, "k": x}},
    "a named tuple": lambda x: Pair(x, [x]),
    "an ordered dict": lambda x: collections.OrderedDict(b=x, a=x),
    "a default dict": lambda x: collections.defaultdict(list, b=x, a=[x]),
    "a class": lambda x: [Box(x), x],
    "Python objects": lambda x: {"name": "loss", "value": x, "n": None},
    "one array twice": lambda x: [x, x],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes"])
@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_results_keep_their_tree(strategy, make, writes):
    with strategy.scope():
        seen = dj.Variable(0, aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA, name="seen")

    def step(x):
        if writes:
            seen.assign_add(1)
        return make(x)

    x = jnp.float32(3)
    jitted = dj.jit(step)
    for run in (lambda: strategy.run(step, args=(x,)), lambda: jitted(x)):
        for _ in range(3):
            found, expected = run(), make(x)
            assert isinstance(found, jax.Array) or type(found) is type(expected)
            assert as_numbers(found) == as_numbers(expected)


def as_numbers(tree):
    return jax.tree.map(lambda leaf: float(leaf) if isinstance(leaf, jax.Array) else leaf, tree)
