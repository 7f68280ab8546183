"""Processes that are about to do different things end with the same error on all, or agree."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from distjax._src import hooks
from distjax._src.cluster import joining
from distjax._src.cluster.job import job
from distjax._src.cluster.ledger import ledger
from distjax._src.cluster.meeting import ComparedFact, agree
from tests.processes import groups

pytestmark = pytest.mark.multiprocess

SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN


@pytest.fixture
def group():
    return groups.group(2, 2)


def step_of(constant):
    return lambda x: dj.get_replica_context().all_reduce("sum", x * constant)


def agreed_step(strategy, x=None):
    """A step that all processes agree on: what a job does after an error that was caught."""
    x = np.float32(2.0) if x is None else x
    return float(strategy.run(lambda x: dj.get_replica_context().all_reduce("sum", x), args=(x,)))


# What each process does: its number is all that differs.


def another_initial_value(strategy, me):
    with strategy.scope():
        dj.Variable(np.full(3, me, np.float32), name="w")


def another_seed(strategy, me):
    with strategy.scope():
        dj.Variable(lambda: jax.random.normal(jax.random.key(me), (3,)), name="w")


def another_name(strategy, me):
    with strategy.scope():
        dj.Variable(0.0, name=f"w{me}")


def another_shape_of_a_variable(strategy, me):
    with strategy.scope():
        dj.Variable(np.zeros(3 + me), name="w")


def another_aggregation(strategy, me):
    with strategy.scope():
        dj.Variable(0.0, name="w", aggregation=(SUM, MEAN)[me])


def another_initial_value_in_a_step(strategy, me):
    made = []

    def step():
        if not made:
            made.append(dj.Variable(jnp.float32(me), name="w"))
        return made[0].value

    strategy.run(step)


def another_number(strategy, me):
    strategy.run(step_of(1.0), args=(float(me),))


def another_array(strategy, me):
    strategy.run(step_of(1.0), args=(np.full(4, me, np.float32),))


def another_shape(strategy, me):
    strategy.run(step_of(1.0), args=(np.zeros(3 + me, np.float32),))


def another_dtype(strategy, me):
    strategy.run(step_of(1), args=(np.zeros(3, (np.float32, np.int32)[me]),))


def another_constant(strategy, me):
    strategy.run(step_of(np.float32(1.0 + me)), args=(np.float32(1.0),))


def another_constant_in_jit(strategy, me):
    with strategy.scope():
        dj.jit(lambda x: strategy.run(step_of(np.float32(1.0 + me)), args=(x,)))(np.float32(1.0))


def another_step_on_a_variable(strategy, me):
    with strategy.scope():
        v = dj.Variable(0.0, name="w", aggregation=MEAN)
    strategy.run(lambda: v.assign_add(1.0 + me))


def another_variable(strategy, me):
    with strategy.scope():
        pair = [dj.Variable(0.0, name=name, aggregation=MEAN) for name in "ab"]
    strategy.run(lambda: pair[me].assign_add(1.0))


def another_call(strategy, me):
    with strategy.scope():
        if me:
            dj.Variable(0.0, name="w")
        else:
            strategy.run(step_of(1.0), args=(1.0,))


def another_seed_of_a_module(strategy, me):
    with strategy.scope():
        dj.flax.create(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(me)))


def another_seed_of_a_plain_module(strategy, me):
    strategy.run(lambda model: model(jnp.ones(2)), args=(nnx.Linear(2, 3, rngs=nnx.Rngs(me)),))


def another_reduction(strategy, me):
    own = strategy.distribute_values_from_function(lambda ctx: np.zeros(5, np.float32))
    strategy.reduce(("sum", "mean")[me], own)


#: What differs, and what the error says of it.
def another_order_of_devices(strategy, me):
    joining._used.clear()  # of other tests
    devices = strategy.mesh.devices.reshape(-1)[[2, 0, 3, 1] if me else [3, 0, 2, 1]]
    dj.MultiWorkerMirroredStrategy(list(devices), model_axes={"model": 2})


DIFFERENT = {
    another_order_of_devices: "differs from process 0 in the groups of devices of a strategy",
    another_initial_value: "differs from process 0 in the initial value of 'w'",
    another_seed: "differs from process 0 in the initial value of 'w'",
    another_name: "differs from process 0 in what they do",
    another_shape_of_a_variable: "float32[4], ON_WRITE, NONE, mirrored' on process 1",
    another_aggregation: "differs from process 0 in variable 0, 'w'",
    another_initial_value_in_a_step: "differs from process 0 in the initial value of 'w'",
    another_number: "differs from process 0 in argument x of",
    another_array: "first [1.0]' on process 1",
    another_shape: "differs from process 0 in argument x of",
    another_dtype: "differs from process 0 in argument x of",
    another_constant: "2.000000e+00",
    another_constant_in_jit: "2.000000e+00",
    another_step_on_a_variable: "differs from process 0 in the program of",
    another_variable: "differs from process 0 in variable",
    another_seed_of_a_module: "differs from process 0 in the initial values",
    another_seed_of_a_plain_module: "differs from process 0 in value 1, Linear.kernel",
    another_reduction: "differs from process 0 in strategy.reduce",
    another_call: "the creation of 'w'\" on process 1",
}


def refuse(do):
    """Returns the error on this process; then all of them go on together."""
    strategy = dj.MultiWorkerMirroredStrategy()
    with pytest.raises(dj.errors.AgreementError) as caught:
        do(strategy, job().process_id)
    assert agreed_step(strategy) == 8.0
    return str(caught.value)


@pytest.mark.parametrize("do", DIFFERENT, ids=lambda do: do.__name__)
def test_what_differs_is_the_same_error_on_all(group, do):
    first, second = group.call(refuse, do)
    assert first == second
    assert DIFFERENT[do] in first
    assert first.startswith("processes need to do the same, and process 1 on ")


# -- what one process does alone ---------------------------------------------------

#: Each in shapes of its own, as what has been agreed on before is not compared again.
ALONE = {
    "a read of metric 'loss'": (
        lambda s, own: dj.metrics.Mean("loss", dtype=jnp.bfloat16).result(),
        "the read of variable 'loss/",
    ),
    "a read of a metric of integers": (
        lambda s, own: dj.metrics.Accuracy("hits").result(),
        "the read of variable 'hits/",
    ),
    "a read of an ON_READ variable": (
        lambda s, own: (
            dj.Variable(
                np.zeros(17, np.float32),
                name="seen",
                synchronization=dj.VariableSynchronization.ON_READ,
                aggregation=MEAN,
            ).value
        ),
        "the read of variable 'seen'",
    ),
    "reduce": (lambda s, own: s.reduce("mean", own(19)), "strategy.reduce"),
    "reduce of a tree": (lambda s, own: s.reduce("sum", [own(21), own(22)]), "strategy.reduce"),
    "reduce with a mask": (
        lambda s, own: s.reduce("sum", own(23), axis=0, mask=own(23, bool)),
        "strategy.reduce with a mask",
    ),
    "reduce_to": (
        lambda s, own: s.extended.reduce_to("sum", own(25), own(25)),
        "strategy.reduce",
    ),
    "gather": (lambda s, own: s.gather(own(27), axis=0), "strategy.gather"),
    "assert_mirrored": (lambda s, own: s.assert_mirrored([]), "assert_mirrored"),
    "next": (lambda s, own: next(iter(s.distribute_dataset([np.ones(4)]))), "the next element of"),
}


def alone_among_others(what):
    """The error, where the others come to another meeting; they have made what it reads, too."""
    strategy, me = dj.MultiWorkerMirroredStrategy(), job().process_id
    call = ALONE[what][0]

    def own(size, dtype=np.float32):
        return strategy.distribute_values_from_function(lambda ctx: np.ones(size, dtype))

    with strategy.scope(), pytest.raises(dj.errors.AgreementError) as caught:
        if me == 0 or "read of" in what:
            call(strategy, own) if me == 0 else create_what_is_read(call, strategy, own)
        meet_elsewhere()
    assert agreed_step(strategy) == 8.0
    return str(caught.value)


def meet_elsewhere():
    agree("elsewhere", [ComparedFact("nothing", "nothing")])


def create_what_is_read(call, strategy, own):
    """Does the same, and is elsewhere where the other process reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "on_operation", [lambda *operation: meet_elsewhere()])
        call(strategy, own)


@pytest.mark.parametrize("what", ALONE)
def test_what_one_process_does_alone_is_named(group, what):
    for text in group.call(alone_among_others, what):
        assert "differs from process 0 in what they do" in text
        assert ALONE[what][1] in text and "elsewhere" in text


# -- what is known of launches -------------------------------------------------


def steps_on_a_donated_state():
    """A small state goes from step to step; whether each launch is still known to complete."""
    strategy = dj.MultiWorkerMirroredStrategy()

    @dj.jit(donate_argnums=0)
    def step(state):
        return strategy.run(lambda s: jax.tree.map(lambda x: x + 1, s), args=(state,))

    state = strategy.extended.broadcast_to({"n": jnp.int32(0), "w": jnp.zeros(3)})
    for _ in range(5):
        state = step(state)
    tokens = [token for _, token in ledger._launched if token is not None][-5:]
    return int(state["n"]), [token.is_deleted() for token in tokens]


def test_each_launch_of_a_donated_state_can_be_awaited(group):
    assert group.call(steps_on_a_donated_state) == [(5, [False] * 5)] * 2


# -- no false alarm ------------------------------------------------------------


def own_values():
    strategy = dj.MultiWorkerMirroredStrategy()
    own = strategy.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group)
    )
    total = strategy.run(lambda x: dj.get_replica_context().all_reduce("sum", x), args=(own,))
    return float(total)


def test_values_per_replica_may_differ(group):
    assert group.call(own_values) == [6.0, 6.0]


def trace_once_more(number):
    """Only process 1 drops what it has compiled; both have agreed on the text before."""
    strategy = dj.MultiWorkerMirroredStrategy()

    add = lambda x: x + 1.0
    call = lambda fn, x: float(strategy.run(fn, args=(np.float32(x),)))
    first = call(add, 1.0)
    if job().process_id == 1:
        add = types.FunctionType(add.__code__, add.__globals__, add.__name__)
    return first, call(add, number)


@pytest.mark.parametrize("number", [1.0, 2.0])
def test_a_program_that_was_agreed_on_needs_no_meeting(group, number):
    assert group.call(trace_once_more, number) == [(2.0, number + 1.0)] * 2


def on_one_process():
    """Strategies of this process alone take no part."""
    if job().process_id == 1:
        strategy = dj.MirroredStrategy(jax.local_devices())
        with strategy.scope():
            v = dj.Variable(1.0, aggregation=SUM)
        strategy.run(lambda: v.assign_add(jnp.ones(())))
        return float(v.value)
    return None


def test_strategies_of_one_process_compare_nothing(group):
    assert group.call(on_one_process) == [None, 3.0]


def say_what_was_warned(call):
    joining._warned.clear()
    with pytest.warns(dj.errors.ClusterWarning) as caught:
        CALLS_ALONE[call]()
        CALLS_ALONE[call]()  # from another line
    return [str(warning.message).splitlines()[0] for warning in caught]


CALLS_ALONE = {
    "MirroredStrategy()": dj.MirroredStrategy,
    "pmap without a strategy": lambda: dj.pmap(lambda x: x)(np.ones(2)),
    "ParameterServerStrategy": dj.ParameterServerStrategy,
}


@pytest.mark.parametrize("call", CALLS_ALONE)
def test_what_takes_local_devices_in_a_job_warns(group, call):
    text = f"{call} takes the devices of this process only, and the job has several processes."
    assert group.call(say_what_was_warned, call) == [[text]] * 2
