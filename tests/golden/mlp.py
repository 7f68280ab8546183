"""The small model that both sides train: its data, its first weights, its constants."""

from tests.golden.closed_form import smooth

GLOBAL_BATCH, NUM_STEPS = 24, 10
SIZES = {"w1": [4, 5], "b1": [5], "w2": [5, 2], "b2": [2]}
LEARNING_RATE, MOMENTUM, BETA1, BETA2, EPSILON = 0.1, 0.9, 0.9, 0.99, 1e-3
MOVING, BN_EPSILON = 0.8, 1e-2

#: name -> (optimizer, how gradients meet, synchronization of the moving statistics or None).
METHODS = {
    "sgd_aggregation": ("sgd", "aggregation", None),
    "sgd_all_reduce": ("sgd", "all_reduce", None),
    "sgd_merge_call": ("sgd", "merge_call", None),
    "momentum_merge_call": ("momentum", "merge_call", None),
    "adam_merge_call": ("adam", "merge_call", None),
    "batch_norm_on_read": ("sgd", "all_reduce", "ON_READ"),
    "batch_norm_on_write": ("sgd", "all_reduce", "ON_WRITE"),
}
#: name -> the slot variables of each weight.
SLOTS = {"sgd": (), "momentum": ("velocity",), "adam": ("m", "v")}
#: how gradients meet -> the aggregation of the weights.
AGGREGATIONS = {"aggregation": "SUM", "all_reduce": "MEAN", "merge_call": "NONE"}


def first_weights():
    """Returns name -> float32 array."""
    return {name: smooth(shape, seed) for seed, (name, shape) in enumerate(SIZES.items())}


def batch(step):
    """Returns inputs [24, 4] and targets [24, 2] of a step; two batches take turns."""
    return smooth([GLOBAL_BATCH, 4], 10 + step % 2), smooth([GLOBAL_BATCH, 2], 20 + step % 2)
