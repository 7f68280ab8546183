"""Jobs of several processes: a loop that resumes, and processes started from a notebook.

`python -m distjax launch` starts them from a shell; see the guide on jobs.
"""

from distjax._src.launch.job import Job
from distjax._src.launch.notebook import notebook_launcher

__all__ = ["Job", "notebook_launcher"]
