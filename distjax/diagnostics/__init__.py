"""Diagnostics: what a step does, where values live, how training progresses."""

from distjax.context.finding import Finding
from distjax.diagnostics.check_step import check
from distjax.diagnostics.explain_step import explain
from distjax.diagnostics.explanation import Explanation
from distjax.diagnostics.explanation_diff import ExplanationDiff
from distjax.diagnostics.first_process import is_first_process, progress
from distjax.diagnostics.summaries import SummaryWriter
from distjax.diagnostics.visualizing import visualize

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
