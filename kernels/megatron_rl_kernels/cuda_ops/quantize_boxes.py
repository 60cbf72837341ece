"""quantize_boxes in CUDA C++: the kernels of quantize_boxes.cu on the tables of quantize_table.py."""

from collections.abc import Sequence

import numpy as np

from megatron_rl_kernels.cuda_ops.nvrtc import launch_tiles
from megatron_rl_kernels.quantize_table import QuantizeTable, preparing


def launch(tables: Sequence[QuantizeTable]) -> None:
    """Quantize, on the current stream."""
    for t in tables:
        function = f"{str(t.dtype).removeprefix('torch.')}_{'aligned' if t.aligned else 'any'}"
        arguments = (
            t.tiles.rows.data_ptr(),
            t.tiles.row_of_tile.data_ptr(),
            t.lines.data_ptr(),
            np.int32(t.power_of_two),
        )
        launch_tiles("quantize_boxes", function, len(t.tiles.row_of_tile), t.lines.device, *arguments)


prepare = preparing(launch)
