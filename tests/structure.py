"""What the house weighs: lines, files and imports by package; what a first call passes.

python -m tests.structure
"""

import ast
import collections
import pathlib
import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import optax

import distjax as dj
from tests.test_floors import KERNEL

ROOT = pathlib.Path(dj.__file__).parent
#: Modules beside the packages on which the kernel stands.
BASE = {"errors", "hooks", "interrupts", "jax_compat", "jaxprs", "masks", "tables", "traces"}
BASE |= {"typing", "user_lines", "user_mesh", "__init__"}


def imported(path: pathlib.Path) -> set[str]:
    """Returns the modules of distjax that a file imports from."""
    nodes = ast.walk(ast.parse(path.read_text()))
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {module for module in named if module.split(".")[0] == "distjax"}


def weigh() -> dict[str, tuple[int, int, int]]:
    """Returns by package: lines, files and imports from within distjax."""
    found = collections.defaultdict(lambda: (0, 0, 0))
    for path in sorted(ROOT.rglob("*.py")):
        if not (text := path.read_text()).strip():
            continue
        first = path.relative_to(ROOT).with_suffix("").parts
        first = first[1] if first[0] == "_src" and len(first) > 1 else first[0]
        package = "base" if first in BASE else first
        new = len(text.splitlines()), 1, len(imported(path))
        found[package] = tuple(map(sum, zip(found[package], new, strict=True)))
    return dict(found)


def first_call() -> tuple[int, int]:
    """Returns how many files README's optimizer step passes at its first call, and how deep."""
    strategy = dj.MirroredStrategy()
    with strategy.scope():
        w = dj.Variable(jnp.zeros(4), name="w")
        optimizer = dj.optim.Optimizer(optax.sgd(0.1), reduce_op="mean")
        optimizer.init([w])

    def step(x):
        grads = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w.value)
        optimizer.apply_gradients([(grads, w)])

    batch = strategy.per_replica(jnp.ones((8, 2, 4)))
    files, deepest = set(), 0

    def profile(frame, event, _):
        nonlocal deepest
        if event != "call" or not frame.f_code.co_filename.startswith(str(ROOT)):
            return
        files.add(frame.f_code.co_filename)
        depth, at = 0, frame
        while at is not None:
            depth, at = depth + at.f_code.co_filename.startswith(str(ROOT)), at.f_back
        deepest = max(deepest, depth)

    sys.setprofile(profile)
    strategy.run(step, args=(batch,))
    sys.setprofile(None)
    return len(files), deepest


def main() -> None:
    weights = weigh()
    print(f"{'package':16} lines  files  imports a file")
    kernel = {name: w for name, w in weights.items() if name in {*KERNEL, "base"} - {"objects"}}
    sums = {"the kernel": kernel, "distjax": weights}
    rows = [*sorted(weights.items(), key=lambda item: -item[1][0])]
    rows += [(n, tuple(map(sum, zip(*of.values(), strict=True)))) for n, of in sums.items()]
    for name, (lines, files, imports) in rows:
        print(f"{name:16} {lines:6,} {files:5} {imports / files:8.1f}")
    files, depth = first_call()
    print(f"a first call of an optimizer's step: {files} files, {depth} frames of distjax deep")


if __name__ == "__main__":
    main()
