"""What the backends for NVIDIA GPUs share: CUDA, the state of a GPU, and nvidia-smi."""
