"""The communication pass: rows without sends and receives in, rows with them out."""

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.actions import parse
from deepspeed_prt.program.communication import (
    LOOKAHEAD,
    add_communication,
    counterpart,
    incoming,
    outgoing,
    peer_of,
)
from deepspeed_prt.program.errors import ProgramError
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import forward_only

from .common import BI, UNI, ReplayError, lines, programs, replay, rows_of, table_of


def communicated(table, name, ranks, reuse, direction=UNI):
    return table_of(add_communication(rows_of(table), Placement(name, ranks, reuse, direction)))


@pytest.mark.parametrize(("name", "reuse", "table"), [
    ("loop", 1, "0F0 0B0"),
    ("loop", 2, "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"),
    ("wave", 3, "0F0 1F0 2F0 2B0 1B0 0B0"),
])
def test_one_rank_sends_nothing(name, reuse, table):
    assert communicated(table, name, 1, reuse) == [table]


def test_one_micro_batch_over_two_ranks():
    assert communicated("""
        0F0 0B0
        1F0 1B0
    """, "loop", 2, 1) == lines("""
                0F0 0SEND_F0 0RECV_B0 0B0
        1RECV_F0 1F0                  1B0 1SEND_B0
    """)


def test_a_gradient_is_received_one_action_ahead_and_never_before_its_forward():
    assert communicated("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """, "loop", 2, 1) == lines("""
                 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1               1B1 1SEND_B1
    """)


def test_a_rank_in_the_middle():
    # Rank 1 makes 1B0 after 1F1, so rank 0 asks for its gradient after 0F1.
    assert communicated("""
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """, "loop", 3, 1) == lines("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
        1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 1F1 1SEND_F1 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1
        2RECV_F0 2F0 2RECV_F1 2B0 2SEND_B0 2F1 2B1 2SEND_B1
    """)


def test_reuse_in_a_loop_on_two_ranks_where_next_and_previous_are_one_peer():
    # Nothing can overlap, and each receive is posted when all that its message needs of the same rank is over.
    assert communicated("""
        0F0 2F0 2B0 0B0
        1F0 3F0 3B0 1B0
    """, "loop", 2, 2) == lines("""
                 0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0
        1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0                   3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0
    """)


def test_the_turning_point_of_a_wave_is_local():
    assert communicated("""
        0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """, "wave", 2, 2) == lines("""
        0F0 0SEND_F0 3RECV_F0 0F1 0SEND_F1 3F0 3RECV_F1 3B0 3SEND_B0 3F1 0RECV_B0 3B1 3SEND_B1 0RECV_B1 0B0 0B1
        1RECV_F0 1F0 1RECV_F1 2F0 2SEND_F0 1F1 2RECV_B0 2F1 2SEND_F1 2B0 2RECV_B1 1B0 1SEND_B0 2B1 1B1 1SEND_B1
    """)


def test_a_later_message_pulls_the_earlier_ones_of_its_channel_forward():
    # Rank 1 uses 1F1 first, but rank 0 sends 1F0's input first, so both receives are posted before 1F1.
    assert communicated("""
        0F0 0F1
        1F1 1F0
    """, "loop", 2, 1) == lines("""
        0F0 0SEND_F0 0F1 0SEND_F1
        1RECV_F0 1RECV_F1 1F1 1F0
    """)


def test_forwards_alone():
    assert communicated("""
        0F0 0F1
        1F0 1F1
    """, "loop", 2, 1) == lines("""
        0F0 0SEND_F0      0F1 0SEND_F1
        1RECV_F0 1RECV_F1 1F0 1F1
    """)


def test_the_gradient_of_the_input_leaves_before_that_of_the_weights_is_computed():
    assert communicated("""
        0F0 0I0 0W0
        1F0 1I0 1W0
    """, "loop", 2, 1) == lines("""
        0F0 0SEND_F0 0RECV_B0 0I0              0W0
        1RECV_F0 1F0          1I0 1SEND_B0     1W0
    """)


def test_a_weight_gradient_hides_a_transfer_as_any_action_does():
    assert communicated("""
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1W0 1I1 1W1
    """, "loop", 2, 1) == lines("""
                 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0     0I1          0W1
        1RECV_F0 1F0 1RECV_F1          1I0 1SEND_B0 1F1          1W0     1I1 1SEND_B1 1W1
    """)


def test_whole_and_split_backwards_side_by_side():
    assert communicated("""
        0F0 0I0 0W0 0F1 0B1
        1F0 1B0 1F1 1I1 1W1
    """, "loop", 2, 1) == lines("""
        0F0 0SEND_F0 0RECV_B0 0I0 0W0               0F1 0SEND_F1 0RECV_B1 0B1
        1RECV_F0 1F0          1B0 1SEND_B0 1RECV_F1 1F1               1I1 1SEND_B1 1W1
    """)


def test_both_directions_on_two_ranks():
    # Micro-batch 1 goes up, from rank 1 to rank 0: each channel has an activation, then a gradient of the other pipe.
    assert communicated("""
        0F0 1F1 1B1 0B0
        0F1 1F0 1B0 0B1
    """, "loop", 2, 1, BI) == lines("""
        1RECV_F1 0F0 0SEND_F0 1F1 0RECV_B0 1B1 1SEND_B1 0B0
        1RECV_F0 0F1 0SEND_F1 1F0 0RECV_B1 1B0 1SEND_B0 0B1
    """)


def test_a_message_waits_for_the_gradient_before_it_in_its_channel():
    # Rank 0 needs the activation of micro-batch 1 right after 0F0, but rank 1 sends it after the gradient of
    # micro-batch 0, whose receive cannot be posted before 0F0.
    assert communicated("""
        0F0 1F1 1B1 0B0
        1F0 1B0 0F1 0B1
    """, "loop", 2, 1, BI) == lines("""
                 0F0 0SEND_F0 0RECV_B0     1RECV_F1     1F1 1B1 1SEND_B1 0B0
        1RECV_F0 1F0          1B0 1SEND_B0 0F1 0SEND_F1 0RECV_B1         0B1
    """)


def test_both_directions_with_a_single_micro_batch():
    assert communicated("""
        0F0 0B0
        1F0 1B0
    """, "loop", 2, 1, BI) == communicated("""
        0F0 0B0
        1F0 1B0
    """, "loop", 2, 1)


def test_both_directions_through_a_rank_in_the_middle():
    # Rank 1 hears from both sides; what it needs first it asks for first.
    assert communicated("""
        0F0 2F1 2B1 0B0
        1F0 1F1 1B1 1B0
        0F1 2F0 2B0 0B1
    """, "loop", 3, 1, BI) == lines("""
                          0F0 0SEND_F0 2RECV_F1     2F1               2B1 2SEND_B1 0RECV_B0 0B0
        1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 1RECV_B1 1RECV_B0 1B1 1SEND_B1 1B0 1SEND_B0
        2RECV_F0          0F1 0SEND_F1 2F0          0RECV_B1          2B0 2SEND_B0          0B1
    """)


LOOP, WAVE = Placement("loop", 2, 2), Placement("wave", 2, 2)  # routes 0 1 0 1 and 0 1 1 0
BOTH = Placement("loop", 3, 1, BI)  # routes 0 1 2 and 2 1 0


@pytest.mark.parametrize(("text", "placement", "other", "peer"), [
    ("1SEND_F5", LOOP, "2RECV_F5", 0),
    ("2RECV_F5", LOOP, "1SEND_F5", 1),
    ("2SEND_B5", LOOP, "1RECV_B5", 1),
    ("1RECV_B5", LOOP, "2SEND_B5", 0),
    ("0SEND_F4", BOTH, "1RECV_F4", 1),
    ("1SEND_F4", BOTH, "2RECV_F4", 2),
    ("1SEND_F5", BOTH, "2RECV_F5", 0),
    ("1RECV_F5", BOTH, "0SEND_F5", 2),
    ("1SEND_B4", BOTH, "0RECV_B4", 0),
    ("1SEND_B5", BOTH, "0RECV_B5", 2),
    ("1RECV_B5", BOTH, "2SEND_B5", 0),
])
def test_the_two_ends_of_a_message(text, placement, other, peer):
    assert str(counterpart(parse(text))) == other
    assert str(counterpart(parse(other))) == text
    assert peer_of(parse(text), placement) == peer


@pytest.mark.parametrize(("text", "placement", "sent", "needed"), [
    ("0F3", LOOP, "0SEND_F3", None),
    ("1F3", LOOP, "1SEND_F3", "1RECV_F3"),
    ("1F3", WAVE, None, "1RECV_F3"),
    ("2F3", WAVE, "2SEND_F3", None),
    ("3F3", LOOP, None, "3RECV_F3"),
    ("3B3", LOOP, "3SEND_B3", None),
    ("2B3", WAVE, None, "2RECV_B3"),
    ("1B3", WAVE, "1SEND_B3", None),
    ("0B3", LOOP, None, "0RECV_B3"),
    ("1I3", LOOP, "1SEND_B3", "1RECV_B3"),
    ("0I3", LOOP, None, "0RECV_B3"),
    ("1I3", WAVE, "1SEND_B3", None),
    ("1W3", LOOP, None, None),
    ("1F3", BOTH, "1SEND_F3", "1RECV_F3"),
    ("0F3", BOTH, "0SEND_F3", None),
    ("2I3", BOTH, "2SEND_B3", None),
])
def test_what_a_compute_action_sends_and_needs(text, placement, sent, needed):
    message = outgoing(parse(text), placement)
    assert (str(message) if message else None) == sent
    recv = incoming(parse(text), placement)
    assert (str(recv) if recv else None) == needed


@settings(max_examples=40, deadline=None)
@given(programs(), st.booleans())
def test_both_sides_of_every_channel_have_one_order(program, evaluates):
    program = forward_only(program) if evaluates else program
    sent, received = defaultdict(list), defaultdict(list)
    routes = program.placement.routes
    for rank, row in enumerate(program.rows):
        for stage, kind, micro_batch in row:
            route = routes[micro_batch % len(routes)]
            if kind == "SEND_F":
                sent[rank, route[stage + 1]].append(("F", stage + 1, micro_batch))
            elif kind == "SEND_B":
                sent[rank, route[stage - 1]].append(("B", stage - 1, micro_batch))
            elif kind == "RECV_F":
                received[route[stage - 1], rank].append(("F", stage, micro_batch))
            elif kind == "RECV_B":
                received[route[stage + 1], rank].append(("B", stage, micro_batch))
    assert sent == received
    assert all(source != target for source, target in sent)
    boundaries = sum(below != above for below, above in itertools.pairwise(routes[0]))
    ways = 1 if evaluates else 2
    assert sum(map(len, sent.values())) == ways * boundaries * program.micro_batches


@settings(max_examples=40, deadline=None)
@given(programs())
def test_sends_follow_their_action_and_receives_come_ahead(program):
    assert LOOKAHEAD == 1
    for row in program.rows:
        position = {action: index for index, action in enumerate(row)}
        computes = [action for action in row if action.is_compute]
        user = {(action.stage, "F" if action.kind == "F" else "B", action.micro_batch): place
                for place, action in enumerate(computes) if action.kind != "W"}
        for index, (stage, kind, micro_batch) in enumerate(row):
            if kind in ("SEND_F", "SEND_B"):
                maker = row[index - 1]
                assert (maker.stage, maker.micro_batch) == (stage, micro_batch), "a send waits for nothing else"
                assert maker.kind == "F" if kind == "SEND_F" else maker.kind in ("B", "I")
            elif kind in ("RECV_F", "RECV_B"):
                use = user[stage, kind[-1], micro_batch]
                assert index < position[computes[use]]
                if kind == "RECV_B":
                    assert position[parse(f"{stage}F{micro_batch}")] < index
                if use > 0 and index > position[computes[use - 1]]:
                    # One action before its use, it would wait for that action.
                    early = list(row)
                    early.insert(position[computes[use - 1]], early.pop(index))
                    rows = tuple(tuple(early) if other is row else other for other in program.rows)
                    with pytest.raises(ReplayError):
                        replay(replace(program, rows=rows))


@settings(max_examples=40, deadline=None)
@given(programs(), st.booleans())
def test_an_executor_with_first_in_first_out_channels_runs_the_program(program, evaluates):
    replay(forward_only(program) if evaluates else program)


@settings(max_examples=30, deadline=None)
@given(programs())
def test_the_computation_is_left_as_it_was(program):
    assert add_communication(program.compute_rows(), program.placement) == program.rows


@pytest.mark.parametrize(("table", "message"), [
    ("0F0 0B0", "a program for 2 ranks has 1 rows; write one row per rank"),
    ("0F0 0B0\n2F0\n", "rank 1: 2F0 is out of range; stages are 0..1"),
])
def test_rows_that_fit_no_placement(table, message):
    with pytest.raises(ProgramError) as error:
        communicated(table, "loop", 2, 1)
    assert str(error.value) == message
