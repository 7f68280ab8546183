"""Executes every notebook, and checks that each .ipynb is the pair of its .py.

    python notebooks/execute.py            # changes no file
    python notebooks/execute.py --write    # writes the .ipynb files anew, with their outputs
    python notebooks/execute.py --again    # as a reader may: each cell twice, then in any order

The .py files (jupytext's percent format) are what is written and reviewed; the .ipynb files are the
same cells with outputs. A cell that fails or warns, or a pair that differs, ends the program with
status 1.
"""

import argparse
import asyncio
import copy
import pathlib
import random
import sys
import tempfile
import time

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parent
TIMEOUT_SECONDS = 300
REWRITE = "make notebooks NOTEBOOK_FLAGS=--write"


def scripts(folder: pathlib.Path = FOLDER) -> list[pathlib.Path]:
    """The .py halves of the notebooks, in the order in which they are read."""
    return sorted(folder.glob("[0-9]_*.py"))


def read_script(script: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook of a .py file, without outputs."""
    notebook = jupytext.read(script, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # jupytext draws them at random, and a second write would differ
    return notebook


def sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """What has to be equal in both halves of a pair."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def is_pair(script: pathlib.Path) -> bool:
    """Whether the .ipynb beside a .py file is there and has the same cells."""
    path = script.with_suffix(".ipynb")
    return path.exists() and sources(nbformat.read(path, 4)) == sources(read_script(script))


def run_again(notebook: nbformat.NotebookNode, seed: int) -> None:
    """Puts each cell in twice, and then all of them once more, in an order drawn from `seed`."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shuffled = random.Random(seed).sample(cells, len(cells))
    twice = [cell for cell in cells for _ in range(2)]
    notebook.cells = [copy.deepcopy(cell) for cell in [*twice, *shuffled]]


def warnings_of(notebook: nbformat.NotebookNode) -> list[str]:
    """What its cells have written to stderr: a reader would take it for a fault."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.text for output in outputs if output.get("name") == "stderr"]


async def execute(notebook: nbformat.NotebookNode, folder: pathlib.Path) -> None:
    """Runs the cells on a kernel of this very Python, whatever kernels the user has installed."""
    # With no folders to search, the only kernel is ipykernel's own, started by sys.executable.
    specs = KernelSpecManager(kernel_dirs=[])
    with tempfile.TemporaryDirectory() as sockets:
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=specs,
            transport="ipc",  # sockets in a folder of our own: no ports
            ip=f"{sockets}/kernel",
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=TIMEOUT_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            await client.async_execute()
        finally:
            await manager.shutdown_kernel(now=True)
    # The kernel writes its Python's version, which is not the reader's.
    notebook.metadata.pop("language_info", None)


def main() -> int:
    """Executes all notebooks; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the .ipynb files anew")
    parser.add_argument("--again", action="store_true", help="each cell twice, then in any order")
    parser.add_argument("--seed", type=int, default=0, help="of that order (0)")
    given = parser.parse_args()
    write = given.write and not given.again
    faults = []
    for script in scripts():
        start = time.perf_counter()
        notebook = read_script(script)
        if given.again:
            run_again(notebook, given.seed)
        asyncio.run(execute(notebook, script.parent))
        if write:
            nbformat.write(notebook, script.with_suffix(".ipynb"))
        elif not is_pair(script):
            faults.append(f"{script.name} and its .ipynb differ; write it anew: {REWRITE}")
        faults += [
            f"a cell of {script.name} writes to stderr: {text}" for text in warnings_of(notebook)
        ]
        print(f"{script.name}: executed in {time.perf_counter() - start:.1f} s", flush=True)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
