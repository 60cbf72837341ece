"""What tools/convert costs: memory of all its processes, speed against `cp` of the same bytes, and what a kill loses.

    python tools/bench_convert.py --gb 8

A Qwen3-MoE-shaped checkpoint of random bytes is made on the spot, imported, exported, and compared bit for bit. `cp`,
import and export take turns, three times, and begin with what they read in memory: none waits for what another drove
out of it. Import and export end with their bytes on disk. `cp` ends earlier, which is when its speed is taken; after
how long its bytes are on disk stands beside it. Memory is the peak of the sum over the processes of PSS, in which a
page that several share counts once. The exit code is 1 when something differs or a limit is missed; speed is compared
from 4 GB on.
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
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_rl.formats import hf_files  # noqa: E402
from megatron_rl.layouts.compile import hf_layouts  # noqa: E402
from megatron_rl.models import load_table  # noqa: E402
from megatron_rl.rollout.launch import end_group  # noqa: E402

CONVERT = [sys.executable, str(ROOT / "tools" / "convert")]
KILLED = """
import os, signal, sys; from megatron_rl.convert import cli, importing; write = importing.write_unit
def write_unit(unit):
    write(unit)
    if len(list(unit.partial.glob("unit-*.json"))) >= 24: os.kill(os.getppid(), signal.SIGKILL)  # of 64 or so
importing.write_unit = write_unit; sys.exit(cli.main(sys.argv[1:]))
"""
"""tools/convert, killed half-way by one of its own workers: who waits for that moment outside may miss it."""
SAMPLE_S = 0.25
MAX_PEAK_BYTES, MIN_SPEED = 2e9, 0.5
SPEED_FROM_BYTES = 4e9
"""Below, the start of a command takes most of its time, and its speed says nothing."""
BLOCK_BYTES = 16 << 20
BUFFER = bytearray(BLOCK_BYTES)
ROUNDS = 3


def hf_config(gb: float) -> dict:
    """Qwen3-30B-A3B's, with as many layers as make `gb`; with less than 4 also fewer experts and words."""
    published = json.loads((ROOT / "tests" / "published" / "qwen3_30b_a3b.json").read_text())
    experts, vocab = (128, 151936) if gb >= 4 else (8, 8192)
    hidden, expert = published["hidden_size"], published["moe_intermediate_size"]
    layer_bytes = 2 * (experts * 3 * expert * hidden + hidden * (32 + 4 + 4 + 32) * 128)
    layers = max(round((gb * 1e9 - 4 * vocab * hidden) / layer_bytes), 1)
    return {**published, "num_hidden_layers": layers, "num_experts": experts, "vocab_size": vocab}


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


def into_memory(source: Path) -> None:
    """Read `source`, and drop from the page cache what lies beside it: memory has not room for all."""
    for path in (p for p in source.parent.rglob("*") if p.is_file()):
        with open(path, "rb", buffering=0) as f:
            if source not in path.parents:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as f:
            while f.readinto(BUFFER):
                pass


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of `cp`, and until the bytes are on disk."""
    into_memory(source)
    start = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    copied_s = time.monotonic() - start
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    on_disk_s = time.monotonic() - start
    shutil.rmtree(target)
    return copied_s, on_disk_s


class Memory:
    """Samples a process and its descendants until it ends."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.peak_bytes = process, 0
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            sum_bytes = 0
            for pid in descendants(self.process.pid):
                try:
                    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                except OSError:
                    continue  # it ended
                sum_bytes += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
            self.peak_bytes = max(self.peak_bytes, sum_bytes)
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


def convert(source: Path, *arguments: str) -> tuple[float, int]:
    """Seconds from start to end of a command that reads `source`, and the bytes of memory that it took."""
    into_memory(source)
    start = time.monotonic()
    process = subprocess.Popen([*CONVERT, *arguments], stdout=subprocess.DEVNULL)
    memory = Memory(process)
    code = process.wait()
    seconds = time.monotonic() - start
    memory.thread.join()
    if code:
        raise SystemExit(f"convert {' '.join(arguments)} ended with {code}")
    return seconds, memory.peak_bytes


def kill_and_resume(source: Path, out: Path) -> tuple[int, int, int]:
    """Kill -9 an import by two processes half-way, start again. Returns: bytes redone, of the largest unit, of all."""
    words = ["import", "--hf", str(source), "--out", str(out), "--processes", "2"]
    partial, environment = out.with_name(out.name + ".partial"), {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", KILLED, *words], env=environment, start_new_session=True)
    if (code := process.wait()) != -signal.SIGKILL:
        raise SystemExit(f"the import was not killed, and ended with {code}")
    end_group(process.pid)  # its workers end with it
    redone = sum(path.stat().st_size for path in partial.glob("*.tmp"))
    written = {path.name: path.stat() for path in (partial / "whole").glob("*.distcp")}
    convert(source, *words)
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
    if asked.directory and not asked.directory.is_dir():
        parser.error(f"--directory {asked.directory} does not exist. Create it, on the disk to be measured.")
    with tempfile.TemporaryDirectory(dir=asked.directory) as work:
        run(Path(work), asked.gb)


def run(root: Path, gb: float) -> None:
    hf, megatron, again = root / "hf", root / "megatron", root / "again"
    config = hf_config(gb)
    nbytes = write_random(hf, config)
    print(
        f"{nbytes / 1e9:.2f} GB, {config['num_hidden_layers']} layers, {len(os.sched_getaffinity(0))} cores", flush=True
    )
    copies, imports, exports = [], [], []
    for left in reversed(range(ROUNDS if nbytes >= SPEED_FROM_BYTES else 1)):
        copies.append(copy(hf, root / "copy"))
        imports.append(convert(hf, "import", "--hf", str(hf), "--out", str(megatron)))
        exports.append(convert(megatron, "export", "--checkpoint", str(megatron), "--out", str(again)))
        if left:
            shutil.rmtree(megatron)
            shutil.rmtree(again)
    equal = same(hf, again, sorted(p.name for p in hf.iterdir()))
    shutil.rmtree(again)
    copy_s, on_disk_s = (statistics.median(seconds) for seconds in zip(*copies, strict=True))
    print(f"cp       {nbytes / copy_s / 1e6:7.0f} MB/s   {listed(copies)}; on disk after {on_disk_s:.1f} s")
    over = []
    for name, runs in (("import", imports), ("export", exports)):
        seconds, peak_bytes = statistics.median(seconds for seconds, _ in runs), max(peak for _, peak in runs)
        speed = copy_s / seconds
        print(
            f"{name}   {nbytes / seconds / 1e6:7.0f} MB/s   {listed(runs)}; {speed:.2f} of cp's speed (at least "
            f"{MIN_SPEED}), peak memory {peak_bytes / 1e9:.2f} GB PSS (at most {MAX_PEAK_BYTES / 1e9:.0f})"
        )
        over += over_limits(name, nbytes, speed=speed, peak_bytes=peak_bytes)
    print(f"export is {'equal to' if equal else 'DIFFERENT FROM'} what was imported, bit for bit")
    redone, unit, total = kill_and_resume(hf, root / "resumed")
    whole = same(megatron, root / "resumed", sorted(p.name for p in megatron.iterdir()))
    print(
        f"killed half-way and started again: {redone / 1e6:.0f} MB redone of {total / 1e6:.0f}, in files of at most "
        f"{unit / 1e6:.0f}; the result is {'the same' if whole else 'DIFFERENT'}"
    )
    for line in over:
        print(line, file=sys.stderr)
    if over or not equal or not whole:
        raise SystemExit(1)


def listed(runs: Sequence[tuple[float, float]]) -> str:
    """The first of each, in seconds: the median, and all."""
    times = [seconds for seconds, _ in runs]
    return f"{statistics.median(times):.1f} s ({', '.join(f'{s:.1f}' for s in times)})"


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
