"""Placements: the rank of each stage, in one direction and in two."""

import pytest
from hypothesis import given, settings

from deepspeed_prt.program.placement import DOWN, UP, Placement

from .common import BI, UNI, placements


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
def test_the_route_of_one_pipe(name, ranks, reuse, route):
    placement = Placement(name, ranks, reuse)
    assert placement.direction == UNI
    assert placement.routes == (tuple(map(int, route.split())), )
    assert placement.stages == ranks * reuse
    assert placement.pipes == 1


@pytest.mark.parametrize(("name", "ranks", "reuse", "down", "up"), [
    ("loop", 2, 1, "0 1", "1 0"),
    ("wave", 2, 1, "0 1", "1 0"),
    ("loop", 2, 2, "0 1  0 1", "1 0  1 0"),
    ("wave", 2, 2, "0 1  1 0", "1 0  0 1"),
    ("loop", 3, 2, "0 1 2  0 1 2", "2 1 0  2 1 0"),
    ("wave", 3, 2, "0 1 2  2 1 0", "2 1 0  0 1 2"),
    ("wave", 4, 1, "0 1 2 3", "3 2 1 0"),
])
def test_the_up_pipe_mirrors_the_down_pipe(name, ranks, reuse, down, up):
    placement = Placement(name, ranks, reuse, BI)
    assert placement.routes == (tuple(map(int, down.split())), tuple(map(int, up.split())))
    assert placement.routes[:1] == Placement(name, ranks, reuse).routes
    assert placement.stages == ranks * reuse, "each stage has two copies, which are one stage"
    assert placement.pipes == 2


def test_micro_batches_take_the_pipes_in_turn():
    assert [Placement("loop", 2, 1, BI).pipe_of(micro_batch) for micro_batch in range(5)] == [DOWN, UP, DOWN, UP, DOWN]
    assert [Placement("loop", 2, 1).pipe_of(micro_batch) for micro_batch in range(5)] == [DOWN] * 5


@pytest.mark.parametrize(("name", "down", "up"), [
    ("loop", [(0, 3, 6), (1, 4, 7), (2, 5, 8)], [(2, 5, 8), (1, 4, 7), (0, 3, 6)]),
    ("wave", [(0, 5, 6), (1, 4, 7), (2, 3, 8)], [(2, 3, 8), (1, 4, 7), (0, 5, 6)]),
])
def test_stages_of_a_rank(name, down, up):
    placement = Placement(name, 3, 3)
    assert [placement.stages_of(rank, DOWN) for rank in range(3)] == down
    assert [placement.stages_on(rank) for rank in range(3)] == down
    both = Placement(name, 3, 3, BI)
    assert [both.stages_of(rank, DOWN) for rank in range(3)] == down
    assert [both.stages_of(rank, UP) for rank in range(3)] == up


@pytest.mark.parametrize(("name", "ranks", "reuse", "held"), [
    ("loop", 2, 1, ["0 1", "0 1"]),
    ("wave", 2, 2, ["0 1 2 3", "0 1 2 3"]),
    ("loop", 3, 1, ["0 2", "1", "0 2"]),  # the middle rank is its own mirror: it holds one copy for both pipes
    ("wave", 3, 2, ["0 2 3 5", "1 4", "0 2 3 5"]),
    ("loop", 4, 2, ["0 3 4 7", "1 2 5 6", "1 2 5 6", "0 3 4 7"]),
])
def test_stages_that_a_rank_holds_for_both_pipes(name, ranks, reuse, held):
    placement = Placement(name, ranks, reuse, BI)
    assert [" ".join(map(str, placement.stages_on(rank))) for rank in range(ranks)] == held


def test_what_a_rank_computes_in_order_of_micro_batches():
    assert Placement("loop", 2, 2).visits_of(1, 2) == [(1, 0), (3, 0), (1, 1), (3, 1)]
    assert Placement("loop", 2, 2, BI).visits_of(1, 3) == [(1, 0), (3, 0), (0, 1), (2, 1), (1, 2), (3, 2)]
    assert Placement("wave", 2, 2, BI).visits_of(0, 1) == [(0, 0), (3, 0)]
    assert Placement("loop", 2, 2, BI).visits_of(1, 0) == []


@pytest.mark.parametrize(("name", "ranks", "reuse", "remote"), [
    ("loop", 1, 3, []),
    ("loop", 3, 1, [1, 2]),
    ("loop", 2, 3, [1, 2, 3, 4, 5]),
    ("wave", 2, 3, [1, 3, 5]),  # 0 1 | 1 0 | 0 1: the turning points 2 and 4 are local
    ("wave", 3, 2, [1, 2, 4, 5]),
    ("wave", 1, 3, []),
])
def test_remote_boundaries(name, ranks, reuse, remote):
    for direction in (UNI, BI)[:ranks]:
        placement = Placement(name, ranks, reuse, direction)
        assert [stage for stage in range(-1, placement.stages + 2) if placement.is_remote(stage)] == remote


@settings(max_examples=60, deadline=None)
@given(placements(ranks=9, reuse=6))
def test_every_rank_has_reuse_stages_a_pipe_and_every_stage_one_rank(placement):
    for pipe in range(placement.pipes):
        owned = [placement.stages_of(rank, pipe) for rank in range(placement.ranks)]
        assert all(len(stages) == placement.reuse and list(stages) == sorted(stages) for stages in owned)
        assert sorted(stage for stages in owned for stage in stages) == list(range(placement.stages))
        assert all(placement.rank_of(stage, pipe) == rank for rank, stages in enumerate(owned) for stage in stages)


@settings(max_examples=60, deadline=None)
@given(placements(ranks=9, reuse=6, directions=[BI]))
def test_a_rank_and_its_mirror_hold_the_same_stages(placement):
    for rank in range(placement.ranks):
        mirror = placement.mirror(rank)
        assert placement.mirror(mirror) == rank
        assert placement.stages_of(rank, UP) == placement.stages_of(mirror, DOWN)
        assert placement.stages_on(rank) == placement.stages_on(mirror)
        assert len(placement.stages_on(rank)) == placement.reuse * (1 if mirror == rank else 2)
    copies = [stage for rank in range(placement.ranks) for stage in placement.stages_on(rank)]
    assert set(copies) == set(range(placement.stages))
    assert len(copies) == 2 * placement.stages - placement.reuse * (placement.ranks % 2)


@settings(max_examples=60, deadline=None)
@given(placements(ranks=9, reuse=6))
def test_a_micro_batch_moves_to_a_neighbour_or_stays(placement):
    p = placement.ranks
    for pipe in range(placement.pipes):
        for stage in range(1, placement.stages):
            move = placement.rank_of(stage, pipe) - placement.rank_of(stage - 1, pipe)
            assert placement.is_remote(stage) == (move != 0)
            if placement.name == "wave":
                assert abs(move) <= 1
            else:
                assert move % p == (1 if pipe == DOWN else -1) % p


@pytest.mark.parametrize(("arguments", "message"), [
    (("ring", 2, 2), "unknown placement 'ring': use one of loop, wave"),
    (("loop", 2, 2, "both"), "unknown direction 'both': use one of unidirectional, bidirectional"),
    (("loop", 0, 2), "at least 1 rank, got 0"),
    (("loop", 2, 0), "reuse .* at least 1, got 0"),
    (("wave", 2, -1), "reuse .* at least 1, got -1"),
    (("loop", 1, 2, BI), "bidirectional pipeline needs at least 2 ranks .*, got 1; use direction 'unidirectional'"),
])
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        Placement(*arguments)
