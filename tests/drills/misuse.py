"""Random programs in which one process does something else: python -m tests.drills.misuse [seeds].

A program is a list of calls on 2 processes of 2 devices, of which one is changed on one process:
made by it alone, or twice, or with another argument; a seed, a constant, an order of creation. It
passes if it ends with an error or a code on all processes and has committed no checkpoint from the
change on, or if its numbers are those of one process that runs it as it was meant.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence

from tests.processes.jobs import Ended, run_job

_START = """
import json, time
import numpy as np
import jax, jax.numpy as jnp
import distjax as dj
if P > 1:
    dj.initialize(ADDRESS, P, I, meeting_timeout=6, shutdown_timeout=8, step_deadline=20)
strategy = dj.MultiWorkerMirroredStrategy()
MEAN, SUM = dj.VariableAggregation.MEAN, dj.VariableAggregation.SUM
seen = []

def average(x):
    return dj.get_replica_context().all_reduce("mean", x)

def train(x):
    w.assign_sub(0.1 * (w.value - rate * jnp.mean(x)))
    seen_by_all.update(jnp.mean(x))
    return average(jnp.mean(w.value))

def evaluate(x):
    return average(jnp.sum(w.value * jnp.mean(x)))

def scaled(x):
    w.assign_add(jnp.zeros(4) + 0.01 * jnp.mean(x))

def adder(by):
    def add(x):
        w.assign_add(jnp.zeros(4) + by * jnp.mean(x))
    return add

small, large = adder(0.01), adder(0.02)

def save(step):
    checkpointer.save(step, {"w": w, "seen": seen_by_all})
    checkpointer.wait()
"""

#: The setting of a program, and how it may be changed; {who}: whether this process is the one.
_SETUP = {
    "seed = 0": "seed = {who}",
    "rate = 1.0": "rate = 1.0 + {who}",
    "shuffle = 0": "shuffle = {who}",
    "name = 'w'": "name = 'w' + str({who})",
    "order = ['w', 'b']": "order = ['w', 'b'][:: 1 - 2 * {who}]",
}

#: The calls that show a change of the setting; else it shows when variables are made.
_SHOWN_BY = {"rate = 1.0": "(train,", "shuffle = 0": "next(data)"}

_CREATE = """
with strategy.scope():
    made = {}
    for each in order:
        initial = lambda: jax.random.normal(jax.random.key(seed), (4,))
        made[each] = dj.Variable(initial, name=name if each == "w" else each, aggregation=MEAN)
    w = made["w"]
    seen_by_all = dj.metrics.Mean()
batches = np.random.default_rng(shuffle).normal(size=(40, 8)).astype(np.float32)
data = iter(strategy.distribute_dataset(list(batches)))
checkpointer = dj.checkpoint.Checkpointer(os.environ["TEST_DIRECTORY"])
"""

#: Calls that involve all processes. {at}: the number of the call.
_CALLS = (
    "seen.append(float(strategy.run(train, args=(np.float32(0.5),))))",
    "strategy.run(train, args=(next(data),))",
    "seen.append(float(strategy.run(evaluate, args=(np.float32(0.25),))))",
    "strategy.run(scaled, args=(np.arange(3.0, dtype=np.float32),))",
    "strategy.run(scaled, args=(0.125,))",
    "strategy.run(small, args=(np.float32(1.0),))",
    "strategy.run(large, args=(np.float32(1.0),))",
    "w.assign(np.full(4, 0.5, np.float32))",
    "seen.append(float(seen_by_all.result()))",
    "save({at})",
    "seen.append(float(strategy.reduce('sum', strategy.run(lambda: w.value[0]))))",
)

#: What may come to a call on one process.
_CHANGES = (
    "if {who}: {call}",
    "for _ in range(1 + {who}): {call}",
    "if {who}: {other}\nelse: {call}",
    "if {who}: {other}\n{call}",
    "if {who}: raise ValueError('mine')\n{call}",
    "if {who}: sys.exit(0)\n{call}",
    "strategy.run(train, args=(np.float32(0.5 + {who}),))",
    "strategy.run(scaled, args=(0.125 + {who},))",
    "strategy.run(scaled, args=(np.ones(3 + {who}, np.float32),))",
    "strategy.run(scaled, args=(np.ones(3, ('f', 'i')[{who}]),))",
    "strategy.run((train, evaluate)[{who}], args=(np.float32(0.5),))",
    "strategy.run((small, large)[{who}], args=(np.float32(1.0),))",
    "seen.append(float(strategy.reduce(('sum', 'mean')[{who}], strategy.run(lambda: w.value[0]))))",
    "w.assign(np.full(4, 0.5 + {who}, np.float32))",
    "save({at} + {who})",
    "with strategy.scope(): dj.Variable(float({who}), name='late')",
)

#: What one process may do alone: the program has to agree with one process.
_HARMLESS = (
    "if {who}: print(sum(range(10**7)))\n{call}",
    "if {who}: print(np.asarray(w.value), seen_by_all)\n{call}",
    "if {who}: dj.MirroredStrategy(jax.local_devices()).run(lambda: jnp.ones(()))\n{call}",
    "if {who}: dj.OneDeviceStrategy(jax.local_devices()[0]).run(lambda: jnp.ones(()))\n{call}",
    "if {who}: jax.clear_caches()\n{call}",
)

_END = """
print("RESULT", json.dumps([np.asarray(w.value).tolist(), float(seen_by_all.result()), seen]))
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and its change.

    Attributes:
      meant: the program without the change.
      changed: with it.
      change: what it is, in a line.
      at: the number of the first call that is changed; -1 where it is before all of them.
      is_harmless: whether it has to agree with one process.
    """

    meant: str
    changed: str
    change: str
    at: int
    is_harmless: bool


def draw(seed: int) -> Program:
    """Returns the program of a seed."""
    drawn = random.Random(seed)
    calls = [drawn.choice(_CALLS) for _ in range(drawn.randint(5, 9))]
    calls += [drawn.choice(calls) for _ in range(drawn.randint(3, 6))]  # compiled by now
    calls = [call.format(at=at) for at, call in enumerate(calls)]
    who = f"(I == {drawn.randrange(2)})"
    setup, at = dict.fromkeys(_SETUP), -1
    new, is_harmless = list(calls), False
    kind = drawn.random()
    if kind < 0.2:
        line = drawn.choice(list(_SETUP))
        setup[line] = change = _SETUP[line].format(who=who)
        if line in _SHOWN_BY:
            shown = (i for i, call in enumerate(calls) if _SHOWN_BY[line] in call)
            at = next(shown, len(calls))
    else:
        is_harmless = kind > 0.8
        pattern = drawn.choice(_HARMLESS if is_harmless else _CHANGES)
        at = drawn.randrange(len(calls))
        other = drawn.choice([call for call in calls if call != calls[at]] or calls)
        new[at] = pattern.format(who=who, call=calls[at], other=other, at=at)
        change = new[at].replace("\n", "; ")
    text = lambda lines, body: "\n".join([_START, *lines, _CREATE, *body, _END])
    meant = text(_SETUP, calls)
    changed = text([new or line for line, new in setup.items()], new)
    return Program(meant, changed, change, at, is_harmless)


class Failure(Exception):
    """A program that has ended as none may."""


def run(program: Program) -> str:
    """Returns how a program ended, in a word or two.

    Raises:
      Failure: with another number, or not on all processes.
    """
    with tempfile.TemporaryDirectory(prefix="distjax-misuse-") as folder:
        environment = {"TEST_DIRECTORY": os.path.join(folder, "several")}
        ended = run_job(program.changed, devices=2, environment=environment, seconds=150)
        codes = [process.code for process in ended]
        committed = (
            [int(n) for n in os.listdir(folder + "/several") if n.isdigit()]
            if (os.path.isdir(folder + "/several"))
            else []
        )
        if any(codes):
            late = [step for step in committed if step >= program.at]
            if not all(codes) or min(codes) < 0 or late or program.is_harmless:
                raise Failure(f"codes {codes}, checkpoints {committed}: {ended[0].said[-1500:]}")
            return f"codes {codes[0]}, {codes[1]}"
        (alone,) = run_job(
            program.meant,
            ids=(0,),
            devices=4,
            environment={"TEST_DIRECTORY": os.path.join(folder, "one")},
            seconds=150,
        )
        if alone.code:
            raise Failure(alone.said[-1500:])
        _require_equal([_result(process) for process in ended], _result(alone))
        return "agrees"


def _result(ended: Ended) -> list[object]:
    lines = [line for line in ended.said.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1].removeprefix("RESULT "))


def _require_equal(found: Sequence[object], expected: object) -> None:
    flat = lambda x: [y for each in x for y in flat(each)] if isinstance(x, list) else [x]
    for each in found:
        pairs = list(zip(flat(each), flat(expected), strict=True))
        if any(abs(a - b) > 1e-5 * max(1.0, abs(b)) for a, b in pairs):
            raise Failure(f"{each}, and {expected} of one process")


def main(seeds: Sequence[int]) -> None:
    """Runs the programs of the seeds and prints a table; ends with 1 if one of them failed."""
    failures = 0
    print(f"{'seed':>6}  {'result':14}  change", flush=True)
    for seed in seeds:
        program = draw(seed)
        try:
            result = run(program)
        except Failure as failure:
            failures, result = failures + 1, f"FAILED: {failure}"
        print(f"{seed:6}  {result:14}  {program.change}", flush=True)
    print(f"{len(seeds)} programs, {failures} of which failed")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or range(30))
