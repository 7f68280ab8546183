"""dj.explain says what a step proves and costs, and changes nothing."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import distjax as dj
from tests.diagnostics.lines import line_of
from tests.replicas import ids, local, per_replica

MEAN, SUM = dj.VariableAggregation.MEAN, dj.VariableAggregation.SUM
ON_READ = dj.VariableSynchronization.ON_READ


def at(marker):
    return line_of(__file__, marker)


@pytest.fixture(params=["mirrored2", "mirrored8", "virtual2"])
def several(request):
    count = int(request.param[-1])
    if request.param.startswith("virtual"):
        return dj.VirtualStrategy(count)
    return dj.MirroredStrategy(jax.devices()[:count])


# -- what was proved -----------------------------------------------------------


def test_localities_by_path(several):
    with several.scope():
        w = dj.Variable(1.0, name="w", aggregation=SUM)
        count = dj.Variable(0.0, name="count", synchronization=ON_READ, aggregation=SUM)
        seen = dj.Variable(0.0, name="seen", aggregation=MEAN)

    def replica(batch, scale, mode):
        ctx = dj.get_replica_context()
        count.assign_add(batch["x"])
        seen.assign(batch["x"])
        y = batch["x"] * w.value * scale
        return {"own": y, "all": ctx.all_reduce("sum", y), "mode": mode, "size": 3}

    def step(batch, scale, *, mode):
        out = several.run(replica, args=(batch, scale), kwargs={"mode": mode})
        return out["own"], several.reduce("mean", out["own"])

    batch = {"x": ids(several), "mask": np.float32(1)}
    found = dj.explain(step, batch, 2.0, mode="train")
    assert found.arguments == {"batch['mask']": "M", "batch['x']": "T", "scale": "M"}
    assert found.results == {"[0]": "T", "[1]": "M"}
    [run] = found.runs
    assert (run.function, run.num_replicas) == (
        "test_localities_by_path.<locals>.replica",
        several.num_replicas_in_sync,
    )
    assert dict(run.arguments) == {"batch['mask']": "M", "batch['x']": "T", "scale": "M"}
    assert dict(run.results) == {"['all']": "M", "['own']": "T"}
    uses = {v.name: (v.locality, v.is_read, v.is_written) for v in found.variables}
    assert uses == {
        "w": ("M", True, False),
        "count": ("T", True, True),
        "seen": ("M", True, True),
    }


def test_the_line_of_each_run(several):
    def double(x):
        return x * 2

    def step(x):
        x = several.run(double, args=(x,))  # first run
        return several.run(double, args=(x,))  # second run

    lines = [run.source.split(" ")[0] for run in dj.explain(step, ids(several)).runs]
    assert lines == [at("first run"), at("second run")]


# -- reductions of what is equal -----------------------------------------------


def equal_lines(found):
    return sorted((each.what, each.source.split(" ")[0]) for each in found.equal_reductions)


def test_a_second_reduction_is_pointed_out(several):
    with several.scope():
        w = dj.Variable(0.0, name="w", aggregation=MEAN)

    def replica(x):
        mean = dj.get_replica_context().all_reduce("mean", x)
        w.assign(mean)  # reduced again by its aggregation
        return mean

    def step(x):
        return several.reduce("sum", several.run(replica, args=(x,)))  # reduced a third time

    assert equal_lines(dj.explain(step, ids(several))) == sorted(
        [
            ("psum", at("reduced again by its aggregation")),
            ("reduce(SUM)", at("reduced a third time")),
        ]
    )


def test_first_reductions_are_not(several):
    with several.scope():
        w = dj.Variable(0.0, name="w", aggregation=MEAN)

    def merge(strategy, x):
        return strategy.reduce("sum", x)

    def replica(x):
        ctx = dj.get_replica_context()
        w.assign_sub(jax.grad(lambda v: ctx.all_reduce("mean", v * x))(w.value))
        return ctx.merge_call(merge, args=(x,)), ctx.all_reduce("sum", x)

    assert equal_lines(dj.explain(replica, ids(several), strategy=several)) == []


def test_loops_count_at_their_fixpoint(several):
    """A carry that starts equal and ends different is not an equal one."""

    def merge(strategy, x):
        return strategy.reduce("sum", x)

    def replica(x):
        ctx = dj.get_replica_context()
        zero = jnp.zeros_like(x)
        different = lambda c, _: (ctx.all_reduce("sum", c) + x, None)
        merged = lambda c, _: (ctx.merge_call(merge, args=(c,)) + x, None)

        def equal(c, _):
            return ctx.all_reduce("mean", c) + 1, None  # equal in the scan

        def equal_while(c):
            return lax.psum(c, ctx.strategy.axis_name)  # equal in the while

        def equal_branch(c):
            return ctx.all_reduce("sum", c)  # equal in the branch

        carries = [lax.scan(f, zero, None, length=2)[0] for f in (different, merged, equal)]
        last = lax.while_loop(lambda c: c < 1, equal_while, zero + 1)
        return carries, lax.cond(last > 0, equal_branch, lambda c: c, last)

    assert equal_lines(dj.explain(replica, ids(several), strategy=several)) == sorted(
        ("psum", at(f"equal in the {where}")) for where in ("scan", "while", "branch")
    )


@pytest.mark.parametrize("make", [dj.OneDeviceStrategy, lambda: dj.MirroredStrategy([d0()])])
def test_one_replica_is_explained_as_several(make):
    """A program is wrong or right for any number of replicas: one device must not hide it."""

    def explained(strategy):
        def replica(w, x):
            context = dj.get_replica_context()
            mean = context.all_reduce("mean", x.mean(0))
            return w - context.all_reduce("mean", mean), x.sum(), context.replica_id_in_sync_group

        def step(w, x):
            new, total, number = strategy.run(replica, args=(w, x))
            return new, total, number, strategy.reduce("sum", total), strategy.reduce("mean", new)

        (x,) = strategy.distribute_dataset([np.ones((4, 3), np.float32)])
        return dj.explain(step, jnp.ones(3), x)

    lone, several = explained(make()), explained(dj.VirtualStrategy(2))
    assert [use.what for use in lone.equal_reductions] == ["psum", "reduce(MEAN)"]
    assert lone.equal_reductions == several.equal_reductions
    assert lone.arguments == several.arguments == {"w": "M", "x": "T"}
    assert list(lone.results.values()) == ["M", "T", "T", "M", "M"]
    assert lone.results == several.results
    (of_lone,), (of_several,) = lone.runs, several.runs
    assert (of_lone.arguments, of_lone.results) == (of_several.arguments, of_several.results)
    assert of_lone.why == of_several.why


def d0():
    return jax.devices()[0]


# -- costs ---------------------------------------------------------------------


def test_flops_and_memory():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        w = dj.Variable(jnp.ones((64, 32)), name="w")

    def step(x):
        return dj.get_replica_context().all_reduce("sum", x @ w.value)

    x = per_replica(strategy, [np.ones((16, 64), np.float32)] * 2)
    found = dj.explain(step, x, strategy=strategy)
    assert 2 * 16 * 64 * 32 <= found.flops <= 1.1 * 2 * 16 * 64 * 32  # a matrix product a device
    memory = found.memory
    assert memory.argument_bytes == (64 * 32 + 16 * 64) * 4
    assert 16 * 32 * 4 <= memory.output_bytes <= 16 * 32 * 4 + 32
    assert memory.donated_bytes == 0
    known = memory.argument_bytes + memory.output_bytes + memory.temporary_bytes
    assert memory.peak_bytes == known


def test_flops_of_a_callback_are_unknown():
    strategy = dj.MirroredStrategy(jax.devices()[:2])

    def step(x):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    found = dj.explain(step, per_replica(strategy, [np.ones(4, np.float32)] * 2), strategy=strategy)
    assert found.flops is None
    assert "unknown" in str(found)


# -- nothing is changed --------------------------------------------------------


def test_nothing_runs_and_no_variable_changes(several, capfd):
    with several.scope():
        w = dj.Variable(1.0, name="w", aggregation=SUM)
    storage = w.storage
    ran = []

    def replica(x):
        jax.debug.callback(lambda: ran.append(1))
        return w.assign_add(x)

    step = dj.jit(lambda x: several.run(replica, args=(x,)))
    x = ids(several)
    before = dj.explain(step, x)
    assert w.storage is storage and ran == []
    assert float(w.value) == 1.0
    total = sum(range(several.num_replicas_in_sync))
    assert float(step(x)) == 1.0 + total
    assert float(step(x)) == 1.0 + 2 * total
    assert len(ran) > 0
    after = dj.explain(step, x)  # traced anew, though compiled already
    assert after.runs == before.runs != ()
    assert float(w.value) == 1.0 + 2 * total


def test_variables_are_not_created(several):
    class Layer:
        v = None

        def __call__(self, x):
            if self.v is None:
                self.v = dj.Variable(0.0, name="lazy", aggregation=SUM)
            return self.v.assign_add(x)

    layer = Layer()
    with pytest.raises(dj.errors.ContextError) as error:
        dj.explain(layer, ids(several), strategy=several)
    first = "dj.explain and dj.check need a function whose variables exist."
    assert str(error.value).splitlines()[0] == first
    assert "'lazy'" in str(error.value)
    assert layer.v is None
    assert several.describe().variables == ()
    several.run(layer, args=(ids(several),))
    found = dj.explain(layer, ids(several), strategy=several)
    assert [v.name for v in found.variables] == ["lazy"]


def test_inside_a_trace_it_raises(several):
    step = lambda x: dj.explain(lambda x: x, x)
    for call in (lambda: dj.jit(step)(1.0), lambda: several.run(step, args=(1.0,))):
        with pytest.raises(dj.errors.ContextError) as error:
            call()
        first = "dj.explain needs to be called outside of run, dj.jit and other traces."
        assert str(error.value).splitlines()[0] == first


# -- what can be explained -----------------------------------------------------


def test_methods_and_static_arguments():
    strategy = dj.MirroredStrategy(jax.devices()[:2])

    class Model:
        @functools.partial(dj.jit, static_argnames="scale")
        def step(self, x, scale):
            return strategy.reduce("sum", x) * scale

        def plain(self, x):
            return strategy.reduce("sum", x)

        @dj.jit
        def twice(self, x):
            return self.step(x, scale=2)  # one compiled method in another

    model, x = Model(), ids(strategy)
    found = dj.explain(model.step, x, scale=3)
    assert found.arguments == {"x": "T"} and found.written_counts == {"all-reduce": (1, 4)}
    assert dj.explain(model.plain, x).written_counts == {"all-reduce": (1, 4)}
    assert local(strategy, model.step(x, scale=3)) == [3.0, 3.0]
    assert local(strategy, model.twice(x)) == [2.0, 2.0]


def test_run_itself_can_be_explained(several):
    def replica(x):
        return x * 2

    found = dj.explain(several.run, replica, args=(ids(several),))
    assert dict(found.runs[0].arguments) == {"x": "T"}


def test_arguments_from_elsewhere_are_placed():
    strategy = dj.MirroredStrategy(jax.devices()[2:4])
    x = jax.device_put(jnp.ones(3), jax.devices()[7])

    def replica(x):
        return dj.get_replica_context().all_reduce("sum", x)

    found = dj.explain(replica, x, strategy=strategy)
    assert found.written_counts == {"all-reduce": (1, 12)}
    assert x.sharding.device_set == {jax.devices()[7]}


def test_an_error_of_the_users_keeps_its_type_and_gets_a_hint(several):
    def replica(x):
        return dj.get_replica_context().all_reduce("sum", x)

    with several.scope(), pytest.raises(AttributeError) as error:
        dj.explain(replica, ids(several))
    assert any(note.endswith("strategy=strategy)") for note in error.value.__notes__)


def test_args_as_in_run(several):
    with pytest.raises(TypeError) as error:
        dj.explain(lambda x: x, args=(ids(several),), strategy=several)
    assert (
        "Call it like the step: dj.explain(step, x, y, strategy=strategy)" in error.value.__notes__
    )


def test_pictures(several):
    def replica(x):
        return {"<b>": dj.get_replica_context().all_reduce("sum", x)}

    found = dj.explain(replica, jnp.float32(1), strategy=several)
    text, page = str(found), found._repr_html_()
    for part in ("flops", "at most at once", "argument", "psum", "as written", __file__):
        assert part in text and part in page
    assert "<b>" in text and "&lt;b&gt;" in page and "<b>" not in page


def test_an_array_with_a_row_for_each_replica_is_pointed_out(pair):
    rows, params = np.zeros((2, 3)), {"b": np.zeros(2), "w": np.zeros((3, 2))}
    step = lambda batch, params: jax.lax.psum(batch["x"] @ params["w"] + params["b"], "replica")
    found = dj.explain(step, {"x": rows}, params, strategy=pair)
    assert found.possible_rows == ("batch['x']",) and found.arguments["batch['x']"] == "M"
    assert "arrays with as many rows as there are replicas" in str(found)  # not b, beside w
    wrapped = dj.explain(step, {"x": pair.per_replica(rows)}, params, strategy=pair)
    assert wrapped.possible_rows == () and "as many rows" not in str(wrapped)
    lone = dj.explain(step, {"x": rows[:1]}, params, strategy=dj.VirtualStrategy(1))
    assert lone.possible_rows == ()


# -- a screen -------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.dense(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, dj.get_replica_context().all_reduce("mean", grads))
    return {"loss": loss}


def test_a_module_fits_a_screen():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    (x,) = strategy.distribute_dataset([np.ones((4, 8), np.float32)])
    found = dj.explain(train, model, optimizer, x, strategy=strategy)
    lines = str(found).splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100, str(found)
    rows = [" ".join(line.split()) for line in lines]
    assert "argument model (26), optimizer (38) M" in rows
    assert any(row.startswith("18 all-reduce") for row in rows)
    reasons = dict(row.split(" T ") for row in rows if " T " in row)
    norm = "Model.blocks.*.norm"
    assert {"['loss']", f"{norm}.mean (4)", f"{norm}.var (4)"} == {*reasons}
    assert reasons["['loss']"].startswith("x -> ... -> test_explain.py:")
    assert not any("[2][" in path for run in found.runs for path, *_ in run.why)
    page = found._repr_html_()
    assert "18 all-reduce" in page and "strategy.jit(" not in page
    large = dataclasses.replace(found.memory, argument_bytes=2**21, output_bytes=2**21)
    assert "strategy.jit(step, donate" in str(dataclasses.replace(found, memory=large))
    whole = str(dataclasses.replace(found, full=True)).splitlines()
    assert sum("all-reduce" in line for line in whole) > 18 and len(whole) > 150


class Tied(nnx.Module):
    """A module that has a part twice, as `nnx.SpectralNorm` has the layer that it normalizes."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.again = nnx.Sequential(self.dense)

    def __call__(self, x):
        return self.again(self.dense(x))


def test_a_part_that_is_shared_stays_one():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    model = Tied(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    (x,) = strategy.distribute_dataset([np.ones((4, 8), np.float32)])
    found = dj.explain(train, model, optimizer, x, strategy=strategy)
    assert found.written_counts["all-reduce"].num_ops == 2  # of a kernel and a bias
    assert model.again.layers[0] is model.dense


def test_full_and_the_name_of_a_partial(pair):
    def step(scale, x):
        return scale * x

    compiled = pair.jit(functools.partial(step, 2.0))
    short, long = (dj.explain(compiled, ids(pair), full=full) for full in (False, True))
    assert long.full and not short.full and long.name.endswith("<locals>.step")
    assert json.loads(long.to_json()) == json.loads(short.to_json())
