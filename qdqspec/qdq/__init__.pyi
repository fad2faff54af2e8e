from .calibrate import (
    calibrate_with as calibrate_with,  # return the range of each tensor over all feeds, by several methods
    given_ranges as given_ranges,  # the ranges in a file for the wanted tensors
)
from .capabilities import (
    Capabilities as Capabilities,  # the support of a backend for Q/DQ models on this device
)
from .chains import (
    EQUALIZATIONS as EQUALIZATIONS,  # reads what `Equalization.record` makes
    Absorber as Absorber,  # a linear operator whose weight is divided by the factors of its input
    Chain as Chain,  # tensors whose channels can have common factors
    Equalization as Equalization,  # channels of a tensor times powers of two, and the constants that change
    ScaledConstant as ScaledConstant,  # a constant multiplied or divided by the channels' factors
    branched as branched,  # a change without effect for each branch that may have factors
    find_chains as find_chains,  # the chains of the main graph, in graph order
)
from .diff import (
    diff_models as diff_models,  # compare two models, either or both with Q/DQ, made by any tool: data and text
)
from .equalize import (
    ScaledValues as ScaledValues,  # the constants of a model with the factors of some changes
    branches_of as branches_of,  # the changes of a model whose factors are in inserted products
    equalized as equalized,  # the model with these factors, which its metadata holds
    touched as touched,  # the changes of tensors or constants that a placement quantizes
)
from .excerpt import (
    Excerpt as Excerpt,  # a part of a model
    Excerpts as Excerpts,  # cuts parts out of one model, whose inputs have these shapes
)
from .formats import (
    BIAS_FORMAT as BIAS_FORMAT,  # int32, always stored as integers
    BLOCK_SIZES as BLOCK_SIZES,  # of 8-bit weights: those of operator MatMulNBits
    FORMATS as FORMATS,  # all number formats by name
    QuantParams as QuantParams,  # scale and zero point of one Q/DQ pair
    number_format as number_format,  # the format of that name
)
from .import_qdq import (
    Imported as Imported,  # the placement of a quantized model with its numbers, and notes for the reader
    import_placement as import_placement,  # import the Q/DQ pairs of a model, made by any tool
    placement_for as placement_for,  # the placement of a quantized model for its float original
)
from .insert import (
    Inserter as Inserter,  # makes candidates of one model; the common parts are prepared once
    RaisedInputs as RaisedInputs,  # the consumers of a model after the opset was raised
)
from .match import (
    PASSED_OVER as PASSED_OVER,  # operators that tools remove and insert
    Matcher as Matcher,  # finds sites in one model
    fit_scheme as fit_scheme,  # the pairs as sites of the model that they were made for
)
from .pair_numbers import (
    is_constant as is_constant,  # whether all these tensors are constants of the model
    is_op as is_op,  # whether a node is a Q or DQ, or another operator with that role
    makes_scale as makes_scale,  # whether a DQ makes a tensor that is only used as a scale
)
from .pairs import (
    BIAS_INPUT as BIAS_INPUT,  # of a Conv
    Pair as Pair,  # the nodes and constants of one site
    PairMaker as PairMaker,  # makes the pairs of one model
    QuantSource as QuantSource,  # source of the numbers of a site
    biased_layer as biased_layer,  # the Conv that alone reads a weight, if its bias is its own
)
from .quantizer import (
    Corrections as Corrections,  # ranges and scales that replace those of calibration
    Quantizer as Quantizer,  # gives scale and zero point of a site, and the integers of a weight
    WeightKey as WeightKey,  # tensor, number format, axis of the scales
    along as along,  # scale or zero point in a shape that broadcasts over the tensor's
    as_real as as_real,  # floats of a type that numpy lacks, converted to float32
    dequantize as dequantize,  # the real values of stored numbers
    params_of as params_of,  # scale and zero point of a pair of a scheme
    quantize as quantize,  # the stored numbers of ``values``
    weight_key as weight_key,  # the key of a weight's numbers, which do not depend on its consumers
    weight_params as weight_params,  # scale and zero point of a weight, from its values
)
from .ranges import (
    TensorRange as TensorRange,  # the lowest and highest real value to represent
    keep_ranges as keep_ranges,  # the ranges with given ones, also for copies of their tensors
    saturations as saturations,  # the ends of what the readers of these tensors distinguish
    tie_ranges as tie_ranges,  # give one range to tensors that a runtime merges at equal scales
)
from .region_schemes import (
    Frames as Frames,  # the frames of a model's regions, each computed on first use
    PatternCache as PatternCache,  # the best schemes of each pattern, as a file, for warm starts
)
from .scheme_file import (
    SchemeFile as SchemeFile,  # content of a scheme file
    SchemeNumbers as SchemeNumbers,  # the numbers of a scheme in the form that insertion needs
    apply_scheme as apply_scheme,  # the model with the pairs and numbers of a scheme
    read_scheme as read_scheme,  # read a scheme file
    write_scheme as write_scheme,  # write a placement and the numbers of its sites
)
from .search_space import (
    SchemeSpace as SchemeSpace,  # all placements of one model that the backend can use and the spec allows
    judge as judge,  # the nodes that a backend's search may quantize, and reasons against others
    project as project,  # the placement of the labels derived from the sites
)
from .strip import (
    strip_qdq as strip_qdq,  # the float model of a model with Q/DQ pairs
)
from .survival import (
    check_survival as check_survival,  # run optimizers on a model, and report which pairs survive
)
from .units import (
    WEIGHT_AXES as WEIGHT_AXES,  # the axis of output channels of convolutions
    Edge as Edge,  # a tensor and one consumer's input
    Form as Form,  # the quantized parts of a unit in one format
    Unit as Unit,  # an operator with the nodes fused into it
    Units as Units,  # all units of a model
    dynamic_misfit as dynamic_misfit,  # the reason against dynamic quantization in blocks
    edges_before as edges_before,  # this edge, and those from which the runtime moves a pair to it
    format_choices as format_choices,  # the formats of a case that the backend supports
    weight_input as weight_input,  # the index of a constant float weight of a linear operator, or ``None``
    with_results as with_results,  # the unit with other results
)
