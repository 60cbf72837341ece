"""Hugging Face checkpoints into megatron-core's torch_dist format and back, bit for bit, without a parallel layout."""
