import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import megatron_rl.metrics
import megatron_rl.progress
from megatron_rl.errors import BackendError
from megatron_rl.metrics import Metrics, sample_metrics
from megatron_rl.progress import clock, sparkline, summary_lines
from megatron_rl.records import append_record, drop_records, read_records
from megatron_rl.types import Sample

ISSUE_KEYS = {
    *("step", "reward/mean", "eval/reward", "loss", "grad_norm", "kl", "entropy", "mismatch/logprob_abs_diff_mean"),
    *(f"time/{stage}_s" for stage in ("generate", "reward", "logprobs", "update", "sync", "step")),
    *("throughput/tokens_per_s", "sync/bytes_received", "sync/bytes_needed", "rss/max_bytes"),
}
UPDATE = {
    "loss": 0.5,
    "grad_norm": 1.25,
    "kl": 0.01,
    "entropy": 1.5,
    "mismatch/logprob_abs_diff_mean": 1e-5,
    "lr": 1e-4,
}
SAMPLES = [
    Sample("a", 0, None, 0, prompt_tokens=10, response_tokens=3, finish="stop", version=0, reward=1.0),
    Sample("a", 0, None, 1, prompt_tokens=10, response_tokens=8, finish="length", version=0, reward=0.0),
    Sample("b", 1, None, 2, prompt_tokens=12, response_tokens=2, finish="stop", version=0, reward=0.5),
    Sample("b", 1, None, 3, prompt_tokens=12, response_tokens=4, finish="stop", version=0, reward=0.5),
]


def open_metrics(directory, *, steps=3):
    output = io.StringIO()
    return Metrics(directory, name="demo", steps=steps, console=Console(file=output)), output


def full_step(metrics, step, *, reward=None, let_pass=lambda seconds: None):
    """Where seconds can be let pass, its stages take 1, 2, 3 ..., and its evaluation 6."""
    with metrics.step(step) as m:
        for seconds, stage in enumerate(("generate", "reward", "logprobs", "update", "sync"), start=1):
            with m.time(stage):
                let_pass(seconds)
        m.log_samples(SAMPLES)
        m.log(UPDATE)
        m.log({"sync/bytes_received": 7, "sync/bytes_needed": 7})
        if reward is not None:
            with m.time("evaluate"):
                let_pass(6)
                m.log({"eval/reward": reward})


def steps_of(path):
    return [r["step"] for r in read_records(path)]


def test_a_full_step_records_every_key_that_other_tools_read(tmp_path):
    metrics, _ = open_metrics(tmp_path)
    with metrics:
        full_step(metrics, 1, reward=0.25)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.keys() >= ISSUE_KEYS
    assert record["step"] == 1
    assert record["eval/reward"] == 0.25
    assert {key: record[key] for key in UPDATE} == UPDATE


def test_engines_that_drift_away_from_the_trainer_raise_one_alarm_each_time(tmp_path):
    metrics, output = open_metrics(tmp_path, steps=6)
    with metrics:
        for step, mismatch in enumerate((0.05, 0.2, 0.3, 0.05, 0.7), start=1):
            with metrics.step(step) as m:
                m.log({"mismatch/logprob_abs_diff_mean": mismatch})
    text = " ".join(output.getvalue().split())
    assert re.findall(r"ALARM: log-probabilities of trainer and engines differ by (\S+) a token", text) == [
        "0.2",
        "0.7",
    ]


def test_sample_metrics_worked_by_hand():
    assert sample_metrics(SAMPLES) == {
        "reward/mean": 0.5,
        "reward/std": math.sqrt((0.25 + 0.25) / 4),
        "reward/min": 0.0,
        "reward/max": 1.0,
        "group/uniform_fraction": 0.5,  # b's two rewards are equal
        "response_tokens/mean": 17 / 4,
        "response_tokens/max": 8.0,
        "response_tokens/cut_fraction": 0.25,
        "tokens/total": 17.0 + 44.0,
    }


@pytest.fixture
def let_pass(monkeypatch):
    """`let_pass(seconds)`: else the time that is measured stands still, whatever the machine does."""
    now = [1000.0]
    stopped = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    for module in (megatron_rl.metrics, megatron_rl.progress):
        monkeypatch.setattr(module, "time", stopped)
    return lambda seconds: now.append(now.pop() + seconds)


def test_stages_add_up_and_the_step_leaves_its_evaluation_out(tmp_path, let_pass):
    metrics, _ = open_metrics(tmp_path)
    with metrics, metrics.step(1) as m:
        for _ in range(2):
            with m.time("update"):
                let_pass(2.0)
        with m.time("evaluate"):
            let_pass(8.0)
        let_pass(1.0)
        m.log({"tokens": 50})
    (record,) = read_records(metrics.path)
    assert (record["time/update_s"], record["time/evaluate_s"], record["time/step_s"]) == (4.0, 8.0, 5.0)
    assert record["throughput/tokens_per_s"] == 10.0


def test_an_evaluation_of_the_starting_weights_has_no_step_time(tmp_path):
    metrics, _ = open_metrics(tmp_path)
    with metrics, metrics.step(0) as m:
        m.log({"eval/reward": 0.5})
    (record,) = read_records(metrics.path)
    assert record.keys() == {"step", "eval/reward", "rss/sum_bytes", "rss/max_bytes"}


def test_a_step_that_raises_leaves_no_record(tmp_path):
    metrics, _ = open_metrics(tmp_path)
    with pytest.raises(RuntimeError, match="engine"), metrics:
        full_step(metrics, 1)
        with metrics.step(2) as m, m.time("generate"):
            raise RuntimeError("engine")
    assert steps_of(metrics.path) == [1]


def test_a_resumed_run_has_exactly_one_record_a_step(tmp_path):
    metrics, _ = open_metrics(tmp_path)
    with metrics:
        for step in range(5):
            full_step(metrics, step)
    kept = read_records(metrics.path)[:3]
    metrics, _ = open_metrics(tmp_path)
    with metrics:  # from the checkpoint of step 2
        for step in (3, 4, 5):
            full_step(metrics, step)
    assert steps_of(metrics.path) == [0, 1, 2, 3, 4, 5]
    assert read_records(metrics.path)[:3] == kept


def test_warm_start_steps_go_to_a_file_of_their_own(tmp_path):
    metrics, output = open_metrics(tmp_path)
    with metrics:
        for step in (1, 2):
            with metrics.warm_start_step(step, of=2) as m, m.time("update"):
                m.log({"loss": 1.0 / step})
        full_step(metrics, 1)
    assert [r["loss"] for r in read_records(tmp_path / "warm_start.jsonl")] == [1.0, 0.5]
    assert steps_of(metrics.path) == [1]
    assert "warm start 2/2  loss 0.5" in output.getvalue()


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    append_record(tmp_path / "m.jsonl", {"step": 1, "loss": math.nan, "grad_norm": math.inf, "kl": 0.5})
    assert read_records(tmp_path / "m.jsonl") == [{"step": 1, "loss": None, "grad_norm": None, "kl": 0.5}]


def test_a_torn_last_line_is_neither_read_nor_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    append_record(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert steps_of(path) == [1]
    drop_records(path, from_step=3)
    append_record(path, {"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_run_killed_while_it_writes_leaves_a_readable_file(tmp_path):
    # Long lines, so that most of the time is spent inside the write.
    script = (
        "import sys; from pathlib import Path; from megatron_rl.records import append_record\n"
        "keys = {f'key/{i:08}': i * 1.1 for i in range(20_000)}\n"
        "print('ready', flush=True)\n"
        "for step in range(10**6): append_record(Path(sys.argv[1]), {'step': step, **keys})\n"
    )
    path = tmp_path / "m.jsonl"
    for attempt in range(5):
        process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.05 + 0.037 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        records = read_records(path)
        assert [r["step"] for r in records] == list(range(len(records)))
        assert all(len(r) == 20_001 for r in records)
        path.unlink()


def test_a_full_disk_is_named_with_the_mend():
    with pytest.raises(BackendError, match="/dev/full cannot be written .No space left.*it resumes"):
        append_record(Path("/dev/full"), {"step": 1})


def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path):
    path = tmp_path / "m.jsonl"
    script = (
        "import resource, signal, sys; from pathlib import Path; from megatron_rl.records import append_record\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))\n"
        "for step in range(9): append_record(Path(sys.argv[1]), {'step': step})\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert "BackendError" in result.stderr and "could not take 12 bytes: the disk is full" in result.stderr
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_memory_counts_descendants():
    """In a process of its own: this one's memory and children are also those of the tests before."""
    script = textwrap.dedent("""
        import json, subprocess, sys
        from megatron_rl.metrics import memory_metrics
        found = [memory_metrics()]
        large = "x = b'1' * 200_000_000; print('ready', flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", large], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            found.append(memory_metrics())
            child.stdin.close()
        print(json.dumps(found))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    alone, both = json.loads(done.stdout)
    assert alone["rss/sum_bytes"] == alone["rss/max_bytes"] > 0
    assert both["rss/sum_bytes"] > alone["rss/sum_bytes"] + 200_000_000


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # It reads files in the order of their names: second, host, process, and the number in it as text: 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    for steps in ((1, 2, 3), (3, 4)):
        metrics, _ = open_metrics(tmp_path)
        with metrics:
            for step in steps:
                full_step(metrics, step)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [e.step for e in accumulator.Scalars("reward/mean")] == [1, 2, 3, 4]
    assert accumulator.Scalars("loss")[0].value == 0.5


def test_the_reward_curve_is_a_picture_of_the_whole_run(tmp_path):
    from matplotlib.image import imread

    metrics, _ = open_metrics(tmp_path)
    with metrics:
        full_step(metrics, 1, reward=0.25)
    first = imread(tmp_path / "reward.png")
    assert first.shape[:2] == (540, 900)
    metrics, _ = open_metrics(tmp_path)
    with metrics:
        full_step(metrics, 2, reward=0.75)
    assert (imread(tmp_path / "reward.png") != first).any()


def test_the_reward_curve_is_drawn_before_the_summary_names_it(tmp_path):
    metrics, _ = open_metrics(tmp_path, steps=1)
    with metrics:
        full_step(metrics, 1)
        assert (tmp_path / "reward.png").exists()


def test_a_run_without_rewards_draws_no_curve(tmp_path):
    metrics, _ = open_metrics(tmp_path)
    with metrics, metrics.step(1) as m:
        m.log({"loss": 1.0})
    assert not (tmp_path / "reward.png").exists()


def test_output_to_a_file_is_one_plain_line_a_step(tmp_path, let_pass):
    metrics, output = open_metrics(tmp_path, steps=2)
    with metrics:
        metrics.status("starting 2 engines")
        with metrics.step(0) as m:
            m.log({"eval/reward": 0.25})
        full_step(metrics, 1, let_pass=let_pass)
        full_step(metrics, 2, reward=0.5, let_pass=let_pass)
    lines = output.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[:2] == ["starting 2 engines", "step 0/2  eval 0.250"]
    numbers = "loss 0.5  kl 0.01  entropy 1.5  grad norm 1.25  lr 0.0001  mismatch 1e-05"
    times = "15.00 s (generate 1.00, reward 2.00, logprobs 3.00, update 4.00, sync 5.00"
    rate = "4 tokens/s"  # 61 / 15
    assert lines[2] == f"step 1/2  reward 0.500  {numbers}  {times})  {rate}  0:00:15 left"
    assert lines[3] == f"step 2/2  reward 0.500  eval 0.500  {numbers}  {times}, evaluate 6.00)  {rate}"


LIVE = """
import sys; from pathlib import Path; from megatron_rl.metrics import Metrics
with Metrics(Path(sys.argv[1]), name="demo", steps=2) as metrics:
    for step, reward in ((0, 0.25), (1, 0.375), (2, 0.5)):
        with metrics.step(step) as m:
            m.log({"eval/reward": reward, "reward/mean": reward / 2})
    print("a line from elsewhere")
metrics.summary({"curve": Path("reward.png")})
"""


def test_a_terminal_shows_a_live_panel_and_keeps_other_output_readable(tmp_path):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE, str(tmp_path)], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            output += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert "\x1b[" in output.decode()
    assert "demo step 2/2" in text
    assert re.search(r"held out +0.250 \(step 0\) -> 0.500 \(step 2\)", text)
    assert re.search(r"reward +0.250  ▁▅█", text)
    assert "a line from elsewhere" in text
    assert text.index("held-out reward   0.250 at step 0 -> 0.500 at step 2 (+0.250)") > text.rindex("held out ")


def test_summary_worked_by_hand(tmp_path):
    records = [
        {"step": 0, "eval/reward": 0.25},
        {"step": 1, "time/generate_s": 3.0, "time/update_s": 1.0, "time/step_s": 4.0},
        {"step": 2, "time/generate_s": 5.0, "time/update_s": 1.0, "time/step_s": 6.0, "eval/reward": 0.75},
    ]
    warm_start = [{"step": 1, "time/update_s": 10.0, "time/step_s": 10.0}]
    assert summary_lines(records, warm_start, results={"model": tmp_path}, wall_s=61.0) == [
        "held-out reward   0.250 at step 0 -> 0.750 at step 2 (+0.500)",
        "time by stage           total  share   median of a step",
        "  warm start            10.0 s    50%      10.00 s",
        "  generate               8.0 s    40%       4.00 s",
        "  update                 2.0 s    10%       1.00 s",
        "this process      0:01:01",
        f"model             {tmp_path}",
    ]


def test_a_summary_of_nothing_still_says_where_the_results_lie(tmp_path):
    assert summary_lines([], [], results={"log": tmp_path}, wall_s=1.0)[-1] == f"log               {tmp_path}"


def test_sparkline_spans_its_own_range_and_averages_long_series():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([0, 0, 1, 1, 2, 2], width=3) == "▁▅█"


def test_clock_shows_hours_minutes_seconds():
    assert clock(3723.4) == "1:02:03"


def fill_disk_of(directory):
    """Every event written from now on meets a full disk. In one move: a thread writes there whenever it likes."""
    (events,) = directory.iterdir()
    link = directory.with_name("link")
    link.symlink_to("/dev/full")
    os.replace(link, events)


def test_a_full_disk_under_tensorboard_is_told_once_and_the_run_goes_on(tmp_path, capfd):
    metrics, output = open_metrics(tmp_path)
    with metrics:
        full_step(metrics, 1)
        fill_disk_of(tmp_path / "tensorboard")
        full_step(metrics, 2)
        full_step(metrics, 3)
    assert output.getvalue().count("TensorBoard gets no more of metrics.jsonl") == 1
    assert "No space left on device" in output.getvalue()
    assert len(read_records(tmp_path / "metrics.jsonl")) == 3
    assert "Traceback" not in capfd.readouterr().err


def test_the_writer_thread_of_tensorboard_dies_without_a_traceback(tmp_path, capfd):
    metrics, output = open_metrics(tmp_path)
    with metrics:
        full_step(metrics, 1)
        fill_disk_of(tmp_path / "tensorboard")
        thread = metrics._writers[metrics.path].file_writer.event_writer._async_writer._worker
        thread._next_flush_time = 0  # seconds later, as it comes
        full_step(metrics, 2)
        thread.join(timeout=20)
        assert not thread.is_alive()
        full_step(metrics, 3)
    assert output.getvalue().count("TensorBoard gets no more of metrics.jsonl") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_tensorboard_directory_that_cannot_be_made_costs_no_record(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    metrics, output = open_metrics(tmp_path)
    with metrics:
        full_step(metrics, 1)
    assert "TensorBoard gets no more of metrics.jsonl" in output.getvalue()
    assert len(read_records(tmp_path / "metrics.jsonl")) == 1
