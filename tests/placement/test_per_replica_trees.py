"""A PerReplica in trees: what is still a value per replica, and what is none (decision 20)."""

import copy
import operator

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

import distjax as dj
from distjax.errors import LocalityError
from tests.replicas import ids, local, per_replica

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def tree(pair):
    """A tree as a step returns it: rows of a vector, and a scalar of each replica."""
    return {"x": pair.per_replica(ROWS), "loss": ids(pair)}


def is_wrapped(tree):
    return jax.tree.map(dj.is_per_replica, tree, is_leaf=dj.is_per_replica)


# -- idioms of published loops ------------------------------------------------------


def test_unreplicate_gives_the_rows_of_the_first_replica(pair, tree, how):
    first = how(lambda tree: jax.tree.map(lambda x: x[0], tree))(tree)
    assert is_wrapped(first) == {"x": False, "loss": False}
    assert first["x"].tolist() == [0, 1, 2] and float(first["loss"]) == 0
    doubled = pair.run(lambda tree: jax.tree.map(lambda x: 2 * x, tree), args=(first,))
    assert doubled["x"].tolist() == [0, 2, 4]


def test_the_mean_of_metrics_is_a_number(pair, tree, how):
    mean = how(lambda tree: jax.tree.map(jnp.mean, tree))(tree)
    assert {k: float(x) for k, x in mean.items()} == {"x": 2.5, "loss": 0.5}
    assert float(pair.reduce("mean", mean["x"])) == 2.5


def test_floats_are_values_and_come_out_bare(tree):
    assert jax.tree.map(lambda x: float(x.mean()), tree) == {"x": 2.5, "loss": 0.5}
    assert jax.tree.map(lambda x: complex(x.mean()), tree["x"]) == 2.5


def test_metrics_of_several_steps_are_stacked(tree):
    stacked = jax.tree.map(lambda *steps: np.stack(steps), tree, tree, tree)
    assert stacked["x"].shape == (3, 2, 3) and stacked["loss"].shape == (3, 2)


def test_the_replicas_rows_end_to_end_are_no_value_per_replica(pair, tree):
    flat = jax.tree.map(lambda x: x.reshape(-1), tree)
    assert is_wrapped(flat) == {"x": False, "loss": True}  # [R] is a scalar on each replica
    assert flat["x"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [np.float16, np.int32, bool])
def test_the_dtype_may_change(pair, tree, dtype):
    cast = jax.tree.map(lambda x: x.astype(dtype), tree)
    assert all(is_wrapped(cast).values()) and cast["x"].dtype == dtype
    assert local(pair, cast["x"]) == ROWS.astype(dtype).tolist()


# -- what is no value -----------------------------------------------------------------


DESCRIPTIONS = {
    "sharding": lambda x: x.sharding,
    "spec": lambda x: jax.sharding.PartitionSpec("replica"),
    "axis": lambda x: 0,
    "mask": lambda x: x.ndim > 1,
    "name": lambda x: "name",
    "None": lambda x: None,
    "abstract": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    "restore": lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_of_each_leaf_stays_in_its_place(tree, name):
    described = jax.tree.map(DESCRIPTIONS[name], tree)
    assert is_wrapped(described) == {"x": True, "loss": True}
    assert described["x"].aux == tree["x"].aux and described["x"].shape == (3,)
    assert repr(described["x"]).startswith("PerReplica(R=2, ")


def test_descriptions_are_used_beside_the_tree(pair, tree):
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    for placed in (
        jax.device_put(jax.device_get(tree), shardings),
        jax.tree.map(jax.device_put, jax.device_get(tree), shardings),
        jax.jit(lambda tree: tree, out_shardings=shardings)(tree),
        jax.jit(lambda tree: tree, in_shardings=(shardings,))(tree),
    ):
        assert local(pair, placed["x"]) == ROWS.tolist()
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)


NO_ARRAY = {
    "reduce": (lambda s, x: s.reduce("sum", x), LocalityError, "the value to reduce"),
    "local_results": (lambda s, x: s.local_results(x), LocalityError, "local_results"),
    "per_replica": (lambda s, x: s.per_replica(x), LocalityError, "per_replica: the value"),
    "first": (lambda s, x: s.first(x), LocalityError, "first: the value"),
    "operator": (lambda s, x: operator.add(x, 1), TypeError, "an operator"),
}


@pytest.mark.parametrize("name", NO_ARRAY)
def test_what_holds_no_array_is_refused_where_a_value_is_needed(pair, tree, name):
    use, error, where = NO_ARRAY[name]
    count = jax.tree.map(lambda x: int(x.sum()), tree)["x"]
    with pytest.raises(error) as info:
        use(pair, count)
    assert str(info.value) == (
        f"{where} needs one array [R, ...] of a value per replica.\n"
        "  Got: a PerReplica that holds no array: int (15).\n"
        "  Why: jax.tree.map leaves in its place what a function gives for the array of a "
        "PerReplica, if it is neither an array nor a float.\n"
        "  Fix: take it out: jax.tree.leaves(x)[0]"
    )


def test_what_holds_no_array_is_copied_and_shown(tree):
    name = jax.tree.map(lambda x: "name", tree["x"])
    assert jax.tree.leaves(jax.tree.map(lambda x: x, name)) == ["name"]
    assert name._repr_html_() == "<code>PerReplica(R=2, name)</code>"
    copied = copy.deepcopy(name)
    assert (copied.stacked, copied.shape) == ("name", (3,))


# -- equality of trees ----------------------------------------------------------------


def test_trees_are_equal_where_the_replicas_and_shapes_are(pair):
    structure = lambda rows: jax.tree.structure(pair.per_replica(rows))
    assert structure(ROWS) == structure(ROWS.astype(np.int32))
    assert hash(structure(ROWS)) == hash(structure(ROWS + 1))
    assert structure(ROWS) != structure(ROWS[:, :2])
    other = dj.MirroredStrategy(jax.devices()[2:4])
    assert structure(ROWS) != jax.tree.structure(other.per_replica(ROWS))


def test_mapping_over_values_of_two_shapes_is_an_error_of_jax(pair):
    with pytest.raises(ValueError, match="metadata"):
        jax.tree.map(jnp.multiply, pair.per_replica(ROWS), ids(pair))


def test_a_tree_of_rows_does_not_fit_the_tree_of_values(tree):
    first = jax.tree.map(lambda x: x[0], tree)
    with pytest.raises(ValueError, match="different types"):
        jax.tree.map(jnp.add, tree, first)


def test_equal_treedefs_share_a_program(pair):
    traces = []
    step = jax.jit(lambda tree: traces.append(1) or jax.tree.map(lambda x: x + 1, tree))
    for start in (0, 1, 2):
        assert local(pair, step(pair.per_replica(ROWS + start))) == (ROWS + start + 1).tolist()
    step(pair.per_replica(ROWS[:, :2]))
    assert len(traces) == 2


# -- transformations -------------------------------------------------------------------


def test_vmap_sees_the_value_of_one_replica_and_gives_rows(pair, tree):
    seen = []
    out = jax.vmap(lambda tree: seen.append(is_wrapped(tree)) or tree)(tree)
    assert seen == [{"x": False, "loss": False}]
    assert isinstance(out["x"], jax.Array) and out["x"].tolist() == ROWS.tolist()
    assert local(pair, pair.per_replica(out)["x"]) == ROWS.tolist()


def test_vmap_beside_a_whole_value(tree):
    batched = jax.vmap(lambda tree, i: tree, in_axes=(None, 0))(tree, jnp.arange(4))
    assert batched["x"].shape == (4, 2, 3) and isinstance(batched["x"], jax.Array)
    axes = jax.tree.map(lambda x: None, tree)
    whole = jax.vmap(lambda tree, i: tree, in_axes=(axes, 0), out_axes=None)(tree, jnp.arange(4))
    assert is_wrapped(whole) == {"x": True, "loss": True}


def test_scan_carries_it_and_stacks_steps(pair, tree):
    step = lambda tree, _: (jax.tree.map(lambda x: x + 1, tree), tree)
    last, steps = jax.lax.scan(step, tree, None, length=3)
    assert local(pair, last["x"]) == (ROWS + 3).tolist()
    assert isinstance(steps["x"], jax.Array) and steps["x"].shape == (3, 2, 3)
    _, rows = jax.lax.scan(lambda carry, x: (carry, is_wrapped(x) or x), None, tree["x"])
    assert rows.shape == (2, 3)


def test_loops_and_branches_give_it_back(pair, tree):
    double = lambda tree: jax.tree.map(lambda x: 2 * x, tree)
    for out in (
        jax.lax.cond(True, double, lambda tree: tree, tree),
        jax.lax.fori_loop(0, 1, lambda _, tree: double(tree), tree),
        jax.checkpoint(double)(tree),
    ):
        assert local(pair, out["x"]) == (2 * ROWS).tolist()


def test_derivatives_have_the_tree_of_the_values(pair, tree):
    loss = lambda tree: (tree["x"].stacked ** 2).sum() + tree["loss"].stacked.sum()
    for gradient in (
        jax.grad(loss)(tree),
        jax.vjp(loss, tree)[1](jnp.float32(1))[0],
        jax.jit(jax.grad(loss))(tree),
    ):
        assert local(pair, gradient["x"]) == (2 * ROWS).tolist()
        assert local(pair, gradient["loss"]) == [1, 1]
    double = lambda tree: jax.tree.map(lambda x: 2 * x, tree)
    _, tangent = jax.jvp(double, (tree,), (tree,))
    assert local(pair, tangent["x"]) == (2 * ROWS).tolist()
    assert float(jax.linearize(loss, tree)[1](tree)) == 2 * float((ROWS**2).sum()) + 1


JACOBIANS = {"jacfwd": jax.jacfwd, "jacrev": jax.jacrev, "hessian": jax.hessian}


@pytest.mark.parametrize("name", JACOBIANS)
def test_a_jacobian_is_taken_of_the_stacked_array(pair, name):
    """Of the PerReplica it is an error of JAX: its columns are no values per replica."""
    x = pair.per_replica(ROWS)
    loss = lambda stacked: (stacked**2).sum()
    with pytest.raises((TypeError, ValueError), match="tree structure|different types"):
        JACOBIANS[name](lambda x: loss(x.stacked))(x)
    found = JACOBIANS[name](loss)(x.stacked)
    expected = 2 * (np.eye(6).reshape(2, 3, 2, 3) if name == "hessian" else ROWS)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
def test_a_jacobian_of_a_function_that_gives_one(pair, name):
    x = pair.per_replica(ROWS)
    with pytest.raises(ValueError, match="tree structure|different types"):
        JACOBIANS[name](lambda w: jax.tree.map(lambda rows: w * rows, x))(2.0)
    np.testing.assert_array_equal(JACOBIANS[name](lambda w: w * x.stacked)(2.0), ROWS)


def test_eval_shape_has_the_tree_of_the_result(pair, tree):
    step = lambda tree: pair.run(lambda tree: {"out": tree["x"].sum(), "x": tree["x"]}, (tree,))
    abstract, result = jax.eval_shape(step, tree), step(tree)
    assert jax.tree.structure(abstract) == jax.tree.structure(result)
    assert jax.tree.leaves(abstract)[0].shape == (2,)


def test_on_the_host_and_back(pair, tree):
    on_host = jax.device_get(tree)
    assert isinstance(on_host["x"].stacked, np.ndarray)
    assert local(pair, on_host["x"]) == ROWS.tolist()
    assert float(pair.reduce("sum", on_host["loss"])) == 1
    assert local(pair, pair.run(lambda x: x + 1, args=(on_host["x"],))) == (ROWS + 1).tolist()
    jax.block_until_ready(tree)


def test_raveled_and_back(pair, tree):
    flat, unravel = ravel_pytree(tree)
    assert flat.shape == (8,)
    assert local(pair, unravel(flat)["x"]) == ROWS.tolist()


def test_keys(pair):
    keys = pair.per_replica(jax.random.split(jax.random.key(0), 2))
    data = jax.tree.map(jax.random.key_data, keys)
    assert np.shape(jax.tree.leaves(data)[0]) == (2, 2)
    assert is_wrapped(jax.tree.map(jnp.copy, keys))


def test_orbax_saves_and_restores_it(pair, tree, tmp_path):
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", abstract)
    assert is_wrapped(restored) == {"x": True, "loss": True}
    assert local(pair, restored["x"]) == ROWS.tolist()


def test_a_layout_of_the_users_own_is_no_other_value(mirrored):
    """A map may lay the rows out in another way: each replica still has its own."""
    x = mirrored.per_replica(ROWS)
    whole = jax.tree.map(lambda rows: jax.device_put(rows, mirrored.extended.topology.mirrored), x)
    assert local(mirrored, whole) == ROWS.tolist()
    assert local(mirrored, mirrored.run(lambda x: x, args=(whole,))) == ROWS.tolist()
    assert np.asarray(mirrored.reduce("sum", whole)).tolist() == ROWS.sum(0).tolist()


# -- laws --------------------------------------------------------------------------------

MAPS = {
    "identity": lambda x: x,
    "add": lambda x: x + 1,
    "cast": lambda x: x > 0,
    "reversed": lambda x: x[::-1],
    "first": lambda x: x[0],
    "mean": jnp.mean,
    "rows": lambda x: x.mean(0),
    "of each": lambda x: x.reshape(x.shape[0], -1).sum(-1),
    "flat": lambda x: x.reshape(-1),
    "transposed": lambda x: x.T,
    "stacked": lambda x: jnp.stack([x, x]),
    "batched": lambda x: x[None],
}


@settings(max_examples=60, deadline=None)
@given(
    num_replicas=st.integers(1, 3),
    shape=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    name=st.sampled_from(sorted(MAPS)),
)
def test_law_an_array_with_the_replicas_in_front_is_wrapped_and_any_other_is_pmaps(
    num_replicas, shape, name
):
    strategy = dj.VirtualStrategy(num_replicas)
    rows = np.arange(np.prod((num_replicas, *shape)), dtype=np.float32)
    x, fn = strategy.per_replica(rows.reshape(num_replicas, *shape)), MAPS[name]
    expected = fn(x.stacked)
    mapped = jax.tree.map(fn, x)
    is_same, others = expected.shape == x.stacked.shape, (*shape, *expected.shape[1:])
    if is_same or num_replicas not in others:
        is_flat_in_front = name == "flat" and np.prod(shape) == 1
        keeps_rows = is_same or name == "of each" or is_flat_in_front
        assert dj.is_per_replica(mapped) == keeps_rows
    (leaf,) = jax.tree.leaves(mapped)
    np.testing.assert_array_equal(leaf, expected)
    in_jit = jax.jit(lambda x: jax.tree.map(fn, x))(x)
    abstract = jax.eval_shape(lambda x: jax.tree.map(fn, x), x)
    assert jax.tree.structure(in_jit) == jax.tree.structure(abstract)
    assert jax.tree.structure(jax.tree.map(lambda leaf: leaf, mapped)) == jax.tree.structure(mapped)
    if num_replicas not in others:  # else the equations tell more than the shape
        assert jax.tree.structure(in_jit) == jax.tree.structure(mapped)


@settings(max_examples=30, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(1, 3), max_size=2).map(tuple), min_size=2, max_size=2))
def test_law_treedefs_are_equal_just_where_the_shapes_are(shapes):
    strategy = dj.VirtualStrategy(2)
    a, b = (jax.tree.structure(per_replica(strategy, [np.ones(s)] * 2)) for s in shapes)
    assert (a == b) == (shapes[0] == shapes[1])
    if a == b:
        assert hash(a) == hash(b)
