"""The command line, and the one place where the strategy is chosen."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import jax

import distjax as dj


def _sharded(partition: str) -> Callable[..., dj.Strategy]:
    return functools.partial(dj.ShardedStrategy, partition=partition)


#: Called with the devices of the replicas.
OF_DEVICES = {
    "mirrored": dj.MirroredStrategy,
    "zero1": _sharded("optimizer"),
    "sharded": _sharded("parameters"),
    "central": dj.CentralStorageStrategy,
}
#: Over all processes of a job.
OF_A_JOB = {
    "multi_worker": dj.MultiWorkerMirroredStrategy,
    "multi_worker_zero1": _sharded("optimizer"),
    "multi_worker_sharded": _sharded("parameters"),
    "multi_worker_central": dj.CentralStorageStrategy,
}
WITH_MODEL_AXES = (*OF_DEVICES, *OF_A_JOB)
STRATEGIES = (*OF_DEVICES, *OF_A_JOB, "virtual", "one_device")
OUT = Path(__file__).parent / "out"


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="mirrored", help="default: mirrored")
    add("--replicas", type=int, default=2, help="of a strategy of one process (2)")
    add("--model-axes", type=int, default=1, help="devices that share the heads of a replica (1)")
    add("--steps", type=int, default=600, help="training steps (600)")
    add("--global-batch", type=int, default=32, help="windows per step, all replicas (32)")
    add("--micro-batches", type=int, default=1, help="parts of a step whose gradients are added")
    add("--context", type=int, default=96, help="tokens of a window (96)")
    add("--width", type=int, default=96, help="size of a token's vector, a multiple of 4 (96)")
    add("--layers", type=int, default=3, help="blocks of the model (3)")
    add("--dropout", type=float, default=0.1, help="rate (0.1)")
    add("--data", type=Path, metavar="FILE", help="a text; default: the help topics of CPython")
    add("--checkpoints", type=Path, metavar="FOLDER", help="save there, and resume from there")
    add("--save-every", type=int, default=100, help="steps between checkpoints (100)")
    add("--log-every", type=int, default=50, help="steps between lines of output (50)")
    add("--dump-losses", type=Path, metavar="FILE", help="write the logged losses as JSON")
    add("--sample", type=int, default=300, help="characters to write at the end (300)")
    add("--seed", type=int, default=0)
    return parser


def defaults() -> argparse.Namespace:
    """The options of a training run without any on the command line."""
    return _parser("").parse_args([])


def parse(description: str) -> argparse.Namespace:
    """The options of one training run."""
    parser = _parser(description)
    options = parser.parse_args()
    is_whole = options.strategy == "one_device" or options.strategy in OF_A_JOB
    parts = options.micro_batches * (1 if is_whole else options.replicas)
    if options.replicas < 1 or options.micro_batches < 1 or options.global_batch % parts:
        parser.error(
            f"--replicas {options.replicas} times --micro-batches {options.micro_batches} "
            f"does not divide --global-batch {options.global_batch}"
        )
    if options.model_axes > 1 and options.strategy not in WITH_MODEL_AXES:
        parser.error(f"--model-axes is for --strategy {', '.join(WITH_MODEL_AXES)}")
    return options


def make_strategy(name: str, num_replicas: int, num_each: int = 1) -> dj.Strategy:
    """The strategy of that name; call it before anything touches a device.

    Args:
        name: One of `STRATEGIES`.
        num_replicas: Of a strategy of one process.
        num_each: The devices of each replica, which hold its heads in parts.
    """
    axes = {"model_axes": {"model": num_each}} if num_each > 1 else {}
    if name in OF_A_JOB:  # JAX_NUM_CPU_DEVICES says how many devices a process has
        dj.initialize()
        return OF_A_JOB[name](**axes)
    count = num_replicas * num_each
    jax.config.update("jax_num_cpu_devices", count)  # has no effect on other platforms
    if name == "virtual":
        return dj.VirtualStrategy(num_replicas)
    if name == "one_device":
        return dj.OneDeviceStrategy()
    return OF_DEVICES[name](jax.devices()[:count], **axes)
