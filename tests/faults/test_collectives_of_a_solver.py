"""A collective inside a linear solver, whose loop ends when its own replica is done, is refused.

Replicas that iterate a different number of times meet at a different number of
collectives: devices wait for each other for ever, and a virtual strategy makes up
an answer. The functions of `lax.custom_linear_solve` are searched for that, too.
"""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

import distjax as dj

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:4]),
    "virtual": lambda: dj.VirtualStrategy(4),
    "sharded": lambda: dj.ShardedStrategy(
        jax.devices()[:4], partition="parameters", min_split_bytes=0
    ),
    "central": lambda: dj.CentralStorageStrategy(jax.devices()[:4]),
}


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


def average_with_others(x):
    return 2 * x + 0.1 * dj.get_replica_context().all_reduce("mean", x)


def on_its_own(x):
    return 2 * x


def solve_by_loop(matvec, b):
    """The user's own solver: goes on while its own residual is large."""

    def is_far(x):
        return jnp.sum(jnp.abs(matvec(x) - b)) > 1e-4

    return jax.lax.while_loop(is_far, lambda x: x + 0.3 * (b - matvec(x)), jnp.zeros_like(b))


SOLVERS = {
    "cg": lambda matvec, b: cg(matvec, b, maxiter=5)[0],
    "gmres": lambda matvec, b: gmres(matvec, b, maxiter=5)[0],
    "bicgstab": lambda matvec, b: bicgstab(matvec, b, maxiter=5)[0],
    "custom_linear_solve": lambda matvec, b: jax.lax.custom_linear_solve(
        matvec, b, solve_by_loop, symmetric=True
    ),
}


def right_hand_sides(strategy):
    """A vector per replica; that of the first is solved by no step at all."""
    return strategy.distribute_values_from_function(
        lambda context: jnp.ones(3) * context.replica_id_in_sync_group
    )


def step_with(solver, matvec):
    def step(b):
        return SOLVERS[solver](matvec, b)

    return step


@pytest.mark.parametrize("solver", ["cg", "custom_linear_solve"])
def test_refused_where_the_program_is_traced(owner, solver):
    """`lower` traces and launches nothing, so that this test cannot hang."""
    step = step_with(solver, average_with_others)
    program = dj.jit(lambda b: owner.run(step, args=(b,)))
    with pytest.raises(dj.errors.DivergenceError, match="holds psum"):
        program.lower(right_hand_sides(owner))


@pytest.mark.parametrize("solver", SOLVERS)
def test_refused_by_run_of_a_virtual_strategy(solver):
    strategy = dj.VirtualStrategy(2)
    with pytest.raises(dj.errors.DivergenceError, match="holds psum"):
        strategy.run(step_with(solver, average_with_others), args=(right_hand_sides(strategy),))


@pytest.mark.parametrize("solver", ["cg", "custom_linear_solve"])
def test_a_solver_without_collectives_may_end_when_its_replica_is_done(owner, solver):
    out = owner.run(step_with(solver, on_its_own), args=(right_hand_sides(owner),))
    results = [jax.device_get(x) for x in owner.local_results(out)]
    for number, result in enumerate(results):
        assert result == pytest.approx([number / 2] * 3, abs=1e-3)


#: XLA ends a process whose collective waits this long: what hangs is over in seconds.
PATIENCE = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=2 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
)

ON_DEVICES = """
import jax, jax.numpy as jnp, distjax as dj
strategy = dj.MirroredStrategy(jax.devices()[:4])
b = strategy.distribute_values_from_function(
    lambda context: jnp.ones(3) * context.replica_id_in_sync_group
)
matvec = lambda x: 2 * x + 0.1 * dj.get_replica_context().all_reduce("mean", x)
try:
    out = strategy.run(lambda b: jax.scipy.sparse.linalg.cg(matvec, b, maxiter=5)[0], args=(b,))
    jax.block_until_ready(strategy.local_results(out))
except dj.errors.DivergenceError:
    print("refused")
"""


def test_refused_before_devices_wait_for_each_other():
    flags = f"{os.environ['XLA_FLAGS']} {PATIENCE}"
    child = subprocess.run(
        [sys.executable, "-c", ON_DEVICES],
        cwd=pathlib.Path(dj.__file__).parents[1],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (child.returncode, child.stdout) == (0, "refused\n"), child.stderr[-2000:]
