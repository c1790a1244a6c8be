"""Placements: the rank of each stage."""

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.placement import Placement

placements = st.builds(Placement, st.sampled_from(["loop", "wave"]), st.integers(1, 9), st.integers(1, 6))


@pytest.mark.parametrize(("name", "ranks", "reuse", "route"), [
    ("loop", 1, 1, "0"),
    ("wave", 1, 1, "0"),
    ("loop", 1, 3, "0 0 0"),
    ("wave", 1, 3, "0 0 0"),
    ("loop", 2, 1, "0 1"),
    ("wave", 2, 1, "0 1"),
    ("loop", 2, 2, "0 1  0 1"),
    ("wave", 2, 2, "0 1  1 0"),
    ("loop", 3, 3, "0 1 2  0 1 2  0 1 2"),
    ("wave", 3, 3, "0 1 2  2 1 0  0 1 2"),
    ("wave", 3, 4, "0 1 2  2 1 0  0 1 2  2 1 0"),
])
def test_route(name, ranks, reuse, route):
    placement = Placement(name, ranks, reuse)
    assert placement.route == tuple(map(int, route.split()))
    assert placement.stages == ranks * reuse


@pytest.mark.parametrize(("name", "stages"), [
    ("loop", [(0, 3, 6), (1, 4, 7), (2, 5, 8)]),
    ("wave", [(0, 5, 6), (1, 4, 7), (2, 3, 8)]),
])
def test_stages_of_a_rank(name, stages):
    placement = Placement(name, 3, 3)
    assert [placement.stages_of(rank) for rank in range(3)] == stages


@pytest.mark.parametrize(("name", "ranks", "reuse", "remote"), [
    ("loop", 1, 3, []),
    ("loop", 3, 1, [1, 2]),
    ("loop", 2, 3, [1, 2, 3, 4, 5]),
    ("wave", 2, 3, [1, 3, 5]),  # 0 1 | 1 0 | 0 1: the turning points 2 and 4 are local
    ("wave", 3, 2, [1, 2, 4, 5]),
    ("wave", 1, 3, []),
])
def test_remote_boundaries(name, ranks, reuse, remote):
    placement = Placement(name, ranks, reuse)
    assert [stage for stage in range(-1, placement.stages + 2) if placement.is_remote(stage)] == remote


@settings(max_examples=60, deadline=None)
@given(placements)
def test_every_rank_has_reuse_stages_and_every_stage_one_rank(placement):
    owned = [placement.stages_of(rank) for rank in range(placement.ranks)]
    assert all(len(stages) == placement.reuse and list(stages) == sorted(stages) for stages in owned)
    assert sorted(stage for stages in owned for stage in stages) == list(range(placement.stages))
    assert all(placement.rank_of(stage) == rank for rank, stages in enumerate(owned) for stage in stages)


@settings(max_examples=60, deadline=None)
@given(placements)
def test_a_micro_batch_moves_to_a_neighbour_or_stays(placement):
    p = placement.ranks
    for stage in range(1, placement.stages):
        move = placement.rank_of(stage) - placement.rank_of(stage - 1)
        assert placement.is_remote(stage) == (move != 0)
        if placement.name == "wave":
            assert abs(move) <= 1
        else:
            assert move % p == 1 % p


@pytest.mark.parametrize(("arguments", "message"), [
    (("ring", 2, 2), "unknown placement 'ring': use one of loop, wave"),
    (("loop", 0, 2), "at least 1 rank, got 0"),
    (("loop", 2, 0), "reuse .* at least 1, got 0"),
    (("wave", 2, -1), "reuse .* at least 1, got -1"),
])
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        Placement(*arguments)
