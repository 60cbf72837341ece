"""Compiles the CUDA sources beside this file, which include no header. Compiling takes no GPU, launching does."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from cuda.core import Device, Kernel, LaunchConfig, ObjectCode, Program, ProgramOptions, launch

THREADS = 256
"""Of every block."""


def compile_source(name: str, arch: str, **macros: int) -> ObjectCode:
    """The cubin of `name`.cu for an architecture such as sm_90, with the macros defined."""
    source = (Path(__file__).parent / f"{name}.cu").read_text()
    defined = [(macro, str(value)) for macro, value in {"THREADS": THREADS, **macros}.items()]
    return Program(source, "c++", ProgramOptions(std="c++17", arch=arch, define_macro=defined)).compile("cubin")


@cache
def _kernel(name: str, function: str, device: int, macros: tuple[tuple[str, int], ...]) -> Kernel:
    Device(device).set_current()
    major, minor = torch.cuda.get_device_capability(device)
    return compile_source(name, f"sm_{major}{minor}", **dict(macros)).get_kernel(function)


def launch_tiles(name: str, function: str, blocks: int, device: torch.device, *arguments: Any, **macros: int) -> None:
    """Run a kernel of `name`.cu, a block for each tile, on torch's current stream."""
    with torch.cuda.device(device):
        kernel = _kernel(name, function, torch.cuda.current_device(), tuple(macros.items()))
        launch(torch.cuda.current_stream(), LaunchConfig(grid=blocks, block=THREADS), kernel, *arguments)
