"""copy_boxes and quantize_boxes in CUDA C++: compiled by NVRTC on first use, on the tables of the Triton kernels."""
