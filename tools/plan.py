"""What a run and a weight sync would take, before anything is started.

    python tools/plan.py run experiment=deepseek_v3_32_nodes model.path=DIR
    python tools/plan.py sync --model DIR --trainer world=1024,tp=8,pp=16,ep=64 --engine tp=32,ep=32 --engines 16

run: GPUs, nodes, memory on each GPU, of a command line of the program's. sync: bytes on every link, messages, balance,
memory; layouts are those of a MegatronTopology and an SglangTopology. Trainer and engines stand on nodes of their own,
one rank on each device in order, or with --colocated both on the same devices.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config_loading import load_config  # noqa: E402
from megatron_rl.convert.fp8 import without_quantization  # noqa: E402
from megatron_rl.errors import ConfigError, DataError, LayoutError  # noqa: E402
from megatron_rl.layouts.megatron_topology import MegatronTopology  # noqa: E402
from megatron_rl.layouts.sglang_topology import SglangTopology  # noqa: E402
from megatron_rl.main import read_config  # noqa: E402
from megatron_rl.models import load_table  # noqa: E402
from megatron_rl.resharding.schedule import make_schedule, receives, sends  # noqa: E402
from megatron_rl.resharding.spec import Placement, SyncSpec  # noqa: E402
from megatron_rl.resharding.traffic import Traffic, measure  # noqa: E402
from megatron_rl.run_plan import describe, plan_run  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 printed, 2 refused."""
    asked = _parser().parse_args(arguments)
    if asked.command == "run":
        return plan_of_run(asked.overrides)
    try:
        spec = read_spec(asked)
        started = time.perf_counter()
        schedule = make_schedule(spec)
        planned_s = time.perf_counter() - started
        rows = {
            "trainer": lambda: sends(schedule, spec.trainer.world_size // 2),
            "engine": lambda: receives(schedule, 0),
        }
        costs = {side: planned_s + _seconds(own) for side, own in rows.items()}
        # Before the messages of all ranks are added up, which no rank has to do.
        peak_mb = _peak_bytes() / 1e6
        traffic = measure(schedule)
    except (ConfigError, DataError, LayoutError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(table(traffic))
    for side, seconds in costs.items():
        print(f"plan of one {side} rank".ljust(28) + f"{seconds:.2f} s, at most {peak_mb:.0f} MB in the process")
    if asked.png:
        draw(traffic, asked.png, title=f"{spec.hf_config['architectures'][0]}: {asked.trainer} to {asked.engine}")
        print("picture".ljust(28) + str(asked.png))
    return 0


def plan_of_run(overrides: Sequence[str]) -> int:
    """Returns the exit code: 0 printed, 2 refused, maybe after the plan: what the program would refuse."""
    planned = False
    try:
        config = load_config(overrides)
        print(describe(config, plan_run(config)))
        planned = True
        read_config(overrides)
    except (ConfigError, LayoutError) as error:
        print(f"{'the program would refuse it now' if planned else 'refused'}: {error}", file=sys.stderr)
        return 2
    return 0


def read_spec(asked: argparse.Namespace) -> SyncSpec:
    """Raises: ConfigError, DataError or LayoutError for what cannot be."""
    path = asked.model / "config.json" if asked.model.is_dir() else asked.model
    try:
        hf = without_quantization(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}). Give a config.json or the directory of one.") from error
    model = load_table(hf)
    sizes = {"num_layers": model.num_layers, "mtp_layers": model.mtp_layers, "pipeline_layout": asked.pipeline_layout}
    trainer = MegatronTopology(**sizes, **read_sizes(asked.trainer, MegatronTopology, "--trainer", taken=sizes))
    engine = SglangTopology(**read_sizes(asked.engine, SglangTopology, "--engine"))
    readers, per_node = asked.engines * engine.world_size, asked.gpus_per_node
    first = 0 if asked.colocated else -(-trainer.world_size // per_node) * per_node
    places = [divmod(i, per_node) for i in range(max(trainer.world_size, first + readers))]
    placement = Placement(tuple(places[: trainer.world_size]), tuple(places[first : first + readers]))
    size = asked.bucket_mb << 20
    dtypes, counts = (asked.dtype, asked.dtype), {"engines": asked.engines, "bucket_bytes": size}
    return SyncSpec(hf, trainer, engine, *dtypes, **counts, placement=placement, fp8=asked.fp8)


def _peak_bytes() -> int:
    """The most memory this process had. Not getrusage's, which after an exec begins with that of the process before."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def read_sizes(text: str, topology: type, option: str, *, taken: Sequence[str] = ()) -> dict[str, Any]:
    """ "tp=8,pp=16" as keywords of a topology; `world` is short for world_size. Raises: ConfigError."""
    known = {field.name for field in fields(topology)} - set(taken)
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        key = {"world": "world_size"}.get(key, key)
        if key not in known or not (value.isdecimal() and int(value) or value in ("true", "false")):
            raise ConfigError(
                f"{option} has {part!r}: each part is KEY=NUMBER or KEY=true. Keys: {', '.join(sorted(known))}."
            )
        sizes[key] = int(value) if value.isdecimal() else value == "true"
    if missing := {"world_size"} & known - set(sizes):
        raise ConfigError(f"{option} has no {missing.pop()}: how many ranks there are is unknown. Add world=NUMBER.")
    return sizes


def table(traffic: Traffic) -> str:
    """Lines of figures. GB are 10^9 bytes."""
    received = int(traffic.fetched.sum() + traffic.in_node.sum())
    rows = {
        "over the network": f"{_gb(traffic.sent.sum())}, {_ratio(traffic.sent.sum(), traffic.least_network)} of what "
        "the engines' nodes lack",
        "inside nodes": _gb(traffic.in_node.sum()),
        "received by engine ranks": f"{_gb(received)}, {_ratio(received, traffic.least_received)} of what their "
        "devices lack",
        "each sender's NIC": _spread(traffic.sent),
        "each receiver's NIC": _spread(traffic.fetched),
        "each receiver in its node": _spread(traffic.in_node),
        "messages of a trainer rank": f"mean {traffic.messages_sent.mean():.0f}, most {traffic.messages_sent.max()}",
        "messages of an engine rank": f"mean {traffic.messages_read.mean():.0f}, most {traffic.messages_read.max()}",
        "staging on each side": f"two messages of at most {_gb(traffic.largest)}: {_gb(2 * traffic.largest)}",
    }
    return "\n".join(f"{name:27} {value}" for name, value in rows.items())


def draw(traffic: Traffic, path: Path, *, title: str) -> None:
    """Write a PNG: bytes between every two nodes, and on every NIC."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    links, senders, receivers = figure.subplot_mosaic("aab;aac").values()
    picture = links.imshow(traffic.links / 1e9, aspect="auto", interpolation="nearest", vmin=0)
    links.set(xlabel="node of engines", ylabel="node of trainer", title="GB between nodes")
    figure.colorbar(picture, ax=links)
    for axes, nbytes, whose in ((senders, traffic.sent, "sender"), (receivers, traffic.fetched, "receiver")):
        axes.fill_between(np.arange(len(nbytes)), nbytes / 1e9, step="mid", alpha=0.6)
        axes.axhline(nbytes.mean() / 1e9, color="black", linewidth=1, linestyle="--")
        axes.set(xlabel=f"{whose}'s rank", ylabel="GB", title=f"network, each {whose} (dashed: mean)")
        axes.set_ylim(bottom=0)
    figure.suptitle(title)
    figure.savefig(path, format="png")


def _seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3f} GB"


def _ratio(nbytes: float, least: float) -> str:
    return f"{nbytes / least:.3f}" if least else "nothing"


def _spread(nbytes: np.ndarray) -> str:
    busiest, mean = int(nbytes.argmax()), nbytes.mean()
    most = f"{_gb(nbytes[busiest])} (rank {busiest})"
    return f"mean {_gb(mean)}, most {most}, {_ratio(nbytes[busiest], mean)} times the mean"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|sync")
    run = commands.add_parser("run", help="a whole run")
    run.add_argument("overrides", nargs="+", help="experiment=NAME key=value ...: as for the program")
    sync = commands.add_parser("sync", help="a weight sync")
    sync.add_argument("--model", type=Path, required=True, help="a config.json, or the directory of one")
    sync.add_argument("--trainer", required=True, help="world=1024,tp=8,pp=16,ep=64: fields of MegatronTopology")
    sync.add_argument("--pipeline-layout", help="layers of each pipeline stage, in megatron-core's letters")
    sync.add_argument("--engine", required=True, help="tp=32,ep=32: fields of SglangTopology")
    sync.add_argument("--engines", type=_positive, default=1, help="how many (default 1)")
    sync.add_argument("--gpus-per-node", type=_positive, default=8, help="each with a NIC of its own (default 8)")
    sync.add_argument("--colocated", action="store_true", help="engines on the trainer's devices")
    sync.add_argument("--bucket-mb", type=_positive, default=64, help="MiB of a message, at most (default 64)")
    sync.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    sync.add_argument("--fp8", action="store_true", help="engines keep linears in FP8, in blocks of 128 x 128")
    sync.add_argument("--png", type=Path, help="a picture of bytes on every link, to this file")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
