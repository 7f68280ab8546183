"""One function, called by several threads at once in any order: no step is lost or made twice.

The threads meet at the start only. What they write commutes (integers are added), so that the
variables end as numpy says, whoever comes first, and each call returns what it alone computed.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import distjax as dj
from tests.laws.drawing import AS_IT_COMES, NAMES, drawn
from tests.laws.scripts import FIRST, MEAN, ON_READ, SUM, Between, Call, Script
from tests.own_threads import in_threads

pytestmark = [
    pytest.mark.usefixtures("switch_often"),
    pytest.mark.filterwarnings("ignore::distjax.errors.LocalityWarning"),
    pytest.mark.filterwarnings("ignore::distjax.errors.RecompilationWarning"),
]

STRATEGIES = {
    "one_device": dj.OneDeviceStrategy,
    "mirrored2": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual3": lambda: dj.VirtualStrategy(3),
    "parameters2": lambda: dj.ShardedStrategy(
        jax.devices()[:2], partition="parameters", min_split_bytes=0
    ),
    "central2": lambda: dj.CentralStorageStrategy(jax.devices()[:2]),
}
COMBINED = {SUM: np.sum, MEAN: np.mean, FIRST: lambda values: values[0]}
#: What the modes that commute write, of what each replica is given.
WRITTEN = {"add": lambda x: x, "sub": lambda x: -x, "loop": lambda x: 2 * x + 1}


# -- the model ------------------------------------------------------------------------


def given_to(call, num_replicas):
    """Returns what the replicas compute of the argument, [R]."""
    x = np.full(num_replicas, call.amount)
    if call.kind == "per_replica":
        x = x + np.arange(num_replicas)
    return x * call.factor * (1 if call.kind in ("int", "float") else call.size)


def change(item, name, v):
    """Returns what an item adds to the components of a variable, [R] (times 1, 2, 3, ...)."""
    R = v.strategy.num_replicas_in_sync
    if isinstance(item, Between):
        if item.what == "evaluate" or item.what != "train" and item.name != name:
            return np.zeros(R)
        if item.what != "train":
            return np.full(R, item.amount)
        written = np.full(R, item.amount)
    elif name not in item.names:
        return np.zeros(R)
    elif item.mode == "update":
        return np.full(R, -given_to(item, R).sum())
    else:
        written = WRITTEN[item.mode](given_to(item, R))
    return written if v.synchronization is ON_READ else np.full(R, COMBINED[v.aggregation](written))


def assert_all_is_written(script, before, items):
    """Asserts that each component is what it was, and all changes."""
    found = script.look()
    for name, v in script.variables.items():
        added = sum(change(item, name, v) for item in items)
        for old, new, factor in zip(before[name][1], found[name][1], added, strict=False):
            np.testing.assert_allclose(new, old + factor * np.arange(1, 7), 1e-6, err_msg=name)


# -- the law --------------------------------------------------------------------------


def do_all(script, items):
    """Returns the results of items, done one after another."""
    results = []
    for item in items:
        try:
            results.append(script.do(item))
        except BaseException as error:
            error.add_note(f"at item {len(results)} of {items}")
            raise
    return results


def replay(strategy, sequences):
    """Runs sequences at once; asserts that each item was done once, and by itself."""
    script = Script(strategy, {}, dj.jit)
    before = script.look()
    works = [functools.partial(do_all, script, items) for items in sequences]
    results = in_threads(*works)
    for items, returned in zip(sequences, results, strict=True):
        assert len(items) == len(returned)
        for item, result in zip(items, returned, strict=True):
            if isinstance(item, Call):
                result = result if item.road == "run" else result[0]
                wanted = given_to(item, strategy.num_replicas_in_sync)
                assert np.ravel(strategy.local_results(result["total"])).tolist() == wanted.tolist()
    assert_all_is_written(script, before, [item for items in sequences for item in items])
    script.look_at_held()


def threads(names):
    """Returns what draws a sequence for each of two or three threads."""
    calls = st.builds(
        Call,
        road=st.sampled_from(["run", "jit"]),
        mode=st.sampled_from([*WRITTEN, "update"]),
        names=names,
        kind=st.sampled_from(["int", "array", "per_replica"]),
        size=st.integers(1, 2),
        amount=st.integers(-2, 3),
    )
    others = st.builds(
        Between,
        what=st.sampled_from(["assign_add", "evaluate", "train"]),
        name=st.sampled_from([name for name in NAMES if name != "seen"]),
        amount=st.integers(-2, 3),
    )
    items = st.lists(st.one_of(calls, calls, others), min_size=3, max_size=5)
    return st.lists(items, min_size=2, max_size=3)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_threads_in_any_order(kind):
    """Every call touches all variables: programs are built once."""

    @drawn(2, list(STRATEGIES).index(kind))
    @given(threads(st.just(NAMES)))
    def law(sequences):
        replay(STRATEGIES[kind](), sequences)

    law()


@pytest.mark.parametrize("kind", ["mirrored2", "virtual3"])
def test_threads_that_bring_variables(kind):
    """Each call may touch variables that its program has not met yet."""
    begin = [
        [Call("run", "add", (first,)), Call("run", "add", (second,), size=2)]
        for first, second in zip(NAMES[:3], NAMES[3:], strict=True)
    ]

    @drawn(3, 0, **AS_IT_COMES)
    @given(
        threads(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True).map(tuple))
    )
    def law(sequences):
        items = (sequences * 2)[:3]
        replay(STRATEGIES[kind](), [[*a, *b] for a, b in zip(begin, items, strict=True)])

    law()
