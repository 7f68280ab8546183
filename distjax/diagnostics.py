"""Diagnostics: what a step does, where values live, how training progresses."""

from distjax._src.check.check import check
from distjax._src.context import Finding
from distjax._src.diagnostics.explain_step import explain
from distjax._src.diagnostics.explanation import Explanation, ExplanationDiff
from distjax._src.diagnostics.summaries import SummaryWriter, is_first_process, progress
from distjax._src.diagnostics.visualizing import visualize

__all__ = [
    "Explanation",
    "ExplanationDiff",
    "Finding",
    "SummaryWriter",
    "check",
    "explain",
    "is_first_process",
    "progress",
    "visualize",
]
