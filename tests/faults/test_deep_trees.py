"""Trees as deep as `jax.jit` takes them are arguments and results here too."""

import jax
import jax.numpy as jnp
import pytest

import distjax as dj
from tests.own_threads import in_own_thread

DEPTH = 900


def nested(leaf):
    """Returns a leaf in DEPTH lists."""
    for _ in range(DEPTH):
        leaf = [leaf]
    return leaf


def added(tree):
    return jax.tree.map(lambda x: x + 1, tree)


CALLS = {
    "jax": lambda strategy, tree: jax.jit(added)(tree),
    "jit": lambda strategy, tree: dj.jit(added)(tree),
    "run": lambda strategy, tree: strategy.run(added, args=(tree,)),
    "run_in_jit": lambda strategy, tree: dj.jit(lambda t: strategy.run(added, args=(t,)))(tree),
    "merge": lambda strategy, tree: strategy.run(
        lambda t: dj.get_replica_context().merge_call(lambda _, t: added(t), args=(t,)), (tree,)
    ),
}


@pytest.mark.parametrize("how", CALLS)
def test_a_deep_tree_is_an_argument_and_a_result(pair, how):
    # The stack of a thread is as deep as that of a program of its own, not of pytest.
    result = in_own_thread(lambda: CALLS[how](pair, nested(jnp.float32(1))))
    (leaf,) = jax.tree.leaves(result)
    assert float(leaf) == 2
    assert jax.tree.structure(result) == jax.tree.structure(nested(0))
