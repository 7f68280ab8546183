"""Griffe extension: the docstring sections of distjax, in a form that mkdocstrings lays out.

`Example` becomes griffe's `Examples`, which knows doctest prompts. The sections that griffe does
not know (`Locality: M out. Context: any.`) become lines with a bold label.
"""

import re
from typing import Any

import griffe

LABELS = "Context|Cost|Locality|Source|State"


def as_google_sections(text: str) -> str:
    """Returns the text of a docstring with our sections in a form that griffe lays out."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(rf"^({LABELS}): ", r"\n**\1:** ", text, flags=re.MULTILINE)
    return re.sub(rf"(?<=\. )({LABELS}): ", r"**\1:** ", text)


class DocstringSections(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = as_google_sections(obj.docstring.value)
