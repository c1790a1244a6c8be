"""The slot pass: which buffer each (stage, micro-batch) uses, and for how long."""

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.actions import parse_row
from deepspeed_prt.program.build import build
from deepspeed_prt.program.communication import LOOKAHEAD
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import forward_only
from deepspeed_prt.program.slots import assign_slots, lifetimes

from .common import BI, programs, rows_of


@pytest.mark.parametrize(("row", "slots"), [
    # One after the other: one slot.
    ("0F0 0B0 0F1 0B1", {(0, 0): 0, (0, 1): 0}),
    # Two at a time, and the slot of micro-batch 0 is used again by 2.
    ("0F0 0F1 0B0 0F2 0B1 0B2", {(0, 0): 0, (0, 1): 1, (0, 2): 0}),
    # All at once.
    ("0F0 0F1 0F2 0B0 0B1 0B2", {(0, 0): 0, (0, 1): 1, (0, 2): 2}),
    # The lowest free slot, though 1 was freed first.
    ("0F0 0F1 0F2 0B1 0B0 0F3 0B2 0B3", {(0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 0}),
    # Split: a slot is held until the weight gradient, so 2 needs one of its own.
    ("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2", {(0, 0): 0, (0, 1): 1, (0, 2): 2}),
    ("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", {(0, 0): 0, (0, 1): 1, (0, 2): 0}),
    ("", {}),
])
def test_one_stage(row, slots):
    assert assign_slots([parse_row(row)], Placement("loop", 1, 1)) == (slots, )


def test_a_receive_claims_its_slot_and_a_send_holds_it():
    table = """
        0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    placement = Placement("loop", 2, 1)
    assert lifetimes(rows_of(table)[1], placement) == {(1, 0): (0, 4), (1, 1): (2, 7)}
    assert assign_slots(rows_of(table), placement) == ({(0, 0): 0, (0, 1): 1}, {(1, 0): 0, (1, 1): 1})


def test_a_stage_fed_by_its_own_rank_claims_its_slot_at_the_forward_below():
    placement = Placement("wave", 2, 2)  # stages 1 and 2 on rank 1
    row = parse_row("1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0")
    assert lifetimes(row, placement) == {(1, 0): (0, 7), (2, 0): (1, 5)}


def test_stages_of_a_rank_do_not_share_slots_while_both_are_held():
    # 0F0 claims a slot for stage 0 and one for stage 1, which it feeds; of two claimed at once the lower number goes to
    # the one that is free again first.
    (slots, ) = assign_slots([parse_row("0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1")], Placement("loop", 1, 2))
    assert slots == {(0, 0): 1, (1, 0): 0, (0, 1): 2, (1, 1): 0}


def test_a_split_backward_holds_its_slot_beyond_its_send():
    placement = Placement("loop", 2, 1)
    row = "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1"
    assert lifetimes(parse_row(row), placement) == {(1, 0): (0, 8), (1, 1): (2, 9)}


def test_both_directions():
    # Rank 0: stage 1 of micro-batch 1, which comes up, and stage 0 of micro-batch 0, which goes down.
    placement = Placement("loop", 2, 1, BI)
    row = "1RECV_F1 0F0 0SEND_F0 1F1 0RECV_B0 1B1 1SEND_B1 0B0"
    assert lifetimes(parse_row(row), placement) == {(1, 1): (0, 6), (0, 0): (1, 7)}
    assert assign_slots([parse_row(row)], placement) == ({(1, 1): 0, (0, 0): 1}, )


def test_a_turning_point_in_each_pipe():
    # A wave over two ranks, both directions: rank 1 turns micro-batch 0 at its stages 1 and 2, rank 0 micro-batch 1.
    placement = Placement("wave", 2, 2, BI)
    assert lifetimes(parse_row("0F0 1RECV_F1 1F1 2F1 2SEND_F1"), placement) == {(0, 0): (0, 0), (1, 1): (1, 2),
                                                                              (2, 1): (2, 4)}


def test_one_slot_a_micro_batch_for_1f1b():
    program = build("1f1b", Placement("loop", 4, 1), 8)
    assert [program.num_slots(rank) for rank in range(4)] == [4, 4, 3, 2]
    chimera = build("1f1b", Placement("loop", 4, 1, BI), 8)
    assert [chimera.num_slots(rank) for rank in range(4)] == [4, 4, 4, 4]


def alive(program, rank):
    """For each action of a rank, the (stage, micro-batch) pairs in use, by the meaning of the actions."""
    routes, row = program.placement.routes, program.rows[rank]
    touched = {}
    for index, (stage, kind, micro_batch) in enumerate(row):
        touched.setdefault((stage, micro_batch), []).append(index)
        route = routes[micro_batch % len(routes)]
        if kind == "F" and stage + 1 < len(route) and route[stage + 1] == rank:
            touched.setdefault((stage + 1, micro_batch), []).append(index)
    return [[visit for visit, indices in touched.items() if indices[0] <= index <= indices[-1]]
            for index in range(len(row))]


@settings(max_examples=40, deadline=None)
@given(programs(), st.booleans())
def test_slots_never_clash_and_are_as_few_as_possible(program, evaluates):
    program = forward_only(program) if evaluates else program
    for rank, slots in enumerate(program.slots):
        used = [[slots[visit] for visit in visits] for visits in alive(program, rank)]
        assert all(len(set(together)) == len(together) for together in used)
        assert program.num_slots(rank) == max(map(len, used)), "as many as are ever needed at once"
        assert set().union(*used) == set(range(program.num_slots(rank)))


@settings(max_examples=40, deadline=None)
@given(programs())
def test_a_rank_has_at_most_two_more_slots_than_activations(program):
    # One for the receive that is posted ahead, and one more where the order of a channel pulls a receive forward.
    for rank in range(program.placement.ranks):
        held = program.peak_in_flight(rank) * program.placement.reuse
        assert held <= program.num_slots(rank) <= held + 2
        if program.schedule in ("gpipe", "breadth_first"):
            assert program.num_slots(rank) == held


@settings(max_examples=40, deadline=None)
@given(programs())
def test_evaluation_needs_hardly_more_slots_than_training(program):
    # Training may have to post a receive later, as its message waits for a backward.
    evaluation = forward_only(program)
    for rank in range(program.placement.ranks):
        assert evaluation.num_slots(rank) <= program.num_slots(rank) + LOOKAHEAD
