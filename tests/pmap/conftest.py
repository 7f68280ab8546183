"""The fixture of the replicas that cases of pmap run on."""

from tests.pmap.kinds import replicas  # noqa: F401  (a fixture)
