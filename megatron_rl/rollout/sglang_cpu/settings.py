"""Flags and environment of a server without a GPU: the only place where its start differs from one on GPUs."""

import os
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"

CPU_FLAGS: dict[str, object] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "disable-cuda-graph": True,
    # Makes the seed of each sample count; without it equal prompts get equal samples.
    "enable-deterministic-inference": True,
    # A cached prefix changes the shapes of matrix products, and with them the last bits of log-probabilities.
    "disable-radix-cache": True,
    # An idle scheduler otherwise polls without pause, on a core that the trainer needs.
    "sleep-on-idle": True,
}


def cpu_environment(tp: int) -> dict[str, str]:
    """Environment variables of a server with `tp` ranks."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # Otherwise torch's CUDA build loads NCCL for tp > 1 and dies without a device.
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        # By default SGLang wants one NUMA node a rank. Nothing is pinned without its AMX kernels.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp)),
        "OMP_NUM_THREADS": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # torch takes large tensors in huge pages, which copies fill a fifth faster
        "CUDA_VISIBLE_DEVICES": "",
    }
