"""A small regression, its batch, and what a check says of a step, for tests of `dj.check`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import CheckError, RecompilationWarning
from tests.diagnostics.lines import line_of

#: Also what `num_replicas_in_sync` is, and no other number in these programs.
R = 4
RULE = "numbers that depend on the number of replicas"
_rng = np.random.default_rng(0)
X = _rng.normal(size=(8, 3)).astype(np.float32)
Y = _rng.normal(size=8).astype(np.float32)


def params():
    """Returns new weights."""
    return {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.array(0.1)}


def loss_of(params, x, y):
    """The mean over the rows."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def summed_loss(params, x, y):
    """Each replica's share of the mean over the global batch."""
    return jnp.sum((x @ params["w"] + params["b"] - y) ** 2) / len(X)


def descend(params, grads):
    """Returns the weights after a step."""
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)  # descends


def batch_of(strategy, *arrays):
    """Returns the replicas' rows of arrays, as a training loop gets them."""
    return next(iter(strategy.distribute_dataset([arrays or (X, Y)])))


def is_right(step, *args, **options):
    """Returns whether the check finds nothing, and warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", RecompilationWarning)  # of all checks of one step
        return dj.check(step, *args, **options) is None


def finding_of(step, *args, **options):
    """Returns the one finding of a check."""
    [finding] = findings_of(step, *args, **options)
    return finding


def findings_of(step, *args, **options):
    """Returns the findings of a check that raises."""
    with pytest.raises(CheckError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore", RecompilationWarning)
        dj.check(step, *args, **options)
    return caught.value.findings


def is_at(finding, file, marker):
    """Returns whether a finding names the line of `file` that ends with `# <marker>`."""
    return finding.source.startswith(f"{line_of(file, marker)} ")
