"""mkdocs hook: the examples, the notebooks and the changelog as pages of the site.

They stand beside `docs/` in the repository, where they are run; here they become pages, each
example with its code. `mkdocs.yml` names the pages in its `nav`.
"""

import base64
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
_LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages; mkdocs calls it when it has listed `docs/`."""
    for name, content in _pages():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Tells the search what to show first: an error's text is looked for where it is explained."""
    boost = {
        "errors.md": 4,
        "limits.md": 2,
        "quick_start.md": 2,
        "training.md": 2,
        "tf_distribute_api.md": 0.2,
        "changelog.md": 0.2,
    }
    page.meta["search"] = {"boost": boost.get(page.file.src_uri, 1)}
    return markdown


def _pages() -> Iterator[tuple[str, str | bytes]]:
    yield "changelog.md", (ROOT / "CHANGELOG.md").read_text()
    for folder in ("examples", "notebooks"):
        yield f"{folder}/index.md", _linked((ROOT / folder / "README.md").read_text())
    for readme in sorted((ROOT / "examples").glob("*/README.md")):
        yield f"examples/{readme.parent.name}.md", _example(readme)
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        yield from _notebook(notebook)


def _linked(text: str) -> str:
    """Returns `text` with its links to other READMEs, notebooks and files as links to the pages."""
    text = re.sub(r"\]\((?:\.\./)+docs/", "](../", text)
    text = re.sub(r"\]\((\w+)/README\.md\)", r"](\1.md)", text)
    text = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", text)
    return re.sub(r"\]\((\w+)\.(py|sh|yaml)\)", r"](#\1_\2)", text)


def _example(readme: pathlib.Path) -> str:
    sources = [
        f"## {path.name} {{ #{path.stem}_{path.suffix[1:]} data-search-exclude }}\n\n"
        f"```{_LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
        for path in sorted(readme.parent.iterdir())
        if path.suffix in _LANGUAGES
    ]
    return "\n".join([_linked(readme.read_text()), *sources])


def _notebook(path: pathlib.Path) -> Iterator[tuple[str, str | bytes]]:
    """Yields the page of a notebook, and its pictures."""
    parts: list[str] = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            picture = output.get("data", {}).get("image/png")
            if picture is not None:
                name = f"{path.stem}_{number}.png"
                parts.append(f"![What the cell above draws]({name})")
                yield f"notebooks/{name}", base64.b64decode(picture)
            else:
                parts.append(_text(output))
    yield f"notebooks/{path.stem}.md", "\n\n".join(parts) + "\n"


def _text(output: dict[str, Any]) -> str:
    """Returns what a cell prints or shows, as a table where it is one."""
    data = output.get("data", {})
    if "text/html" in data:
        return "<div>" + "".join(data["text/html"]).replace("\n\n", "\n") + "</div>"
    lines = data.get("text/plain") or output.get("text") or output.get("traceback", [])
    return "```text\n" + "".join(lines).rstrip("\n") + "\n```"
