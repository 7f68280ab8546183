"""Workers and servers of TensorFlow in one process, with a coordinator."""

import numpy as np
import tensorflow as tf

from tests.golden.recording import tensorflow_side as side
from tests.processes.jobs import free_address

NUM_SERVERS = 2
NEGATIVE = np.float32(-1)


def ask_all(cases, ask):
    """Yields a record for each of the cases, which name the number of their workers.

    Args:
      cases: by number of workers: what is asked, and with which arguments.
      ask: the functions that ask, by name.
    """
    for num_workers, of_them in cases.items():
        cluster = Cluster(num_workers)
        for what, *parts in of_them:
            case = {"what": what, "parts": parts, "workers": num_workers}
            outcome = side.outcome_of(lambda w=what, c=cluster, p=parts: ask[f"ask_{w}"](c, *p))
            yield "/".join([what, *map(str, parts)]), case, outcome
            side.outcome_of(cluster.coordinator.join)  # leaves no error to the next case


class Cluster:
    """Workers and servers of this process, with a coordinator."""

    def __init__(self, num_workers):
        addresses = [free_address() for _ in range(num_workers + NUM_SERVERS)]
        spec = {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
        cluster = tf.train.ClusterSpec(spec)
        # Each function holds a thread while it reads what another server has.
        threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=num_workers + 3)
        tasks = [(job, i) for job in spec for i in range(len(spec[job]))]
        self.servers = [tf.distribute.Server(cluster, j, i, "grpc", threads) for j, i in tasks]
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def variable(self, value=0.0, **options):
        with self.strategy.scope():
            return tf.Variable(value, **options)

    def schedule(self, fn, *args, **kwargs):
        return self.coordinator.schedule(tf.function(fn), args=args, kwargs=kwargs)

    def dataset(self, fn):
        return iter(self.coordinator.create_per_worker_dataset(fn))


def raised(act):
    """Returns "nothing", or the name of the error that `act` raises."""
    outcome = side.outcome_of(act)
    return outcome["error"] if isinstance(outcome, dict) and "error" in outcome else "nothing"


def did_raise(act):
    return raised(act) != "nothing"


def check(x):
    """Fails at the worker for what is negative."""
    tf.debugging.assert_non_negative(x)
    return x


def of_numbers(count):
    return lambda: tf.data.Dataset.range(count, output_type=tf.int32)
