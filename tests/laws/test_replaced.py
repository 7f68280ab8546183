"""What a step reaches is replaced, swapped, deleted and put back between calls of one function.

The reference interpreter runs the Python of a step at each call, so it uses what is there. A
compiled step has to give the same: after each call all objects that were ever there have the
reference's values, and a call that finds nothing raises the same error.
"""

import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from tests.laws.drawing import EXAMPLES

pytestmark = [
    pytest.mark.filterwarnings("ignore::distjax.errors.RecompilationWarning"),
    pytest.mark.filterwarnings("ignore::distjax.errors.ReductionWarning"),
]
STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
}
MODES = {
    "run": lambda strategy, step: lambda x: strategy.run(step, args=(x,)),
    "dj.jit": lambda strategy, step: dj.jit(lambda x: strategy.run(step, args=(x,))),
    "strategy.jit": lambda strategy, step: strategy.jit(step),
}
KINDS = ("variable", "metric", "optimizer", "layer", "holder", "list")
PLACES = ("attribute", "item", "cell", "global", "element", "nested")


def use(obj, x, total):
    """What a step does with an object, by its kind."""
    if isinstance(obj, dj.Variable):
        obj.assign_add(total)
    elif isinstance(obj, dj.metrics.Metric):
        obj.update(x)
    elif isinstance(obj, dj.optim.Optimizer):
        obj.apply_gradients([(x.sum(), v) for v in obj.variables])
    elif isinstance(obj, dj.layers.BatchNormalization):
        obj.moving_mean.assign_add(jnp.full(1, total))
    elif isinstance(obj, types.SimpleNamespace):
        use(obj.inner, x, total)
    elif isinstance(obj, list):
        for each in obj:
            use(each, x, total)
    else:
        assert obj is None


def values_of(obj):
    """The values of all variables of an object."""
    if isinstance(obj, dj.Variable):
        return [np.asarray(obj.value)]
    if isinstance(obj, dj.metrics.Metric):
        return [np.asarray(obj.result())]
    if isinstance(obj, dj.optim.Optimizer):
        return [np.asarray(v.value) for v in jax.tree.leaves((obj.variables, obj.state))]
    if isinstance(obj, dj.layers.BatchNormalization):
        return [np.asarray(obj.moving_mean.value)]
    inner = obj if isinstance(obj, list) else [obj.inner]
    return [value for each in inner for value in values_of(each)]


class Program:
    """One step, the places where it looks for objects, and what is done to them.

    Args:
      strategy: the strategy.
      mode: how the step is called.
      number: makes the names of globals unique.
    """

    def __init__(self, strategy, mode, number):
        self.strategy, self.objects, self.dict, self.list = strategy, [], {}, []
        self.nested = types.SimpleNamespace(below=types.SimpleNamespace())
        self.space = {"use": use, "__builtins__": __builtins__, "__name__": "users_own"}
        exec("def use_global(x, total): use(there, x, total)", self.space)
        cell = None

        def in_cell(x, total):
            use(cell, x, total)

        def put_into_cell(value):
            nonlocal cell
            cell = value

        def delete_cell():
            nonlocal cell
            del cell

        self.in_cell, self.put_into_cell, self.delete_cell = in_cell, put_into_cell, delete_cell
        for place in PLACES:
            self.put(place, None)
        self.call = mode(strategy, self.step)

    def step(self, x):
        total = dj.get_replica_context().all_reduce("sum", x.sum())
        use(self.attribute, x, total)
        use(self.dict["there"], x, total)
        self.in_cell(x, total)
        self.space["use_global"](x, total)
        for each in self.list:
            use(each, x, total)
        use(self.nested.below.there, x, total)
        return total

    def put(self, place, obj):
        if place == "attribute":
            self.attribute = obj
        elif place == "item":
            self.dict["there"] = obj
        elif place == "cell":
            self.put_into_cell(obj)
        elif place == "global":
            self.space["there"] = obj
        elif place == "element":
            self.list[:1] = [obj]
        else:
            self.nested.below.there = obj

    def get(self, place):
        return {
            "attribute": lambda: self.attribute,
            "item": lambda: self.dict["there"],
            "cell": lambda: next(
                c.cell_contents
                for n, c in zip(
                    self.in_cell.__code__.co_freevars, self.in_cell.__closure__, strict=True
                )
                if n == "cell"
            ),
            "global": lambda: self.space["there"],
            "element": lambda: next(iter(self.list), None),
            "nested": lambda: self.nested.below.there,
        }[place]()

    def delete(self, place):
        {
            "attribute": lambda: delattr(self, "attribute"),
            "item": lambda: self.dict.clear(),
            "cell": self.delete_cell,
            "global": lambda: self.space.pop("there"),
            "nested": lambda: delattr(self.nested.below, "there"),
        }[place]()

    def make(self, kind, rate):
        with self.strategy.scope():
            if kind == "variable":
                made = dj.Variable(0.0, aggregation=dj.VariableAggregation.MEAN)
            elif kind == "metric":
                made = dj.metrics.Sum("sum")
            elif kind == "optimizer":
                made = dj.optim.Optimizer(optax.sgd(rate, momentum=0.5 if rate > 1 else None))
                made.init([dj.Variable(0.0, name="w")])
            elif kind == "layer":
                made = dj.layers.BatchNormalization(1)
            elif kind == "holder":
                made = types.SimpleNamespace(inner=self.make("variable", rate))
            else:
                made = [self.make("metric", rate), self.make("variable", rate)]
        self.objects.append(made)
        return made

    def do(self, action):
        name, place, other, kind, rate, number = action
        if name == "make":
            self.put(place, self.make(kind, rate))
        elif name == "put back" and self.objects:
            self.put(place, self.objects[number % len(self.objects)])
        elif name == "swap":
            one, two = self.get(place), self.get(other)
            self.put(place, two)
            self.put(other, one)
        elif name == "empty":
            self.put(place, None)
        elif name == "delete":
            self.list.clear()
        elif name == "inside" and self.objects:
            obj = self.objects[number % len(self.objects)]
            if isinstance(obj, dj.optim.Optimizer):
                with self.strategy.scope():
                    obj.init([dj.Variable(1.0, name="another")])
            elif isinstance(obj, list):
                obj.append(self.make("variable", rate))
            elif isinstance(obj, types.SimpleNamespace):
                obj.inner = self.make("metric", rate)
            elif isinstance(obj, dj.metrics.Metric):
                obj.variables = self.make("metric", rate).variables
            elif isinstance(obj, dj.layers.BatchNormalization):
                obj.moving_mean = self.make("layer", rate).moving_mean


def draw(rng):
    names = ("make", "make", "make", "put back", "swap", "empty", "inside", "inside", "delete")
    return (
        rng.choice(names),
        *rng.sample(PLACES, 2),
        rng.choice(KINDS),
        rng.choice([0.5, 2.0]),
        rng.randrange(100),
    )


def call_both(tested, reference, number):
    x = np.float32([number, 1.0])
    assert float(tested.call(x)) == float(reference.call(x))


#: What Python raises where nothing is; a list without the item is a list.
MISSING = {
    "attribute": AttributeError,
    "item": KeyError,
    "cell": NameError,
    "global": NameError,
    "nested": AttributeError,
}


@pytest.mark.parametrize("where", STRATEGIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(EXAMPLES or 1))
def test_a_step_uses_what_is_there(where, mode, seed):
    rng = random.Random(f"{where} {mode} {seed}")
    tested = Program(STRATEGIES[where](), MODES[mode], 0)
    reference = Program(dj.testing.ReferenceStrategy(2), MODES["run"], 1)
    history = []
    for number in range(6 if EXAMPLES else 4):
        action = draw(rng)
        history.append(action)
        if action[0] == "delete" and action[1] in MISSING:
            place = action[1]
            held = tested.get(place)
            tested.delete(place)
            with pytest.raises(MISSING[place]):  # and nothing changes, unlike in plain Python
                tested.call(np.float32([number, 1.0]))
            tested.put(place, held)
        else:
            tested.do(action)
            reference.do(action)
        call_both(tested, reference, number)
        if number % 2:  # the compiled call, too
            call_both(tested, reference, number + 1)
        for one, two in zip(tested.objects, reference.objects, strict=True):
            for found, wanted in zip(values_of(one), values_of(two), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=str(history))
