"""The example of the package's README runs."""

import pathlib
import re

import distjax.flax


def test_the_example_runs():
    readme = pathlib.Path(distjax.flax.__file__).with_name("README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names = {}
    exec(block, names)
    assert int(names["optimizer"].step[...]) == 1
