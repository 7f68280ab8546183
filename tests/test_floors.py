"""Imports go down the floors only, and optional packages stay in their bridges."""

import ast
import pathlib

import distjax

ROOT = pathlib.Path(distjax.__file__).parent

FLOORS = {
    "errors": -2,
    "integers": -2,
    "tables": -2,
    "jax_compat": -1,
    "tracebacks": -1,
    "placement": 0,
    "context": 1,
    "collectives": 2,
    "variables": 3,
    "replica": 4,
    "data": 5,
    "strategies": 6,
    "flax": 7,
    "optim": 7,
    "metrics": 7,
    "layers": 7,
    "losses": 7,
    "checkpoint": 7,
    "diagnostics": 7,
    "launch": 8,
    "plan": 8,
    "testing": 9,
    "compat": 9,
}
OPTIONAL = {
    "flax",
    "optax",
    "orbax",
    "tensorflow",
    "torch",
    "grain",
    "chex",
    "tensorboardX",
    "tqdm",
}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            if node.module == "distjax":
                yield from (f"distjax.{alias.name}" for alias in node.names)


def package_of(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def library_files():
    return [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


def test_imports_go_down_only():
    seen = 0
    for path in library_files():
        floor = FLOORS[package_of(path)]
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "distjax" and len(parts) > 1:
                seen += 1
                assert FLOORS[parts[1]] <= floor, f"{path.name} imports {module}, from above"
    assert seen > 50


def test_optional_packages_are_imported_in_their_bridges_only():
    for path in library_files():
        for module in imported_modules(path):
            package = module.split(".")[0]
            is_bridge = FLOORS[package_of(path)] >= 7
            assert package not in OPTIONAL or is_bridge, f"{path.name} imports {module}"


def test_no_file_names_jax_internals():
    for path in library_files():
        assert "jax._src" not in path.read_text(), path.name
