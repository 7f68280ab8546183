"""Runs benchmarks by name: `python -m benchmarks [names...] [--quick]`."""

import argparse
import os
import pathlib

import jax

from benchmarks import (
    analysis_cost,
    check_cost,
    compile_time,
    dispatch,
    first_call,
    flax_steps,
    input_batches,
    mapped_calls,
    over_processes,
    parity,
    ray_servers,
    servers,
    servers_tensorflow,
    steps_in_flight,
    steps_on_iterator,
)
from benchmarks.report import report, write

VIRTUAL_CPU_DEVICES = 8
BENCHMARKS = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (
        parity,
        dispatch,
        compile_time,
        first_call,
        analysis_cost,
        check_cost,
        steps_in_flight,
        steps_on_iterator,
        flax_steps,
        input_batches,
        mapped_calls,
        over_processes,
        servers,
        ray_servers,
        servers_tensorflow,
    )
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument(
        "names",
        nargs="*",
        help=f"which to run, of {', '.join(BENCHMARKS)}; all if none is named",
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and short runs")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path(__file__).parent / "results",
        help="where the JSON files go",
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    return options


def main() -> None:
    """Runs the chosen benchmarks; each prints its table and writes its file."""
    options = parse()
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        # Matters on the CPU only, where one device would be one replica.
        jax.config.update("jax_num_cpu_devices", VIRTUAL_CPU_DEVICES)
    for name in options.names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        rows = benchmark.run(options.quick)
        print(report(benchmark, rows), flush=True)
        write(benchmark, rows, options.output, options.quick)


if __name__ == "__main__":
    main()
