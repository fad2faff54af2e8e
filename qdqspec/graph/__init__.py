"""What a model is: loading, hashing, looking at nodes and tensors. May import floor 0, onnx and numpy."""
