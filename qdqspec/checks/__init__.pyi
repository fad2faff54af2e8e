from .base import (
    ByteSize as ByteSize,  # a size in bytes, such as ``4MiB``
    Check as Check,  # one kind of check
    CheckParams as CheckParams,  # the keys that every check has, whatever its kind
    Evidence as Evidence,  # all measurements of a case, as checks receive them
    FigureRequest as FigureRequest,  # figures that a check defines itself, by name
    ScoreRequest as ScoreRequest,  # a task metric of reference and tuned model
    Section as Section,  # a titled part of a verdict's text
    Verdict as Verdict,  # the result of a check
    needs_of as needs_of,  # all kinds of evidence that a check of a case needs
    raised as raised,  # the verdict of a check whose data, metric or backend raised an error
    requested as requested,  # the requests of one type of several checks
    requests_of as requests_of,  # the evidence that a check of a case requests with parameters
    require_a_limit as require_a_limit,  # raise ``ValueError`` if none of the named limits is given
    timed_out as timed_out,  # the verdict of a check that was not decided within the time limit
    unmeasured as unmeasured,  # the verdict of a check whose evidence is missing
    verdict as verdict,  # a verdict with the headline cut to one line
)
from .kinds.parity import (
    ParityCheck as ParityCheck,  # limits on the difference of the outputs
    compared_sections as compared_sections,  # an input with its outputs, or the outputs on all data
)
from .kinds.regression import (
    judge_change as judge_change,  # whether a change passes, is stale, inconclusive, or fails
)
from .parity_text import (
    noise_shares as noise_shares,  # the shares of quantization and runtime in the noise
    number_notes as number_notes,  # a line for each output that is NaN, infinite or zero in every sample
    slice_notes as slice_notes,  # a line for each output with a slice far below the whole, with the cure
)
from .rejected import (
    candidates_section as candidates_section,  # candidates that were not selected, with their kernels
    why_text as why_text,  # the reason that accurate candidates gain too little
)
