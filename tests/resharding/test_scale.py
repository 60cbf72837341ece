"""The published models at the scale they are trained and served at: bytes, balance and messages of a whole sync."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import load_table
from megatron_rl.resharding.schedule import make_schedule
from megatron_rl.resharding.spec import BUCKET_BYTES, Placement, SyncSpec
from megatron_rl.resharding.traffic import Traffic, measure
from tests.tiny import PUBLISHED

TOOL = [sys.executable, str(Path(__file__).parents[2] / "tools" / "plan.py"), "sync"]
DEEPSEEK = {"pp": 16, "pipeline_layout": "Ettt|(t*4|)*14,ttmL"}
KIMI = {"pp": 16, "pipeline_layout": "Ettt|(t*4|)*14,ttL"}
QWEN = {"pp": 16, "first_stage_layers": 5, "last_stage_layers": 5}
GLM = {"pp": 16, "pipeline_layout": "E,t*5|(t*6|)*14,t*3,mL"}
PLAIN: dict[str, Any] = {"tp": 32, "ep": 32}
ATTENTION_DP = PLAIN | {"dp_attention": 32, "moe_dense_tp": 1}
GROUPS_OF_8 = PLAIN | {"dp_attention": 4, "dp_lm_head": True}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "ep16_tp1": ("deepseek_v3", 256, {**DEEPSEEK, "ep": 16}, PLAIN),
    "ep32_tp4_attention_dp": ("deepseek_v3", 512, {**DEEPSEEK, "ep": 32, "tp": 4}, ATTENTION_DP),
    "ep64_tp8": ("deepseek_v3", 1024, {**DEEPSEEK, "ep": 64, "tp": 8}, PLAIN),
    "ep64_tp8_groups_of_8": ("deepseek_v3", 1024, {**DEEPSEEK, "ep": 64, "tp": 8}, GROUPS_OF_8),
    "kimi_k2": ("kimi_k2", 1024, {**KIMI, "ep": 64, "tp": 8}, PLAIN),
    "kimi_k2_attention_dp": ("kimi_k2", 512, {**KIMI, "ep": 32, "tp": 2}, ATTENTION_DP),
    "qwen3_235b": ("qwen3_235b_a22b", 1024, {**QWEN, "ep": 64, "tp": 8}, PLAIN),
    "fp8": ("deepseek_v3", 1024, {**DEEPSEEK, "ep": 64, "tp": 8}, {"tp": 16, "ep": 16}),
    "glm4_5": ("glm4_5", 1024, {**GLM, "ep": 32, "tp": 8}, PLAIN),
}
ENGINES, PER_NODE = 8, 8


@cache
def traffic_of(name: str, *, colocated: bool = False) -> Traffic:
    model, world, trainer, engine = CASES[name]
    table, topology = load_table(PUBLISHED[model]), SglangTopology(**engine)
    ours = MegatronTopology(world, table.num_layers, mtp_layers=table.mtp_layers, **trainer)
    places = [divmod(i, PER_NODE) for i in range(world + ENGINES * topology.world_size)]
    theirs = places[: ENGINES * topology.world_size] if colocated else places[world:]
    placement = Placement(tuple(places[:world]), tuple(theirs))
    dtypes, size = ("bfloat16", "bfloat16"), BUCKET_BYTES["cuda"]
    options = {"bucket_bytes": size, "placement": placement, "fp8": name == "fp8"}
    spec = SyncSpec(PUBLISHED[model], ours, topology, *dtypes, ENGINES, **options)
    return measure(make_schedule(spec))


def check(traffic: Traffic) -> None:
    assert traffic.sent.sum() == traffic.fetched.sum() == traffic.links.sum() == traffic.least_network
    assert traffic.fetched.sum() + traffic.in_node.sum() == traffic.least_received
    assert max(traffic.messages_sent.max(), traffic.messages_read.max()) <= 3000
    assert traffic.largest <= 64 << 20
    assert traffic.fetched.max() <= 1.15 * traffic.fetched.mean()


@pytest.mark.parametrize("name", CASES)
def test_a_large_sync_moves_no_byte_twice_over_links_that_share_the_load(name: str) -> None:
    traffic = traffic_of(name)

    check(traffic)
    # Of 16 stages the fullest have 4 of DeepSeek-V3's 58 layers with experts, 1.103 times the mean; 4 of Kimi's 60.
    assert traffic.sent.max() <= 1.15 * traffic.sent.mean()


def test_an_engine_beside_its_trainer_gets_less_over_the_network() -> None:
    apart, beside = traffic_of("ep32_tp4_attention_dp"), traffic_of("ep32_tp4_attention_dp", colocated=True)

    check(beside)
    assert beside.least_received < apart.least_received and beside.least_network < apart.least_network


def test_bytes_of_deepseek_v3_by_hand() -> None:
    hidden, layers, sparse, nodes = 7168, 61, 58, 4
    # On every rank of an engine, and so once to each of its nodes: the ways down of attention, norms, and routers.
    norms = 2 * hidden + 1536 + 512
    whole = layers * ((1536 + 512 + 64) * hidden + norms) + hidden + sparse * 256 * hidden
    # Cut over all 32 ranks, and so once to an engine: 128 heads, the three dense layers, experts, and two vocabularies.
    attention = layers * (128 * 192 * 1536 + 128 * 256 * 512 + 128 * 128 * hidden)
    experts = sparse * (256 + 1) * 3 * 2048 * hidden
    cut = attention + 3 * 3 * 18432 * hidden + experts + 2 * 129280 * hidden
    bias = sparse * 256 * 4  # float32, on every rank

    traffic = traffic_of("ep64_tp8")

    assert traffic.sent.sum() == ENGINES * (2 * cut + nodes * (2 * whole + bias))
    assert traffic.least_received == ENGINES * (2 * cut + 32 * (2 * whole + bias))


def test_bytes_of_deepseek_v3_in_fp8_by_hand() -> None:
    """A byte an element and 4 for a block of 128 x 128; the way down of keys and values ends within a block."""
    hidden, layers, sparse, nodes, block = 7168, 61, 58, 2, 128 * 128
    whole = layers * ((1536 + 576) * hidden + 4 * (12 + 5) * 56)
    whole += 2 * (layers * (2 * hidden + 1536 + 512) + hidden + sparse * 256 * hidden) + sparse * 256 * 4
    attention = layers * (128 * 192 * 1536 + 128 * 256 * 512 + 128 * 128 * hidden)
    quantized = attention + 3 * 3 * 18432 * hidden + sparse * (256 + 1) * 3 * 2048 * hidden
    cut = quantized + quantized // block * 4 + 2 * 2 * 129280 * hidden

    traffic = traffic_of("fp8")

    assert traffic.sent.sum() == ENGINES * (cut + nodes * whole)
    assert traffic.least_received == ENGINES * (cut + 16 * whole)


def test_the_tool_prints_a_plan_of_1024_ranks_that_takes_under_a_gigabyte(tmp_path: Path) -> None:
    model, sizes = Path(__file__).parents[1] / "published" / "kimi_k2.json", "world=1024,tp=8,pp=16,ep=64"
    layout = ["--pipeline-layout", "Ettt|(t*4|)*14,ttL", "--engine", "tp=32,ep=32", "--engines", "16"]
    picture = tmp_path / "links.png"
    command = [*TOOL, "--model", str(model), "--trainer", sizes, *layout, "--png", str(picture)]

    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "over the network            32949.673 GB, 1.000 of what" in out
    peaks = [int(mb) for mb in re.findall(r"plan of one \w+ rank .* at most (\d+) MB", out)]
    assert len(peaks) == 2 and max(peaks) < 1000  # 150 when written, in 2.4 s
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("world=1024,tp=8,pp=16,ep=64", "refused: The model's 61 layers, leave 61 for 16"),
        ("world=16,pt=8", "refused: --trainer has 'pt=8': each part is KEY=NUMBER"),
        ("tp=8", "refused: --trainer has no world_size"),
    ],
)
def test_the_tool_refuses_with_a_sentence(sizes: str, message: str) -> None:
    model = Path(__file__).parents[1] / "published" / "deepseek_v3.json"
    command = [*TOOL, "--model", str(model), "--trainer", sizes, "--engine", "tp=32,ep=32"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 2 and done.stderr.startswith(message) and done.stdout == ""
