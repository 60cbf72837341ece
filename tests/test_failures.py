"""Which of several errors is told."""

from pathlib import Path

from ray.exceptions import ActorDiedError

from megatron_rl.errors import SyncError
from megatron_rl.failures import explain


def test_of_a_push_that_lost_a_rank_its_engine_speaks_and_its_peers_only_where_nobody_else_does() -> None:
    peer = SyncError("engine 0 rank 1 ended in the middle of a weight update; its log says why.")
    engine = SyncError(f"engine-0 did not take the weights: sglang::scheduler_TP1 is gone. SyncError: {peer}")

    assert explain({"trainer-0": peer, "engine-0": engine}, what="Weight sync", logs=None).args == engine.args
    assert explain({"trainer-0": peer}, what="Weight sync", logs=None).args == peer.args


def test_a_process_that_died_without_a_word_has_no_end_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "scorer.log").touch()

    error = explain({"scorer": ActorDiedError()}, what="Judging samples", logs=tmp_path)

    log = tmp_path / "scorer.log"
    assert str(error) == f"Judging samples: scorer died. {log} is empty. Resume with the same command."
