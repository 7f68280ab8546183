"""Where a line of a test file is, for tests of source lines."""

import pathlib


def line_of(file, marker):
    """Returns "file:line" of the one line of `file` that ends with `# <marker>`."""
    lines = pathlib.Path(file).read_text().splitlines()
    [number] = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"{file}:{number}"
