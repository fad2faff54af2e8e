from .check import (
    sort_nodes as sort_nodes,  # move each node behind those whose outputs it or its bodies read
    type_problem as type_problem,  # the first problem in types and shapes that ONNX's checker finds
)
from .conversion import (
    computes_in_float16 as computes_in_float16,  # whether an operator reads or makes float16
    converted_like as converted_like,  # the model, in float32 if ``other`` was converted
    in_float32 as in_float32,  # the model with float32 in place of float16, in bodies too
    raise_opset as raise_opset,  # the same model at default opset ``version`` or above, as a new proto
    with_integer_kernels as with_integer_kernels,  # the model that pairs are inserted into
    with_types as with_types,  # the model with ``dtype`` for tensors of unknown type
)
from .definition import (
    as_defined as as_defined,  # the model with integer operators replaced by their definition
    evaluator_of as evaluator_of,  # the reference implementation of a model
    is_quantized as is_quantized,  # whether a model has Q/DQ nodes or operators that compute in integers
    reference_outputs as reference_outputs,  # the outputs of a model as ONNX defines them
)
from .dynamic_kernels import (
    CARRIED as CARRIED,  # node metadata of inserted nodes: the tensor whose values the node carries
    QUANTIZE as QUANTIZE,  # the operator that finds its range at run time
    encoded as encoded,  # a node or tensor as text for the metadata of a node
    with_kernels as with_kernels,  # integer kernels behind dynamic pairs and stored weights
)
from .dynamic_pairs import (
    with_pairs as with_pairs,  # Q/DQ pairs in the place of kernels with dynamic ranges
)
from .flat import (
    Scope as Scope,  # one graph of a model
    closed as closed,  # the model of a flat form
    find_scopes as find_scopes,  # all graphs of a model, each before its bodies
    flat_form as flat_form,  # the flat form of a model, in which each node has a name
    names_in as names_in,  # each name of a tensor or node of a graph, without those of its bodies
    numbered_name as numbered_name,  # the name, or if it is in ``taken`` with the first free number
    scopes_of as scopes_of,  # the path of the graph that each node of a flat form is in
    unique_node_names as unique_node_names,  # a unique name for each node of one graph
)
from .fold import (
    fold_constants as fold_constants,  # compute nodes that depend on constants only
    fold_weights as fold_weights,  # compute constant weights, and fold BatchNormalization
    folded_like as folded_like,  # the model folded as ``other`` was, or ``None``
    with_constant_numbers as with_constant_numbers,  # numbers of Q and DQ as constants
)
from .given import (
    OwnCopy as OwnCopy,  # a changed copy of a user's model; its file exists as long as the copy
    cautions as cautions,  # properties that make measurements unreliable, each with advice
    digests_of as digests_of,  # digests of interface and nodes as one text
    given_model as given_model,  # the user's model, inlined, with constant weights and fixed inputs
    inlined as inlined,  # a copy with local functions inlined; the model itself if it has none
    is_faithful as is_faithful,  # whether the cast is valid
    random_nodes as random_nodes,  # the names of nodes that draw random numbers in each run
    with_true_outputs as with_true_outputs,  # the model, with the shapes of a run where declared ones differ
)
from .model import (
    QDQ_OPS as QDQ_OPS,  # QuantizeLinear and DequantizeLinear
    Model as Model,  # a loaded model
    Node as Node,  # one node of the main graph or of a body; a tensor of a body has its unique name
    allows as allows,  # whether a shape agrees with a declaration, in which ``None`` is any size
    load_model as load_model,  # read and validate a model
    require_path as require_path,  # the model's file; a model in memory must be saved first
    shape_text as shape_text,  # ``[1, ?, 3]``
)
from .observe import (
    with_outputs as with_outputs,  # the model with ``tensors`` as its only outputs
)
from .regions.search import (
    find_regions as find_regions,  # cut the graphs of a model into regions
)
from .storage import (
    LARGE as LARGE,  # bytes of a model file from which its weights stay on disk
    WEIGHTS as WEIGHTS,  # default name of a file of weights
    WeightStore as WeightStore,  # a file of tensor bytes in ``folder`` that models saved there refer to
    refuse_overwriting as refuse_overwriting,  # raise `OutputError` if a path is one of the inputs
    save_model as save_model,  # write a model atomically
    tensor_bytes as tensor_bytes,  # a tensor's elements in ONNX's raw format
    with_own_bytes as with_own_bytes,  # the same tensor with its bytes included
    write_text as write_text,  # write a text file atomically
)
from .unify import (
    joined as joined,  # the classes of keys that are in one group, directly or not
)
