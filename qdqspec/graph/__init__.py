"""ONNX models: loading, hashing, access to nodes and tensors."""
