"""Arguments say what they are: which are `Any`, and how often the type checker is overruled."""

import ast
import pathlib
import re
import tomllib

import distjax

ROOT = pathlib.Path(distjax.__file__).parent

#: The arguments whose annotation is a bare `Any`, and why Python has no better word for each.
ANY_ARGUMENTS = {
    "_src/diagnostics/collectives.py _operations(op)": "MLIR, which has no public types",
    "_src/objects/stateful.py before(outcome)": "what the bridge's own `collect` returned",
    "_src/objects/stateful.py combine_writes(outcome)": "what the bridge's own `collect` returned",
    "_src/objects/stateful.py write_back(outcome)": "what the bridge's own `collect` returned",
    "_src/replica/trace.py _name_after(traced)": "a function that is given attributes of JAX's",
    "_src/servers/coordinator.py create_variable(options)": "those of `make_variable`, handed on",
    "_src/strategies/extended.py create_variable(options)": "those of `make_variable`, handed on",
}


def source_files():
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in sorted(ROOT.rglob("*.py"))}


def find_arguments(source):
    """Yields "function(argument)" and the annotation, or None, of each argument but self."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            a = node.args
            stars = [arg for arg in (a.vararg, a.kwarg) if arg is not None]
            for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, *stars):
                if arg.arg not in ("self", "cls"):
                    annotation = arg.annotation and ast.unparse(arg.annotation)
                    yield f"{node.name}({arg.arg})", annotation


def is_bare(annotation):
    """Returns whether an annotation says no more than `Any`."""
    return set(re.findall(r"\w+", annotation)) <= {"Any", "typing", "None", "Optional", "Union"}


def test_bare_any_is_seen():
    source = "def f(self, a: Any, *b: int, c: Any | None = None, d=1, **e: dict[str, Any]): ..."
    found = dict(find_arguments(source))
    assert found["f(d)"] is None
    bare = [name for name, annotation in found.items() if annotation and is_bare(annotation)]
    assert bare == ["f(a)", "f(c)"]


def test_arguments_that_are_any_are_listed_with_their_reason():
    found = []
    for path, source in source_files().items():
        for name, annotation in find_arguments(source):
            assert annotation is not None, f"{path} {name} has no annotation"
            if is_bare(annotation) and annotation != "None":
                found.append(f"{path} {name}")
    assert sorted(found) == sorted(ANY_ARGUMENTS)
    assert len(found) <= 60


def test_any_has_one_other_name():
    alias = re.compile(r"^(\w+)(?:: TypeAlias)? = (?:typing\.)?(\w+)\b(?:  #.*)?$", re.MULTILINE)
    for path, source in source_files().items():
        names = {"Any", "PyTree"}
        others = [name for name, of in alias.findall(source) if of in names]
        assert others == (["PyTree"] if path == "_src/typing.py" else []), path


def test_the_type_checker_is_strict_and_seldom_overruled():
    text = (ROOT.parent / "pyproject.toml").read_text()
    settings = tomllib.loads(text)["tool"]["pyright"]
    assert settings["typeCheckingMode"] == "strict"
    off = {name for name, value in settings.items() if value is False}
    assert {name for name in off if not name.startswith("reportUnknown")} == {
        "reportMissingTypeStubs",
        "reportInvalidTypeForm",
        "reportPrivateImportUsage",
    }
    overruled = re.compile(r"#\s*(?:type|pyright): ignore|\btyping\.cast\(|\bcast\(\s*[\"A-Z]")
    assert sum(len(overruled.findall(s)) for s in source_files().values()) <= 20
