"""TensorFlow's parameter servers: the other side of `servers_tensorflow`.

Runs in an environment that has TensorFlow 2.21 and no JAX. Reads a number of steps from each line
of its input, schedules that many, and answers with the seconds per step. The servers of the
cluster are in this process, or in a process each.
"""

import json
import os
import socket
import subprocess
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf

_INPUTS, _CLASSES = 784, 10
_SERVER = "server"  # an argument: be one of a cluster


def start_cluster(num_workers, are_apart):
    """Returns the servers (workers and one parameter server) and a resolver of their addresses."""
    # All are held until all are known, so that no port is given out twice.
    sockets = [socket.socket() for _ in range(num_workers + 1)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    cluster = {"worker": addresses[:-1], "ps": addresses[-1:]}
    tasks = [("worker", i) for i in range(num_workers)] + [("ps", 0)]
    start = start_process if are_apart else start_server
    servers = [start(cluster, job, i) for job, i in tasks]
    spec = tf.train.ClusterSpec(cluster)
    return servers, tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")


def start_server(cluster, job, index):
    """Returns one server, in this process."""
    # A function blocks a thread while it reads from another server; with fewer, all would wait.
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=len(cluster["worker"]) + 2)
    return tf.distribute.Server(tf.train.ClusterSpec(cluster), job, index, "grpc", threads)


def start_process(cluster, job, index):
    """Returns one server, in a process that ends with this one, since its input is our pipe."""
    command = [sys.executable, "-m", "benchmarks.servers_tensorflow_worker", _SERVER]
    return subprocess.Popen(
        [*command, json.dumps(cluster), job, str(index)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def make_step(strategy, hidden):
    """Returns a step 784-h-h-10 with Adam written out as arithmetic, its state at the servers."""
    sizes = (_INPUTS, hidden, hidden, _CLASSES)
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            tf.Variable(rng.normal(0, 0.05, shape).astype(np.float32))
            for shape in zip(sizes[:-1], sizes[1:], strict=True)
        ]
        biases = [tf.Variable(tf.zeros(width)) for width in sizes[1:]]
        variables = [*weights, *biases]
        firsts, seconds = [[tf.Variable(tf.zeros(v.shape)) for v in variables] for _ in range(2)]
        count = tf.Variable(0.0)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            x = images
            for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                x = tf.matmul(x, weight) + bias
                x = tf.tanh(x) if i < len(weights) - 1 else x
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=x)
            loss = tf.reduce_mean(loss)
        gradients = tape.gradient(loss, variables)
        t = count.assign_add(1.0)
        rate = 1e-3 * tf.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        for v, m, s, g in zip(variables, firsts, seconds, gradients, strict=True):
            m.assign_add(0.1 * (g - m))
            s.assign_add(0.001 * (g * g - s))
            v.assign_sub(rate * m / (tf.sqrt(s) + 1e-8))
        return loss

    return step


def main(num_workers, hidden, examples, are_apart):
    """Answers each line of the input."""
    servers, resolver = start_cluster(num_workers, are_apart)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    step = make_step(strategy, hidden)
    rng = np.random.default_rng(1)
    images = tf.constant(rng.normal(size=(examples, _INPUTS)).astype(np.float32))
    batch = images, tf.constant(rng.integers(0, _CLASSES, examples).astype(np.int32))
    for line in sys.stdin:
        num_steps = int(line)
        start = time.perf_counter()
        for _ in range(num_steps):
            coordinator.schedule(step, args=batch)
        coordinator.join()
        print((time.perf_counter() - start) / num_steps, flush=True)
    os._exit(0 if servers else 1)  # the coordinator's threads never end


def serve(cluster, job, index):
    """Runs one server until the process that started it ends."""
    server = start_server(json.loads(cluster), job, int(index))
    sys.stdin.read()
    os._exit(0 if server else 1)


if __name__ == "__main__":
    if sys.argv[1] == _SERVER:
        serve(*sys.argv[2:])
    else:
        main(*map(int, sys.argv[1:]))
