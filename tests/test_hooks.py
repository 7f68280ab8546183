"""Events: layers hear all of them, others those of their thread, and none of a trace for shapes."""

import threading

import jax.numpy as jnp
import pytest

import distjax as dj
from distjax._src import hooks


@pytest.fixture
def event():
    return hooks.Event()


def test_a_layer_hears_before_those_that_listen(event):
    heard = []
    event.append(lambda what: heard.append(("layer", what)))
    with hooks.listening((event, lambda what: heard.append(("listener", what)))):
        hooks.tell(event, 1)
    hooks.tell(event, 2)
    assert heard == [("layer", 1), ("listener", 1), ("layer", 2)]


def test_other_threads_are_not_listened_to(event):
    heard = []
    with hooks.listening((event, heard.append)):
        thread = threading.Thread(target=hooks.tell, args=(event, "elsewhere"))
        thread.start()
        thread.join()
        hooks.tell(event, "here")
    assert heard == ["here"]


def test_a_trace_for_shapes_is_heard_by_layers_and_by_those_that_begin_in_it(event):
    outer, inner, layer = [], [], []
    event.append(layer.append)
    with hooks.listening((event, outer.append)), hooks.only_shapes():
        hooks.tell(event, 1)
        with hooks.listening((event, inner.append)):
            hooks.tell(event, 2)
    assert (outer, inner, layer) == ([], [2], [1, 2])


def test_a_dry_run_is_one_also_in_its_traces_for_shapes(event):
    with hooks.listening(is_dry_run=True):
        with hooks.only_shapes(), hooks.listening((event, print)):
            assert hooks.is_dry_run()
    assert not hooks.is_dry_run()


def test_answers_are_those_that_are_not_none(event):
    event.extend([lambda: None, lambda: 0, lambda: "one"])
    assert hooks.tell(event) == [0, "one"]


def test_launches_are_counted_by_a_watcher(pair, monkeypatch):
    launches = []
    watcher = hooks.Watcher(end=lambda returned: launches.append(returned is not None))
    monkeypatch.setattr(hooks, "watchers", hooks.Event([lambda build: watcher]))
    fn = lambda x: dj.get_replica_context().all_reduce("sum", x)
    for n in range(3):
        pair.run(fn, args=(jnp.float32(n),))
    assert launches == [True] * 3
