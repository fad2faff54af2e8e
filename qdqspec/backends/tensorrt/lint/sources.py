"""Sources of the rules for TensorRT. None of them was measured by us."""

PARSER = "onnx-tensorrt, helper of QuantizeLinear and DequantizeLinear"
HEADER = "NvInfer.h, IQuantizeLayer and IDequantizeLayer"
HEADER_BEFORE = "NvInfer.h 10.9 to 10.12, IQuantizeLayer and IDequantizeLayer"
HEADER_SINCE = "NvInfer.h 10.13 to 11.1, IQuantizeLayer and IDequantizeLayer"
NEW_PARSER = "onnx-tensorrt 10.15, helper of QuantizeLinear and DequantizeLinear"
TABLES = "onnx-tensorrt, docs/operators.md of 10.1, 10.15 and 11.1, and its changelog up to 10.15"
OPERATORS = "onnx-tensorrt, docs/operators.md"
GUIDE = 'NVIDIA, "Working with Quantized Types", Q/DQ layer-placement recommendations'
FUSIONS = "NVIDIA, TensorRT best practices, layer fusion"
ISSUE = "github.com/NVIDIA/TensorRT issue"
MODEL_OPTIMIZER = "github.com/NVIDIA/Model-Optimizer"
