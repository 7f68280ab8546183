"""The committed notebooks: pairs with equal cells, outputs that are small and without failures.

That the cells run is the matter of `make notebooks`, and with `NOTEBOOK_FLAGS=--again` that they
run as a reader may run them: each twice, and then all in any order.
"""

import base64
import importlib.util
import pathlib
import shutil

import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
LARGEST_PICTURE_BYTES = 40_000


def load_execute():
    """`notebooks/execute.py` as a module."""
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = load_execute()
SCRIPTS = execute.scripts()


def outputs_of(script):
    notebook = nbformat.read(script.with_suffix(".ipynb"), 4)
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_both_halves_have_the_same_cells(script):
    assert execute.is_pair(script)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_outputs_are_clean(script):
    outputs = outputs_of(script)
    assert outputs
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        assert "ipykernel_" not in str(output.get("text", "")), "a path of the machine"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_pictures_are_there_and_small(script):
    pictures = [o.data["image/png"] for o in outputs_of(script) if "image/png" in o.get("data", {})]
    assert pictures
    assert max(len(base64.b64decode(p)) for p in pictures) < LARGEST_PICTURE_BYTES


def test_a_pair_that_differs_is_noticed(tmp_path):
    copied = pathlib.Path(shutil.copy(SCRIPTS[0], tmp_path))
    assert not execute.is_pair(copied)  # no other half
    shutil.copy(SCRIPTS[0].with_suffix(".ipynb"), tmp_path)
    assert execute.is_pair(copied)
    copied.write_text(copied.read_text() + "\n# %%\nprint('one cell more')\n")
    assert not execute.is_pair(copied)


def test_a_cell_that_warns_is_noticed():
    warned = nbformat.v4.new_output("stream", name="stderr", text="UserWarning: an old name")
    printed = nbformat.v4.new_output("stream", name="stdout", text="1")
    cells = [nbformat.v4.new_code_cell("f()", outputs=[printed, warned])]
    assert execute.warnings_of(nbformat.v4.new_notebook(cells=cells)) == [warned.text]
