"""Memory that processes of one machine share: one writer, any number of readers.

Anonymous files (memfd) rather than names below /dev/shm: the kernel frees them with their last process, so a killed run
leaves nothing behind, and the size of /dev/shm, 64 MiB in many containers, does not matter.
"""

import errno
import mmap
import os

import torch
from torch import Tensor

from megatron_rl.errors import SyncError


class SharedBuffer:
    """`nbytes` of shared memory owned by this process; readers open `path` while it lives."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._descriptor = os.memfd_create("megatron-rl-weights")
        os.ftruncate(self._descriptor, nbytes)
        self._memory = mmap.mmap(self._descriptor, nbytes)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        """uint8 [nbytes], a view of the shared memory."""

    @property
    def path(self) -> str:
        """A name that other processes of the same user can open."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Let go of it; readers keep what they have mapped."""
        os.close(self._descriptor)


def attach_shared(path: str, nbytes: int) -> Tensor:
    """Another process's SharedBuffer: uint8 [nbytes], not to be written.

    Raises: SyncError when the owner is gone or the size is not the announced one; OSError without memory to map it.
    """
    try:
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size != nbytes:
                raise SyncError(f"{path} has {size} bytes where {nbytes} were announced: not the expected buffer.")
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        raise SyncError(
            f"The shared memory {path} cannot be opened ({error}): the process that wrote it has ended, or runs as "
            "another user or on another machine. Start both sides on one machine as one user."
        ) from error
