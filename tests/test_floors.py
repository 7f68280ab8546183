"""Imports go down the floors only, and optional packages stay in their bridges."""

import ast
import functools
import pathlib
import re

import jax.numpy as jnp

import distjax
import distjax as dj
from distjax._src import hooks

ROOT = pathlib.Path(distjax.__file__).parent
#: Modules users import, beside the private code: they hand on names of what they stand for.
FACES = {"checkpoint", "diagnostics", "flax", "lax", "launch", "optim", "parts", "plan"}
FACES |= {"servers", "testing"}

FLOORS = {
    "errors": -4,
    "hooks": -3,
    "interrupts": -5,
    "tables": -4,
    "user_lines": -4,
    "typing": -4,
    "jax_compat": -3,
    "jaxprs": -2,
    "traces": -2,
    "masks": -2,
    "user_mesh": -1,
    "cluster": 8,
    "placement": 0,
    "context": 1,
    "collectives": 2,
    "variables": 3,
    "replica": 4,
    "objects": 5,
    "program": 6,
    "data": 7,
    "strategies": 8,
    "lint": 8,
    "flax": 9,
    "optim": 9,
    "metrics": 9,
    "layers": 9,
    "losses": 9,
    "lax": 9,
    "checkpoint": 9,
    "check": 11,
    "launch": 10,
    "__main__": 11,
    "diagnostics": 10,
    "parts": 9,
    "pmap": 9,
    "plan": 11,
    "servers": 9,
    "testing": 11,
    "compat": 11,
}
OPTIONAL = {
    "flax",
    "optax",
    "orbax",
    "tensorflow",
    "torch",
    "grain",
    "chex",
    "ray",
    "tensorboardX",
    "tqdm",
    "cloudpickle",
}


@functools.cache
def imported_modules(path):
    """Returns what a file imports: inside functions and under TYPE_CHECKING too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module)
            if node.module.partition(".")[0] == "distjax":
                found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def package_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "_src" else parts[0]


def floor_of(path):
    """Returns the floor of a file; what users import hands on names of all floors."""
    is_face = path.relative_to(ROOT).parts[0] != "_src" and package_of(path) in FACES
    return max(FLOORS.values()) + 1 if is_face else FLOORS[package_of(path)]


def package_named(module):
    """Returns the package of distjax in which a module is, or None."""
    parts = module.removeprefix("distjax.").removeprefix("_src.").split(".")
    return parts[0] if module.startswith("distjax.") and parts[0] != "_src" else None


def library_files():
    return [p for p in sorted(ROOT.rglob("*.py")) if p.stem != "__init__" or package_of(p) in FACES]


def test_imports_go_down_only():
    seen = 0
    for path in library_files():
        package = package_of(path)
        for module in imported_modules(path):
            other = package_named(module)
            if other not in (None, package):
                seen += 1
                is_below = FLOORS[other] < floor_of(path)
                assert is_below, f"{path.relative_to(ROOT)} imports {module}, not from below"
    assert seen > 50


def find_circle(edges):
    """Returns a list of modules that import each other in turn, or None."""
    done, open_now = set(), []

    def visit(module):
        if module in open_now:
            return [*open_now[open_now.index(module) :], module]
        if module in done:
            return None
        open_now.append(module)
        found = next(filter(None, map(visit, edges[module])), None)
        open_now.pop()
        done.add(module)
        return found

    return next(filter(None, map(visit, edges)), None)


def test_the_faces_hand_on_names_only():
    """What users import beside `distjax` itself holds no code of its own."""
    for name in FACES - {"testing", "checkpoint"}:
        body = ast.parse((ROOT / f"{name}.py").read_text()).body
        assert {type(node) for node in body} <= {ast.Expr, ast.ImportFrom, ast.Assign}, name
    assert set(dir(dj)) >= FACES | set(dj.__all__)
    assert not [name for name in dir(dj) if name.startswith("_") and not name.endswith("__")]


def test_no_modules_import_each_other():
    names = {
        p: ".".join(("distjax", *p.relative_to(ROOT).with_suffix("").parts))
        for p in library_files()
    }
    modules = {*names.values()}
    edges = {
        name: [m for m in imported_modules(path) if m in modules] for path, name in names.items()
    }
    assert sum(map(len, edges.values())) > 200
    assert find_circle(edges) is None


def test_a_circle_is_found():
    edges = {"a": ["b"], "b": ["c", "d"], "c": [], "d": ["b"]}
    assert find_circle(edges) == ["b", "d", "b"]
    assert find_circle(edges | {"d": []}) is None


def test_optional_packages_are_imported_in_their_bridges_only():
    for path in library_files():
        for module in imported_modules(path):
            package = module.split(".")[0]
            is_bridge = FLOORS[package_of(path)] >= 9
            assert package not in OPTIONAL or is_bridge, f"{path.name} imports {module}"


def test_no_file_names_jax_internals():
    for path in library_files():
        assert not re.search(r"\bjax\._src", path.read_text()), path.name


#: The packages that name no layer above them.
KERNEL = ("placement", "context", "collectives", "variables", "objects", "replica", "program")
KERNEL += ("strategies", "data")
LAYERS = ("cluster", "servers", "flax", "lint", "pmap")


def test_the_kernel_imports_no_layer():
    """What a layer does in the kernel it registers with `distjax._src.hooks`."""
    for path in library_files():
        if package_of(path) in KERNEL:
            for module in imported_modules(path):
                is_layer = package_named(module) in LAYERS
                assert not is_layer, f"{path.relative_to(ROOT)} imports {module}"


def test_a_step_runs_with_no_layer(monkeypatch, pair):
    for name, event in vars(hooks).items():
        if isinstance(event, hooks.Event):
            monkeypatch.setattr(hooks, name, hooks.Event())
    monkeypatch.setattr(hooks, "object_layers", {})
    with pair.scope():
        total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def step(x):
        total.assign_add(x)
        return dj.get_replica_context().all_reduce("sum", x)

    results = [float(pair.run(step, args=(jnp.float32(n),))) for n in range(3)]
    assert results == [0, 2, 4]
    assert float(total.value) == 6


def test_package_readmes_name_their_floor():
    for readme in ROOT.glob("_src/*/README.md"):
        told = re.search(r"^Floor (\d+):", readme.read_text(), re.MULTILINE)
        if told:
            assert int(told[1]) == FLOORS[readme.parent.name], readme
