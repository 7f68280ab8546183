"""One function in several modes, called in any order: as the reference interpreter has it.

Every other test calls a function in one mode first. These call one function object with modes,
shapes, static values and sets of variables mixed, through `run` and `dj.jit`, between writes and
reads by other code; some calls raise. After each item its result and every variable are those of
the reference interpreter, and no array that the script has held has changed. After a call that
raised nothing has. `LAW_EXAMPLES` draws more: see `drawing`.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given

import distjax as dj
from tests.drill_mark import all_drills_but
from tests.laws.drawing import (
    AS_IT_COMES,
    EXAMPLES,
    drawn,
    runnable,
    sequences,
    sizes,
)
from tests.laws.scripts import Call, Script

pytestmark = [
    pytest.mark.filterwarnings("ignore::distjax.errors.LocalityWarning"),
    pytest.mark.filterwarnings("ignore::distjax.errors.RecompilationWarning"),
]

STRATEGIES = {
    "default": dj.get_strategy,
    "one_device": dj.OneDeviceStrategy,
    "mirrored2": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "mirrored3": lambda: dj.MirroredStrategy(jax.devices()[:3]),
    "virtual2": lambda: dj.VirtualStrategy(2),
    "virtual3": lambda: dj.VirtualStrategy(3),
    "parameters2": lambda: dj.ShardedStrategy(
        jax.devices()[:2], partition="parameters", min_split_bytes=0
    ),
    "parameters3": lambda: dj.ShardedStrategy(
        jax.devices()[:3], partition="parameters", min_split_bytes=0
    ),
    "central2": lambda: dj.CentralStorageStrategy(jax.devices()[:2]),
}
OTHER_COUNTS = ("mirrored3", "virtual2", "parameters3")


def replay(strategy, items, by_size):
    """Runs the items under `strategy` and under the reference, and compares after each."""
    tested = Script(strategy, by_size, dj.jit)
    reference = Script(
        dj.testing.ReferenceStrategy(strategy.num_replicas_in_sync), by_size, jit=None
    )
    for number, item in enumerate(items):
        try:
            if item.raises:
                with pytest.raises(item.error, match=item.mode):
                    tested.do(item)
            else:
                found, wanted = tested.do(item), reference.do(item)
                assert_same_result(strategy, found, reference.strategy, wanted)
            wanted = reference.look()
            assert_same_state(tested.look(wanted), wanted)
            tested.look_at_held()
        except BaseException as error:
            error.add_note(f"at item {number}: {item}")
            raise


def assert_same_result(strategy, found, reference, wanted):
    """Asserts that two results have one tree and, on each replica, the same values."""
    (ours, our_tree), (theirs, their_tree) = leaves(strategy, found), leaves(reference, wanted)
    assert our_tree == their_tree
    for x, y in zip(ours, theirs, strict=True):
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            assert_close(x, y, "the result")
        else:
            assert x == y and type(x) is type(y)


def leaves(strategy, tree):
    """Returns the leaves and the tree; arrays as one of all replicas."""
    flat, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, dj.PerReplica))
    shared = strategy.num_replicas_in_sync

    def leaf(x):
        if not isinstance(x, (jax.Array, dj.PerReplica)):
            return x
        rows = list(map(np.asarray, strategy.local_results(x)))
        return np.stack(rows if len(rows) == shared else rows * shared)

    return [leaf(x) for x in flat], treedef


def assert_same_state(found, wanted):
    """Asserts that variables have one value and the same components (or one for all)."""
    for name, (value, components) in wanted.items():
        assert_close(found[name][0], value, f"the value of {name}")
        assert_close(found[name][1], components[: len(found[name][1])], f"components of {name}")


def assert_close(found, wanted, what):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=what)


#: One of each kind; `make laws` draws for all of them.
KINDS = [kind for kind in STRATEGIES if EXAMPLES or kind not in OTHER_COUNTS]


@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_any_order(kind):
    @drawn(3, list(STRATEGIES).index(kind))
    @given(sequences(), sizes())
    def law(items, by_size):
        strategy = STRATEGIES[kind]()
        items = runnable(items, kind == "default")
        replay(strategy, items, by_size)

    law()


#: Where a family of calls that meets a known fault is drawn.
PLACES = [("default", "jit"), ("mirrored2", "run"), ("virtual2", "run"), ("parameters2", "jit")]


@pytest.mark.parametrize("kind, road", all_drills_but(PLACES[2:], PLACES))
def test_a_later_call_brings_an_object(kind, road):
    """The first call of a program has arrays only."""
    begin = [Call(road, None), Call(road, "add", ("sum",))]
    draw_after(begin, kind)


@pytest.mark.parametrize("kind, road", all_drills_but(PLACES[2:], PLACES))
def test_a_call_that_makes_a_variable_raises(kind, road):
    """The variable is made by the next call."""
    begin = [Call(road, "eval"), Call(road, "raise_later"), Call(road, "later")]
    draw_after(begin, kind)


def draw_after(begin, kind):
    """Runs the law on sequences that begin so."""

    @drawn(2, 0, **AS_IT_COMES)
    @given(sequences(), sizes())
    def law(items, by_size):
        items = runnable(items, kind == "default")
        replay(STRATEGIES[kind](), [*begin, *items], by_size)

    law()


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_value_of_another_shape_is_reduced_to_a_split_variable(shape):
    """Mode "update" reduces what has the variable's shape, until this holds."""
    split = Script(STRATEGIES["parameters2"](), {}, dj.jit)
    each = lambda context: np.full(shape, 1 + context.replica_id_in_sync_group, np.float32)
    x = split.strategy.distribute_values_from_function(each)
    total = split.strategy.extended.reduce_to("sum", x, split.variables["mean"])
    np.testing.assert_array_equal(total, np.full(shape, 3))
