from .base import (
    AnyRequest as AnyRequest,  # a type of request
    ByteSize as ByteSize,  # a size in bytes, such as ``4MiB``
    Check as Check,  # one kind of check
    CheckParams as CheckParams,  # the keys that every check has, whatever its kind
    Evidence as Evidence,  # all measurements of a case, as checks receive them
    FigureRequest as FigureRequest,  # figures that a check defines itself, by name
    ScoreRequest as ScoreRequest,  # a task metric of reference and tuned model
    Section as Section,  # a titled part of a verdict's text
    Verdict as Verdict,  # the result of a check
    baseline_entries as baseline_entries,  # the entries of baselines that checks of these cases compare with
    needs_of as needs_of,  # all kinds of evidence that a check of a case needs
    raised as raised,  # the verdict of a check whose data, metric or backend raised an error
    requested as requested,  # the requests of one type, each with the id of its check
    requests_of as requests_of,  # the evidence that a check of a case requests with parameters
    require_a_limit as require_a_limit,  # raise ``ValueError`` if none of the named limits is given
    timed_out as timed_out,  # the verdict of a check that was not decided within the time limit
    unmeasured as unmeasured,  # the verdict of a check whose evidence is missing
    verdict as verdict,  # a verdict with the headline cut to one line
)
from .baselines import (
    FOLDER as FOLDER,  # the name of the folder of baselines
    Conditions as Conditions,  # the conditions of a run's ratio
    Entry as Entry,  # the baseline of one check of one case
    Figure as Figure,  # a ratio tuned / reference, its time, and the changes since the previous one
    Name as Name,  # case and entry: ("int8-b8", "regression")
    Renewal as Renewal,  # an entry to write, the ratio it replaces, and the digests of its model's nodes
    RoleTimes as RoleTimes,  # the samples of one role on both clocks, build by build
    baseline_file as baseline_file,  # the path of the baseline file of a case's spec for a device
    baseline_folder as baseline_folder,  # the folder of the baselines of a case's spec
    changes as changes,  # all differences that may explain why an entry was renewed
    differences as differences,  # differences that may explain a change and permit a comparison
    figures_elsewhere as figures_elsewhere,  # the figures of the same check on other devices
    find_baselines as find_baselines,  # the file named, or all baselines below a folder, sorted
    history_of as history_of,  # the past figures of an entry, the oldest first, and its present one
    is_stale as is_stale,  # whether the model became faster than its baseline by more than the allowance
    judge_change as judge_change,  # fail if intervals and ranks both exclude the allowance
    obsolete_entries as obsolete_entries,  # entries below a spec's baseline folder that are not used
    read_baseline as read_baseline,  # the baselines in a file, ``None`` if it does not exist
    rules_of as rules_of,  # the rules of a case that its ratio depends on
    update_baseline as update_baseline,  # put entries into a file and drop others
    why_incomparable as why_incomparable,  # the reason why entry and run are not comparable, or nothing
)
from .kinds.parity import (
    ParityCheck as ParityCheck,  # limits on the difference of the outputs
)
from .parity_text import (
    LIMITS as LIMITS,  # the limits of a single comparison
    SLICE as SLICE,  # the limit of the worst slice
    comparison_sections as comparison_sections,  # the difference of each output, and its origin
    noise_shares as noise_shares,  # the shares of quantization and runtime in the noise
    probe_sections as probe_sections,  # an input, its outputs, and how to reproduce the difference
)
from .rejected import (
    HEADERS as HEADERS,  # columns of the table of candidates
    SLOWER as SLOWER,  # the reason "slower"
    UNPROVED as UNPROVED,  # the reason "gain not proved"
    candidate_row as candidate_row,  # a candidate under `HEADERS`; kernels are unknown without a profile
    candidates_section as candidates_section,  # candidates that were not selected, with their kernels
    kernel_lines as kernel_lines,  # a sentence for each candidate with a profile
    why_text as why_text,  # the reason that accurate candidates gain too little
)
