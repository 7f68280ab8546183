"""Training files as they are published for `jax.pmap`, and the lines that `dj.pmap` changes.

The files are written anew, each after the form of a public family of programs; they are whole and
know nothing of distjax. A port is the text of the file with some lines exchanged. Run as a program
(`python -m tests.migration.ports`), this prints the table of the migration page.
"""

import pathlib
import types

import jax
import numpy as np

PUBLISHED = pathlib.Path(__file__).parent / "published"
_IMPORT = ("import jax\n", "import jax, distjax as dj\n")
_DECORATOR = ("@functools.partial(jax.pmap,", "@functools.partial(dj.pmap,")
_PARTIAL = ("@partial(jax.pmap,", "@partial(dj.pmap,")

#: Per file: (what stands there, what it becomes), each within one line.
CHANGES = {
    "imagenet_linen": [
        ("p_train_step = jax.pmap", "p_train_step = dj.pmap"),
        ("p_eval_step = jax.pmap", "p_eval_step = dj.pmap"),
    ],
    "mnist_mlp": [_DECORATOR, _DECORATOR],
    "ppo": [_PARTIAL],
    "mcmc": [_DECORATOR],
    "self_supervised": [("update = jax.pmap", "update = dj.pmap")],
    "evolution": [_PARTIAL],
}


def source_of(name: str) -> str:
    """Returns the published file."""
    return (PUBLISHED / f"{name}.py").read_text()


def port_of(name: str) -> str:
    """Returns the file with its lines exchanged."""
    text = source_of(name)
    for old, new in (_IMPORT, *CHANGES[name]):
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new, 1)
    return text


def changed_lines(name: str) -> int:
    """Returns how many lines the port changes."""
    pairs = zip(source_of(name).splitlines(), port_of(name).splitlines(), strict=True)
    return sum(old != new for old, new in pairs)


def run(text: str, num_steps: int) -> object:
    """Returns what the file's `main` returns."""
    module = types.ModuleType("published")
    exec(compile(text, "published", "exec"), module.__dict__)
    return module.main(num_steps)


def difference(name: str, num_steps: int) -> float:
    """Returns the largest difference between the results of the two, relative to their size."""
    pairs = zip(
        *(jax.tree.leaves(run(f(name), num_steps)) for f in (port_of, source_of)), strict=True
    )
    return max(
        float(np.max(np.abs(np.asarray(x) - np.asarray(y))) / max(1.0, np.max(np.abs(y))))
        for x, y in pairs
    )


def main() -> None:
    """Prints file, lines, changed lines, and the largest difference over five steps."""
    print("| file | lines | changed | largest difference |\n|---|---:|---:|---:|")
    for name in CHANGES:
        lines = len(source_of(name).splitlines())
        print(
            f"| {name} | {lines} | {changed_lines(name)} | {difference(name, 5):.1e} |", flush=True
        )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
