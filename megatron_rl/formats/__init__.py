"""Checkpoints on disk: Hugging Face's safetensors, megatron-core's torch_dist, and the manifest of their hashes."""
