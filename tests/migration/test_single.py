"""Five files for one device, ported: `dj.check` passes them, and no hasty port of them."""

import jax
import numpy as np
import pytest

import distjax as dj
from tests.drill_mark import all_drills_but
from tests.migration import single_ports as ports
from tests.migration.sharded_ports import load

Compiled = type(dj.jit(len))
#: Without random numbers of each replica's own: the numbers are those of one device.
EQUAL = ("adversarial", "dpsgd", "graphs")


@pytest.fixture
def checked(monkeypatch):
    """Names of the compiled steps that were checked, each at its first call."""
    found, call = [], Compiled.__call__

    def checking(step, *args):
        if step.__name__ not in found:
            found.append(step.__name__)
            assert dj.check(step, *args) is None
        return call(step, *args)

    monkeypatch.setattr(Compiled, "__call__", checking)
    return found


@pytest.mark.parametrize("name", all_drills_but(["dpsgd", "diffusion"], ports.CHANGES))
def test_a_port_is_right(name, checked):
    found = load(ports.port_of(name)).main(2)
    assert checked == ["make_step" if name == "diffusion" else "train_step"]
    if name not in EQUAL:
        return
    expected = load(ports.source_of(name)).main(2)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", all_drills_but(["dpsgd"], ports.WRONG))
@pytest.mark.filterwarnings("ignore::distjax.errors.ReductionWarning")
def test_a_hasty_port_is_not(name, checked):
    text = ports.wrong_port_of(name)
    with pytest.raises(dj.errors.CheckError) as caught:
        load(text).main(1)
    [found] = [f for f in caught.value.findings if f.level == "error"]
    number = int(found.source.removeprefix("published:").split()[0])
    assert LINES[name] in text.splitlines()[number - 1]
    assert FIXES.get(name, "") in found.text


#: In the line that is named.
LINES = {
    "vae": "random.normal",
    "dpsgd": "all_reduce",
    "graphs": "jnp.sum(mask)",
}
#: In the fix, where the check has more than advice.
FIXES = {"vae": "fold_in(key)", "graphs": "the mean over the replicas of what"}
