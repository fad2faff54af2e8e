from .base import (
    Proposal as Proposal,  # a placement to build
    SearchSetup as SearchSetup,  # all information that a strategy has before its first proposal
    Strategy as Strategy,  # ask, build, tell, until done
    profiled as profiled,  # a proposal whose layers are timed too
)
from .coverage import (
    CoverageSearch as CoverageSearch,  # one search
)
from .guide import (
    AccuracyOracle as AccuracyOracle,  # predicts the SQNR of placements without building them
    Guide as Guide,  # what is expected of the accuracy of placements
)
from .journal import (
    Journal as Journal,  # an open journal
    read_journal as read_journal,  # header and trials of a journal, oldest first
    trial_from_json as trial_from_json,  # the inverse of `trial_to_json`
    trial_to_json as trial_to_json,  # the fields of a trial
)
from .limits import (
    Limits as Limits,  # the limits of a case, and what is known of placements
    MetricLimit as MetricLimit,  # the smallest value of a metric
)
from .loop import (
    Built as Built,  # a built candidate, or the trial of a failed build
    Contest as Contest,  # decides which candidate is the best so far, the incumbent
    Search as Search,  # a search in progress
    Watch as Watch,  # called with the progress of a search
    candidates_of as candidates_of,  # the number of builds that count in a budget
)
from .select import (
    Selection as Selection,  # the selected placement, the role under which it was confirmed, and the reason
    choose as choose,  # the simplest placement inside the best interval, if its gain is proved
    finalists as finalists,  # the roles to confirm
    front_of as front_of,  # trials that no other beats in both latency and accuracy
    is_candidate as is_candidate,  # whether a trial timed a whole quantized model
    missed_text as missed_text,  # by how much a placement missed a limit
    raw_winner as raw_winner,  # the combination of all wins in parts of the model
    reaches as reaches,  # whether a trial is accurate enough
    shortfall_text as shortfall_text,  # by how much faster candidates missed each limit
)
from .strategies.region import (
    best_by_pattern as best_by_pattern,  # the best candidate for each pattern
)
