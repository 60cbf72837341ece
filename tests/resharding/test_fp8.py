"""A push into engines that keep FP8: they get what `export --fp8` writes, cut as SGLang's own loader cuts it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.convert.exporting import export_checkpoint
from megatron_rl.convert.importing import import_checkpoint
from megatron_rl.errors import LayoutError, SyncError
from megatron_rl.formats.hf_files import read_hf_config
from megatron_rl.layouts.compile import check_sglang
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import load_table
from megatron_rl.resharding.spec import Placement, SyncSpec
from tests.fp8_models import ENGINES, FP8, in_fp8, write_both
from tests.resharding.pushing import destinations, fill, flip_a_bit, hashed, pushing, sources, values_of

LAYERS = 4
TRAINERS: dict[str, dict[str, Any]] = {
    "one": {"world_size": 1},
    "tp2_ep2": {"world_size": 4, "tp": 2, "ep": 2},
    "pp2_vpp2": {"world_size": 2, "pp": 2, "vpp": 2},
    "pp2_ep2": {"world_size": 4, "pp": 2, "ep": 2},
    "tp4": {"world_size": 4, "tp": 4},
    "tp2_etp4": {"world_size": 4, "tp": 2, "etp": 4},
    "tp4_ep2_etp2": {"world_size": 4, "tp": 4, "ep": 2, "etp": 2},
}


@dataclass(frozen=True)
class Case:
    """A model."""

    family: str
    path: Path
    hf_config: dict[str, Any]
    held: dict[str, Tensor]
    """As it is trained, by HF name."""
    exported: dict[str, Tensor]
    """In FP8, by HF name, scales too."""

    def spec(self, trainer: str, engine: dict[str, Any], dtype: str = "bfloat16", **options: Any) -> SyncSpec:
        mtp = self.hf_config.get("num_nextn_predict_layers", 0)
        sizes = dict(TRAINERS[trainer])
        if not any(key.endswith("experts") for key in self.hf_config):
            sizes = {key: n for key, n in sizes.items() if key not in ("ep", "etp")}
        ours = MegatronTopology(num_layers=LAYERS, mtp_layers=mtp, **sizes)
        return SyncSpec(self.hf_config, ours, SglangTopology(**engine), dtype, "bfloat16", fp8=True, **options)

    def pushing(self, spec: SyncSpec) -> Any:
        return pushing(spec, held=values_of(self.held), wanted=values_of(self.exported))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For each rank, or they wait for each other's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    found = {}
    for family, config in FP8.items():
        path = tmp_path_factory.mktemp("fp8") / family
        held, exported = write_both(path / "hf", path / "fp8", config)
        found[family] = Case(family, path, read_hf_config(path / "hf"), held, exported)
    return found


def test_they_are_what_export_writes(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["deepseek_v3"]
    import_checkpoint(case.path / "hf", tmp_path / "megatron", processes=1)
    export_checkpoint(tmp_path / "megatron", tmp_path / "fp8", processes=1, quantize=True)
    written = load_file(tmp_path / "fp8" / "model.safetensors")
    assert written.keys() == case.exported.keys()
    assert all(hashed(tensor) == hashed(case.exported[name]) for name, tensor in written.items())
    assert read_hf_config(tmp_path / "fp8") == read_hf_config(case.path / "fp8")


def pairs(family: str) -> list[tuple[str, dict[str, Any]]]:
    """Every trainer with a third of the engines, or with half of two."""
    engines, chosen = ENGINES[family], []
    for t, (trainer, sizes) in enumerate(TRAINERS.items()):
        if family != "qwen3" or "etp" not in sizes:
            chosen += [(trainer, engine) for e, engine in enumerate(engines) if (t + e) % min(len(engines), 3) == 0]
    return chosen


def torn(spec: SyncSpec, exported: dict[str, Tensor]) -> set[str]:
    """HF tensors with a block that no rectangle of a trainer rank holds whole: each block is looked for in each."""
    boxes: dict[str, set[tuple[Any, Any]]] = {}
    for box in (box for layouts in sources(spec).values() for layout in layouts for box in layout.boxes):
        boxes.setdefault(box.hf, set()).add((box.hf_offset, box.shape))
    found = set()
    for name in (name for name in exported if name + "_scale_inv" in exported):
        rows, columns = exported[name].shape
        for top, left in itertools.product(range(0, rows, 128), range(0, columns, 128)):
            bottom, right = min(top + 128, rows), min(left + 128, columns)
            if not any(
                y <= top and x <= left and bottom <= y + high and right <= x + wide
                for (y, x), (high, wide) in boxes[name]
            ):
                found.add(name)
    return found


def needed(spec: SyncSpec, in_full: set[str]) -> list[int]:
    """Bytes for each rank of an engine: what it keeps, but two for an element where senders lack blocks."""
    totals = []
    for layouts in (layouts for _, layouts in sorted(destinations(spec).items())):
        full = {layout.name for layout in layouts if any(box.hf in in_full for box in layout.boxes)}
        total = 0
        for layout in layouts:
            elements = sum(prod(box.shape) for box in layout.boxes)
            is_full = layout.name.removesuffix("_scale_inv") in full
            each = 2 * (layout.dtype != "float32") if is_full else getattr(torch, layout.dtype).itemsize
            total += elements * each
        totals.append(total)
    return totals


@pytest.mark.parametrize("family", FP8)
def test_every_engine_rank_gets_its_part_of_the_exported_checkpoint(family: str, cases: dict[str, Case]) -> None:
    ways: set[bool] = set()
    for i, (trainer, engine) in enumerate(pairs(family)):
        spec = cases[family].spec(trainer, engine, engines=1 + i % 2, bucket_bytes=(17_000, 1 << 18)[i % 2])
        with cases[family].pushing(spec) as it:
            sent, loaded = it.push()

            assert it.is_complete(), (trainer, engine)
            in_full = torn(spec, cases[family].exported)
            wanted = needed(spec, in_full) * spec.engines
            assert [r.received_bytes for r in loaded] == [r.needed_bytes for r in loaded] == wanted
            matrices = [t[0] if t.dim() == 3 else t for t in it.wanted[0].values()]
            assert all(r.staging_bytes <= spec.bucket_bytes + 2 * max(m.numel() for m in matrices) * 2 for r in loaded)
            assert all(r.staging_bytes <= 2 * spec.bucket_bytes for r in sent)
            ways.add(bool(in_full))
    assert ways == ({True} if family == "qwen3" else {True, False})


@pytest.mark.parametrize(("trainer", "engine"), [("pp2_ep2", {"tp": 2}), ("tp2_etp4", {"tp": 2, "ep": 2})])
def test_it_crosses_nodes_once_and_is_handed_on_inside(
    trainer: str, engine: dict[str, Any], cases: dict[str, Case]
) -> None:
    placement = Placement(((0, 0), (0, 1), (1, 0), (1, 1)), ((1, 2), (1, 3), (2, 0), (2, 1)))
    spec = cases["deepseek_v3"].spec(trainer, engine, engines=2, placement=placement, bucket_bytes=1 << 17)
    with cases["deepseek_v3"].pushing(spec) as it:
        _, loaded = it.push()
        assert it.is_complete()
        assert all(report.received_bytes == report.needed_bytes for report in loaded)


@pytest.mark.parametrize("trainer", ["tp2_ep2", "tp2_etp4"])
def test_it_is_made_of_the_trainers_own_numbers_and_compared_where_it_arrived(
    trainer: str, cases: dict[str, Case]
) -> None:
    """float32 is not rounded to bfloat16 first: `export --fp8` takes what the checkpoint holds."""
    case = cases["qwen3_moe"]
    spec = case.spec(trainer, {"tp": 2}, dtype="float32", bucket_bytes=1 << 16)
    held = {name: tensor.float() * 1.00123 for name, tensor in case.held.items()}
    with pushing(spec, held=values_of(held), wanted=values_of(in_fp8(held))) as it:
        it.push(version=1)
        assert it.is_complete()
        it.push(version=2, compare=True)

        for name in ("model.layers.1.mlp.experts.w2_weight", "model.layers.2.mlp.experts.w13_weight_scale_inv"):
            it.parameters[1][name].view(torch.uint8)[2, 1, 4] ^= 1
            with pytest.raises(SyncError, match=rf"engine 0 rank 1: {name}\[2, 1, [14]\] is .* after the load"):
                it.push(version=3, compare=True)
            it.push(version=3)
            assert it.is_complete()


@pytest.mark.parametrize("trainer", ["tp2_ep2", "tp2_etp4"])
def test_a_flipped_bit_is_found_and_the_next_push_heals(
    trainer: str, cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["qwen3_moe"]
    with case.pushing(case.spec(trainer, {"tp": 2}, bucket_bytes=1 << 16)) as it:
        for of in (0, 20):
            with monkeypatch.context() as patch:
                flip_a_bit(patch, of=of)
                with pytest.raises(
                    SyncError, match=r"rank \d: the \d+ bytes at \d+ of message .*trainer rank \d .*sent"
                ):
                    it.push(version=1)
            it.push(version=1)
            assert it.is_complete()


@pytest.mark.parametrize("trainer", ["tp2_ep2", "tp2_etp4"])
def test_what_changed_is_enough_where_engines_hold_what_was_sent(trainer: str, cases: dict[str, Case]) -> None:
    case = cases["qwen3_moe"]
    spec = case.spec(trainer, {"tp": 2}, bucket_bytes=1 << 16, delta=True)
    held = {name: tensor.clone() for name, tensor in case.held.items()}
    for name in held:
        held[name][..., 3] *= 0.5  # most blocks keep their largest element, and so their scale
    with case.pushing(spec) as it:
        it.push(version=1)
        after = {rank: fill(layouts, values_of(held)) for rank, layouts in sources(spec).items()}
        wanted = [fill(layouts, values_of(in_fp8(held))) for _, layouts in sorted(destinations(spec).items())]
        it.tensors, it.wanted = after, wanted
        _, loaded = it.push(version=2)

        assert it.is_complete()
        for report in loaded:
            assert report.covered_bytes == report.needed_bytes
            assert report.received_bytes < report.needed_bytes * (0.6 if trainer == "tp2_ep2" else 1)


@pytest.mark.parametrize(
    ("family", "trainer"), [("deepseek_v3", "pp2_ep2"), ("deepseek_v3", "tp2_etp4"), ("qwen3", "one")]
)
def test_sglangs_own_loader_gets_the_exported_checkpoint(family: str, trainer: str, cases: dict[str, Case]) -> None:
    spec = cases[family].spec(trainer, {"tp": 2}, bucket_bytes=1 << 17, direct=False)
    with cases[family].pushing(spec) as it:
        _, loaded = it.push()
        assert it.is_complete()
        extra = "model.layers.4."  # prediction layers
        assert sorted(it.loaded[0]) == sorted(name for name in cases[family].exported if not name.startswith(extra))
        assert all(report.received_bytes == report.needed_bytes for report in loaded)


@pytest.mark.parametrize(
    ("family", "engine", "found"),
    [
        (
            "qwen3",
            {"tp": 4},
            r"self_attn.k_proj.weight \[256, 264\] .* has \[0:64, 0:264\] of it at row 128 .*rollout.tp",
        ),
        (
            "deepseek_v3",
            {"tp": 4},
            r"experts.\{expert\}.gate_proj.weight .*\[0:64, 0:152\].*Lower rollout.tp / rollout.ep to one of 1, 2, or",
        ),
    ],
)
def test_an_engine_that_would_cut_blocks_is_refused(
    family: str, engine: dict[str, Any], found: str, cases: dict[str, Case]
) -> None:
    with pytest.raises(LayoutError, match=found):
        check_sglang(load_table(cases[family].hf_config), SglangTopology(**engine), quantized=True)


def test_a_message_must_hold_a_block(cases: dict[str, Case]) -> None:
    with pytest.raises(LayoutError, match="Messages of 16399 bytes: an FP8 block with its scale takes 16400"):
        cases["qwen3"].spec("one", {}, bucket_bytes=16399)
