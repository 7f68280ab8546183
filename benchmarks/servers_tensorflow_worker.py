"""TensorFlow's parameter servers in one process: the other side of `servers_tensorflow`.

Runs in an environment that has TensorFlow 2.21 and nothing of JAX. Reads a number of steps from
each line of its input, schedules as many, and answers with the seconds of one.
"""

import os
import socket
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf

_INPUTS, _CLASSES = 784, 10


def start_cluster(num_workers):
    """Returns servers in this process, workers and one parameter server, and where they are."""
    # Held until all are known: a connection of one server might take the port of the next.
    sockets = [socket.socket() for _ in range(num_workers + 1)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    cluster = tf.train.ClusterSpec({"worker": addresses[:-1], "ps": addresses[-1:]})
    tasks = [("worker", i) for i in range(num_workers)] + [("ps", 0)]
    # Each function holds a thread while it reads what another server has: with fewer, all wait.
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=num_workers + 2)
    servers = [tf.distribute.Server(cluster, job, i, "grpc", threads) for job, i in tasks]
    return servers, tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")


def make_step(strategy, hidden):
    """Returns a step 784-h-h-10 with Adam as its arithmetic is, its state at the servers."""
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


def main(num_workers, hidden, examples):
    """Answers lines until there are none."""
    servers, resolver = start_cluster(num_workers)
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


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
