from .find import (
    MIN_SAMPLES as MIN_SAMPLES,  # of both parts together; fewer cannot be split
    CorrectionTask as CorrectionTask,  # the inputs of the search for corrections
    FoundCorrections as FoundCorrections,  # the accepted corrections, and the gain of each that was tried
    Ranges as Ranges,  # range by tensor
    find_corrections as find_corrections,  # try each allowed correction in turn, and keep those that help
    read_found as read_found,  # the corrections in a file, if it is of the same run
    write_found as write_found,  # write corrections with their gains; ``run`` describes model, data and rules
)
from .layers import (
    find_layers as find_layers,  # the linear layers whose weights these sites quantize, by weight
)
from .numbers import (
    NARROW as NARROW,  # the best method on SqueezeNet, the second best on a face detector
)
from .overflow import (
    PairMaxima as PairMaxima,  # the largest inputs of a layer by column, and their sums by pairs of columns
    SumLimit as SumLimit,  # limits of a layer's weights, so that no sum of two products overflows
    observed_limits as observed_limits,  # the limits of int8 weights, by the inputs on these feeds
)
