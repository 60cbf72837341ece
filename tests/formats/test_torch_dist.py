"""What torch would write and read, without torch."""

import io
import os
import pickle
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.errors import DataError
from megatron_rl.formats import torch_dist, torch_save

SHAPES = [(7,), (3, 5), (1, 70_000), (1, 1, 40, 56), (2, 300), (1,)]


@pytest.mark.parametrize("dtype", torch_save.STORAGES)
def test_torch_reads_what_stands_between_the_two_halves_of_an_envelope(dtype: str) -> None:
    for shape in SHAPES:
        tensor = torch.arange(prod(shape)).view(shape).to(getattr(torch, dtype))
        before, after = torch_save.envelope(dtype, shape)

        whole = before + tensor.view(torch.uint8).numpy().tobytes() + after
        found = torch.load(io.BytesIO(whole), weights_only=True)

        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(found, tensor)
        assert torch_save.find_data(io.BytesIO(b"x" * 9 + whole + b"x"), 9, len(whole)) == (
            9 + len(before),
            tensor.nbytes,
        )


def test_contents_are_those_that_torch_reads(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7), "c": torch.ones(2, 1, 4).half()}
    dcp.save({**tensors, "no tensor": {"x": [1]}}, checkpoint_id=tmp_path, no_dist=True)

    found = torch_dist.read_contents(tmp_path)

    theirs = FileSystemReader(tmp_path).read_metadata().storage_data
    places = {index.fqn: (info.relative_path, info.offset, info.length) for index, info in theirs.items()}
    assert found.dtypes == {"a": "bfloat16", "b": "float32", "c": "float16"}
    for key, tensor in tensors.items():
        (item,) = found.items[key]
        assert (item.key, item.offset, item.shape) == (key, (0,) * tensor.dim(), tuple(tensor.shape))
        assert (item.file, item.at, item.nbytes) == places[key]


class Harmful:
    """Unpickled by pickle, it makes a directory."""

    def __init__(self, made: Path):
        self.made = made

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.made),)


def test_nothing_in_metadata_is_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "made")))

    with pytest.raises(DataError, match=r"\.metadata cannot be read .*it was changed or cut after it was written"):
        torch_dist.read_contents(tmp_path)
    assert not (tmp_path / "made").exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert (tmp_path / "made").exists()  # which is what would have happened
