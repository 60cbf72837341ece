"""Sweeps: one run for each point, as a job of Slurm or a process here, in a directory that a second start goes on with.

`python -m megatron_rl.sweeps DIR` prints how far a sweep is.
"""
