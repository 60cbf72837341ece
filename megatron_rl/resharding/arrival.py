"""Proof that what arrived is what was sent, part by part."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.resharding.delta import Rebuild
from megatron_rl.resharding.messages import Message, Part
from megatron_rl.resharding.timer import Timer
from megatron_rl.resharding.views import checksum_of, parts_of


def proved(
    message: Message, news: Mapping[str, Any], memory: Tensor, *, me: str, giver: str, rebuild: Rebuild, timer: Timer
) -> Iterator[tuple[Part, Tensor]]:
    """Each part of a message as soon as it is proved, and the memory that the message lies in.

    A CPU that goes on with a part at once finds it in its nearest caches.
    news: the offer of the message; what was sent lies in `memory`.
    Raises: SyncError naming both ranks and the tensors of the first part that has another checksum than the offer says.
    """
    parts, delta = parts_of(message, memory.device), news["delta"]
    sent = [Part(0, news["nbytes"], message.pieces)] if delta else parts
    for part, checksum in zip(sent, news["checksums"], strict=True):
        with timer("check"):
            found = checksum_of(memory[part.start : part.end])
        if found != checksum:
            raise SyncError(
                f"{me}: the {part.end - part.start} bytes at {part.start} of message {message.number} from {giver} "
                f"({part.content}) arrived with checksum {found}, sent with {checksum}. Push again."
            )
        if not delta:
            yield part, memory
    if delta:
        whole = rebuild(giver, message, memory, timer, **delta)
        for part in parts:
            yield part, whole
