"""What SGLang 0.5.23 needs to serve on a machine without a GPU."""
