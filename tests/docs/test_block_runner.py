"""The runner of code blocks notices what goes wrong."""

import pytest

from tests.docs.code_blocks import blocks_of, run_page


@pytest.fixture
def page(tmp_path):
    def write(text):
        path = tmp_path / "page.md"
        path.write_text(text)
        return path

    return write


def test_blocks_share_a_namespace_and_know_their_lines(page):
    written = page("# Page\n\n```python\nx = 1\n```\n\n```python\ny = x + 1\n```\n")
    assert run_page(written)["y"] == 2
    assert [block.line for block in blocks_of(written)] == [4, 8]


def test_an_error_carries_the_line_of_the_page(page):
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page("text\n\n```python\nx = 1\n1 / 0\n```\n"))
    assert caught.traceback[-1].lineno + 1 == 5


def test_a_marked_block_needs_its_error(page):
    marked = "<!-- raises: ValueError -->\n```python\n{}\n```\n"
    run_page(page(marked.format("int('a')")))
    with pytest.raises(AssertionError, match="page.md:3 raises nothing"):
        run_page(page(marked.format("int('1')")))
    with pytest.raises(KeyError):
        run_page(page(marked.format("{}['a']")))


def test_a_marked_block_needs_its_warning(page):
    warns = "import warnings\nfrom distjax import errors\nwarnings.warn('x', errors.{})"
    marked = "<!-- warns: LocalityWarning -->\n```python\n" + warns + "\n```\n"
    run_page(page(marked.format("LocalityWarning")))
    with pytest.raises(AssertionError, match="raises nothing"):
        run_page(page("<!-- warns: LocalityWarning -->\n```python\nx = 1\n```\n"))


def test_an_unmarked_warning_is_an_error(page):
    code = "import warnings\nfrom distjax import errors\nwarnings.warn('x', errors.LocalityWarning)"
    with pytest.raises(UserWarning, match="x"):
        run_page(page(f"```python\n{code}\n```\n"))


def test_a_text_block_is_what_is_printed(page):
    run_page(page("```python\nprint('three', 3)\n```\n\n```text\nthree ...\n```\n"))
    with pytest.raises(AssertionError, match="gives\nthree 3"):
        run_page(page("```python\nprint('three', 3)\n```\n```text\nfour\n```\n"))


def test_a_text_block_is_what_the_error_says(page):
    marked = (
        "<!-- raises: ValueError -->\n```python\nraise ValueError('no: 1')\n```\n```text\n{}\n```\n"
    )
    run_page(page(marked.format("no: ...")))
    with pytest.raises(AssertionError, match="gives\nno: 1"):
        run_page(page(marked.format("yes")))
