"""One process of a group: joins its job, then calls what the parent names, until told to end."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import traceback
from typing import Any


def serve(file: int, address: str, num_processes: int, process_id: int, devices: int) -> None:
    """Joins the job at `address`; then answers each (function, arguments) that comes.

    An answer is ("result", value), or ("raised", text of the exception with its traceback).

    Args:
      file: the number of the pipe on which they come.
      address, num_processes, process_id: of the job.
      devices: of this process.
    """
    connection = multiprocessing.connection.Connection(file)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", devices)  # the parent's script may have imported it
    jax.config.update("jax_compilation_cache_dir", os.environ.get("DISTJAX_TESTS_PROGRAMS"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    import distjax as dj

    patient = dict(initialization_timeout=120, heartbeat_timeout=60, meeting_timeout=60)
    dj.initialize(address, num_processes, process_id, **patient)
    connection.send(("result", jax.device_count()))
    while True:
        try:
            fn, args = connection.recv()
        except EOFError:  # the parent is gone
            os._exit(0)
        try:
            answer = ("result", fn(*args))
        except BaseException as error:
            answer = ("raised", "".join(traceback.format_exception(error)))
        connection.send(answer)


_num_exchanges = 0


def exchange(value: Any) -> list[Any]:
    """Returns what each process of the job gave, by its number: JSON, without a device."""
    from distjax._src.cluster.job import job

    global _num_exchanges
    _num_exchanges += 1
    joined = job()
    key = f"tests/exchange/{_num_exchanges}"
    joined.client.key_value_set(f"{key}/{joined.process_id}", json.dumps(value))
    return [
        json.loads(joined.client.blocking_key_value_get(f"{key}/{process}", 20_000))
        for process in range(joined.num_processes)
    ]
