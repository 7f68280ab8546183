"""The table of all primitives is whole, and the analysis does what it says."""

import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.experimental.hijax as hijax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax._src.replica import analysis
from tests.replica import primitives

AXIS = "replica"

LISTED = """
import gc, importlib, importlib.util, sys
import jax.extend.core, jax.experimental.hijax as hijax
for module in sys.argv[1].split():
    importlib.import_module(module)
for module in sys.argv[2].split():
    if importlib.util.find_spec(module):
        importlib.import_module(module)
def below(cls):
    return {cls}.union(*map(below, cls.__subclasses__()))
print(*{p.name for p in gc.get_objects() if isinstance(p, jax.extend.core.Primitive)})
base = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive
print(*{c.__name__ for c in below(base) - {base}})
"""


@pytest.fixture(scope="module")
def listed():
    """The names of all primitives, and of the classes of those that are objects."""
    modules = " ".join(primitives.MODULES), " ".join(primitives.OPTIONAL_MODULES)
    child = subprocess.run(
        [sys.executable, "-c", LISTED, *modules],
        cwd=pathlib.Path(dj.__file__).parents[1],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return [set(line.split()) for line in child.stdout.splitlines()]


def test_every_primitive_has_a_rule(listed):
    known = [name for rule in primitives.RULES for name in rule.names]
    assert len(known) == len(set(known)), "a primitive with two rules"
    assert len(listed[0]) > 390, "the enumeration has lost most of them"
    assert listed[0] - set(known) == set(), "primitives that the table does not know"


def test_every_class_of_jax_that_is_a_primitive_has_a_rule(listed):
    known = analysis.HI_PRIMITIVES | primitives.HI_PRIMITIVES_WITH_JAXPRS
    assert listed[1] - known - primitives.OTHER_HI_PRIMITIVES == set()


def proofs(name, differs, effects=(), **params):
    """Returns what is proved of the two results of a made-up equation with two operands."""
    var = lambda: types.SimpleNamespace(aval=jax.core.ShapedArray((), np.float32))
    eqn = types.SimpleNamespace(
        primitive=types.SimpleNamespace(name=name),
        params=params,
        effects=effects,
        source_info=types.SimpleNamespace(name_stack=""),
        invars=[var(), var()],
        outvars=[var(), var()],
    )
    return analysis.Analysis(AXIS).outputs_of(eqn, differs)


def names_of(rule):
    """Returns the names that one rule of the table holds."""
    return next(sorted(r.names) for r in primitives.RULES if r.name == rule)


def test_functions_of_their_operands():
    for name in [*names_of("functions of their operands"), "a primitive that nobody knows"]:
        assert proofs(name, [False, False]) == [False, False], name
        assert proofs(name, [False, True]) == [True, True], name


def test_each_operand_comes_out_as_it_went_in():
    for name in names_of("each operand"):
        assert proofs(name, [False, True]) == [False, True], name


def test_collectives():
    groups = {"axis_index_groups": [[0], [1]]}
    for key in ("axes", "axis_name"):
        for axes in (AXIS, (AXIS,), ("other", AXIS)):
            for name in names_of("equalizing collectives"):
                assert proofs(name, [True, True], **{key: axes}) == [False, False], name
                assert proofs(name, [True, True], **{key: axes}, **groups) == [True, True], name
            for name in names_of("other collectives"):
                assert proofs(name, [False, False], **{key: axes}) == [True, True], name


def test_a_collective_of_another_axis_is_a_function_of_its_operands():
    assert proofs("psum", [False, True], axes=("other",)) == [True, True]


@pytest.mark.parametrize("name", ["not functions", "effects and references"])
def test_sources_of_difference(name):
    effects = () if name == "not functions" else ("an effect",)
    for primitive in names_of(name):
        assert proofs(primitive, [False, False], effects) == [True, True], primitive


def test_a_primitive_that_nobody_knows_with_an_inner_source():
    draws = jax.make_jaxpr(lambda: lax.rng_uniform(0.0, 1.0, ()))()
    within = jax.make_jaxpr(lambda: jax.jit(lambda: lax.rng_uniform(0.0, 1.0, ()))())()
    pure = jax.make_jaxpr(lambda: jnp.sin(1.0))()
    for jaxpr, differs in ((draws, True), (within, True), (pure, False)):
        assert proofs("nobody knows", [False, False], body=jaxpr) == [differs, differs]


_HiPrim = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


class OwnNumber(_HiPrim):
    """A user's primitive: no jaxpr shows that it asks for the replica's number."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return x + lax.axis_index(AXIS)


def test_what_a_users_primitive_object_runs_is_not_known():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    out = strategy.run(lambda w: OwnNumber(jax.typeof(w))(w), args=(np.float32(1),))
    assert isinstance(out, dj.PerReplica)
    assert [float(x) for x in strategy.local_results(out)] == [1, 2]


def test_jaxs_own_primitive_objects_are_functions(pair):
    edges = jnp.arange(3.0)
    out = pair.run(lambda w: jnp.searchsorted(edges, w), args=(np.float32(1.5),))
    assert isinstance(out, jax.Array) and int(out) == 2


def test_a_forward_derivative_of_a_function_with_a_vjp_is_jaxs_error(pair):
    """Its equation (custom_lin) holds no jaxpr, and JAX refuses it when it is lowered."""
    double = jax.custom_vjp(lambda x: 2 * x)
    double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    with pytest.raises(TypeError, match="forward-mode autodiff .* custom_vjp"):
        pair.run(lambda x: jax.jvp(double, (x,), (x,))[1], args=(np.float32(1),))
