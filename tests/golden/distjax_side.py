"""distjax on virtual CPU devices: strategies, values in, outcomes out."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import distjax as dj
from tests.golden.closed_form import numbers
from tests.golden.records import plain


def make_strategy(name):
    """Returns the strategy that a record names: mirrored3, central2, one_device, default."""
    if name == "default":
        return dj.get_strategy()
    if name == "one_device":
        return dj.OneDeviceStrategy()
    kind, count = re.fullmatch(r"([a-z]+)(\d)", name).groups()
    if kind == "virtual":
        return dj.VirtualStrategy(int(count))
    kinds = {"mirrored": dj.MirroredStrategy, "central": dj.CentralStorageStrategy}
    return kinds[kind](jax.devices()[: int(count)])


def make_variable(initial, *, trainable=None, name="v", sync="AUTO", aggregation="NONE"):
    """Returns a variable with the modes that a record names."""
    return dj.Variable(
        initial,
        trainable=trainable,
        name=name,
        synchronization=dj.VariableSynchronization[sync],
        aggregation=dj.VariableAggregation[aggregation],
    )


def per_replica(strategy, values):
    """Returns values[r] on replica r."""
    return strategy.distribute_values_from_function(
        lambda ctx: jnp.asarray(values[ctx.replica_id_in_sync_group])
    )


def numbers_per_replica(strategy, shape, dtype):
    count = strategy.num_replicas_in_sync
    return per_replica(strategy, [numbers(shape, dtype, seed=r) for r in range(count)])


def array(value):
    """Returns an array with its dtype."""
    value = jnp.asarray(value)
    return {"value": plain(value), "dtype": value.dtype.name}


def locals_of(strategy, value):
    """Returns what each replica holds, with the dtype."""
    parts = [np.asarray(x) for x in strategy.local_results(value)]
    return {"locals": [plain(x) for x in parts], "dtype": parts[0].dtype.name}
