"""Rules for operators without an importer in TensorRT's ONNX parser, by version.

Sources: the parser's table of operators at 10.1, 10.15 and 11.1, and its changelog. None was measured by this
project.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx.defs

from qdqspec.backends.tensorrt.lint.rule import TABLES, rule
from qdqspec.graph.flat import MARKERS
from qdqspec.graph.model import QDQ_OPS, Node
from qdqspec.graph.ops import is_default
from qdqspec.qdq.lint.rules import Find, Hit
from qdqspec.qdq.lint.view import View

# "N" in the tables of all three versions, or in none of them. Integer operators are reported by TRT011.
NEVER = frozenset(
    {
        "AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
        "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "CumProd", "DFT", "DeformConv", "Det",
        "ImageDecoder", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss",
        "Optional", "OptionalGetElement", "OptionalHasElement", "RegexFullMatch", "SequenceAt", "SequenceConstruct",
        "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
        "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "SwiGLU",
        "TfIdfVectorizer", "Unique",
    }
)  # fmt: skip
_CURE = "replace it before the export, cut the model there, or load a plugin of that name"
_INTEGER_DOMAIN = "com.microsoft"  # its QLinear operators are reported by TRT011, its Q and DQ by TRT012


def _of_types(*op_types: str) -> Find:
    def find(view: View) -> Iterator[Hit]:
        """ONNX's operators of certain types."""
        return ((node, f"is a {node.op_type}") for node in view.of(*op_types))

    return find


rule(
    "TRT025",
    "refused",
    "The parser has no importer for this operator",
    cure=_CURE,
    source=f"sources of NVIDIA: {TABLES}; of BitCast, CumProd, DeformConv and SwiGLU measured with TensorRT for RTX "
    "1.7.1.116, whose parser is of the same code",
)(_of_types(*NEVER))
rule(
    "TRT026",
    "refused",
    "The parser has no importer for Attention yet",
    cure="export the MatMul, Softmax and MatMul that it consists of, or use TensorRT 10.14",
    source=TABLES,
    until="10.14",
)(_of_types("Attention"))
rule(
    "TRT027",
    "refused",
    "The parser has no importer for this operator of language models yet",
    cure="export the operators that it consists of, or use TensorRT 10.15",
    source=TABLES,
    until="10.15",
)(_of_types("RMSNormalization", "RotaryEmbedding", "TensorScatter"))
rule(
    "TRT028",
    "refused",
    "The parser has no importer for Swish yet",
    cure="export Sigmoid and Mul, or use TensorRT 11.1",
    source=f"{TABLES}: not in the table of 10.15, in that of 11.1",
    until="11.1",
    unknown=("10.16", "11.1"),
)(_of_types("Swish"))


@rule(
    "TRT029",
    "refused",
    "An operator of another domain without an importer and without a local function",
    cure="export ONNX's own operators, or load a plugin of that name (--qdq-plugin)",
    source="onnx-tensorrt 10.1, ModelImporter.cpp: an operator without importer and local function must be a plugin",
    unknown=("10.2", ""),
)
def foreign_operators(view: View) -> Iterator[Hit]:
    """Operators such as FusedMatMul of com.microsoft, except TensorRT's domains and those of TRT011 and TRT012."""
    for node in _foreign(view):
        if not onnx.defs.has(node.op_type) or node.op_type in NEVER:
            yield node, f"is {node.domain}.{node.op_type}"


@rule(
    "TRT053",
    "note",
    "An operator of another domain is taken for ONNX's of the same name",
    cure="make sure that both compute the same from the same inputs and attributes, or export ONNX's",
    source="onnx-tensorrt 10.1, ModelImporter.cpp: importers are found by the operator's type, whatever its domain",
    unknown=("10.2", ""),
)
def read_as_onnx(view: View) -> Iterator[Hit]:
    """Operators of other domains that are read as ONNX's, such as Gelu of com.microsoft."""
    for node in _foreign(view):
        if onnx.defs.has(node.op_type) and node.op_type not in NEVER:
            yield node, f"is {node.domain}.{node.op_type}"


def _foreign(view: View) -> Iterator[Node]:
    for node in view.model.nodes:
        ours = node.domain == MARKERS  # markers of inlined bodies; not in the file
        if ours or is_default(node) or node.domain.startswith("trt") or node.op_type in QDQ_OPS:
            continue
        if node.domain == _INTEGER_DOMAIN and node.op_type.startswith(("QLinear", "QGemm", "MatMulNBits")):
            continue
        yield node
