"""At the end of a run with FUZZ_SEEDS: what was proved of its programs, by which rules."""

import collections
import os

from tests.replica.primitives import RULES


def pytest_terminal_summary(terminalreporter):
    """Prints the counts that tests have recorded as "proofs", in whichever process they ran."""
    counts = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "proofs" and report.when == "call":
                    counts.update(value)
    if "FUZZ_SEEDS" not in os.environ or not counts:
        return
    write = terminalreporter.write_line
    terminalreporter.section("proofs in random programs")
    write("{programs} programs, {refused} refused as divergent".format_map(counts))
    write(
        "{values} results, {proved} proved equal and compared on every replica".format_map(counts)
    )
    names = sorted({key.split()[0] for key in counts if " " in key})
    for rule in RULES:
        hit = [name for name in names if name in rule.names]
        proved = sum(counts[f"{n} {k}"] for n in hit for k in _PROVED)
        unproved = sum(counts[f"{n} {k}"] for n in hit for k in _UNPROVED)
        row = f"{rule.name}: {len(hit)} of {len(rule.names)} primitives, "
        write(row + f"{proved} times proved equal, {unproved} times not: {' '.join(hit)}")


_PROVED = ("equal", "equal of different")
_UNPROVED = ("differs", "differs of different", "both", "both of different")
