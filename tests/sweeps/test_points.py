import json
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from megatron_rl.errors import DataError
from megatron_rl.run_directory import ENDING, INTERRUPTED
from megatron_rl.sweeps.points import Point, as_ended, begin, load, load_all, point_name, quoted, save


@pytest.mark.parametrize(
    ("swept", "name"),
    [
        (["++algorithm.lr=1e-06"], "lr_1e-06"),
        (["++seed=3", "++algorithm.lr=1e-06"], "lr_1e-06+seed_3"),
        (["++algorithm.lr=1", "++sft.lr=2"], "algorithm.lr_1+sft.lr_2"),
        (["parallel=ep2"], "parallel_ep2"),
        ([], "one_point"),
    ],
)
def test_a_name_says_what_the_point_is(swept: list[str], name: str) -> None:
    assert point_name(swept) == name
    assert point_name(swept[::-1]) == name


def test_values_that_name_no_directory_still_have_names_of_their_own() -> None:
    paths = ["/data/a.jsonl", "/data-a.jsonl", "data/a.jsonl", "'data a.jsonl'", "x" * 200, "x" * 201]

    names = [point_name([f"++data.path={path}"]) for path in paths]

    assert len(set(names)) == len(paths)
    assert all(len(name) < 120 and set(name).isdisjoint("/ '") for name in names)


@pytest.mark.parametrize("value", ["a b", "it's", r"a\'b", "/tmp/x=1,2", "1e3", "null", "/plain/path_1.2-3", "[1]", ""])
def test_a_quoted_value_is_read_back_as_it_was(value: str) -> None:
    parsed = OverridesParser.create().parse_override(f"runs_dir={quoted(value)}").value()

    assert str(parsed) == value and not isinstance(parsed, int | float | list)


def test_a_point_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    first = Point(1, "b", ("steps=2",), tmp_path / "b", launcher="slurm_grpo", job="17", state="PENDING", seconds=2.5)
    second = Point(0, "c", (), tmp_path / "c", note="why")
    for point in (first, second):
        save(point)

    assert load_all(tmp_path) == [second, first]
    assert load(tmp_path / "other") is None


def test_a_file_that_describes_no_point_is_named(tmp_path: Path) -> None:
    for text in ("{", "[]", json.dumps({"index": 0})):
        (tmp_path / "point.json").write_text(text)
        with pytest.raises(DataError, match="point.json does not describe a point .* Put it back"):
            load(tmp_path)


def test_a_point_ends_as_its_run_says_and_fails_when_it_says_nothing(tmp_path: Path) -> None:
    point = Point(0, "a", (), tmp_path, state="RUNNING", seconds=1.0)
    ends = {"": "COMPLETED", INTERRUPTED: "CANCELLED", "no GPU": "FAILED"}
    for error, state in ends.items():
        (tmp_path / ENDING).write_text(json.dumps({"error": error, "seconds": 7.5}))
        note = "no GPU" if state == "FAILED" else ""
        assert as_ended(point) == replace(point, state=state, note=note, seconds=7.5)

    begun = begin(point, launcher="local")

    assert (begun.state, begun.seconds) == ("SUBMITTING", None)
    assert as_ended(point) == replace(point, state="FAILED", note="ended without a word")
