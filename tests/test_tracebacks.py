"""Where errors and warnings point: at the user's lines."""

import subprocess
import sys
import traceback
import warnings

import jax
import jax.numpy as jnp
import pytest

import distjax as dj


def step(x):
    return inner(x)


def inner(x):
    return x + undefined  # noqa: F821


def train(strategy):
    return strategy.run(step, args=(jnp.ones(2),))


def names_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_lines_of_an_error_in_a_step(strategy):
    with pytest.raises(NameError) as caught:
        train(strategy)
    assert names_of(caught.value)[1:] == ["train", "run", "step", "inner"]


def test_lines_of_an_error_in_a_step_in_dj_jit(strategy):
    with pytest.raises(NameError) as caught:
        dj.jit(train)(strategy)
    assert names_of(caught.value)[1:] == ["__call__", "train", "step", "inner"]


def test_lines_of_an_error_of_distjax():
    strategy = dj.VirtualStrategy(2)
    with strategy.scope():
        v = dj.Variable(0.0, name="v")

    def writes(x):
        v.assign(x)

    with pytest.raises(dj.errors.AggregationError) as caught:
        strategy.run(writes, args=(1.0,))
    assert names_of(caught.value)[1:] == ["run", "writes"]


def test_lines_of_an_error_in_a_step_that_is_examined(strategy):
    with pytest.raises(NameError) as caught:
        dj.check(step, jnp.ones(2), strategy=strategy, rules_only=True)
    names = names_of(caught.value)[1:]
    assert names == ["check", "_check_by_rules", "lower_step", "lower", "step", "inner"]


@pytest.mark.xfail(strict=True, reason="the frames of the check are kept")
def test_lines_of_an_error_in_a_step_that_is_checked(strategy):
    with pytest.raises(NameError) as caught:
        dj.check(step, jnp.ones(2), strategy=strategy)
    names = names_of(caught.value)
    assert names[1] == "check" and names[-2:] == ["step", "inner"] and len(names) < 9


def test_lines_of_an_error_in_a_closure():
    with dj.Coordinator(dj.ParameterServerStrategy(1)) as coordinator:
        with pytest.raises(NameError) as caught:
            coordinator.schedule(step, args=(jnp.ones(2),))
    assert names_of(caught.value)[1:] == ["schedule", "step", "inner"]


def test_all_lines_when_jax_is_asked_for_them():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(NameError) as caught:
            train(dj.VirtualStrategy(2))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    names = names_of(caught.value)
    assert names[-2:] == ["step", "inner"] and "trace_replica" in names


PROMPTS = ["<stdin>", "<ipython-input-1-0123>", "<python-input-3>", "<doctest t[0]>", "file.py"]


@pytest.mark.parametrize("name", PROMPTS)
def test_a_warning_points_at_what_is_typed_at_a_prompt(name):
    source = "strategy.run(lambda state, x: {'w': state['w'] + x}, args=({'w': 0.0}, x))"
    strategy = dj.VirtualStrategy(2)
    x = strategy.distribute_values_from_function(lambda context: jnp.float32(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(source, name, "exec"), {"strategy": strategy, "x": x})
    (warning,) = caught
    assert warning.category is dj.errors.LocalityWarning and warning.filename == name


def test_lines_of_python_minus_c():
    """The user's code is in "<string>" there, as is what dataclasses generate."""
    source = """if True:
        import sys
        from distjax._src import user_lines
        def step():
            return user_lines.is_library_code(sys._getframe().f_code)
        names = "step", "Model.__call__", "__create_fn__.<locals>.__init__", "__new__"
        print(step(), *(user_lines.is_library_file("<string>", name) for name in names))
    """
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False", "False", "True", "True"], result.stderr
