"""Which of several failures counts: processes that Ray runs for us failed, and one error goes to the user."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ray.exceptions import OutOfMemoryError, RayActorError

from megatron_rl.errors import BackendError, ConfigError, DataError, LayoutError, SyncError

logger = logging.getLogger(__name__)

LOST = "where Ray has ended or cannot be reached"
LOG_TAIL_LINES = 12
CAUSES_SHOWN = 4
"""Of several processes that failed in ways of their own."""
_OURS = (ConfigError, DataError, LayoutError, SyncError, BackendError)
_OURS_BY_NAME = {kind.__name__: kind for kind in _OURS}
_CREATION = re.compile(r"raised in its creation task.*?\n(?:\w+\.)*(\w+(?:Error|Exception)): (.*)\Z", re.DOTALL)
"""In Ray's text of an actor whose constructor raised: the exception, after the traceback."""
_PEER_IS_GONE = re.compile(
    r"Connection (closed|reset) by peer|ncclRemoteError|\A[\w ]+ ended in the middle of a weight update"
)
"""Of gloo, NCCL and a push: who says it has lost another, which may say why itself."""


def explain(failed: Mapping[str, Exception], *, what: str, logs: Path | None, lost: Sequence[str] = ()) -> Exception:
    """One error for several processes that failed together: a death outranks what it made its peers suffer.

    lost: nodes that cannot be reached. `logs` is the directory of <process name>.log files, whose tail is quoted.
    """
    if lost:
        for name, error in failed.items():
            logger.error("%s: %s\n%s", what, name, error)
        return BackendError(
            f"{what}: lost {' and '.join(lost)}, {LOST}; with it failed {', '.join(failed)}. Resume with the same "
            "command."
        )
    for name, error in failed.items():
        if isinstance(error, OutOfMemoryError) or "low on memory" in str(error):
            return BackendError(
                f"{what}: {name} was killed because its machine had no memory left. {_tail(name, logs)}Free some, or "
                "spread the run over more machines, and start the same command again: it resumes."
            )
        if isinstance(error, RayActorError):
            logger.error("%s: %s\n%s", what, name, error)
            if raised := _CREATION.search(str(error)):
                kind, text = raised.groups()
                return _OURS_BY_NAME.get(kind, BackendError)(f"{what}: {name} could not start: {kind}: {text}")
            return BackendError(f"{what}: {name} died. {_tail(name, logs)}Resume with the same command.")
    causes = [getattr(error, "cause", error) for error in failed.values()]
    ours = {str(cause): cause for cause in causes if isinstance(cause, _OURS)}
    told = [text for text in ours if not _PEER_IS_GONE.search(text)] or list(ours)
    if told:
        more = f"\nand {len(told) - CAUSES_SHOWN} more" if len(told) > CAUSES_SHOWN else ""
        return type(ours[told[0]])("\n".join(told[:CAUSES_SHOWN]) + more)
    name, error = next(iter(failed.items()))
    cause = getattr(error, "cause", error)
    logger.error("%s: %s\n%s", what, name, error)
    return BackendError(f"{what}: {name} failed with {type(cause).__name__}: {cause}. {_tail(name, logs)}")


def lost_a_peer(error: Exception) -> bool:
    """Whether it says only that another process is gone, which may say why itself."""
    return bool(_PEER_IS_GONE.search(str(getattr(error, "cause", error))))


def _tail(name: str, logs: Path | None) -> str:
    path = logs / f"{name}.log" if logs else None
    if path is None or not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    if not lines:
        return f"{path} is empty. "
    return f"The end of {path}:\n" + "\n".join(f"    {line}" for line in lines) + "\n"
