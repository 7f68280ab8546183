"""The code blocks of a page, and how they are run.

The python blocks of a page run in order, in one namespace. An HTML comment on the line before a
block says that it fails, or that it is left out unless a package is installed (`<!-- needs: torch
-->`), and a `text` block after it what it prints or what the error says:

    <!-- raises: LocalityError -->
    ```python
    ...
    ```
    ```text
    first line of the message...
    ```

`...` in a text block stands for anything, as in a doctest.
"""

import contextlib
import dataclasses
import doctest
import importlib.util
import io
import pathlib
import re
import warnings

from distjax import errors

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (raises|warns|needs): (\w+) -->\n\Z")


@dataclasses.dataclass(frozen=True)
class Block:
    """One python block: where its first line is, what it says, and what has to happen."""

    page: pathlib.Path
    line: int
    source: str
    fails_with: str | None
    needs: str | None
    output: str | None

    def run(self, namespace):
        """Runs the block and checks its output or its failure."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return
        code = compile("\n" * (self.line - 1) + self.source, str(self.page), "exec")
        printed = io.StringIO()
        failure = None
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("error", errors.LocalityWarning)
            warnings.simplefilter("error", errors.ReductionWarning)
            warnings.simplefilter("error", errors.RecompilationWarning)
            try:
                exec(code, namespace)
            except Exception as error:
                if type(error).__name__ != self.fails_with:
                    raise
                failure = error
        where = f"{self.page.name}:{self.line}"
        assert self.fails_with is None or failure is not None, f"{where} raises nothing"
        if self.output is not None:
            got = printed.getvalue() if failure is None else f"{failure}\n"
            assert says(self.output, got), f"{where} gives\n{got}"


def says(want, got):
    """Whether `got` is the text `want`, in which `...` stands for anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(want, got, flags)


def blocks_of(page):
    """Returns the python blocks of a page."""
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        if fence[1] != "python":
            continue
        mark = MARK.search(text, 0, fence.start())
        after = FENCE.match(text, re.compile(r"\n*").match(text, fence.end()).end())
        found.append(
            Block(
                page,
                text.count("\n", 0, fence.start(2)) + 1,
                fence[2],
                mark[2] if mark and mark[1] != "needs" else None,
                mark[2] if mark and mark[1] == "needs" else None,
                after[2] if after and after[1] == "text" else None,
            )
        )
    return found


def run_page(page):
    """Runs the python blocks of a page in order; their namespace."""
    namespace = {"__name__": "__main__"}
    for block in blocks_of(page):
        block.run(namespace)
    return namespace
