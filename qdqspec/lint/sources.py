"""Sources of the rules for TensorRT. None of them was measured by us."""

PARSER = "onnx-tensorrt, helper of QuantizeLinear and DequantizeLinear"
HEADER = "NvInfer.h, IQuantizeLayer and IDequantizeLayer"
OPERATORS = "onnx-tensorrt, docs/operators.md"
GUIDE = 'NVIDIA, "Working with Quantized Types", Q/DQ layer-placement recommendations'
FUSIONS = "NVIDIA, TensorRT best practices, layer fusion"
ISSUE = "github.com/NVIDIA/TensorRT issue"
MODEL_OPTIMIZER = "github.com/NVIDIA/Model-Optimizer"
