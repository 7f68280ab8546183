"""Random schedules of closures through `Deadlines`, in no time and without threads."""

from distjax._src.servers.engine import Deadlines


class Worker:
    def __init__(self):
        self.closure = None
        self.pulled = 0  # the version
        self.own = 0  # its pushes since
        self.to_push = 0


def run_random_schedule(rng):
    """Returns a bound, and how stale each push was; asserts that nobody is stuck."""
    bound = rng.randrange(7)
    deadlines = Deadlines(bound)
    workers = [Worker() for _ in range(rng.randint(1, 6))]
    num_stages = rng.choice([1, 1, 2, 3])
    slow = rng.random()  # a chance that the first worker is passed over
    num_left, number, version, staleness = rng.randint(5, 30), 0, 0, []
    while num_left or any(worker.to_push for worker in workers):
        able = [worker for worker in workers if _is_able(worker, deadlines, num_left, num_stages)]
        assert able, "stuck"
        worker = rng.choice(able)
        if worker is workers[0] and len(able) > 1 and rng.random() < slow:
            continue
        if not worker.to_push:
            worker.closure, number, num_left = number, number + 1, num_left - 1
            worker.pulled, worker.own = version, 0
            worker.to_push = rng.randint(1, num_stages)
            deadlines.pull(worker.closure, worker.to_push)
        elif rng.random() < 0.1:  # it is lost
            worker.to_push = 0
            deadlines.forget(worker.closure)
        else:
            staleness.append(version - worker.pulled - worker.own)
            deadlines.push(worker.closure)
            version, worker.own, worker.to_push = version + 1, worker.own + 1, worker.to_push - 1
    return bound, staleness


def _is_able(worker, deadlines, num_left, num_stages):
    if worker.to_push:
        return deadlines.may_push(worker.closure)
    return num_left and deadlines.may_pull(num_stages)
