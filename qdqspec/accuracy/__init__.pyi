from .compare import (
    SampleOutputs as SampleOutputs,  # the outputs for one sample
    compare_outputs as compare_outputs,  # compare outputs over all samples
    power_of as power_of,  # noise power over signal power
    sqnr_db as sqnr_db,  # ten times the log of signal power over noise power
    sqnr_of_runs as sqnr_of_runs,  # the SQNR of an output over several runs
)
from .culprits import (
    rank_pairs as rank_pairs,  # the pairs of a model with the largest error, and the error of all
)
from .data import (
    Dataset as Dataset,  # samples of one file, or of several in order of name
    feed_of_shapes as feed_of_shapes,  # the first of the feeds that has these shapes
    open_data as open_data,  # open calibration or evaluation data for a model with these inputs
    random_feeds as random_feeds,  # ``count`` feeds of plausible values
    shaped_by_data as shaped_by_data,  # the inputs of a case, with shapes of its data where none are fixed
    without_fill as without_fill,  # inputs or outputs of a feed without samples that only fill up the last one
)
from .evaluator import (
    Evaluator as Evaluator,  # the SQNR of an engine's worst output on one data set, in dB
    Offset as Offset,  # the SQNR of placements minus the one expected
    Runs as Runs,  # the part of an engine's interface that runs it
)
from .given_data import (
    GivenFiles as GivenFiles,  # the files of objects in memory, in a temporary folder
    is_model as is_model,  # whether it is a model in memory
)
from .input_search import (
    input_domains as input_domains,  # the domain of each input
    search_input as search_input,  # search for the smallest input that breaks limits
)
from .metrics import (
    Scores as Scores,  # scores engines by the metrics of a case
    accuracy_evidence as accuracy_evidence,  # two scores compared
    fitting_metric as fitting_metric,  # the built-in metric for such labels and an output of this shape
    joined_metrics as joined_metrics,  # metrics of several sources; later ones win
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
from .shapes import (
    InputSpec as InputSpec,  # the numpy dtype and the full shape, batch included, of one input of a case
    input_specs as input_specs,  # dtype and shapes of each model input in a case
    named_dims as named_dims,  # the dimensions of an input
    require_inputs as require_inputs,  # raise `SpecError` if a key names an unknown input
    resized as resized,  # the same values at other shapes of the same rank
    resolve_shapes as resolve_shapes,  # the static shape of each model input, for one profile of a case
    shape_profiles as shape_profiles,  # the profiles of a case including its batch
    shapes_text as shapes_text,  # shapes as text
)
from .sources import (
    all_files as all_files,  # the files of the data, those of labels included, on which a cache key depends
)
