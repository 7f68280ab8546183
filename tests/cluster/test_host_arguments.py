"""Which arguments of a call are looked at, and that any change of one is seen."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from distjax._src.cluster.programs import checksum


class Pair:
    """A node that tells JAX its leaves, and no names."""

    def __init__(self, *pair):
        self.pair = pair


jax.tree_util.register_pytree_node(Pair, lambda p: (p.pair, None), lambda _, pair: Pair(*pair))


class Named:
    """A node whose name of a leaf is no attribute."""

    def __init__(self, leaf):
        self._leaf = leaf


def flatten_named(node):
    return ((jax.tree_util.GetAttrKey("leaf"), node._leaf),), None


jax.tree_util.register_pytree_with_keys(Named, flatten_named, lambda _, leaves: Named(*leaves))


class Computed(Named):
    """A node whose name of a leaf is an attribute that computes."""

    @property
    def leaf(self):
        raise DeprecationWarning("as nnx.Variable.value says it")


jax.tree_util.register_pytree_with_keys(
    Computed, flatten_named, lambda _, leaves: Computed(*leaves)
)


def checksum_of(*args, **kwargs):
    return checksum((args, kwargs))


#: Pairs of calls that have to differ.
OTHERS = {
    "float": ((0.5,), (0.25,)),
    "int": ((1,), (2,)),
    "bool": ((True,), (False,)),
    "complex": ((1j,), (2j,)),
    "NaN": ((float("nan"),), (0.0,)),
    "numpy number": ((np.float32(1),), (np.float32(2),)),
    "bfloat16": ((ml_dtypes.bfloat16(1),), (ml_dtypes.bfloat16(2),)),
    "array": ((np.arange(1024.0, dtype="f"),), (np.arange(1.0, 1025.0, dtype="f"),)),
    "array of bfloat16": ((np.ones(3, jnp.bfloat16),), (np.zeros(3, jnp.bfloat16),)),
    "columns": ((np.eye(4)[:, :2],), (np.eye(4)[:, 2:],)),
    "in a tree": (({"a": (jnp.ones(2), 1.0)},), ({"a": (jnp.ones(2), 2.0)},)),
    "in a node without names": ((Pair(jnp.ones(2), 1.0),), (Pair(jnp.ones(2), 2.0),)),
    "under a name that is no attribute": ((Named(1.0),), (Named(2.0),)),
    "under a name that is a property": ((Computed(1.0),), (Computed(2.0),)),
    "swapped": ((1.0, 2.0), (2.0, 1.0)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_value_is_another_checksum(what):
    one, other = OTHERS[what]
    assert checksum_of(*one) == checksum_of(*one)
    assert checksum_of(*one) != checksum_of(*other)
    assert checksum_of(jnp.ones(1), x=one) != checksum_of(jnp.ones(1), x=other)


@pytest.mark.parametrize(
    "args", [(jnp.ones(3),), (np.zeros(1025, np.float32),)], ids=["device", "large"]
)
def test_what_is_not_looked_at(args):
    """Arrays of devices are not read, and large ones are compared at the first call only."""
    assert checksum_of(*args) == 0
