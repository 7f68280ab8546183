"""Explanation.diff: what is reduced, proved or found in one of two steps only."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.diagnostics.lines import line_of

MEAN = dj.VariableAggregation.MEAN


@pytest.fixture(scope="module")
def two():
    return dj.MirroredStrategy(jax.devices()[:2])


@pytest.fixture(scope="module")
def x(two):
    return two.distribute_values_from_function(
        lambda ctx: np.full(3, ctx.replica_id_in_sync_group, np.float32)
    )


def mean(x):
    return dj.get_replica_context().all_reduce("mean", x)


def forgetful(params, x):
    return {"w": params["w"] - x, "b": params["b"]}  # forgotten


def reducing(params, x):
    return {"w": params["w"] - dj.get_replica_context().all_reduce("mean", x), "b": params["b"]}


PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}


def explained(step, x, two):
    return dj.explain(step, PARAMS, x, strategy=two)


@pytest.fixture(scope="module")
def diff(two, x):
    return explained(forgetful, x, two).diff(explained(reducing, x, two))


def test_what_only_one_step_reduces(diff):
    first, [collective] = diff.reduced
    assert first == () and (collective.kind, collective.result_bytes) == ("all-reduce", 12)
    assert "(reducing)" in collective.source


def test_what_became_equal_and_why(diff):
    [change] = diff.proofs  # the bias is equal in both
    assert (change.path, change.first, change.second) == ("['w']", "T", "M")
    assert change.why_first.startswith("x, a value per replica -> ")
    assert line_of(__file__, "forgotten") in change.why_first
    assert change.why_second.startswith("psum at ")


def test_what_is_found_in_one_step_only(diff):
    [finding], second = diff.findings
    assert finding.rule == "state that comes back different" and second == ()


def test_text_html_and_json(diff):
    text, html = str(diff), diff._repr_html_()
    for caption in ("forgetful -> reducing:", "reduced in the second only:", "found in the first"):
        assert caption in text and caption.replace(">", "&gt;") in html
    assert "reduced in the first only" not in text
    assert json.loads(diff.to_json())["proofs"][0]["path"] == "['w']"


def test_a_step_does_not_differ_from_itself(two, x):
    same = explained(reducing, x, two).diff(explained(reducing, x, two))
    assert same.proofs == () and same.reduced == ((), ())
    assert str(same) == "reducing -> reducing: nothing differs in what is reduced, proved or found"


def test_the_other_way_round(two, x, diff):
    back = explained(reducing, x, two).diff(explained(forgetful, x, two))
    assert back.reduced == diff.reduced[::-1] and back.findings == diff.findings[::-1]
    assert [(c.first, c.second) for c in back.proofs] == [("M", "T")]


def test_results_that_one_step_lacks_and_variables_of_later_runs(two, x):
    with two.scope():
        seen = dj.Variable(
            np.zeros(3, np.float32),
            name="seen",
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=MEAN,
        )

    def write(x):
        seen.assign(x)

    once = lambda x: two.run(lambda x: (x, mean(x)), args=(x,))
    twice = lambda x: (two.run(lambda x: (x,), args=(x,)), two.run(write, args=(x,)))
    found = dj.explain(once, x).diff(dj.explain(twice, x))
    changes = {change.path: (change.first, change.second) for change in found.proofs}
    assert changes == {"[1]": ("M", "-"), "variable 'seen' of run 2": ("-", "T")}


def test_a_prompt_shows_the_text_of_each_report(two, x):
    found = dj.explain(mean, x, strategy=two)
    for report in (found, found.diff(found), two.describe(), dj.visualize(x)):
        assert repr(report) == str(report)
