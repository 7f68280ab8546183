"""Six whole training files do under `dj.pmap` what they do under `jax.pmap`."""

import functools
import warnings

import jax
import numpy as np
import pytest

import distjax as dj
from tests.drill_mark import all_drills_but
from tests.migration import ports

NUM_STEPS = 5


@pytest.mark.parametrize(
    "name",
    all_drills_but(["imagenet_linen", "mnist_mlp", "mcmc", "evolution"], ports.CHANGES),
)
def test_a_published_file_computes_the_same(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", dj.errors.LocalityWarning)
        found = ports.run(ports.port_of(name), NUM_STEPS)
    expected = ports.run(ports.source_of(name), NUM_STEPS)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (np.shape(x), np.asarray(x).dtype) == (np.shape(y), np.asarray(y).dtype)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ports.CHANGES)
def test_a_port_changes_three_lines_at_most(name):
    assert 2 <= ports.changed_lines(name) <= 3
    assert "dj.pmap" in ports.port_of(name) and "distjax" not in ports.source_of(name)


@pytest.mark.parametrize("name", ["imagenet_linen", "evolution"])
def test_its_steps_break_no_rule_under_run(name, monkeypatch):
    """Of the others the test below asks it, too."""
    checked = check_steps(name, monkeypatch, rules_only=True)
    assert set(checked) >= STEPS[name]


# Not `evolution`: its noise, of [a, -a], pairs with other rows for one replica.
@pytest.mark.parametrize(
    "name", all_drills_but(["mnist_mlp"], ["mnist_mlp", "ppo", "mcmc", "self_supervised"])
)
def test_its_steps_compute_the_same_for_one_replica(name, monkeypatch):
    assert set(check_steps(name, monkeypatch)) >= STEPS[name]


def test_a_batch_norm_of_each_replica_s_own_rows_is_named(monkeypatch):
    """As published: that the statistics differ is meant, and weights differ then, too."""
    with pytest.raises(dj.errors.CheckError) as caught:
        check_steps("imagenet_linen", monkeypatch)
    lines = ports.source_of("imagenet_linen").splitlines()
    found = [f for f in caught.value.findings if f.level == "error"]
    numbers = {int(f.source.removeprefix("published:").split()[0]) for f in found}
    assert any("norm" in lines[number - 1] for number in numbers)


def check_steps(name, monkeypatch, **options):
    """Returns the names of the steps of a file, of which each was checked and is right."""
    checked = []
    check = functools.partial(checking_pmap, jax.pmap, checked, check_options=options)
    monkeypatch.setattr(jax, "pmap", check)
    ports.run(ports.source_of(name), 1)
    return checked


STEPS = {
    "imagenet_linen": {"train_step", "eval_step", "<lambda>"},
    "mnist_mlp": {"update", "evaluate"},
    "ppo": {"update_step"},
    "mcmc": {"sample"},
    "self_supervised": {"update_fn"},
    "evolution": {"generation"},
}


def checking_pmap(
    pmap,
    checked,
    fn,
    axis_name=None,
    *,
    in_axes=0,
    static_broadcasted_argnums=(),
    check_options,
    **options,
):
    """Maps a function, and checks it at its first call as it would be run."""
    strategy = dj.MirroredStrategy(axis_name=axis_name)
    static = {static_broadcasted_argnums} - {()}
    mapped = pmap(
        fn,
        axis_name,
        in_axes=in_axes,
        static_broadcasted_argnums=static_broadcasted_argnums,
        **options,
    )

    def call(*args):
        if fn.__name__ not in checked:
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            axes += (None,) * (len(args) - len(axes))
            given = [
                dj.static(arg) if i in static else arg if axis is None else without_axis(arg)
                for i, (arg, axis) in enumerate(zip(args, axes, strict=True))
            ]
            given = map(expecting, given)
            assert dj.check(fn, *given, strategy=strategy, **check_options) is None
            checked.append(fn.__name__)
        return mapped(*args)

    def without_axis(tree):
        return jax.tree.map(lambda x: x[0] if is_equal(x) else strategy.per_replica(x), tree)

    return call


def is_equal(rows):
    """Returns whether all rows are the same: they become one value under `run`."""
    is_key = jax.dtypes.issubdtype(rows.dtype, jax.dtypes.prng_key)
    rows = np.asarray(jax.random.key_data(rows) if is_key else rows)
    return bool((rows == rows[:1]).all())


def expecting(arg):
    """Returns the argument, with what differs by design marked."""
    if not hasattr(arg, "batch_stats"):
        return arg
    reason = "each replica has statistics of its own"
    return arg.replace(batch_stats=dj.expect(reason, differs=arg.batch_stats))
