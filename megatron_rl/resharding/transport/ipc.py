"""GPU memory that processes of one node share, through CUDA IPC. Not yet run on a GPU."""

import base64
import pickle

import torch
from torch.multiprocessing import reductions

from megatron_rl.errors import SyncError

_DEVICE = 6
"""Of torch's arguments to open shared memory: the number of the device, as its owner counts them."""


class CudaBuffer:
    """`nbytes` on a GPU of this process, as SharedBuffer is in main memory."""

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes = nbytes
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        """uint8 [nbytes]."""
        _, arguments = reductions.reduce_tensor(self.bytes)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        self.path = base64.b64encode(pickle.dumps((uuid, arguments))).decode()
        """What a peer's `attach_cuda` takes."""

    def close(self) -> None:
        """Freed with its last tensor."""


def attach_cuda(path: str) -> torch.Tensor:
    """Another process's CudaBuffer: uint8 [nbytes], not to be written.

    Each process counts the devices that it may see from 0, so the owner's device is found by its UUID.
    Raises: SyncError when this process does not see it, or its owner has ended.
    """
    uuid, arguments = pickle.loads(base64.b64decode(path))
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if uuid not in seen:
        raise SyncError(
            f"This process sees the GPUs {sorted(seen)} and is to read from {uuid} of the same node: "
            "CUDA_VISIBLE_DEVICES hides it. Let trainer and engines see all GPUs of the node."
        )
    arguments = (*arguments[:_DEVICE], seen[uuid], *arguments[_DEVICE + 1 :])
    try:
        tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise SyncError(
            f"The memory of another process on GPU {uuid} cannot be opened: {error}. Resume with the same command."
        ) from error
    return tensor
