from .find import (
    FoundCorrections as FoundCorrections,  # the accepted corrections, and the gain of each that was tried
    find_corrections as find_corrections,  # try each allowed correction in turn, and keep those that help
    read_found as read_found,  # the corrections in a file, if it is of the same run
    write_found as write_found,  # write corrections with their gains; ``run`` describes model, data and rules
)
from .overflow import (
    find_sum_limits as find_sum_limits,  # the limits of int8 weights, on data or by a proof
    note_wide_weights as note_wide_weights,  # note the weights that have more than 7 bits by data alone
    without_overflows as without_overflows,  # given scales, with other ones for channels that can overflow
)
from .problem import (
    MIN_SAMPLES as MIN_SAMPLES,  # of both parts together; fewer cannot be split
    CorrectionTask as CorrectionTask,  # the inputs of the search for corrections
)
