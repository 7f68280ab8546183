"""dj.plan: the compiler's numbers under the user's names, for devices that nothing is put on.

All tests plan for virtual CPU devices, in seconds; those of TPU slices need libtpu.
"""

import json
import os
import pathlib
import subprocess
import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import distjax as dj
from distjax._src.jax_compat import TABLE_BYTES
from distjax._src.plan import command, page, planning, schedule, targets, topologies
from tests.drill_mark import all_drills_but
from tests.live_arrays import no_new_arrays

ALL = ["mirrored", "zero1", "zero2", "zero3", "central"]
WIDTH = 256


def rows(strategy, width=WIDTH, each=4):
    count = each * strategy.num_replicas_in_sync
    return dj.plan.batch(jax.ShapeDtypeStruct((count, width), jnp.float32))


def mean(tree):
    return dj.get_replica_context().all_reduce("mean", tree)


def of_variables(strategy):
    with strategy.scope():
        w = dj.Variable(lambda: jnp.zeros((WIDTH, WIDTH)), name="w")
    optimizer = dj.optim.Optimizer(optax.adam(0.1), "mean")
    optimizer.init([w])

    def step(x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w.value)
        optimizer.apply_gradients([(gradient, w)])
        return loss

    return lambda x: strategy.run(step, args=(x,)), (rows(strategy),)


def of_arrays(strategy):
    tx = optax.chain(dj.optim.reduce_gradients("mean"), optax.adam(0.1))
    params = {"w": jnp.zeros((WIDTH, WIDTH))}

    def step(params, state, x):
        gradient = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    fn = lambda *args: strategy.run(step, args=args)
    return fn, (params, tx.init(params), rows(strategy))


def of_linen(strategy):
    model = nn.Dense(WIDTH, use_bias=False)

    def make():
        params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))

    def step(state, x):
        loss = lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2)
        return state.apply_gradients(grads=mean(jax.grad(loss)(state.params)))

    fn = dj.jit(lambda *args: strategy.run(step, args=args), donate_argnums=0)
    return fn, (jax.eval_shape(make), rows(strategy))


def of_equinox(strategy):
    model = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=jax.random.key(0))
    tx = optax.adam(0.1)

    def step(model, state, x):
        gradient = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        updates, state = tx.update(mean(gradient), state, model)
        return eqx.apply_updates(model, updates), state

    fn = lambda *args: strategy.run(step, args=args)
    return fn, (model, tx.init(eqx.filter(model, eqx.is_array)), rows(strategy))


def of_modules(strategy):
    with strategy.scope():
        model = dj.flax.create(lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    metric = nnx.metrics.Average()

    def step(x):
        loss, gradient = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        metric.update(values=loss)
        optimizer.update(model, mean(gradient))

    return lambda x: strategy.run(step, args=(x,)), (rows(strategy),)


def of_created(strategy):
    def create():
        model = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    with strategy.scope():
        model, optimizer = dj.flax.create(create)

    def step(x):
        loss_fn = lambda model, x: jnp.mean(model(x) ** 2)
        loss, gradient = dj.flax.value_and_grad(loss_fn)(model, x)
        dj.flax.apply_gradients(optimizer, model, gradient)
        return loss

    return lambda x: strategy.run(step, args=(x,)), (rows(strategy),)


STYLES = {
    f.__name__: f for f in (of_variables, of_arrays, of_linen, of_equinox, of_modules, of_created)
}


def planned(target, strategies=("mirrored",), topology="cpu:8", **options):
    return dj.plan.plan(target, topology, strategies=list(strategies), **options).plans


@pytest.mark.parametrize("style", [*STYLES])
def test_every_style_is_planned_under_every_strategy(style):
    parameter = 4 * WIDTH * WIDTH
    for plan in planned(STYLES[style], ALL):
        assert plan.error == ""
        memory = plan.memory
        total = memory.argument_bytes + memory.output_bytes - memory.alias_bytes
        assert memory.peak_bytes == sum(memory.by_cause.values())
        assert memory.peak_bytes - memory.by_cause["code"] == total + memory.temp_bytes
        own = {
            c: sum(v.bytes_per_chip for v in memory.by_variable if v.cause == c)
            for c in ("parameters", "optimizer", "batch")
        }
        is_kept = style in ("of_variables", "of_modules", "of_created")
        split = 8 if is_kept and plan.strategy in ("zero3", "central") else 1
        slots = 8 if is_kept and plan.strategy != "mirrored" else 1
        assert own["parameters"] == parameter // split
        # The counts of steps are arrays of the optimizer in some styles.
        assert own["optimizer"] // 64 == 2 * parameter // slots // 64
        assert own["batch"] == 4 * 4 * WIDTH
        assert sum(own.values()) <= memory.argument_bytes <= sum(own.values()) + 1024


def test_no_array_is_made():
    with no_new_arrays(but=2):  # those of the eager metric, on one device
        planned(of_variables, ALL)
        planned(of_modules, ALL)


def test_what_is_predicted_is_what_training_runs():
    (plan,) = planned(of_variables)
    strategy = dj.MirroredStrategy(jax.devices()[:8])
    fn, _ = of_variables(strategy)
    x = strategy.per_replica(np.ones((8, 4, WIDTH), np.float32))
    compiled = dj.jit(fn).lower(x).compile()
    stats = compiled.memory_analysis()
    assert plan.memory.argument_bytes == stats.argument_size_in_bytes
    assert plan.memory.output_bytes == stats.output_size_in_bytes
    assert plan.memory.alias_bytes == stats.alias_size_in_bytes > 0
    assert plan.memory.temp_bytes == stats.temp_size_in_bytes
    assert plan.flops_per_chip == compiled.cost_analysis()["flops"]
    counts = dj.explain(fn, x).compiled_counts
    assert {c.kind: c.bytes for c in plan.collectives.compiled} == {
        kind: count.result_bytes for kind, count in counts.items()
    }


def test_collectives_have_causes():
    mirrored, zero3 = planned(of_variables, ("mirrored", "zero3"))
    (written,) = mirrored.collectives.written
    assert (written.kind, written.bytes, written.axis) == ("all-reduce", 4 * WIDTH**2, "replica")
    assert "test_plan.py" in written.lines[0]
    assert [c.lines for c in mirrored.collectives.compiled] == [written.lines]
    kinds = {c.kind for c in zero3.collectives.written}
    assert kinds == {"all-gather", "reduce-scatter"}
    assert all(c.lines or c.made_by_xla for c in zero3.collectives.compiled)
    gathers = [c for c in zero3.collectives.compiled if c.kind == "all-gather"]
    assert all("w" in c.variables for c in gathers)


def test_what_is_whole_says_why():
    def target(strategy):
        with strategy.scope():
            w = dj.Variable(np.ones((130, 131), np.float32), name="w")
        return lambda x: strategy.run(lambda x: x @ w.value, args=(x,)), (rows(strategy, 130),)

    mirrored, zero3 = planned(target, ("mirrored", "zero3"))
    assert [(w.name, w.why) for w in mirrored.not_split] == [
        ("w", "mirrored keeps the parameters on each replica")
    ]
    assert zero3.not_split == []  # though 8 divides neither 130 nor 131

    def module(strategy):
        with strategy.scope():
            model = dj.flax.create(lambda: nnx.Linear(129, 131, use_bias=False, rngs=nnx.Rngs(0)))
        return lambda m, x: strategy.run(lambda m, x: m(x), (m, x)), (model, rows(strategy, 129))

    (odd,) = planned(module, ("zero3",))
    assert [(w.name, w.bytes, w.why) for w in odd.not_split] == [
        (
            "Linear.kernel",
            4 * 129 * 131,
            "no axis has a divisor in common with 8 replicas",
        )
    ]
    (functional,) = planned(of_arrays, ("zero3",))
    assert functional.not_split[0].why.startswith("an argument: strategies split variables")
    assert any("donate_argnums" in note for note in functional.notes)


def test_model_axes_and_numbers_of_chips():
    plans = planned(of_variables, topology="cpu:8", model_axes={"model": 2}, chips=[4, 8])
    seen = [(p.topology, p.num_replicas, dict(p.model_axes)) for p in plans]
    two = {"model": 2}
    assert seen == [("cpu:4", 4, {}), ("cpu:4", 2, two), ("cpu:8", 8, {}), ("cpu:8", 4, two)]


def test_options_of_the_compiler():
    options = {"xla_cpu_enable_fast_math": "true"}
    plans = planned(of_variables, options=options)
    assert [p.compiler_options for p in plans] == [{}, options] and not any(p.error for p in plans)
    _, refused = planned(of_variables, options={"xla_no_such": "1"})
    assert "xla_no_such" in refused.error and refused.memory is None


@pytest.mark.parametrize("limit", [0, 99, 100, 500, 10_000, 10**7, 10**12])
@pytest.mark.parametrize("start", [1, 8, 4096])
@pytest.mark.parametrize("refused_above", [10**12, 3000])
def test_the_largest_batch(limit, start, refused_above):
    tried = []
    peak = lambda size: 99 + size + size**2 / 1e5 + (2 * limit if size > refused_above else 0)
    fits = lambda size: peak(size) <= limit

    def peak_of(size):
        tried.append(size)
        return peak(size)

    found = planning.largest_batch(peak_of, start, peak(start), limit)
    is_full = found >= 2**20 or peak(found) > 0.88 * limit or not fits(found + 1 + found // 60)
    assert found == 0 or (fits(found) and is_full)
    assert found or not fits(1)
    assert len(tried) == len(set(tried)) <= 20
    if refused_above > 2**20 and limit >= 500:  # as programs do
        assert len(tried) <= 4


def test_the_largest_batch_where_memory_grows_evenly():
    peak = lambda size: 1000 + 3 * size
    assert peak(planning.largest_batch(peak, 8, peak(8), 100_000)) > 98_000


def test_the_largest_batch_of_a_language_model_takes_two_compilations():
    """Recorded, with libtpu 0.0.50: from some 5,000 examples on each takes less than before."""
    recorded = {8: 22_923_776, 5842: 10_983_479_296, 8907: 15_194_535_424}
    found = planning.largest_batch(recorded.__getitem__, 8, recorded[8], 16_911_433_728)
    assert found == 8907


def test_no_more_examples_where_the_compiler_saves_memory():
    tried = []
    peak = lambda size: min(size, 15_600 - size / 1e6)
    found = planning.largest_batch(lambda n: tried.append(n) or peak(n), 8, peak(8), 16_128)
    assert found == tried[-1] > 15_600 and len(tried) <= 3


def test_json_text_and_page():
    report = dj.plan.plan(of_modules, "cpu:8")
    found = json.loads(report.to_json())
    assert (found["schema"], len(found["plans"])) == (1, len(ALL))
    assert set(found["plans"][0]) >= {"topology", "fits", "memory", "collectives", "not_split"}
    lines = str(report).splitlines()
    assert len(lines) <= 45
    assert "zero3" in str(report) and "Linear.kernel" in str(report)
    text = page.as_page(report)
    assert text.count("<svg") == text.count("<details") == len(ALL)
    assert "http" not in text.replace("http-equiv", "") and "prefers-color-scheme: dark" in text


def test_a_schedule_is_read():
    text = "\n".join(
        [
            "HloModule m, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }",
            "",
            "ENTRY %main (a: f32[4,100], b: f32[8]) -> (f32[8], f32[4,100]) {",
            '  %a = f32[4,100]{1,0:T(8,128)} parameter(0), metadata={op_name="args[0]"}',
            "  %b = f32[8]{0} parameter(1)",
            "  %x = f32[4,100]{1,0:T(8,128)} add(%a, %a)",
            "  %far = (f32[8]{0:S(1)}, f32[8]{0}, u32[]) copy-start(%b)",
            "  %y = f32[4,100]{1,0:T(8,128)} multiply(%x, %x)",
            "  %near = f32[8]{0:S(1)} copy-done(%far)",
            "  %z = f32[8]{0} add(%near, %b)",
            "  ROOT %out = (f32[8]{0}, f32[4,100]{1,0:T(8,128)}) tuple(%z, %y)",
            "}",
        ]
    )
    read = schedule.Schedule(text)
    assert read.aliases == {0: 1}
    assert read.parameters()[0].scope == "args[0]"
    # x alone is a temporary: the rest are arguments, results, or in another memory. But a copy on
    # its way to that has a table of its parts, for as long as the program runs.
    assert schedule.type_bytes_in_memory(read.instructions[2].type) == 4096
    assert [live.bytes for live in read.at_peak] == [4096, TABLE_BYTES]
    assert (min(read.live_bytes), max(read.live_bytes)) == (TABLE_BYTES, TABLE_BYTES + 4096)
    assert not any(i.opcode == "while" for i in read.everywhere.values())


# -- what is refused ------------------------------------------------------------


def parts(caught):
    return [line.strip().partition(":")[0] for line in str(caught.value).splitlines()]


def refused(error, first, *args, **options):
    with pytest.raises(error) as caught:
        dj.plan.plan(*args, **options)
    assert str(caught.value).startswith(first), str(caught.value)
    assert parts(caught)[1:4] == ["Got", "Why", "Fix"]
    return str(caught.value)


@pytest.mark.parametrize("name", ["v5e", "cpu:", "cpu:2:2", "v5e:axb"])
def test_an_unknown_topology(name):
    refused(ValueError, f"topology {name!r} needs to be a kind", of_arrays, name)


def test_too_many_cpus():
    text = refused(ValueError, "cpu:4096 needs as many virtual CPU devices", of_arrays, "cpu:4096")
    assert "JAX_NUM_CPU_DEVICES=4096" in text


def test_no_libtpu(monkeypatch):
    def version(name):
        raise topologies.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(topologies.importlib.metadata, "version", version)
    text = refused(RuntimeError, "a plan for TPUs needs libtpu", of_arrays, "v5e:2x2")
    assert f"pip install 'libtpu=={topologies.LIBTPU}.*'" in text


def test_another_libtpu_and_one_in_use(monkeypatch):
    monkeypatch.setattr(topologies.importlib.metadata, "version", lambda name: "0.0.7")
    assert "libtpu 0.0.7" in refused(RuntimeError, "a plan for TPUs", of_arrays, "v5e:2x2")
    monkeypatch.setattr(
        topologies.importlib.metadata, "version", lambda name: f"{topologies.LIBTPU}.1"
    )
    refused(ValueError, "topology 'x9:2x2' needs to be a kind", of_arrays, "x9:2x2")

    def fail(*args, **options):
        raise RuntimeError("ABORTED: The TPU is already in use by process with pid 7")

    monkeypatch.setattr(topologies.topologies, "get_topology_desc", fail)
    text = refused(RuntimeError, "v5e:2x2 needs libtpu, which one process", of_arrays, "v5e:2x2")
    assert "pid 7" in text
    refused(RuntimeError, "gpu:8 needs", of_arrays, "gpu:8")
    monkeypatch.setattr(topologies, "read_exhausted", lambda text: None)

    def unknown(*args, **options):
        raise RuntimeError("INVALID_ARGUMENT: 3x3 is not divisible by 2x2x1")

    monkeypatch.setattr(topologies.topologies, "get_topology_desc", unknown)
    refused(ValueError, "topology 'v5e:3x3' needs to be a kind", of_arrays, "v5e:3x3")
    refused(RuntimeError, "gpu:8 needs a GPU in this machine", of_arrays, "gpu:8")


@pytest.mark.parametrize("target", [3, lambda: None, lambda a, b: None])
def test_a_target_that_is_no_function_of_a_strategy(target):
    refused(TypeError, "a target needs to be a function of a strategy", target, "cpu:8")


@pytest.mark.parametrize("found", [None, (len,), (len, 3), 5])
def test_a_target_that_returns_no_step(found):
    target = lambda strategy: found
    text = refused(TypeError, "test_a_target", target, "cpu:8")
    assert "needs to return (function, arguments)" in text


def test_unknown_strategies():
    refused(
        ValueError, "a plan needs names of strategies", of_arrays, "cpu:8", strategies=["zero4"]
    )


def test_a_batch_that_does_not_divide():
    target = lambda strategy: (lambda x: x, (dj.plan.batch(np.ones((9, 2))),))
    text = refused(dj.errors.BatchError, "a global batch needs", target, "cpu:8")
    assert "dj.plan.batch of 16 examples" in text


def test_central_storage_with_model_axes():
    plans = planned(of_variables, ("central",), model_axes={"model": 2})
    assert [(p.error, p.num_replicas) for p in plans] == [("", 8), ("", 4)]


# -- the command ------------------------------------------------------------------


def run(*args, cwd):
    command = [sys.executable, "-m", "distjax", "plan", *args]
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(dj.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, env=env)


SCRIPT = """
import jax.numpy as jnp, distjax as dj
def plan(strategy):
    w = jnp.zeros((64, 64))
    step = lambda w, x: strategy.run(lambda w, x: x @ w, args=(w, x))
    return step, (w, dj.plan.batch(jnp.zeros((2 * strategy.num_replicas_in_sync, 64))))
def needs_data(strategy):
    with strategy.scope():
        v = dj.Variable(1.0, name="v")
    return plan(strategy)[0], (float(v.value),)
def raises(strategy):
    raise KeyError("mine")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_the_command_writes_what_it_says(script):
    done = run(
        "train.py:plan",
        "--topology",
        "cpu:16",
        "--strategies",
        "mirrored",
        "--html",
        "p.html",
        "--json",
        "p.json",
        cwd=script,
    )
    assert done.returncode == 0, done.stderr
    assert "cpu:16 (16 chips): no limit of memory to compare with" in done.stdout
    found = json.loads((script / "p.json").read_text())
    assert (found["target"], found["plans"][0]["chips"]) == ("train.py:plan", 16)
    assert (script / "p.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "example",
    all_drills_but(
        ["digits/functional.py"], ["digits/train.py", "digits/functional.py", "digits/modules.py"]
    ),
)
def test_the_examples_have_targets(example, tmp_path):
    root = pathlib.Path(__file__).parents[2]
    target, file = f"examples/{example}:plan", str(tmp_path / "plan.json")
    done = run(target, "--topology", "cpu:4", "--strategies", "mirrored", "--json", file, cwd=root)
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(pathlib.Path(file).read_text())["plans"]
    causes = plan["memory"]["by_cause"]
    # 18,788 numbers of three convolutions, their norms and a linear layer, and momentum for each.
    assert causes["parameters"] >= 4 * 18_000 and causes["optimizer"] >= 4 * 18_000


@pytest.mark.parametrize(
    "args, code, text",
    [
        (["train.py:raises"], 70, "KeyError: 'mine'"),
        (["train.py:needs_data"], 70, "variable 'v' needs real devices to have a value"),
        (["train.py:none"], 2, "nothing called none in train.py"),
        (["none.py:plan"], 2, "no file none.py"),
        (["none:plan"], 2, "no module 'none'"),
        (["train.py"], 2, "needs to be module:function or file.py:function"),
        (["train.py:plan", "--html", "/none/p.html"], 2, "needs to be a file that can be written"),
        (["train.py:plan", "--html", "/dev/full"], 2, "and room for it"),
    ],
)
def test_the_command_refuses(script, args, code, text, monkeypatch, capsys):
    monkeypatch.chdir(script)
    monkeypatch.setattr(command, "_use_no_device", lambda *given: None)
    assert command.main([*args, "--topology", "cpu:2", "--strategies", "mirrored"]) == code
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong, text",
    [
        (["--model-axes", "x"], "argument --model-axes: invalid axis_sizes value: 'x'"),
        (["--option", "x"], "argument --option: invalid option value: 'x'"),
        (["--chips", "8,x"], "argument --chips: invalid numbers value: '8,x'"),
    ],
)
def test_the_command_refuses_values(wrong, text, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(["train.py:plan", "--topology", "cpu:2", *wrong])
    assert caught.value.code == 2 and text in capsys.readouterr().err


def test_a_target_by_name(script, monkeypatch):
    monkeypatch.chdir(script)
    (plan,) = dj.plan.plan("train.py:plan", "cpu:3", strategies=["mirrored"]).plans
    assert (plan.chips, plan.fits) == (3, True)


def test_a_file_is_that_of_its_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(f"plan = lambda strategy: {name!r}\n")
        assert targets.load(f"{tmp_path / name / 'train.py'}:plan")(None) == name
