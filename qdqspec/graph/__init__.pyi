from .conversion import (
    convert_by as convert_by,  # the model as a tool of another package converts it
    in_float32 as in_float32,  # the model with float32 in place of float16, in bodies too
    raise_opset as raise_opset,  # the same model at default opset ``version`` or above, as a new proto
    with_integer_kernels as with_integer_kernels,  # the model that pairs are inserted into
    with_types as with_types,  # the model with ``dtype`` for tensors of unknown type
)
from .definition import (
    as_defined as as_defined,  # the model with integer operators replaced by their definition
    evaluator_of as evaluator_of,  # the reference implementation of a model
    is_quantized as is_quantized,  # whether a model has Q/DQ nodes or operators that compute in integers
)
from .fold import (
    Folded as Folded,  # a smaller model, and the names of nodes that it lacks
    fold_constants as fold_constants,  # compute nodes that depend on constants only
    fold_weights as fold_weights,  # compute constant weights, and fold BatchNormalization
)
from .given import (
    OwnCopy as OwnCopy,  # a changed copy of a user's model; its file exists as long as the copy
    cautions as cautions,  # properties that make measurements unreliable, each with advice
    digests_of as digests_of,  # digests of interface and nodes as one text
    given_model as given_model,  # the user's model, inlined, with constant weights and fixed inputs
    inlined as inlined,  # a copy with local functions inlined; the model itself if it has none
    with_true_outputs as with_true_outputs,  # the model, with the shapes of a run where declared ones differ
)
from .model import (
    Model as Model,  # a loaded model
    Node as Node,  # one node of the main graph or of a body; a tensor of a body has its unique name
    load_model as load_model,  # read and validate a model
    require_path as require_path,  # the model's file; a model in memory must be saved first
)
from .observe import (
    with_outputs as with_outputs,  # the model with ``tensors`` as its only outputs
)
from .storage import (
    WEIGHTS as WEIGHTS,  # default name of a file of weights
    WeightStore as WeightStore,  # a file of tensor bytes in ``folder`` that models saved there refer to
    save_model as save_model,  # write a model atomically
)
