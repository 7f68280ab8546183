"""TensorFlow on eight virtual CPU devices: strategies, values in, outcomes out."""

import os
import re

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # its kernels round by the model of the CPU
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf

from tests.golden.closed_form import numbers

NUM_DEVICES = 8
DEVICES = [f"CPU:{i}" for i in range(NUM_DEVICES)]
SYNCHRONIZATION, AGGREGATION = tf.VariableSynchronization, tf.VariableAggregation


def start():
    """Sets the virtual devices up; one thread, so that sums have one order."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [one] * NUM_DEVICES)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    tf.get_logger().setLevel("ERROR")


def make_strategy(name):
    """Returns the strategy that a record names: mirrored3, central2, one_device, default.

    Mirrored ones reduce on one device: the collectives of several strategies in
    one process get the same numbers in 2.21 and fail.
    """
    if name == "default":
        return tf.distribute.get_strategy()
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    kind, count = re.fullmatch(r"([a-z]+)(\d)", name).groups()
    if kind == "mirrored":
        on_one_device = tf.distribute.ReductionToOneDevice()
        return tf.distribute.MirroredStrategy(DEVICES[: int(count)], on_one_device)
    assert kind == "central", name
    return tf.distribute.experimental.CentralStorageStrategy(DEVICES[: int(count)], "CPU:0")


def make_variable(initial, *, trainable=None, name="v", sync="AUTO", aggregation="NONE"):
    """Returns a variable with the modes that a record names."""
    return tf.Variable(
        initial,
        trainable=trainable,
        name=name,
        synchronization=getattr(SYNCHRONIZATION, sync),
        aggregation=getattr(AGGREGATION, aggregation),
    )


def per_replica(strategy, values):
    """Returns values[r] on replica r."""
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: tf.constant(values[ctx.replica_id_in_sync_group])
    )


def numbers_per_replica(strategy, shape, dtype):
    count = strategy.num_replicas_in_sync
    return per_replica(strategy, [numbers(shape, dtype, seed=r) for r in range(count)])


# -- outcomes -------------------------------------------------------------------


def plain(value):
    """Returns a tensor, variable, number or nest as what JSON has."""
    if isinstance(value, dict):
        return {key: plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return plain(value.numpy())
    if isinstance(value, np.ndarray):
        return [plain(x) for x in value]
    if isinstance(value, np.generic):
        return plain_scalar(value)
    assert value is None or isinstance(value, (bool, int, float, str)), type(value)
    return value


def plain_scalar(value):
    if np.issubdtype(value.dtype, np.complexfloating):
        return {"re": plain(value.real), "im": plain(value.imag)}
    if value.dtype.kind in "biu":
        return value.item()
    return float(str(value.astype(np.float32)) if value.dtype.itemsize < 4 else str(value))


def array(value):
    """Returns a tensor or variable with its dtype."""
    value = tf.convert_to_tensor(value)
    return {"value": plain(value), "dtype": value.dtype.name}


def locals_of(strategy, value):
    """Returns what each replica holds, with the dtype."""
    parts = strategy.experimental_local_results(value)
    arrays = [array(x) for x in parts]
    return {"locals": [x["value"] for x in arrays], "dtype": arrays[0]["dtype"]}


def outcome_of(ask):
    """Returns what `ask()` returns, or the type of the error that it raises."""
    try:
        return ask()
    except Exception as error:
        return {"error": type(error).__name__, "text": first_line(error)}


def first_line(error):
    """Returns the line of an error that says what it is, without addresses, cut short."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if lines[0] == "in user code:" else lines[0]  # a traceback stands between
    return re.sub(r"{{.*?}}\s*|0x[0-9a-f]+", "", line).strip()[:80]
