from .base import (
    Proposal as Proposal,  # a placement to build
    SearchSetup as SearchSetup,  # all information that a strategy has before its first proposal
    Strategy as Strategy,  # ask, build, tell, until done
)
from .confirmation import (
    Confirmed as Confirmed,  # the choice among the finalists of a search, and the measurement behind it
    confirm as confirm,  # rebuild the finalists, time them together, and select one within the limits
    most_builds as most_builds,  # the largest number of builds of a confirmation
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
)
from .loop import (
    Built as Built,  # a built candidate, or the trial of a failed build
    Contest as Contest,  # decides which candidate is the best so far, the incumbent
    Search as Search,  # a search in progress
)
from .strategies.region import (
    best_by_pattern as best_by_pattern,  # the best candidate for each pattern
)
