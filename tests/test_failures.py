"""Which of several errors is told."""

from megatron_rl.errors import SyncError
from megatron_rl.failures import explain


def test_of_a_push_that_lost_a_rank_its_engine_speaks_and_its_peers_only_where_nobody_else_does() -> None:
    peer = SyncError("engine 0 rank 1 ended in the middle of a weight update; its log says why.")
    engine = SyncError(f"engine-0 did not take the weights: sglang::scheduler_TP1 is gone. SyncError: {peer}")

    assert explain({"trainer-0": peer, "engine-0": engine}, what="Weight sync", logs=None).args == engine.args
    assert explain({"trainer-0": peer}, what="Weight sync", logs=None).args == peer.args
