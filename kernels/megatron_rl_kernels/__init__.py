"""Copy operations of weight resharding. Every operation has one name in its Triton or CUDA form and in `reference`."""
