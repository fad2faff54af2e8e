"""What a model is: loading, hashing, looking at nodes and tensors."""
