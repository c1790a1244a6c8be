"""The communication pass: rows without sends and receives in, rows with them out."""

from collections import defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.actions import parse
from deepspeed_prt.program.communication import (
    LOOKAHEAD,
    add_communication,
    consumer_of,
    counterpart,
    incoming,
    outgoing,
    peer_of,
)
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import forward_only

from .common import lines, programs, replay, rows_of, table_of


def communicated(table, name, ranks, reuse):
    return table_of(add_communication(rows_of(table), Placement(name, ranks, reuse)))


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
    assert communicated("""
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """, "loop", 3, 1) == lines("""
        0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
        1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 1F1 1SEND_F1 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1
        2RECV_F0 2F0 2RECV_F1 2B0 2SEND_B0 2F1 2B1 2SEND_B1
    """)


def test_reuse_in_a_loop_on_two_ranks_where_next_and_previous_are_one_peer():
    # Rank 1 posts 1RECV_B0, which it needs last, before 3B0: the sender's order is the channel's order.
    assert communicated("""
        0F0 2F0 2B0 0B0
        1F0 3F0 3B0 1B0
    """, "loop", 2, 2) == lines("""
        2RECV_F0          0F0 0SEND_F0 2F0 2SEND_F0 2RECV_B0 0RECV_B0 2B0 2SEND_B0          0B0
        1RECV_F0 3RECV_F0 1F0 1SEND_F0 3F0          1RECV_B0          3B0 3SEND_B0          1B0 1SEND_B0
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


LOOP, WAVE = Placement("loop", 2, 2), Placement("wave", 2, 2)  # routes 0 1 0 1 and 0 1 1 0


@pytest.mark.parametrize(("text", "other", "peer"), [
    ("1SEND_F5", "2RECV_F5", 0),
    ("2RECV_F5", "1SEND_F5", 1),
    ("2SEND_B5", "1RECV_B5", 1),
    ("1RECV_B5", "2SEND_B5", 0),
])
def test_the_two_ends_of_a_message(text, other, peer):
    assert str(counterpart(parse(text))) == other
    assert peer_of(parse(text), LOOP) == peer


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
])
def test_what_a_compute_action_sends_and_needs(text, placement, sent, needed):
    message = outgoing(parse(text), placement)
    assert (str(message) if message else None) == sent
    recv = incoming(parse(text), placement)
    assert (str(recv) if recv else None) == needed


def test_consumers():
    assert str(consumer_of(parse("1RECV_F3"))) == "1F3"
    assert str(consumer_of(parse("1RECV_B3"))) == "1B3"


@settings(max_examples=50, deadline=None)
@given(programs(), st.booleans())
def test_both_sides_of_every_channel_have_one_order(program, evaluates):
    program = forward_only(program) if evaluates else program
    sent, received = defaultdict(list), defaultdict(list)
    route = program.placement.route
    for rank, row in enumerate(program.rows):
        for stage, kind, micro_batch in row:
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
    boundaries = sum(route[stage - 1] != route[stage] for stage in range(1, len(route)))
    directions = 1 if evaluates else 2
    assert sum(map(len, sent.values())) == directions * boundaries * program.micro_batches


@settings(max_examples=50, deadline=None)
@given(programs())
def test_sends_follow_their_action_and_receives_come_ahead(program):
    assert LOOKAHEAD == 1
    for row in program.rows:
        position = {action: index for index, action in enumerate(row)}
        computes = [action for action in row if action.is_compute]
        for index, action in enumerate(row):
            if action.kind in ("SEND_F", "SEND_B"):
                assert str(row[index - 1]) == str(action).replace("SEND_", ""), "a send waits for nothing else"
            elif action.kind in ("RECV_F", "RECV_B"):
                use = computes.index(consumer_of(action))
                forward = parse(f"{action.stage}F{action.micro_batch}")
                if use > 0 and computes[use - 1] != forward:
                    assert index < position[computes[use - 1]], "posted one action before its use at the latest"
                assert index < position[computes[use]]
                if action.kind == "RECV_B":
                    assert position[forward] < index


@settings(max_examples=50, deadline=None)
@given(programs(), st.booleans())
def test_an_executor_with_first_in_first_out_channels_runs_the_program(program, evaluates):
    replay(forward_only(program) if evaluates else program)


@settings(max_examples=30, deadline=None)
@given(programs())
def test_the_computation_is_left_as_it_was(program):
    assert add_communication(program.compute_rows(), program.placement) == program.rows
