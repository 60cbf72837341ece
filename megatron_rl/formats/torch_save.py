"""The bytes that torch.save writes around the data of a tensor: a zip file of a pickle and the data, uncompressed.

Neither writing nor reading takes torch: importing it would take longer than copying gigabytes.
"""

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Sequence
from math import prod
from typing import Any

from megatron_rl.layouts.boxes import NBYTES

STORAGES = {"bfloat16": "BFloat16Storage", "float16": "HalfStorage", "float32": "FloatStorage"}
"""torch's names of them, by dtype."""
_FOLDER = "archive/"
_LOCAL, _CENTRAL, _END = "<4s5H3I2H", "<4s6H3I5H2I", "<4s4H2IH"
"""Headers of a zip file: before a record, in the list of records at its end, and after that."""
_DATE = (1 << 5) + 1
"""The first day that a zip file can name."""


def envelope(dtype: str, shape: Sequence[int]) -> tuple[bytes, bytes]:
    """(what stands before, what stands after) the data of a contiguous tensor.

    torch.load takes the three records that stand first. Its reader ignores checksums, and that of the data is 0: it
    would be known only after the data.
    Source: torch/serialization.py and caffe2/serialize/inline_container.cc of torch 2.14.
    """
    nbytes = prod(shape) * NBYTES[dtype]
    assert nbytes < 1 << 32, (dtype, shape)  # more takes other headers
    records = {"data.pkl": _pickle(dtype, shape), "byteorder": b"little", "version": b"3\n", "data/0": b""}
    before, listed = b"", b""
    for name, data in records.items():
        size, crc = (len(data), zlib.crc32(data)) if data else (nbytes, 0)
        path = (_FOLDER + name).encode()
        listed += struct.pack(
            _CENTRAL, b"PK\1\2", 20, 20, 0, 0, 0, _DATE, crc, size, size, len(path), 0, 0, 0, 0, 0, len(before)
        )
        listed += path
        before += struct.pack(_LOCAL, b"PK\3\4", 20, 0, 0, 0, _DATE, crc, size, size, len(path), 0) + path + data
    count = len(records)
    end = struct.pack(_END, b"PK\5\6", 0, 0, count, count, len(listed), len(before) + nbytes, 0)
    return before, listed + end


def _pickle(dtype: str, shape: Sequence[int]) -> bytes:
    """torch._utils._rebuild_tensor_v2(storage "0", 0, shape, stride, False, OrderedDict()), in pickle's words."""
    stride = [prod(shape[i + 1 :]) for i in range(len(shape))]
    what, where, device, count, offset, size, steps = (
        pickle.dumps(value, 2)[2:-1]  # without the words that begin and end a pickle
        for value in ("storage", "0", "cpu", prod(shape), 0, tuple(shape), tuple(stride))
    )
    storage = b"(" + what + f"ctorch\n{STORAGES[dtype]}\n".encode() + where + device + count + b"tQ"
    rest = offset + size + steps + b"\x89ccollections\nOrderedDict\n)RtR."
    return b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest


def find_data(file: io.RawIOBase, start: int, length: int) -> tuple[int, int]:
    """(where in `file` the data begins, its bytes), of the only storage in what torch.save wrote from `start` on.

    Raises: zipfile.BadZipFile, NotImplementedError, KeyError, ValueError or OSError where it wrote no such thing.
    """
    view: Any = _View(file, start, length)
    with zipfile.ZipFile(view) as archive:
        (info,) = [i for i in archive.infolist() if i.filename.endswith("/data/0")]
    view.seek(info.header_offset)
    header = view.read(30)
    # A record has extras of its own, which are not those that the list has of it.
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return start + info.header_offset + 30 + lengths, info.file_size


class _View(io.RawIOBase):
    """Part of an open file, as zipfile wants to see it."""

    def __init__(self, file: io.RawIOBase, start: int, length: int):
        self.file, self.start, self.length, self.position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        return self.position

    def read(self, size: int = -1) -> bytes:
        left = max(self.length - self.position, 0)
        size = left if size < 0 else min(size, left)
        self.file.seek(self.start + self.position)
        data = self.file.read(size)
        self.position += len(data)
        return data
