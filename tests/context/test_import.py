"""`import distjax` starts no backend and imports no optional library."""

import subprocess
import sys

import pytest

OPTIONAL = [
    "flax",
    "orbax",
    "optax",
    "tensorflow",
    "chex",
    "grain",
    "torch",
    "tensorboardX",
    "tqdm",
]

PROGRAM = """
import sys
import distjax as dj
from jax._src import xla_bridge  # noqa: TID251
def backends():
    return sorted(xla_bridge._backends)
assert backends() == [], backends()
assert dj.get_strategy().num_replicas_in_sync == 1
assert not dj.has_strategy() and not dj.in_cross_replica_context()
assert dj.get_replica_context().replica_id_in_sync_group == 0
with dj.get_strategy().scope():
    repr(dj.get_strategy())
dj.jit(lambda x: x)
assert backends() == [], backends()
found = sorted({m.partition(".")[0] for m in sys.modules} & set(sys.argv[1:]))
print("imported:", *found)
dj.VirtualStrategy(2)
assert backends() == ["cpu"], backends()  # the question can be answered with yes
"""


@pytest.fixture(scope="module")
def answer():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *OPTIONAL], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_starts_no_backend(answer):
    assert answer.startswith("imported:")


def test_import_brings_no_optional_library(answer):
    assert answer == "imported:"


IN_A_TRACE = """
import jax

@jax.jit
def first_use(x):
    import distjax
    return x

first_use(1.0)
import distjax as dj
variable = dj.Variable(1.0)
assert dj.jit(lambda: variable.assign_add(1.0))() == 2
"""


def test_the_first_import_may_be_in_a_trace():
    """The trace that is current then is not what is current when nothing is traced."""
    subprocess.run([sys.executable, "-c", IN_A_TRACE], check=True, timeout=120)
