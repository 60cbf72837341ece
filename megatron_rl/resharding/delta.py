"""A message as what changed in it since the version before. Compared is what is sent: packed, and cast.

Changes are words, integers as wide as the message's smallest element. They travel in the message's place, as indices
(int32) and then new words, where that is shorter.
"""

from collections.abc import Callable, Mapping

import torch
from megatron_rl_kernels import Delta, apply_delta, copy_boxes, delta_boxes, prepare
from megatron_rl_kernels.reference import INTEGERS
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.layouts.boxes import NBYTES
from megatron_rl.resharding.messages import ALIGN_BYTES, Message
from megatron_rl.resharding.timer import Timer
from megatron_rl.resharding.views import checksum_of, message_views, parts_of, tensor_views

INDEX_BYTES = 4


def word_of(message: Message) -> torch.dtype:
    """What a change of it is counted in."""
    return INTEGERS[min(NBYTES[piece.dtype] for piece in message.pieces)]


def delta_bytes(count: int, word: torch.dtype) -> int:
    """What `count` changes take in a slot."""
    return _values_at(count) + count * word.itemsize


def delta_in(memory: Tensor, count: int, word: torch.dtype) -> Delta:
    """`count` changes of one message in `memory`, uint8, to be read or filled in."""
    indices = memory[: count * INDEX_BYTES].view(torch.int32)
    values = memory[_values_at(count) : delta_bytes(count, word)].view(word)
    return Delta(torch.tensor([count]), indices, values)


def _values_at(count: int) -> int:
    return -(-count * INDEX_BYTES // ALIGN_BYTES) * ALIGN_BYTES


def clear_gaps(memory: Tensor, message: Message) -> None:
    """Before a message is packed: what alignment leaves between rectangles must not differ, or count as changed."""
    if message.payload_bytes < message.nbytes:
        memory.zero_()


class Held:
    """A sender's copy of each message as the engines have it: once more its share of the weights, in their dtype."""

    def __init__(self) -> None:
        self.version: int | None = None
        """None: not known, and everything goes in full."""
        self._messages: dict[int, Tensor] = {}
        """Words, by number."""
        self._comparing: dict[tuple[int, int], Callable[[], Delta]] = {}
        """By memory and message."""
        self.compared = self.changed = 0
        """Words of the push that is going on."""
        self._changes_bytes = 0
        """Of one message in it, at most, beside the slot."""

    @property
    def nbytes(self) -> int:
        """Of all copies, and of the longest list of changes."""
        return sum(words.nbytes for words in self._messages.values()) + self._changes_bytes

    def begin(self) -> None:
        """Of a push."""
        self.compared = self.changed = self._changes_bytes = 0

    def forget(self) -> None:
        """Nobody knows any more what the engines have."""
        self.version = None
        self._messages, self._comparing = {}, {}

    def shorten(self, message: Message, memory: Tensor) -> tuple[Tensor, int] | None:
        """Note what a message in `memory` is now, and put what changed in its place.

        Returns: the part of `memory` that is to be sent, and how many words changed. None where the message stays as it
        is, since nothing is held, or its changes would be longer.
        """
        if message.number not in self._messages:
            self._messages[message.number] = memory.clone().view(word_of(message))
            return None
        held = self._messages[message.number]
        word, key = held.dtype, (memory.data_ptr(), message.number)
        if key not in self._comparing:
            self._comparing[key] = prepare(delta_boxes, [memory.view(word)], [held])
        delta = self._comparing[key]()
        count = len(delta.values)
        self._changes_bytes = max(self._changes_bytes, delta.indices.nbytes + delta.values.nbytes)
        self.compared += message.payload_bytes // word.itemsize
        self.changed += count
        if delta_bytes(count, word) >= message.nbytes:
            held.copy_(memory.view(word))
            return None
        apply_delta([held], delta)
        sent = delta_in(memory, count, word)
        sent.indices.copy_(delta.indices)
        sent.values.copy_(delta.values)
        return memory[: delta_bytes(count, word)], count


class Rebuild:
    """A reader's half: messages put together again from its own rectangles and what changed in them."""

    def __init__(self, me: str, parameters: Mapping[str, Tensor], largest_bytes: int):
        """`me`: as errors name the reader. `largest_bytes`: of a message."""
        self._me, self._parameters, self._largest_bytes = me, parameters, largest_bytes
        self.version: int | None = None
        """What the parameters hold; None where no push of this session has ended."""
        self._memory: Tensor | None = None
        """Made for the first delta."""
        self._steps: dict[int, tuple[Callable[[], None], Callable[[Delta], None], torch.dtype]] = {}
        """By message: pack what is held, apply changes, and their words."""

    @property
    def nbytes(self) -> int:
        """Memory beside the weights."""
        return 0 if self._memory is None else self._memory.nbytes

    def __call__(
        self, giver: str, message: Message, memory: Tensor, timer: Timer, *, since: int, count: int, whole: list[str]
    ) -> Tensor:
        """The whole message, of which `memory` holds the `count` changes since version `since`.

        whole: the checksums of its parts.
        Raises: SyncError when the parameters do not hold that version, or the result is not the sender's message.
        """
        if since != self.version:
            raise SyncError(
                f"{self._me} holds {_named(self.version)}, and {giver} sent what changed since {_named(since)}: a "
                "version was skipped. Push again: then everything is sent."
            )
        if self._memory is None:
            self._memory = torch.empty(self._largest_bytes, dtype=torch.uint8, device=memory.device)
        made = self._memory[: message.nbytes]
        with timer("unpack"):
            if message.number not in self._steps:
                self._steps[message.number] = self._prepare(message, made)
            pack, apply, word = self._steps[message.number]
            clear_gaps(made, message)
            pack()
            apply(delta_in(memory, count, word))
        for part, checksum in zip(parts_of(message, made.device), whole, strict=True):
            with timer("check"):
                found = checksum_of(made[part.start : part.end])
            if found != checksum:
                raise SyncError(
                    f"{self._me}: message {message.number} from {giver}, put together from the parameters and {count} "
                    f"changes since {_named(since)}, has checksum {found} where {giver} has {checksum} "
                    f"({part.content}): the parameters were no longer {_named(since)}. Push again: then everything is "
                    "sent."
                )
        return made

    def _prepare(
        self, message: Message, whole: Tensor
    ) -> tuple[Callable[[], None], Callable[[Delta], None], torch.dtype]:
        parts, held = message_views(whole, message.pieces), tensor_views(self._parameters, message.pieces)
        # A rectangle that the reader holds twice is packed once.
        once = {piece.at: pair for piece, *pair in zip(message.pieces, parts, held, strict=True)}
        pack = prepare(copy_boxes, [part for part, _ in once.values()], [own for _, own in once.values()])
        word = word_of(message)
        return pack, prepare(apply_delta, [whole.view(word)]), word


def _named(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"
