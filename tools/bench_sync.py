"""What a weight sync costs: ours against gathering every tensor under its Hugging Face name for SGLang's own loader.

Usage: python tools/bench_sync.py [--layouts tp2_ep2 pp2_ep2] [--rounds N] [--small] [--json FILE]. Takes minutes.

Both arms run in turns on the same processes: megatron ranks, and one SGLang server of two ranks. The weights change
before every round, and each arm must bring the server to the same checksums. The other arm: tools/gather_everything.py.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

# One thread a process, as everywhere with several ranks on a machine; before torch is imported.
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray  # noqa: E402
import torch  # noqa: E402
from gather_everything import GatheringTrainer  # noqa: E402

from megatron_rl import cluster, pools  # noqa: E402
from megatron_rl.checks import topology_of  # noqa: E402
from megatron_rl.config_loading import load_config  # noqa: E402
from megatron_rl.layouts.sglang_topology import SglangTopology  # noqa: E402
from megatron_rl.models import load_table  # noqa: E402
from megatron_rl.resharding.spec import BUCKET_BYTES, Push, SyncSpec  # noqa: E402
from megatron_rl.resharding.sync import EngineSync  # noqa: E402
from megatron_rl.rollout.options import ServerSettings  # noqa: E402
from megatron_rl.rollout.server import Server  # noqa: E402
from megatron_rl.run import make_model  # noqa: E402

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "vocab_size": 32_768,
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
"""0.51 B parameters, 64 experts a layer."""
SMALL = {"hidden_size": 256, "vocab_size": 4096, "num_hidden_layers": 2}
LAYOUTS = {
    "tp2_ep2": (2, ["parallel.tp=2", "parallel.sp=true", "parallel.ep=2"]),
    "pp2_ep2": (4, ["parallel.pp=2", "parallel.ep=2"]),
}
ENGINE_TP = 2
LIMITS = {"gather_over_ours": 3.0, "share_of_memcpy": 0.4}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both arms on each layout and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5, help="how often the arms take turns, after one to warm up")
    parser.add_argument("--bucket-mb", type=int, default=BUCKET_BYTES["cpu"] >> 20, help="of a message of ours")
    parser.add_argument("--small", action="store_true", help="a model of a few million parameters: does it work at all")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    model = MODEL | (SMALL if options.small else {})
    figures = {}
    with tempfile.TemporaryDirectory(prefix="bench-sync-") as directory:
        for layout in options.layouts:
            figures[layout] = measure(
                Path(directory), model, layout, rounds=options.rounds, bucket_mb=options.bucket_mb
            )
            print("\n".join(table(layout, figures[layout])), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


class Engine:
    """The server as a push needs it. Satisfies `sync.WeightReceiver`."""

    def __init__(self, server: Server):
        self.server = server
        self.pause = server.pause
        self._pool = ThreadPoolExecutor(1)

    def loading(self, spec: SyncSpec, push: Push) -> dict[str, Any]:
        return {"engine-0": self._pool.submit(self.server.load_weights, spec, push)}

    def commit(self, version: int) -> None:
        self.server.commit(version)
        self.server.resume()


def measure(directory: Path, model: dict[str, Any], layout: str, *, rounds: int, bucket_mb: int) -> dict[str, Any]:
    """Both arms, in turns."""
    ranks, parallel = LAYOUTS[layout]
    overrides = ["experiment=cpu_digits", "trainer.dtype=bfloat16", "parallel.ep=1", *parallel]
    config = load_config([*overrides, f"trainer.world_size={ranks}"])
    config.model.random = model
    path = directory / "model"
    if not path.exists():
        make_model(config, path, "0123456789")
    hf = json.loads((path / "config.json").read_text())
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        cluster.start(address=None, cpus=ranks)
        pool = pools.Pool("trainer", ranks, cpus=1)
        trainer = GatheringTrainer(config, path, pool=pool, logs=directory)
        options = {"tp": ENGINE_TP, "dtype": "bfloat16", "max_total_tokens": 2048}
        server = Server(ServerSettings("engine", str(path), str(directory / f"{layout}.log"), "cpu", **options))
        stack.callback(server.stop)
        server.start()
        trainer.ready()
        stack.callback(trainer.sweep)
        spec = SyncSpec(
            hf,
            topology_of(config, load_table(hf)),
            SglangTopology(tp=ENGINE_TP),
            "bfloat16",
            "bfloat16",
            bucket_bytes=bucket_mb << 20,
        )
        last = {"gather": results, "still_running": lambda calls, timeout_s: []}  # a push that fails is the last
        sync = EngineSync(trainer, Engine(server), spec, **last)
        count = trainer.plan_gather()
        records = [one_round(trainer, server, sync, i, buckets=count) for i in range(rounds + 1)][1:]
        memcpy = memcpy_gb_per_s()
    of = {name: median(r[name] for r in records) for name in records[0]}
    received_gb = of["sync/bytes_received"] / 1e9
    return {
        "ours_s": of["ours_s"],
        "gather_s": of["gather_s"],
        "gather_over_ours": median(r["gather_s"] / r["ours_s"] for r in records),
        "bytes_received": of["sync/bytes_received"],
        "bytes_needed": of["sync/bytes_needed"],
        "memcpy_gb_per_s": memcpy,
        "share_of_memcpy": received_gb / of["ours_s"] / memcpy,
        "stages_s": {
            name.removeprefix("sync/"): s for name, s in of.items() if name.startswith("sync/") and name.endswith("_s")
        },
        "staging_bytes": of["sync/staging_bytes"],
    }


def one_round(
    trainer: GatheringTrainer, server: Server, sync: EngineSync, number: int, *, buckets: int
) -> dict[str, float]:
    """Seconds of each arm. Raises: SystemExit when they leave the server with different weights."""
    before = server.checksums()
    trainer.change()
    start = time.perf_counter()
    metrics = sync.push(version=2 * number + 1)
    ours_s = time.perf_counter() - start
    after = server.checksums()
    trainer.change()
    trainer.change()
    start = time.perf_counter()
    server.pause()
    server._post("/begin_weight_update", {})
    for index in range(buckets):
        payloads = trainer.gather_bucket(index, ENGINE_TP)
        update = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket"}
        server._post("/update_weights_from_tensor", {**update, "flush_cache": False})
    server._post("/end_weight_update", {})
    server.commit(2 * number + 2)
    server.resume()
    gather_s = time.perf_counter() - start
    if not before != after == server.checksums():
        raise SystemExit("The two arms leave the server with different weights: the comparison means nothing.")
    return {"ours_s": ours_s, "gather_s": gather_s, **metrics}


def results(calls: dict[str, Any]) -> list[Any]:
    """Of trainer ranks and the server."""
    refs = {name: call for name, call in calls.items() if isinstance(call, ray.ObjectRef)}
    sent = cluster.gather(refs, what="Weight sync", timeout_s=600)
    return [*sent, *(call.result() for name, call in calls.items() if name not in refs)]


def memcpy_gb_per_s() -> float:
    """One thread's, of bytes copied once, between buffers far larger than the caches."""
    source, into = torch.ones(2, 256 << 20, dtype=torch.uint8)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        into.copy_(source)
        times.append(time.perf_counter() - start)
    return source.numel() / 1e9 / median(times)


def table(layout: str, figures: dict[str, Any]) -> list[str]:
    """For people."""
    share = {name: seconds for name, seconds in figures["stages_s"].items()}
    return [
        f"{layout} -> engine tp{ENGINE_TP}: {figures['bytes_received'] / 1e9:.3f} GB received of "
        f"{figures['bytes_needed'] / 1e9:.3f} GB needed, {figures['staging_bytes'] / 1e6:.0f} MB of buffers a rank",
        f"  ours              {figures['ours_s']:.3f} s",
        f"  gather everything {figures['gather_s']:.3f} s, {figures['gather_over_ours']:.2f} times ours "
        f"(wanted: {LIMITS['gather_over_ours']:.0f})",
        f"  speed             {figures['share_of_memcpy']:.0%} of memcpy's {figures['memcpy_gb_per_s']:.1f} GB/s "
        f"(wanted: {LIMITS['share_of_memcpy']:.0%})",
        "  slowest rank      " + ", ".join(f"{name[:-2]} {seconds:.3f}" for name, seconds in share.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
