"""Plans run one after another in the caller's thread, by the words of the plan alone."""

import jax
import numpy as np

from distjax.servers import Engine, ParameterServerStrategy


class SerialServer:
    """Values by key, and what came over the wire."""

    def __init__(self, device):
        self.device, self.values, self.version, self.jitted = device, {}, 0, {}

    def create(self, key, value):
        assert key not in self.values
        self.write({key: value})

    def write(self, values):
        self.values.update(jax.device_put(dict(values), self.device))
        self.version += 1

    def add(self, amounts):
        self.write({key: self.values[key] + x for key, x in amounts.items()})

    def remove(self, keys):
        for key in keys:
            del self.values[key]

    def read(self, keys):
        return self.version, [self.values[key] for key in keys]

    def push(self, push, arrays):
        arrays = [jax.device_put(x, self.device) for x in arrays]
        taken = [self.values[key] for key in push.takes]
        outs = jitted(self.jitted, push.program)(*taken, *arrays)
        assert len(outs) == len(push.writes) + len(push.answers)
        self.values.update(zip(push.writes, outs, strict=False))
        self.version += bool(push.writes)
        return outs[len(push.writes) :]


class SerialStrategy(ParameterServerStrategy):
    """Runs what is given to `run` at once."""

    def __init__(self, servers=1, *, workers=2, cut="arguments", **options):
        super().__init__(workers, servers, engine=SerialEngine(), cut=cut, **options)

    def run_closure(self, fn, args, kwargs):
        plan, flat = self.cut_step(fn, args, kwargs)
        return plan.rebuild(self.engine.run(plan, flat))


class SerialEngine(Engine):
    """Runs each closure at once, on the next worker; counts what travels."""

    max_failures, servers = 1, ()

    def start(self, workers, server_devices, max_staleness):
        self.workers = list(workers)
        self.servers = [SerialServer(device) for device in reversed(jax.devices())]
        self.servers = self.servers[: len(server_devices)]
        self.pulled = self.pushed = self.answered = self.trips = self.closures = 0
        self.jitted = {}

    def run(self, plan, flat):
        home = self.workers[self.closures % len(self.workers)]
        where = lambda slot: home.per_replica if slot in plan.varying else home.mirrored
        self.closures += 1
        slots = dict(zip(plan.arguments, flat, strict=True))
        for slot, key in plan.pulls:
            _, (value,) = self.servers[plan.owners[key]].read([key])
            slots[slot] = value
            self.pulled += value.nbytes
        for stage in plan.stages:
            arrays = [jax.device_put(slots[i], where(i)) for i in stage.operands]
            outs = tuple(map(where, stage.results))
            outs = jitted(self.jitted, stage.program, outs)(*arrays)
            slots.update(zip(stage.results, outs, strict=True))
            for push in stage.pushes:
                arrays = [slots[i] for i in push.operands]
                self.pushed += sum(np.asarray(x).nbytes for x in arrays)
                answers = self.servers[push.server].push(push, arrays)
                self.answered += sum(x.nbytes for x in answers)
                slots.update(zip(push.answers, answers, strict=True))
            self.trips += bool(stage.pushes)
        return [slots[i] for i in plan.results]


def jitted(cache, program, outs=None):
    """Returns a program, compiled once for each place."""
    if (program, outs) not in cache:
        cache[program, outs] = jax.jit(program.fn, out_shardings=outs)
    return cache[program, outs]
