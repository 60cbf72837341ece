"""One SGLang server behind plain methods: tokens in, tokens and log-probabilities out, weights replaced in place.

Runs as an actor; `fleet.py` is the driver's side. The message that `load_weights` sends is read by `receiver.py`.
"""

import base64
import contextlib
import json
import logging
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import requests

from megatron_rl.errors import BackendError, SyncError
from megatron_rl.pools import own_address
from megatron_rl.resharding.spec import LoadReport, Push, SyncSpec
from megatron_rl.rollout.options import LOADER, ServerSettings
from megatron_rl.rollout.process import ServerProcess, free_ports
from megatron_rl.types import Rollouts

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 600.0
"""Until the server has answered a pause or a weight update."""
MEETING_PORTS = 8
"""In a row: with data-parallel attention the parts of a server use those behind the first, too."""


@dataclass(frozen=True, slots=True)
class Request:
    """Prompts to be sampled together. R prompts, G samples of each."""

    prompts: tuple[tuple[int, ...], ...]
    """R token lists."""
    samples_per_prompt: int
    seeds: tuple[int, ...]
    """R * G, prompt after prompt; 63 bits each."""
    max_tokens: int
    temperature: float
    """0 takes the most likely token."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the controller learns of each sample of a request, prompt after prompt."""

    response_tokens: tuple[int, ...]
    finish: tuple[str, ...]
    """`stop` or "length"."""
    versions: tuple[int, ...]


class Server:
    """Owns one server process: a whole server, or the part of one on this node."""

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self._process: ServerProcess | None = None
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy of the environment is not for 127.0.0.1
        self._spec: SyncSpec | None = None
        """The one that the server's ranks have a plan for."""
        self._broken: str | None = None
        """Why the weights are neither one version nor the next."""

    def meeting(self) -> str:
        """host:port where the parts of this server can find each other; for the first part."""
        host = own_address()
        return f"{host}:{free_ports(host, count=MEETING_PORTS)}"

    def start(self, meeting: str | None = None) -> None:
        """Start the process and wait until it is healthy. Raises: BackendError with the server's own error text."""
        self._spec, self._broken = None, None  # of a process that ended
        self._process = ServerProcess(self.settings, meeting)

    def watch(self) -> None:
        """Until `stop`. Raises: BackendError with the server's own error text when the process ends before."""
        if self._process is not None:
            self._process.watch()

    def pid(self) -> int:
        """Of the server's first process, whose number is also its process group's."""
        if self._process is None:
            raise BackendError(f"{self.settings.name} is not running: it has no pid before start() or after stop().")
        return self._process.pid

    def stop(self) -> None:
        """End the process and all its children."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def generate(self, request: Request) -> tuple[Rollouts, Answers]:
        """Sample. Rows of the rollouts are in the order of `request.seeds`; a response ends with its end token, if any.

        Raises: BackendError when the server ends, refuses or takes too long; SyncError when a weight update failed.
        """
        if self._broken is not None:
            raise SyncError(
                f"{self.settings.title} may hold a mixture of weights: {self._broken} Push a version before generating."
            )
        prompts = [list(p) for p in request.prompts for _ in range(request.samples_per_prompt)]
        common = {"max_new_tokens": request.max_tokens, "temperature": request.temperature}
        body = {
            "input_ids": prompts,
            "sampling_params": [{**common, "sampling_seed": seed} for seed in request.seeds],
            "return_logprob": True,
        }
        results = self._post("/generate", body, timeout_s=self.settings.request_timeout_s)
        answers = Answers(
            response_tokens=tuple(len(r["output_ids"]) for r in results),
            finish=tuple(_finish(r["meta_info"]) for r in results),
            versions=tuple(int(r["meta_info"]["weight_version"]) for r in results),
        )
        return _pack(prompts, results), answers

    def pause(self) -> None:
        """Stop generating until `resume`; running requests wait and lose their cached keys and values.

        Raises: SyncError, as the rest of an update does, when the server ends or refuses.
        """
        self._broken = "an update has begun."
        with self._updating("pause"):
            self._post("/pause_generation", {"mode": "retract"})

    def load_weights(self, spec: SyncSpec, push: Push, *, engine: int = 0) -> list[LoadReport]:
        """Take every weight from the trainer's ranks, which send at the same time; the server must be paused.

        `engine` is this one's number among those of `spec`. Returns: one report per rank.

        Raises: SyncError naming the ranks; the server then generates no more until a load has succeeded.
        """
        message = {
            "spec": None if spec == self._spec else spec.to_json(),
            "engine": engine,
            "push": asdict(push),
        }
        serialized = base64.b64encode(pickle.dumps(json.dumps(message).encode())).decode()
        update = {
            "serialized_named_tensors": [serialized] * self.settings.tp,
            "load_format": LOADER,
            "flush_cache": True,  # what the old weights computed
        }
        self._broken, self._spec = "an update did not finish.", None
        with self._updating("take the weights"):
            # With data-parallel attention each group answers, all with the reports of every rank.
            reports = json.loads(self._post("/update_weights_from_tensor", update)["message"].split(" | ")[0])
        self._spec = spec
        return [LoadReport(**r) for r in reports]

    def commit(self, version: int) -> None:
        """Give the loaded weights their version. Still paused."""
        with self._updating(f"commit version {version}"):
            self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def resume(self) -> None:
        """Generate again, with weights that are one version."""
        with self._updating("resume"):
            self._post("/continue_generation", {})
        self._broken = None

    @contextlib.contextmanager
    def _updating(self, what: str) -> Iterator[None]:
        """Raises: SyncError for what fails in the middle of an update; then there is no generating before another."""
        try:
            yield
        except BackendError as error:
            self._broken = str(error)
            raise SyncError(f"{self.settings.title} did not {what}: {error}") from error

    def checksums(self) -> list[dict[str, str]]:
        """Per rank: parameter name -> checksum, computed by the server."""
        answer = self._post("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in answer["ranks"]]

    def _post(self, path: str, body: dict[str, Any] | None, *, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """JSON answer, or None. Raises: BackendError with the server's own text."""
        if self._process is None:
            raise BackendError(
                f"{self.settings.name} is not running: {path} was called before start() or after stop()."
            )
        logged = self._process.log_bytes
        try:
            response = self._http.post(self._process.url + path, json=body, timeout=timeout_s)
        except requests.Timeout as error:
            key = "Raise rollout.request_timeout_s if it was still at work. " if path == "/generate" else ""
            raise BackendError(
                f"{self.settings.title} did not answer {path} within {timeout_s:.0f} s: "
                f"{self._process.error_text(logged)} {key}Resume with the same command."
            ) from error
        except requests.RequestException as error:
            raise BackendError(
                f"{self.settings.title} ended during {path}: {self._process.error_text(logged)} Resume with the same "
                "command."
            ) from error
        is_json = response.headers.get("content-type", "").startswith("application/json")
        answer = response.json() if is_json else response.text
        if response.status_code != requests.codes.ok:
            text = answer.get("message") or answer.get("error") if isinstance(answer, dict) else answer
            raise BackendError(f"{self.settings.title} refused {path} ({response.status_code}): {text}")
        return answer


def _finish(meta_info: dict[str, Any]) -> str:
    reason = meta_info["finish_reason"]
    if reason["type"] not in ("stop", "length"):
        raise BackendError(f"A request was ended by the server: {reason}. Resume with the same command.")
    return reason["type"]


def _pack(prompts: Sequence[list[int]], results: Sequence[dict[str, Any]]) -> Rollouts:
    rows = [p + r["output_ids"] for p, r in zip(prompts, results, strict=True)]
    prompt_lengths = np.array([len(p) for p in prompts], dtype=np.int64)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    logprobs = np.zeros(offsets[-1], dtype=np.float32)
    for row, result in enumerate(results):
        values = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
        assert len(values) == len(result["output_ids"]), (len(values), len(result["output_ids"]))
        if wrong := [v for v in values if v is None or not math.isfinite(v)]:  # JSON has null for NaN
            raise BackendError(
                f"The engine gave {len(wrong)} sampled token(s) the log-probability {wrong[0] or 'NaN'}: its logits "
                "are no numbers, so the weights have diverged. Lower the learning rate, or use rollout.dtype=float32; "
                "resume from an earlier checkpoint."
            )
        logprobs[offsets[row] + prompt_lengths[row] : offsets[row + 1]] = values
    tokens = np.concatenate([np.asarray(row, dtype=np.int32) for row in rows])
    return Rollouts(tokens=tokens, logprobs=logprobs, offsets=offsets, prompt_lengths=prompt_lengths)
