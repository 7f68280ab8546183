"""The command line, and the one place where the strategy is chosen."""

import argparse
from pathlib import Path

import jax

import distjax as dj

STRATEGIES = ("one_device", "mirrored", "virtual", "multi_worker", "parameter_server", "default")
ENGINES = ("threads", "ray")
OUT = Path(__file__).parent / "out"


def parse(description: str) -> argparse.Namespace:
    """The options of one training run."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="mirrored", help="default: mirrored")
    add("--replicas", type=int, default=8, help="of a mirrored or virtual strategy, or workers (8)")
    add("--engine", choices=ENGINES, default="threads", help="of a parameter server (threads)")
    add("--epochs", type=int, default=10, help="passes over the training set (10)")
    add("--steps", type=int, help="stop after so many steps, at the same learning rates")
    add("--global-batch", type=int, default=64, help="examples per step, all replicas (64)")
    add("--data", type=Path, metavar="FILE", help="an .npz file such as MNIST's; see data.py")
    add("--seed", type=int, default=0, help="of the parameters and the order of examples (0)")
    add("--out", type=Path, default=OUT, help="folder for the learning curve (out, beside this)")
    add("--dump-losses", type=Path, metavar="FILE", help="write the loss of each step as JSON")
    parser.set_defaults(script=Path(parser.prog).stem)
    options = parser.parse_args()

    for name in ("replicas", "epochs", "steps", "global_batch"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.strategy in ("mirrored", "virtual") and options.global_batch % options.replicas:
        parser.error(
            f"--replicas {options.replicas} does not divide --global-batch {options.global_batch}"
        )
    return options


def make_strategy(name: str, num_replicas: int, engine: str = "threads") -> dj.Strategy:
    """The strategy of that name; call it before anything touches a device.

    Args:
        name: One of `STRATEGIES`.
        num_replicas: How many replicas a mirrored strategy has (one per device) or a virtual one
            (all on one device), or how many workers a parameter server has. A multi-worker
            strategy ignores it: it has one replica per device of all processes.
        engine: What the workers of a parameter server are: "threads" of this process, or "ray"
            processes.

    Raises:
        SystemExit: If a mirrored strategy needs more devices than there are.
    """
    if name == "multi_worker":  # JAX_NUM_CPU_DEVICES says how many a process has
        dj.initialize()
        return dj.MultiWorkerMirroredStrategy()
    # Makes the CPU appear as this many devices; has no effect on other platforms.
    jax.config.update("jax_num_cpu_devices", num_replicas)
    if name == "one_device":
        return dj.OneDeviceStrategy()
    if name == "virtual":
        return dj.VirtualStrategy(num_replicas)
    if name == "parameter_server":
        runs = dj.servers.RayEngine() if engine == "ray" else engine
        return dj.ParameterServerStrategy(workers=num_replicas, engine=runs)
    if name == "default":
        return dj.get_strategy()
    devices = jax.devices()
    if len(devices) < num_replicas:
        raise SystemExit(
            f"--strategy mirrored --replicas {num_replicas} needs as many devices, and there are "
            f"{len(devices)}: {devices}. Ask for fewer replicas, or for --strategy virtual, which "
            "has all replicas on one device."
        )
    return dj.MirroredStrategy(devices[:num_replicas])
