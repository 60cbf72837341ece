"""copy_boxes in CUDA C++: the kernel of copy_boxes.cu on the table of copy_table.py."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from megatron_rl_kernels.copy_table import CAST_VECTOR, UNITS_OF_TILE, CopyTable, compile_copy
from megatron_rl_kernels.cuda_ops.nvrtc import launch_tiles

MACROS = {"UNITS": UNITS_OF_TILE[1], "CAST_UNITS": UNITS_OF_TILE[CAST_VECTOR], "CAST_VECTOR": CAST_VECTOR}


def launch(table: CopyTable) -> None:
    """Copy, on the current stream."""
    rows, row_of_tile = table.tiles.rows, table.tiles.row_of_tile
    if len(row_of_tile):
        pointers = rows.data_ptr(), row_of_tile.data_ptr()
        launch_tiles("copy_boxes", "copy_boxes", len(row_of_tile), rows.device, *pointers, **MACROS)


def prepare(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
    """The copy, its table compiled."""
    return partial(launch, compile_copy(destinations, sources))
