"""What tools/convert costs: memory of all its processes, speed against `cp` of the same bytes, and what a kill loses.

    python tools/bench_convert.py --gb 8

A Qwen3-MoE-shaped checkpoint of random bytes is made on the spot, imported, exported, and compared bit for bit. `cp`
and conversions all end with their bytes on disk (fsync), in turns, from the same files. Memory is the peak of the sum
over the processes of PSS, in which a page that several share counts once; the sum of RSS counts it once for each. The
exit code is 1 when something differs or a limit is missed; speed is compared from 4 GB on.
"""

import argparse
import filecmp
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_rl.formats import hf_files  # noqa: E402
from megatron_rl.layouts.compile import hf_layouts  # noqa: E402
from megatron_rl.models import load_table  # noqa: E402

CONVERT = [sys.executable, str(ROOT / "tools" / "convert")]
SAMPLE_S = 0.25
MAX_PEAK_BYTES, MIN_SPEED = 2e9, 0.5
SPEED_FROM_BYTES = 4e9
"""Below, the start of a command takes most of its time, and its speed says nothing."""
BLOCK_BYTES = 16 << 20


def hf_config(gb: float) -> dict:
    """Qwen3-30B-A3B's sizes, with as many layers as make `gb`; with less than 4 also fewer experts and words."""
    experts, vocab = (128, 151936) if gb >= 4 else (8, 8192)
    hidden, expert = 2048, 768
    layer_bytes = 2 * (experts * 3 * expert * hidden + hidden * (32 + 4 + 4 + 32) * 128)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 6144,
        "moe_intermediate_size": expert,
        "num_hidden_layers": max(round((gb * 1e9 - 4 * vocab * hidden) / layer_bytes), 1),
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def write_random(directory: Path, config: dict) -> int:
    """Returns: bytes of weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    layouts = hf_layouts(load_table(config), dtype="bfloat16")
    hf_files.write_headers(directory, hf_files.split(layouts))
    rng = np.random.default_rng(0)
    total = 0
    for path in sorted(directory.glob("*.safetensors")):
        first = hf_files.read_header(path)[0].at
        with open(path, "r+b") as f:
            f.seek(first)
            for start in range(first, path.stat().st_size, BLOCK_BYTES):
                f.write(rng.bytes(min(BLOCK_BYTES, path.stat().st_size - start)))
            f.flush()
            os.fsync(f.fileno())
        total += path.stat().st_size - first
    return total


def copy(source: Path, target: Path) -> float:
    """Seconds of `cp` until the bytes are on disk."""
    start = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


class Memory:
    """Samples a process and its descendants until it ends."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.peak_pss, self.peak_rss = process, 0, 0
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            sums = {"Pss": 0, "Rss": 0}
            for pid in descendants(self.process.pid):
                try:
                    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                except OSError:
                    continue  # it ended
                for line in lines:
                    name, _, rest = line.partition(":")
                    if name in sums:
                        sums[name] += int(rest.split()[0]) * 1024
            self.peak_pss, self.peak_rss = max(self.peak_pss, sums["Pss"]), max(self.peak_rss, sums["Rss"])
            time.sleep(SAMPLE_S)


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += descendants(int(child))
    except OSError:
        pass  # it ended
    return found


def convert(*arguments: str) -> tuple[float, Memory]:
    """Seconds from start to end of the command, and its memory."""
    start = time.monotonic()
    process = subprocess.Popen([*CONVERT, *arguments], stdout=subprocess.DEVNULL)
    memory = Memory(process)
    code = process.wait()
    seconds = time.monotonic() - start
    memory.thread.join()
    if code:
        raise SystemExit(f"convert {' '.join(arguments)} ended with {code}")
    return seconds, memory


def kill_and_resume(source: Path, out: Path) -> tuple[int, int, int]:
    """Kill -9 an import by two processes half-way, start it again.

    Returns: bytes redone, of the largest unit, of all units.
    """
    words = ["import", "--hf", str(source), "--out", str(out), "--processes", "2"]
    process = subprocess.Popen([*CONVERT, *words])
    partial = out.with_name(out.name + ".partial")
    while len(list(partial.glob("unit-*.json"))) < 24:  # of 64 or so
        if process.poll() is not None:
            raise SystemExit("the import ended before it could be killed")
        time.sleep(0.002)
    workers = descendants(process.pid)[1:]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        time.sleep(0.01)
    redone = sum(path.stat().st_size for path in partial.glob("*.tmp"))
    written = {path.name: path.stat() for path in (partial / "whole").glob("*.distcp")}
    convert(*words)
    for name, before in written.items():
        after = (out / name).stat()
        redone += before.st_size if (after.st_ino, after.st_mtime_ns) != (before.st_ino, before.st_mtime_ns) else 0
    sizes = [p.stat().st_size for p in out.glob("*.distcp")]
    return redone, max(sizes), sum(sizes)


def same(a: Path, b: Path, names: list[str]) -> bool:
    """Bit for bit."""
    return filecmp.cmpfiles(a, b, names, shallow=False) == (names, [], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--directory", type=Path, default=None, help="for the files; default: a temporary one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory) as work:
        run(Path(work), asked.gb)


def run(root: Path, gb: float) -> None:
    hf, megatron, again = root / "hf", root / "megatron", root / "again"
    config = hf_config(gb)
    nbytes = write_random(hf, config)
    print(
        f"{nbytes / 1e9:.2f} GB, {config['num_hidden_layers']} layers, {len(os.sched_getaffinity(0))} cores", flush=True
    )
    copies = [copy(hf, root / "copy")]
    import_s, imported = convert("import", "--hf", str(hf), "--out", str(megatron))
    copies.append(copy(hf, root / "copy"))
    export_s, exported = convert("export", "--checkpoint", str(megatron), "--out", str(again))
    copies.append(copy(hf, root / "copy"))
    equal = same(hf, again, sorted(p.name for p in hf.iterdir()))
    shutil.rmtree(again)
    copy_s = statistics.median(copies)
    print(f"cp       {nbytes / copy_s / 1e6:7.0f} MB/s   (median of {', '.join(f'{s:.1f}' for s in copies)} s)")
    for name, seconds, memory in (("import", import_s, imported), ("export", export_s, exported)):
        speed = copy_s / seconds
        print(
            f"{name}   {nbytes / seconds / 1e6:7.0f} MB/s   {speed:.2f} of cp (at least {MIN_SPEED})   peak memory "
            f"{memory.peak_pss / 1e9:.2f} GB PSS (at most {MAX_PEAK_BYTES / 1e9:.0f}), {memory.peak_rss / 1e9:.2f} RSS"
        )
    print(f"export is {'equal to' if equal else 'DIFFERENT FROM'} what was imported, bit for bit")
    redone, unit, total = kill_and_resume(hf, root / "resumed")
    whole = same(megatron, root / "resumed", sorted(p.name for p in megatron.iterdir()))
    print(
        f"killed half-way and started again: {redone / 1e6:.0f} MB redone of {total / 1e6:.0f}, in files of at most "
        f"{unit / 1e6:.0f}; the result is {'the same' if whole else 'DIFFERENT'}"
    )
    over = [
        *over_limits("import", nbytes, speed=copy_s / import_s, peak_bytes=imported.peak_pss),
        *over_limits("export", nbytes, speed=copy_s / export_s, peak_bytes=exported.peak_pss),
    ]
    for line in over:
        print(line, file=sys.stderr)
    if over or not equal or not whole:
        raise SystemExit(1)


def over_limits(what: str, nbytes: int, *, speed: float, peak_bytes: float) -> list[str]:
    """A line for each limit that a conversion of so many bytes misses; `speed` is a share of cp's."""
    limits = {
        f"{what} takes {peak_bytes / 1e9:.2f} GB, more than {MAX_PEAK_BYTES / 1e9:.0f}": peak_bytes > MAX_PEAK_BYTES,
        f"{what} has {speed:.2f} of cp's speed, less than {MIN_SPEED}": nbytes >= SPEED_FROM_BYTES
        and speed < MIN_SPEED,
    }
    return [text for text, is_missed in limits.items() if is_missed]


if __name__ == "__main__":
    main()
