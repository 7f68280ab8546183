"""Variables in notebooks."""

import jax
import jax.numpy as jnp
import numpy as np

import distjax as dj
from distjax._src.typing import VariableAggregation

ON_READ = dj.VariableSynchronization.ON_READ


def cells(page):
    """Returns the rows of the tables of a page."""
    rows = page.split("<tr>")[1:]
    return [tuple(c.split("</td>")[0] for c in row.split("<td>")[1:]) for row in rows]


def test_a_mirrored_variable(pair):
    with pair.scope():
        w = dj.Variable(jnp.arange(3.0), name="<w>", aggregation=VariableAggregation.MEAN)
    page = w._repr_html_()
    assert "<caption>Variable &#x27;&lt;w&gt;&#x27; float32[3]</caption>" in page
    rows = dict(cells(page))
    assert rows["value"] == "[0. 1. 2.]"
    assert rows["bytes per device"] == "12 B" and rows["aggregation"] == "MEAN"
    assert rows["lives"].startswith("mirrored, ")


def test_components_are_shown_even_where_they_cannot_be_combined(pair):
    with pair.scope():
        c = dj.Variable(0.0, synchronization=ON_READ)
    pair.run(lambda: c.assign_add(dj.get_replica_context().replica_id_in_sync_group * 1.0))
    rows = dict(cells(c._repr_html_()))
    assert (rows["replica 0"], rows["replica 1"]) == ("0.0", "1.0")


def test_host_memory_keys_and_large_values():
    strategy = dj.CentralStorageStrategy(jax.devices()[:2])
    with strategy.scope():
        w, key = dj.Variable(np.arange(1000.0)), dj.Variable(jax.random.key(0))
    rows = dict(cells(w._repr_html_()))
    assert rows["bytes on host"] == "3.9 KiB" and len(rows["value"]) < 80
    assert "value" not in dict(cells(key._repr_html_()))


def test_an_array_keeps_its_lines(pair):
    with pair.scope():
        w = dj.Variable(jnp.zeros((2, 1)))
    page = w._repr_html_()
    assert "<tbody style='white-space:pre-wrap'>" in page
    assert dict(cells(page))["value"] == "[[0.]\n [0.]]"


def test_in_a_trace_it_has_no_value(pair):
    with pair.scope():
        w = dj.Variable(1.0, name="w")
    pages = []
    dj.jit(lambda: pages.append(w._repr_html_()))()
    assert "<td>" not in pages[0] and "Variable(&#x27;w&#x27;" in pages[0]
