"""Memory that processes of one machine share: one writer, any number of readers.

Anonymous files (memfd) rather than names below /dev/shm: the kernel frees them with their last process, so a killed run
leaves nothing behind, and the size of /dev/shm, 64 MiB in many containers, does not matter.
"""

import mmap
import os

import torch
import xxhash
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


class AttachedBuffer:
    """Another process's SharedBuffer, mapped here."""

    def __init__(self, path: str, nbytes: int):
        """Raises: SyncError when the owner is gone or the size is not the announced one."""
        try:
            with open(path, "r+b") as file:
                status = os.fstat(file.fileno())
                if status.st_size != nbytes:
                    raise SyncError(
                        f"{path} has {status.st_size} bytes where {nbytes} were announced: not the expected bucket."
                    )
                self._memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise SyncError(
                f"The shared memory {path} cannot be opened ({error}): the trainer rank that wrote it has ended, "
                "or runs as another user or on another machine. Start both sides on one machine as one user."
            ) from error
        self._path, self._inode = path, status.st_ino
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        """uint8 [nbytes]; not to be written."""

    def is_stale(self) -> bool:
        """Whether its path no longer names the memory mapped here, because the owner ended."""
        try:
            return os.stat(self._path).st_ino != self._inode
        except OSError:
            return True


def digest(data: Tensor) -> str:
    """xxh3-128 of uint8 [n]."""
    return xxhash.xxh3_128_hexdigest(data.numpy())
