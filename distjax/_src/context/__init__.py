"""What other packages use of the context."""

# pyright: reportUnusedImport=false

from distjax._src.context.frames import (
    Destinations,
    ExtendedLike,
    Frame,
    ProgramModes,
    StrategyLike,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    mixing_text,
    other_call_text,
    require_strategy,
    set_strategy,
    settings_of_this_thread,
)
from distjax._src.context.reporting import (
    STATE,
    Finding,
    current_reason,
    expect,
    num_reported,
    reason_in,
    report,
    says_equal,
    without_expectations,
)
