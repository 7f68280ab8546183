"""`dj.launch.notebook_launcher`: a function in fresh processes."""

import sys

import cloudpickle
import pytest

import distjax as dj

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("processes of a notebook")]


class Mine(Exception):
    pass


@pytest.fixture
def by_value():
    """Functions of this module go as those of a notebook do."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_results_of_a_closure(capsys, by_value):
    offset = 3

    def total(x):
        import jax

        print("hello")
        strategy = dj.MultiWorkerMirroredStrategy()
        reduced = strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 1.0))
        return jax.process_index(), float(reduced) + x + offset

    results = dj.launch.notebook_launcher(total, (10,), 2, devices_per_process=2)
    assert results == [(0, 17.0), (1, 17.0)]
    said = capsys.readouterr().out.splitlines()
    assert {"[0] hello", "[1] hello"} <= set(said)  # gloo may add pieces of a line of its own


def test_the_first_error_has_its_class(by_value):
    def fail():
        import jax

        if jax.process_index() == 1:
            raise Mine("no")
        strategy = dj.MultiWorkerMirroredStrategy()
        one = lambda: dj.get_replica_context().all_reduce("sum", 1.0)
        while True:
            float(strategy.run(one))

    with pytest.raises(Exception) as raised:
        dj.launch.notebook_launcher(fail)
    assert type(raised.value).__name__ == "Mine" and str(raised.value) == "no"
    (note,) = raised.value.__notes__
    assert note.startswith("raised in process 1:\nTraceback") and "Mine: no" in note


def test_a_process_that_ends(by_value):
    with pytest.raises(RuntimeError) as raised:
        dj.launch.notebook_launcher(lambda: __import__("os")._exit(9), processes=1)
    text = str(raised.value)
    assert text.startswith("process 0 of notebook_launcher needs to return.\n  Got: exit code 9.")
    assert "Why: exit code 9, without an error" in text and "Fix: look at what it said" in text


def test_too_long(by_value):
    wait = lambda: __import__("threading").Event().wait()
    with pytest.raises(TimeoutError) as raised:
        dj.launch.notebook_launcher(wait, processes=1, timeout=1)
    text = str(raised.value)
    assert text.startswith("<lambda> needs to return within 1 s.\n  Got: 1 processes that run on")
    assert "Fix: notebook_launcher(..., timeout=600)" in text


def test_what_is_refused(monkeypatch):
    with pytest.raises(TypeError, match="notebook_launcher needs a function.\n  Got: int"):
        dj.launch.notebook_launcher(3)
    with pytest.raises(ValueError, match="processes needs an int of 1"):
        dj.launch.notebook_launcher(print, processes=0)
    with pytest.raises(ValueError, match="devices_per_process needs an int of 1"):
        dj.launch.notebook_launcher(print, devices_per_process=0)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="notebook_launcher needs cloudpickle") as raised:
        dj.launch.notebook_launcher(print)
    assert "Fix: pip install 'distjax[launch]'" in str(raised.value)
