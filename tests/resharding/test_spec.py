"""The spec: as JSON, and what it refuses."""

import json
from dataclasses import replace

import pytest

from megatron_rl.errors import LayoutError
from megatron_rl.resharding.spec import Placement, SyncSpec
from tests.resharding.pushing import make_spec


def test_a_spec_survives_json() -> None:
    spec = make_spec("deepseek_v3", "pp2_vpp2_ep2", "tp2_ep2")
    placement = Placement(((0, 0), (0, 1), (1, 0), (1, 1)), ((0, 0), (0, 1), (2, 0), (2, 5)))

    for some in (spec, replace(spec, engines=2, bucket_bytes=1000, placement=placement)):
        assert SyncSpec.from_json(json.loads(json.dumps(some.to_json()))) == some


def test_a_spec_that_places_other_ranks_is_refused() -> None:
    spec = make_spec("deepseek_v3", "tp2_ep2", "tp2")

    with pytest.raises(LayoutError, match="names 1 trainer ranks and 2 engine ranks, where there are 4 and 2"):
        replace(spec, placement=Placement(((0, 0),), ((0, 1), (0, 2))))
    with pytest.raises(LayoutError, match="takes whole tensors only"):
        replace(spec, direct=False, delta=True)
    with pytest.raises(LayoutError, match="0 engines"):
        replace(spec, engines=0)
