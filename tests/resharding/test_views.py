"""The check that stands before every push: the tensors of a rank are the declared ones."""

import pytest
import torch

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.resharding.views import check_tensors

LAYOUTS = (TensorLayout("w13", (4, 6), "bfloat16", ()), TensorLayout("bias", (3,), "float32", ()))


def test_the_declared_tensors_pass() -> None:
    check_tensors({"bias": torch.ones(3), "w13": torch.ones(4, 6, dtype=torch.bfloat16)}, LAYOUTS, whose="rank 1")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w13", torch.ones(2, 6, dtype=torch.bfloat16), r"w13 is \(2, 6\) bfloat16, declared \(4, 6\) bfloat16"),
        ("w13", torch.ones(6, 4, dtype=torch.bfloat16), r"w13 is \(6, 4\) bfloat16, declared \(4, 6\)"),
        ("bias", torch.ones(3, dtype=torch.bfloat16), r"bias is \(3,\) bfloat16, declared \(3,\) float32"),
        ("more", torch.ones(3), r"more is not in the layout table"),
        ("bias", None, r"bias is missing"),
    ],
    ids=["half", "transposed", "cast", "more", "missing"],
)
def test_any_other_tensor_is_named_before_a_byte_is_written(
    name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = {"bias": torch.ones(3), "w13": torch.ones(4, 6, dtype=torch.bfloat16), name: tensor}
    given = {key: value for key, value in tensors.items() if value is not None}

    with pytest.raises(LayoutError, match=f"^rank 1: 1 of 2 tensors differ from the layout table: {message}"):
        check_tensors(given, LAYOUTS, whose="rank 1")
