"""What processes compare of an element, as text."""

import jax
import numpy as np

from distjax._src.cluster.data import describe_elements
from distjax._src.data.elements import HostTree


def describe(static):
    structure = jax.tree.structure(jax.tree_util.Partial(static, 1.0))
    leaves = [np.ones((1, 4, 2), np.float32)]
    return describe_elements(HostTree(structure, leaves), is_own=False)


def test_functions_in_an_element_are_known_by_their_names():
    """Not by their addresses, which differ between processes."""
    double, same = [lambda x: 2 * x for _ in range(2)]
    assert str(double) != str(same)
    assert describe(double) == describe(same) != describe(np.abs)
