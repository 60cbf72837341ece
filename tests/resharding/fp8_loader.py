"""What SGLang's own loader makes of FP8 checkpoints, one simulated rank after another.

A program, as tests/layouts/sglang_loader.py: fp8_loader.py CUTS, where CUTS is JSON, [[directory, [fields of
SglangTopology]]]. A directory holds `fp8`, a checkpoint in FP8, and `hf`, the same model in bfloat16. Prints one JSON
line per rank: {"loaded": {parameter: [dtype, shape, hash of its bytes]}, "begins": {parameter: [dtype, shape]}}: of one
loaded from FP8, and of what an engine with `rollout.fp8` begins with.
"""

import json
import sys
from pathlib import Path

from sglang.srt.plugins.hook_registry import HookRegistry

from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.rollout.options import FP8_FLAGS
from megatron_rl.rollout.receiver import weights_of
from megatron_rl.rollout.sglang_cpu.hooks import activate_cpu
from tests.layouts.sglang_loader import load_rank
from tests.resharding.pushing import described, hashed

if __name__ == "__main__":
    activate_cpu()
    HookRegistry.apply_hooks()
    override = json.dumps(FP8_FLAGS["json-model-override-args"])
    flags = {"load_format": FP8_FLAGS["load-format"], "json_model_override_args": override}
    for directory, cuts in json.loads(sys.argv[1]):
        for cut in (SglangTopology(**sizes) for sizes in cuts):
            for rank in range(cut.world_size):
                loaded = weights_of(load_rank(Path(directory, "fp8"), cut, rank))
                begins = weights_of(load_rank(Path(directory, "hf"), cut, rank, **flags))
                line = {
                    "loaded": {name: [*described(tensor), hashed(tensor)] for name, tensor in loaded.items()},
                    "begins": {name: described(tensor) for name, tensor in begins.items()},
                }
                print(json.dumps(line), flush=True)
