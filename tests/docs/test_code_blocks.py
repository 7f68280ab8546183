"""Every code block of the READMEs and of the guides does what the page says."""

import ast
import pathlib
import re

import jax.numpy as jnp
import pytest

import distjax as dj
from tests.docs.code_blocks import FENCE, blocks_of, run_page

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("distjax/**/README.md"))]
WITH_CODE = [page for page in PAGES if blocks_of(page)]


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page != README], ids=name_of)
def test_the_blocks_run(page, tmp_path, monkeypatch):
    if "import equinox" in page.read_text():  # which distjax does not depend on
        pytest.importorskip("equinox")
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_the_steps_of_the_readme_find_the_weights():
    namespace = run_page(README)
    assert dj.locality(namespace["w"]).kind == "mirrored"
    assert isinstance(namespace["losses"], dj.PerReplica)
    assert namespace["losses"].stacked.max() < 1e-6
    for weights in (namespace["w"], namespace["model"].kernel[...]):
        assert jnp.allclose(weights.ravel(), jnp.array([1.0, -2.0, 0.5]), atol=1e-3)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_escapes(page):
    text = page.read_text()
    assert text.count("```") == 2 * len(FENCE.findall(text)), "a fence that is not at the margin"
    languages = {language for language, _ in FENCE.findall(text)}
    assert languages <= {"python", "sh", "text"}
    marks = re.findall(r"<!-- (?:raises|warns|needs)", text)
    assert len(marks) == sum(bool(block.fails_with or block.needs) for block in blocks_of(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_in_the_text_exist(page):
    for name in re.findall(r"`(dj(?:\.\w+)+)", page.read_text()):
        found = dj
        for part in name.split(".")[1:]:
            found = getattr(found, part)


def names_raised(path):
    """The names of the classes that a file raises or warns with."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ast.unparse(node.exc.func)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            yield ast.unparse(node.args[1])


#: What only several processes raise: a page runs in one, so `tests/processes` holds their texts.
OF_JOBS = {"AgreementError", "ClusterWarning", "PeerLostError", "StuckError"}


def test_every_error_that_is_raised_has_a_wrong_and_a_cured_example():
    raised = {name for path in (ROOT / "distjax").rglob("*.py") for name in names_raised(path)}
    own = {name for name in vars(dj.errors) if name.endswith(("Error", "Warning"))}
    assert len(raised & own) > 8
    page = ROOT / "docs" / "errors.md"
    for name in sorted(raised & own):
        assert f"\n## {name}\n" in page.read_text(), name
        shown = any(block.fails_with == name for block in blocks_of(page))
        assert shown != (name in OF_JOBS), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_in_the_text_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(), re.MULTILINE)) <= set(targets)
