"""The table of derivatives on docs/migration/shard_map.md, each cell computed.

Two replicas with x = 1 and x = 3, and the loss w * x. A parameter is equal on both (M), or each has
its own (T).
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import distjax as dj
from tests.drill_mark import all_drills_but

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "migration" / "shard_map.md"
HEADING = "## Derivatives, inside and around"
X = np.array([1.0, 3.0], np.float32)
W = {"M": jnp.float32(1), "T": jnp.ones(2)}
SYSTEMS = ["`strategy.run`", "`jax.pmap`"] + [
    f"`shard_map`, `check_vma={check}`" for check in (False, True)
]


def _table():
    section = PAGE.read_text().split(HEADING)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return head, rows


def _run(body, w, equal):
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    w = w if w.ndim == 0 else strategy.per_replica(w)
    out = strategy.run(body(strategy.axis_name), args=(w, strategy.per_replica(X)))
    if equal:
        assert not dj.is_per_replica(out)
        return out
    return out.stacked if dj.is_per_replica(out) else jnp.stack([out, out])


def _pmap(body, w, equal):
    mapped = jax.pmap(
        body("i"),
        "i",
        in_axes=(0 if w.ndim else None, 0),
        out_axes=None if equal else 0,
        devices=jax.devices()[:2],
    )
    return mapped(w, X)


def _shard_map(check_vma):
    def call(body, w, equal):
        mesh = jax.make_mesh(
            (2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
        )

        def local(w, x):
            out = body("i")(w[0] if w.ndim else w, x[0])
            return out if equal else out[None]

        in_specs = (P("i") if w.ndim else P(), P("i"))
        out_specs = P() if equal else P("i")
        return jax.shard_map(
            local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )(w, X)

    return call


CALLS = dict(zip(SYSTEMS, [_run, _pmap, _shard_map(False), _shard_map(True)], strict=True))


def _loss(axis, reduced):
    if reduced is None:
        return lambda w, x: w * x
    return lambda w, x: reduced(w * x, axis)


def _inside(reduced):
    return lambda call, w: call(lambda axis: jax.grad(_loss(axis, reduced)), w, False)


def _around(reduced):
    def derivative(call, w):
        body = lambda axis: _loss(axis, reduced)
        return jax.grad(lambda w: call(body, w, reduced is not None).sum())(w)

    return derivative


DERIVATIVES = {
    "inside, of the loss": _inside(None),
    "inside, of `psum(loss)`": _inside(lax.psum),
    "inside, of `pmean(loss)`": _inside(lax.pmean),
    "around, losses summed outside": _around(None),
    "around, `pmean(loss)` returned as one value": _around(lax.pmean),
}


def test_the_table_has_each_derivative_of_each_kind():
    head, rows = _table()
    assert head == ["the derivative by w", "w", *SYSTEMS]
    assert [tuple(row[:2]) for row in rows] == [(name, w) for name in DERIVATIVES for w in "MT"]


@pytest.mark.parametrize("system", all_drills_but(SYSTEMS[:2], SYSTEMS))
def test_each_cell_is_what_is_computed(system):
    head, rows = _table()
    for row in rows:
        found = DERIVATIVES[row[0]](CALLS[system], W[row[1]])
        said = [float(number) for number in row[head.index(system)].split(",")]
        expected = said if np.size(found) == len(said) else said * np.size(found)
        np.testing.assert_allclose(found, np.reshape(expected, np.shape(found)), err_msg=f"{row}")
