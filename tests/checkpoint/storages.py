"""Every way to store a variable."""

import jax

import distjax as dj

#: By name, what makes the strategy.
STORAGES = {
    "default": lambda: dj.get_strategy(),
    "one_device": lambda: dj.OneDeviceStrategy(jax.devices()[1]),
    "mirrored2": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual4": lambda: dj.VirtualStrategy(4),
    "zero1": lambda: dj.ShardedStrategy(
        jax.devices()[:4], partition="optimizer", min_split_bytes=0
    ),
    "zero2": lambda: dj.ShardedStrategy(
        jax.devices()[:2], partition="gradients", min_split_bytes=0
    ),
    "zero3": lambda: dj.ShardedStrategy(jax.devices(), partition="parameters", min_split_bytes=0),
    "central": lambda: dj.CentralStorageStrategy(jax.devices()[:4]),
}
