from .calibrate import (
    calibrate_with as calibrate_with,  # return the range of each tensor over all feeds, by several methods
    given_ranges as given_ranges,  # the ranges in a file for the wanted tensors
)
from .capabilities import (
    Capabilities as Capabilities,  # the support of a backend for Q/DQ models on this device
)
from .chains import (
    Equalization as Equalization,  # channels of a tensor times powers of two, and the constants that change
)
from .diff import (
    diff_models as diff_models,  # compare two models, either or both with Q/DQ, made by any tool: data and text
)
from .dynamic_pairs import (
    with_pairs as with_pairs,  # Q/DQ pairs in the place of kernels with dynamic ranges
)
from .equalize import (
    branches_of as branches_of,  # the changes of a model whose factors are in inserted products
    equalized as equalized,  # the model with these factors, which its metadata holds
    scaled_tensors as scaled_tensors,  # the tensors whose channels some changes scale
    touched as touched,  # the changes of tensors or constants that a placement quantizes
)
from .excerpt import (
    Excerpts as Excerpts,  # cuts parts out of one model, whose inputs have these shapes
)
from .factors import (
    choose_branches as choose_branches,  # the branches that factors improve, with these factors
    choose_equalizations as choose_equalizations,  # the chains that factors improve, with these factors
)
from .formats import (
    BIAS_FORMAT as BIAS_FORMAT,  # int32, always stored as integers
    FORMATS as FORMATS,  # all number formats by name
    QuantParams as QuantParams,  # scale and zero point of one Q/DQ pair, and its arithmetic
    number_format as number_format,  # the format of that name
)
from .import_qdq import (
    KeptScales as KeptScales,  # the scales that quantized models have for tensors of a model
    import_placement as import_placement,  # import the Q/DQ pairs of a model, made by any tool
)
from .insert import (
    Inserter as Inserter,  # makes candidates of one model; the common parts are prepared once
)
from .match import (
    fit_scheme as fit_scheme,  # the pairs as sites of the model that they were made for
)
from .pairs import (
    QuantSource as QuantSource,  # source of the numbers of a site
    biased_layer as biased_layer,  # the Conv that alone reads a weight, if its bias is its own
)
from .quantizer import (
    Quantizer as Quantizer,  # gives scale and zero point of a site, and the integers of a weight
    WeightKey as WeightKey,  # tensor, number format, axis of the scales
    weight_key as weight_key,  # the key of a weight's numbers, which do not depend on its consumers
)
from .ranges import (
    TensorRange as TensorRange,  # the lowest and highest real value to represent
    tie_ranges as tie_ranges,  # give one range to tensors that a runtime merges at equal scales
)
from .recognize import (
    count_dequantized as count_dequantized,  # the number of dequantized tensors of a model
)
from .region_schemes import (
    Frames as Frames,  # the frames of a model's regions, each computed on first use
    PatternCache as PatternCache,  # the best schemes of each pattern, as a file, for warm starts
)
from .scheme_file import (
    SchemeFile as SchemeFile,  # content of a scheme file, which it reads, writes and applies to a model
)
from .search_space import (
    SchemeSpace as SchemeSpace,  # all placements of one model that the backend can use and the spec allows
    judge as judge,  # the nodes that a backend's search may quantize, and reasons against others
)
from .strip import (
    strip_qdq as strip_qdq,  # the float model of a model with Q/DQ pairs
)
from .survival import (
    check_survival as check_survival,  # run optimizers on a model, and report which pairs survive
)
from .switches import (
    SwitchedModel as SwitchedModel,  # a model in which each pair has a switch, and the feeds that set them
    Switches as Switches,  # switches by number, one for each consumer of a site
    SwitchGraph as SwitchGraph,  # builds models with switches: the whole, and parts for single switches
    sites_of as sites_of,  # the sites of every (unit, label) of a space
)
from .units import (
    Edge as Edge,  # a tensor and one consumer's input
    Form as Form,  # the quantized parts of a unit in one format
    Unit as Unit,  # an operator with the nodes fused into it
    Units as Units,  # all units of a model
)
