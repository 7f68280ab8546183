"""Names that the examples in docstrings use without importing them."""

import pytest


@pytest.fixture(autouse=True)
def doctest_names(request):
    """Puts the usual names into the namespace of a doctest."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import distjax as dj

    names = {"dj": dj, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
    request.getfixturevalue("doctest_namespace").update(names)
