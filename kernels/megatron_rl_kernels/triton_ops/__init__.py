"""Each operation of the package as a Triton kernel."""
