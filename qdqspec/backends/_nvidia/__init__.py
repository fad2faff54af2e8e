"""Shared parts of the backends for NVIDIA GPUs: CUDA, the state of a GPU, and nvidia-smi."""
