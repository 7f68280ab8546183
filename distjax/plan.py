"""Know before paying: what a step needs and does on devices that you do not have."""

from distjax._src.plan.planning import plan
from distjax._src.plan.report import Report
from distjax._src.plan.targets import batch

__all__ = ["Report", "batch", "plan"]
