"""An analysis that proves nothing: what is computed must not depend on what is proved."""

import contextlib
from unittest import mock

from distjax._src.jaxprs import Flow
from distjax._src.replica.analysis import Analysis


@contextlib.contextmanager
def blind():
    """Programs compiled in the block treat every value as differing."""

    def differ(self, eqn, ins):
        return [True] * len(Flow.outputs_of(self, eqn, ins))

    with mock.patch.object(Analysis, "outputs_of", differ):
        yield
