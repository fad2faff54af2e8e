from .case_data import (
    CaseData as CaseData,  # types and shapes of the inputs of a case, and the samples that its model is run on
)
from .compare import (
    SampleOutputs as SampleOutputs,  # the outputs for one sample
    compare_outputs as compare_outputs,  # compare outputs over all samples
    power_of as power_of,  # noise power over signal power
    sqnr_of_runs as sqnr_of_runs,  # the SQNR of an output over several runs
)
from .culprits import (
    rank_pairs as rank_pairs,  # the pairs of a model with the largest error, and the error of all
)
from .data import (
    Dataset as Dataset,  # samples of one file, or of several in order of name
    without_fill as without_fill,  # inputs or outputs of a feed without samples that only fill up the last one
)
from .evaluator import (
    Evaluator as Evaluator,  # the SQNR of an engine's worst output on one data set, in dB
    Offset as Offset,  # the SQNR of placements minus the one expected
    Runs as Runs,  # the part of an engine's interface that runs it
)
from .input_search import (
    input_domains as input_domains,  # the domain of each input
    search_input as search_input,  # search for the smallest input that breaks limits
)
from .metrics import (
    Scores as Scores,  # scores engines by the metrics of a case
    fitting_metric as fitting_metric,  # the built-in metric for such labels and an output of this shape
)
from .predict import (
    RehearsalOracle as RehearsalOracle,  # predicts the SQNR that a search will measure, and its task metric
    RehearsedMetric as RehearsedMetric,  # predicts the task metric
    Rehearser as Rehearser,  # the rehearsal of a space, built on first use
)
from .probes import (
    SavedProbe as SavedProbe,  # an input and the limits that it broke, in a file
    save_for_polygraphy as save_for_polygraphy,  # write an input and the outputs of both models for it
    worst_sample as worst_sample,  # the sample of data that breaks a limit alone and has the largest error
)
from .rehearsal import (
    Rehearsal as Rehearsal,  # the effect of any placement on the outputs of the model, without a build
    RehearsalRefusedError as RehearsalRefusedError,  # a model cannot be rehearsed
    Runtime as Runtime,  # the reference runtime
)
from .sources import (
    LABELS as LABELS,  # the one array of a data file that is no input of a model
    all_files as all_files,  # the files of the data, those of labels included, on which a cache key depends
    npz_bytes as npz_bytes,  # an .npz file of these arrays, with texts ``beside`` them by file name
)
