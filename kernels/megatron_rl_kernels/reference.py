"""What each operation computes, in plain torch: the truth that kernels are tested against, and what runs on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def copy_boxes(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """destinations[i][...] = sources[i], for every i: views of any strides, equal shapes; dtypes may differ.

    Raises: RuntimeError when the shapes of a pair differ. Destinations must not overlap; nothing checks that here.
    """
    if destinations:
        torch._foreach_copy_(list(destinations), list(sources))
