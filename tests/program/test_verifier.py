"""The verifier catches every kind of broken program: each case is a good program with one small thing changed."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from deepspeed_prt.program.actions import Action
from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import complete, forward_only
from deepspeed_prt.program.simulator import DeadlockError, simulate
from deepspeed_prt.program.slots import assign_slots
from deepspeed_prt.program.verifier import ProgramError, verify

from .common import BI, ReplayError, peaks, programs, replay, rows_of, table_of

TWO = Placement("loop", 2, 1)
GOOD = build("1f1b", TWO, 2)
RANK_0 = "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1"
RANK_1 = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"

SPLIT = build("zero_bubble", TWO, 2)
SPLIT_0 = "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0 0I1 0W1"
SPLIT_1 = "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1"

BOTH = build("1f1b", Placement("loop", 2, 1, BI), 2)  # micro-batch 1 goes up, from rank 1 to rank 0
BOTH_0 = "1RECV_F1 0F0 0SEND_F0 1F1 0RECV_B0 1B1 1SEND_B1 0B0"
BOTH_1 = "1RECV_F0 0F1 0SEND_F1 1F0 0RECV_B1 1B0 1SEND_B0 0B1"


def with_rows(*rows, of=GOOD):
    """The program with other rows, and the slots that these need."""
    rows = rows_of("\n".join(rows))
    return replace(of, rows=rows, slots=assign_slots(rows, of.placement))


def fault(program):
    """What the verifier says."""
    with pytest.raises(ProgramError) as error:
        verify(program)
    return str(error.value)


@pytest.mark.parametrize(("program", "rows"), [(GOOD, [RANK_0, RANK_1]), (SPLIT, [SPLIT_0, SPLIT_1]),
                                               (BOTH, [BOTH_0, BOTH_1])])
def test_the_programs_that_are_broken_below_are_good(program, rows):
    assert table_of(program.rows) == rows
    verify(program)
    verify(with_rows(*rows, of=program))


def test_a_program_error_is_a_value_error():
    assert issubclass(ProgramError, ValueError)


# Missing, duplicate, out of range, wrong rank.


@pytest.mark.parametrize(("before", "after", "message"), [
    (RANK_1, RANK_1.replace("1F1 ", ""), "rank 1: 1F1 is missing"),
    (RANK_0, RANK_0.replace("0B0 ", ""), "rank 0: 0B0 is missing"),
    (RANK_0, RANK_0.replace("0F1 ", "0F1 0F1 "), "rank 0: duplicate 0F1"),
    (RANK_1, RANK_1 + " 1SEND_B1", "rank 1: duplicate 1SEND_B1"),
    (RANK_0, RANK_0 + " 2F0", "rank 0: 2F0 is out of range; stages are 0..1"),
    (RANK_0, RANK_0 + " 0F2", "rank 0: 0F2 is out of range; micro-batches are 0..1"),
    (RANK_1, RANK_1 + " 1SEND_B7", "rank 1: 1SEND_B7 is out of range; micro-batches are 0..1"),
    (RANK_1, RANK_1.replace("1F1", "0F1"), "rank 1: 0F1 belongs to rank 0 in placement 'loop'"),
])
def test_the_wrong_actions(before, after, message):
    rows = (after, RANK_1) if before == RANK_0 else (RANK_0, after)
    assert fault(replace(GOOD, rows=rows_of("\n".join(rows)))) == message


@pytest.mark.parametrize(("before", "after", "message"), [
    (SPLIT_0, SPLIT_0.replace(" 0W1", ""), "rank 0: 0W1 is missing"),
    (SPLIT_1, SPLIT_1.replace(" 1W0", ""), "rank 1: 1W0 is missing"),
    (SPLIT_1, SPLIT_1.replace("1I0 ", ""), "rank 1: 1I0 is missing"),
    (SPLIT_0, SPLIT_0.replace("0I0", "").replace("0W0", ""), "rank 0: 0I0 is missing"),
    (SPLIT_0, SPLIT_0 + " 0W0", "rank 0: duplicate 0W0"),
    (SPLIT_0, SPLIT_0 + " 0I1", "rank 0: duplicate 0I1"),
    # A whole backward does what both halves do.
    (SPLIT_0, SPLIT_0 + " 0B0", "rank 0: duplicate 0I0, 0B0 does the same"),
    (SPLIT_0, SPLIT_0.replace("0I0", "0B0"), "rank 0: duplicate 0W0, 0B0 does the same"),
    (SPLIT_0, SPLIT_0.replace("0W0", "0B0"), "rank 0: duplicate 0I0, 0B0 does the same"),
    (SPLIT_1, SPLIT_1.replace("1W1", "1W2"), "rank 1: 1W2 is out of range; micro-batches are 0..1"),
    (SPLIT_1, SPLIT_1.replace("1W1", "0W1"), "rank 1: 0W1 belongs to rank 0 in placement 'loop'"),
])
def test_the_wrong_halves(before, after, message):
    rows = (after, SPLIT_1) if before == SPLIT_0 else (SPLIT_0, after)
    assert fault(replace(SPLIT, rows=rows_of("\n".join(rows)))) == message


def test_whole_and_split_backwards_may_stand_side_by_side():
    verify(with_rows(SPLIT_0, RANK_1))
    verify(with_rows(RANK_0.replace("0B0", "0I0 0W0"), SPLIT_1))
    assert fault(with_rows(RANK_0.replace("0B0", "0I0"), RANK_1)) == "rank 0: 0W0 is missing"
    assert fault(with_rows(RANK_0.replace("0B0", "0W0"), RANK_1)) == "rank 0: 0I0 is missing"


@pytest.mark.parametrize(("before", "after", "message"), [
    # Each pipe has its own ranks.
    (BOTH_0, BOTH_0.replace("1F1", "0F1"), "rank 0: 0F1 belongs to rank 1 in placement 'loop'"),
    (BOTH_1, BOTH_1.replace("1SEND_B0", "1SEND_B1"), "rank 1: 1SEND_B1 belongs to rank 0 in placement 'loop'"),
    (BOTH_1, BOTH_1.replace("0F1", "0F0"), "rank 1: 0F0 belongs to rank 0 in placement 'loop'"),
    (BOTH_0, BOTH_0.replace("1B1 ", ""), "rank 0: 1B1 is missing"),
    (BOTH_1, BOTH_1 + " 0B1", "rank 1: duplicate 0B1"),
    (BOTH_1, BOTH_1 + " 1F2", "rank 1: 1F2 is out of range; micro-batches are 0..1"),
    (BOTH_0, BOTH_0.replace("1RECV_F1 ", ""), "rank 0: 1RECV_F1 is missing"),
    (BOTH_0, BOTH_0 + " 0SEND_B0", "rank 0: 0SEND_B0 is unmatched; that boundary does not join two ranks"),
])
def test_the_wrong_actions_in_two_pipes(before, after, message):
    rows = (after, BOTH_1) if before == BOTH_0 else (BOTH_0, after)
    assert fault(replace(BOTH, rows=rows_of("\n".join(rows)))) == message


def test_another_direction_than_declared():
    assert fault(replace(BOTH, placement=TWO)) == "rank 0: 1RECV_F1 belongs to rank 1 in placement 'loop'"
    assert fault(replace(GOOD, placement=BOTH.placement)) == "rank 0: 0F1 belongs to rank 1 in placement 'loop'"


@pytest.mark.parametrize(("action", "message"), [
    (Action(-1, "F", 0), "rank 0: -1F0 is out of range; stages are 0..1"),
    (Action(0, "F", -1), "rank 0: 0F-1 is out of range; micro-batches are 0..1"),
])
def test_negative_numbers_which_cannot_be_written(action, message):
    assert fault(replace(GOOD, rows=((*GOOD.rows[0], action), GOOD.rows[1]))) == message


def test_one_row_per_rank():
    assert fault(replace(GOOD, rows=GOOD.rows[:1])) == "a program for 2 ranks has 1 rows; write one row per rank"
    assert fault(replace(GOOD, rows=(*GOOD.rows, ()))) == "a program for 2 ranks has 3 rows; write one row per rank"


def test_a_rank_that_does_nothing():
    assert fault(replace(GOOD, rows=(GOOD.rows[0], ()))) == "rank 1: 1F0 is missing"


def test_rows_of_two_ranks_swapped():
    assert fault(replace(GOOD, rows=GOOD.rows[::-1])) == "rank 0: 1RECV_F0 belongs to rank 1 in placement 'loop'"


def test_fewer_micro_batches_than_declared():
    assert fault(replace(GOOD, micro_batches=3)) == "rank 0: 0F2 is missing"


def test_another_placement_than_declared():
    wave = build("interleaved_1f1b", Placement("wave", 2, 2), 2)
    assert "rank 0: 3RECV_F0 belongs to rank 1" in fault(replace(wave, placement=Placement("loop", 2, 2)))


# Messages: unmatched or in another order on the two sides.


@pytest.mark.parametrize(("rank", "dropped", "message"), [
    (1, "1RECV_F0", "rank 1: 1RECV_F0 is missing"),
    (0, "0SEND_F1", "rank 0: 0SEND_F1 is missing"),
    (0, "0RECV_B1", "rank 0: 0RECV_B1 is missing"),
    (1, "1SEND_B0", "rank 1: 1SEND_B0 is missing"),
])
def test_one_end_of_a_message_without_the_other(rank, dropped, message):
    rows = [RANK_0, RANK_1]
    rows[rank] = " ".join(word for word in rows[rank].split() if word != dropped)
    assert fault(with_rows(*rows)) == message


@pytest.mark.parametrize(("rows", "message"), [
    ((RANK_0.replace("0F1", "0RECV_F1 0F1"), RANK_1), "rank 0: 0RECV_F1 is unmatched"),
    ((RANK_0 + " 0SEND_B1", RANK_1), "rank 0: 0SEND_B1 is unmatched"),
    ((RANK_0, RANK_1.replace("1B0", "1SEND_F0 1B0")), "rank 1: 1SEND_F0 is unmatched"),
    ((RANK_0, RANK_1.replace("1B0", "1RECV_B0 1B0")), "rank 1: 1RECV_B0 is unmatched"),
])
def test_a_message_that_leaves_the_pipeline(rows, message):
    assert fault(with_rows(*rows)) == message + "; that boundary does not join two ranks"


def test_a_message_over_a_boundary_within_a_rank():
    wave = build("interleaved_1f1b", Placement("wave", 2, 2), 1)
    rank_0, rank_1 = table_of(wave.rows)
    assert "1F0 2F0" in rank_1
    broken = with_rows(rank_0, rank_1.replace("1F0 2F0", "1F0 1SEND_F0 2RECV_F0 2F0"), of=wave)
    assert fault(broken) == "rank 1: 1SEND_F0 is unmatched; that boundary does not join two ranks"


def test_two_receives_of_one_channel_swapped():
    three = build("1f1b", Placement("loop", 3, 1), 2)
    rank_0, rank_1, rank_2 = table_of(three.rows)
    assert rank_1.startswith("1RECV_F0 1RECV_F1 1F0")
    swapped = rank_1.replace("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0")
    assert fault(with_rows(rank_0, swapped, rank_2, of=three)) == (
        "channel from rank 0 to rank 1: message 0 is sent by 0SEND_F0 but received by 1RECV_F1; "
        "both sides need one order")


def test_two_sends_of_one_channel_swapped():
    late = RANK_0.replace("0SEND_F0 ", "").replace("0SEND_F1", "0SEND_F1 0SEND_F0")
    assert fault(with_rows(late, RANK_1)) == (
        "channel from rank 0 to rank 1: message 0 is sent by 0SEND_F1 but received by 1RECV_F0; "
        "both sides need one order")


def test_an_activation_and_a_gradient_in_one_channel_swapped():
    # On two ranks in a loop with reuse, both travel from rank 1 to rank 0.
    loop = build("interleaved_1f1b", Placement("loop", 2, 2), 4)
    rank_0, rank_1 = table_of(loop.rows)
    assert "2RECV_F2 0RECV_B0" in rank_0
    swapped = rank_0.replace("2RECV_F2 0RECV_B0", "0RECV_B0 2RECV_F2")
    assert fault(with_rows(swapped, rank_1, of=loop)).startswith(
        "channel from rank 1 to rank 0: message 4 is sent by 1SEND_F2 but received by 0RECV_B0")


def test_messages_of_two_pipes_in_one_channel_swapped():
    # From rank 0 to rank 1: the activation of micro-batch 0, then the gradient of micro-batch 1.
    swapped = BOTH_1.replace("1RECV_F0 ", "").replace("1F0 0RECV_B1", "0RECV_B1 1RECV_F0 1F0")
    assert fault(with_rows(BOTH_0, swapped, of=BOTH)) == (
        "channel from rank 0 to rank 1: message 0 is sent by 0SEND_F0 but received by 0RECV_B1; "
        "both sides need one order")


# Order within a rank.


@pytest.mark.parametrize(("rows", "message"), [
    ((RANK_0, RANK_1.replace("1F1 1B1", "1B1 1F1")), "rank 1: wrong order, 1B1 comes before 1F1"),
    ((RANK_0, RANK_1.replace("1RECV_F0 1F0", "1F0 1RECV_F0")), "rank 1: wrong order, 1F0 comes before 1RECV_F0"),
    ((RANK_0.replace("0F0 0SEND_F0", "0SEND_F0 0F0"), RANK_1), "rank 0: wrong order, 0SEND_F0 comes before 0F0"),
    ((RANK_0, RANK_1.replace("1B0 1SEND_B0", "1SEND_B0 1B0")), "rank 1: wrong order, 1SEND_B0 comes before 1B0"),
    ((RANK_0.replace("0RECV_B1 0B0 0B1", "0B0 0B1 0RECV_B1"), RANK_1),
     "rank 0: wrong order, 0B1 comes before 0RECV_B1"),
    (("0RECV_B0 " + RANK_0.replace("0RECV_B0 ", ""), RANK_1), "rank 0: wrong order, 0RECV_B0 comes before 0F0"),
    ((RANK_0.replace("0B0 0B1", "0B1 0B0"), RANK_1),
     "rank 0: wrong order, 0B0 comes after 0B1; gradients are added in micro-batch order"),
])
def test_the_wrong_order_within_a_rank(rows, message):
    assert fault(with_rows(*rows)) == message


@pytest.mark.parametrize(("rows", "message"), [
    ((SPLIT_0.replace("0I0 0RECV_B1 0W0", "0W0 0RECV_B1 0I0"), SPLIT_1), "rank 0: wrong order, 0W0 comes before 0I0"),
    ((SPLIT_0, "1W1 " + SPLIT_1.replace(" 1W1", "")), "rank 1: wrong order, 1W1 comes before 1I1"),
    ((SPLIT_0, SPLIT_1.replace("1F1 1I1", "1I1 1F1")), "rank 1: wrong order, 1I1 comes before 1F1"),
    ((SPLIT_0, SPLIT_1.replace("1I0 1SEND_B0", "1SEND_B0 1I0")), "rank 1: wrong order, 1SEND_B0 comes before 1I0"),
    ((SPLIT_0.replace("0RECV_B1 0W0 0I1", "0W0 0I1 0RECV_B1"), SPLIT_1),
     "rank 0: wrong order, 0I1 comes before 0RECV_B1"),
    ((SPLIT_0, SPLIT_1.replace("1W0 1W1", "1W1 1W0")),
     "rank 1: wrong order, 1W0 comes after 1W1; gradients are added in micro-batch order"),
    ((SPLIT_0.replace("0W0 0I1 0W1", "0I1 0W1 0W0"), SPLIT_1),
     "rank 0: wrong order, 0W0 comes after 0W1; gradients are added in micro-batch order"),
    # A whole backward and a split one of the same stage.
    ((SPLIT_0.replace("0W0 0I1 0W1", "0B1 0W0"), SPLIT_1),
     "rank 0: wrong order, 0W0 comes after 0B1; gradients are added in micro-batch order"),
])
def test_the_wrong_order_of_halves(rows, message):
    assert fault(with_rows(*rows, of=SPLIT)) == message


def test_input_gradients_may_come_in_any_order():
    # Only weight gradients are added up.
    verify(complete("by hand", rows_of("0F0 0F1 0I1 0I0 0W0 0W1"), Placement("loop", 1, 1), 2, 2))
    verify(complete("by hand", rows_of("""
        0F0 0F1 0I1 0I0 0W0 0W1
        1F0 1F1 1I1 1I0 1W0 1W1
    """), TWO, 2, 2))


@pytest.mark.parametrize(("rows", "message"), [
    ((BOTH_0.replace("1RECV_F1 ", "").replace("1F1", "1F1 1RECV_F1"), BOTH_1),
     "rank 0: wrong order, 1F1 comes before 1RECV_F1"),
    ((BOTH_0, BOTH_1.replace("1F0 0RECV_B1 1B0", "1B0 0RECV_B1 1F0")), "rank 1: wrong order, 1B0 comes before 1F0"),
    ((BOTH_0.replace("1F1 0RECV_B0 1B1", "0RECV_B0 1B1 1F1"), BOTH_1), "rank 0: wrong order, 1B1 comes before 1F1"),
])
def test_the_wrong_order_in_two_pipes(rows, message):
    assert fault(with_rows(*rows, of=BOTH)) == message


@pytest.mark.parametrize(("backwards", "message"), [
    # Stage 1 of both pipes is on rank 1. Within a pipe micro-batches come in order, across pipes in any.
    ("1B0 1B1 1B2 1B3", None),
    ("1B1 1B0 1B3 1B2", None),
    ("1B1 1B3 1B0 1B2", None),
    ("1B2 1B1 1B0 1B3", "rank 1: wrong order, 1B0 comes after 1B2; gradients are added in micro-batch order"),
    ("1B0 1B3 1B2 1B1", "rank 1: wrong order, 1B1 comes after 1B3; gradients are added in micro-batch order"),
    ("1I2 1I3 1I0 1I1 1W0 1W1 1W2 1W3", None),
    ("1I0 1I1 1I2 1I3 1W1 1W0 1W3 1W2", None),
    ("1I0 1I1 1I2 1I3 1W3 1W0 1W1 1W2",
     "rank 1: wrong order, 1W1 comes after 1W3; gradients are added in micro-batch order"),
])
def test_gradients_are_added_in_the_order_of_a_pipe(backwards, message):
    program = complete("by hand", rows_of(f"""
        0F0 0F2 2F1 2F3 2B1 2B3 0B0 0B2
        1F0 1F1 1F2 1F3 {backwards}
        0F1 0F3 2F0 2F2 2B0 2B2 0B1 0B3
    """), Placement("loop", 3, 1, BI), 4, 4)
    if message is None:
        verify(program)
        replay(program)
    else:
        assert fault(program) == message


@pytest.mark.parametrize(("before", "after", "message"), [
    ("1F0 2F0", "2F0 1F0", "rank 1: wrong order, 2F0 comes before 1F0"),
    ("2B0 1B0", "1B0 2B0", "rank 1: wrong order, 1B0 comes before 2B0"),
])
def test_the_wrong_order_of_two_stages_that_feed_each_other_on_a_rank(before, after, message):
    wave = Placement("wave", 2, 2)
    compute = "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"
    verify(complete("by hand", rows_of("\n".join(compute)), wave, 1, 1))
    mutated = compute[0], compute[1].replace(before, after)
    assert fault(complete("by hand", rows_of("\n".join(mutated)), wave, 1, 1)) == message


def test_the_wrong_order_of_two_input_gradients_that_feed_each_other_on_a_rank():
    good, bad = "1F0 2F0 2I0 1I0 1W0 2W0", "1F0 2F0 1I0 2I0 1W0 2W0"
    wave = Placement("wave", 2, 2)
    verify(complete("by hand", rows_of(f"0F0 3F0 3I0 0I0 0W0 3W0\n{good}"), wave, 1, 1))
    assert fault(complete("by hand", rows_of(f"0F0 3F0 3I0 0I0 0W0 3W0\n{bad}"), wave, 1, 1)) == (
        "rank 1: wrong order, 1I0 comes before 2I0")


# Cycles over several ranks.

CYCLE_OF_TWO = with_rows("0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
                         "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1")


def test_two_ranks_that_wait_for_each_other():
    assert fault(CYCLE_OF_TWO) == ("the ranks wait for each other in a cycle: "
                                   "rank 0 at 0B0 waits for 1SEND_B0, which rank 1 does after 1F1; "
                                   "rank 1 at 1F1 waits for 0SEND_F1, which rank 0 does after 0B0")
    with pytest.raises(DeadlockError):
        simulate(CYCLE_OF_TWO, Costs.uniform(TWO))


def test_two_ranks_that_wait_for_each_others_input_gradient():
    cyclic = complete("cyclic", rows_of("""
        0F0 0I0 0F1 0W0 0I1 0W1
        1F0 1F1 1I0 1W0 1I1 1W1
    """), TWO, 2, 2)
    assert fault(cyclic) == ("the ranks wait for each other in a cycle: "
                             "rank 0 at 0I0 waits for 1SEND_B0, which rank 1 does after 1F1; "
                             "rank 1 at 1F1 waits for 0SEND_F1, which rank 0 does after 0I0")
    with pytest.raises(DeadlockError):
        simulate(cyclic, Costs.uniform(TWO))


def test_two_pipes_that_wait_for_each_other():
    cyclic = complete("cyclic", rows_of("""
        1F1 0F0 1B1 0B0
        1F0 0F1 1B0 0B1
    """), BOTH.placement, 2, 2)
    assert fault(cyclic) == ("the ranks wait for each other in a cycle: "
                             "rank 0 at 1F1 waits for 0SEND_F1, which rank 1 does after 1F0; "
                             "rank 1 at 1F0 waits for 0SEND_F0, which rank 0 does after 1F1")
    with pytest.raises(DeadlockError):
        simulate(cyclic, Costs.uniform(BOTH.placement))


def test_three_ranks_that_wait_for_each_other_in_a_circle():
    placement = Placement("loop", 3, 2)
    cyclic = complete("cyclic", rows_of("""
        0F0 3F0 0F1 3F1 3B0 3B1 0B0 0B1
        1F0 1F1 4F0 4F1 4B0 4B1 1B0 1B1
        2F1 2F0 5F0 5F1 5B0 5B1 2B0 2B1
    """), placement, 2, 2)
    assert fault(cyclic) == ("the ranks wait for each other in a cycle: "
                             "rank 0 at 3F0 waits for 2SEND_F0, which rank 2 does after 2F1; "
                             "rank 2 at 2F1 waits for 1SEND_F1, which rank 1 does after 1F1; "
                             "rank 1 at 1F1 waits for 0SEND_F1, which rank 0 does after 3F0")
    with pytest.raises(DeadlockError):
        simulate(cyclic, Costs.uniform(placement))


def test_a_receive_that_comes_before_what_its_message_needs():
    # A device that waits for all it has begun before it starts 2B0 would wait for ever.
    loop = build("interleaved_1f1b", Placement("loop", 2, 2), 1)
    rank_0, rank_1 = table_of(loop.rows)
    assert "2B0 2SEND_B0 0RECV_B0" in rank_0
    early = rank_0.replace("2B0 2SEND_B0 0RECV_B0", "0RECV_B0 2B0 2SEND_B0")
    assert fault(with_rows(early, rank_1, of=loop)) == (
        "rank 0: wrong order, 0RECV_B0 comes before 2B0, without which its message is never sent")


def test_only_the_ranks_of_the_cycle_are_named():
    # Rank 0 waits as well, for what ranks 1 and 2 do not get to.
    cyclic = complete("cyclic", rows_of("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
        2F0 2F1 2B0 2B1
    """), Placement("loop", 3, 1), 2, 2)
    assert fault(cyclic) == ("the ranks wait for each other in a cycle: "
                             "rank 1 at 1B0 waits for 2SEND_B0, which rank 2 does after 2F1; "
                             "rank 2 at 2F1 waits for 1SEND_F1, which rank 1 does after 1B0")


# Slots and the cap.


def test_two_micro_batches_in_one_slot():
    clash = replace(GOOD, slots=({(0, 0): 0, (0, 1): 0}, GOOD.slots[1]))
    assert fault(clash) == "rank 0: slot 0 clash at 0F1: stage 0, micro-batch 0 holds it until 0B0"


def test_a_slot_that_a_receive_claims_too_early():
    clash = replace(GOOD, slots=(GOOD.slots[0], {(1, 0): 0, (1, 1): 0}))
    assert fault(clash) == "rank 1: slot 0 clash at 1RECV_F1: stage 1, micro-batch 0 holds it until 1SEND_B0"


def test_two_stages_of_a_rank_in_one_slot():
    wave = build("interleaved_1f1b", Placement("wave", 2, 2), 1)
    clash = replace(wave, slots=(wave.slots[0], {(1, 0): 0, (2, 0): 0}))
    assert fault(clash) == "rank 1: slot 0 clash at 1F0: stage 1, micro-batch 0 holds it until 1SEND_B0"


def test_an_output_that_would_overwrite_its_own_input():
    evaluation = forward_only(build("interleaved_1f1b", Placement("wave", 1, 2), 1))
    assert table_of(evaluation.rows) == ["0F0 1F0"]
    verify(evaluation)
    clash = replace(evaluation, slots=({(0, 0): 0, (1, 0): 0}, ))
    assert fault(clash) == "rank 0: slot 0 clash at 0F0: stage 0, micro-batch 0 holds it until 0F0"


def test_a_micro_batch_without_a_slot():
    assert fault(replace(GOOD, slots=({(0, 0): 0}, GOOD.slots[1]))) == "rank 0: stage 0, micro-batch 1 has no slot"


def test_a_slot_is_held_until_the_weight_gradient():
    clash = replace(SPLIT, slots=(SPLIT.slots[0], {(1, 0): 0, (1, 1): 0}))
    assert fault(clash) == "rank 1: slot 0 clash at 1RECV_F1: stage 1, micro-batch 0 holds it until 1W0"
    one = complete("by hand", rows_of("0F0 0I0 0W0 0F1 0I1 0W1"), Placement("loop", 1, 1), 2, 1)
    verify(replace(one, slots=({(0, 0): 0, (0, 1): 0}, )))
    late = complete("by hand", rows_of("0F0 0I0 0F1 0W0 0I1 0W1"), Placement("loop", 1, 1), 2, 2)
    assert fault(replace(late, slots=({(0, 0): 0, (0, 1): 0}, ))) == (
        "rank 0: slot 0 clash at 0F1: stage 0, micro-batch 0 holds it until 0W0")


def test_micro_batches_of_two_pipes_in_one_slot():
    clash = replace(BOTH, slots=({(1, 1): 0, (0, 0): 0}, BOTH.slots[1]))
    assert fault(clash) == "rank 0: slot 0 clash at 0F0: stage 1, micro-batch 1 holds it until 1SEND_B1"


def test_a_slot_may_be_used_again():
    one_after_the_other = build("1f1b", Placement("loop", 1, 1), 2)
    assert set(one_after_the_other.slots[0].values()) == {0}
    verify(one_after_the_other)


def test_the_cap():
    verify(replace(GOOD, max_in_flight=2))
    assert fault(replace(GOOD, max_in_flight=1.5)) == (
        "rank 0 holds 2 micro-batches in flight, more than max_in_flight 1.5; "
        "raise max_in_flight or choose another schedule")


def test_the_cap_counts_parts_of_a_micro_batch():
    # Rank 0 holds 0F0 0F1 2F0 2F1, rank 1 1F0 1F1 3F0: two stages a rank, so 2 and 1.5 micro-batches.
    loop = build("interleaved_1f1b", Placement("loop", 2, 2), 2)
    assert peaks(loop) == [2, 1.5]
    assert "rank 0 holds 2 micro-batches in flight, more than max_in_flight 1.5;" in fault(
        replace(loop, max_in_flight=1.5))
    tight = build("interleaved_1f1b", Placement("loop", 2, 2), 4, 1.5)
    assert peaks(tight) == [1.5, 1.5]
    verify(tight)


def test_the_cap_counts_until_the_weight_gradient():
    late = complete("by hand", rows_of("0F0 0I0 0F1 0I1 0W0 0W1"), Placement("loop", 1, 1), 2, 1)
    assert fault(late) == ("rank 0 holds 2 micro-batches in flight, more than max_in_flight 1; "
                           "raise max_in_flight or choose another schedule")
    verify(complete("by hand", rows_of("0F0 0I0 0W0 0F1 0I1 0W1"), Placement("loop", 1, 1), 2, 1))


def test_the_cap_counts_both_pipes():
    assert peaks(BOTH) == [2, 2]
    assert "rank 0 holds 2 micro-batches in flight, more than max_in_flight 1;" in fault(replace(BOTH, max_in_flight=1))


def test_an_evaluation_has_no_cap():
    verify(replace(forward_only(GOOD), max_in_flight=0.5))


# Every mutation of a kind, not only the chosen one.

SMALL = [
    build("1f1b", Placement("loop", 3, 1), 3),
    build("interleaved_1f1b", Placement("loop", 2, 2), 3),
    build("interleaved_1f1b", Placement("wave", 2, 3), 2),
    build("gpipe", Placement("wave", 3, 2), 2),
    forward_only(build("interleaved_1f1b", Placement("loop", 3, 2), 2)),
    build("zero_bubble", Placement("loop", 3, 1), 3),
    build("zbv", Placement("wave", 2, 2), 3),
    build("half_memory", Placement("loop", 2, 2), 2),
    build("1f1b", Placement("loop", 3, 1, BI), 4),
    build("interleaved_1f1b", Placement("wave", 2, 2, BI), 3),
    build("zero_bubble", Placement("loop", 3, 1, BI), 4),
    build("zero_bubble", Placement("wave", 2, 2, BI), 3),
    forward_only(build("zero_bubble", Placement("loop", 2, 2, BI), 3)),
]


def each(programs):
    return pytest.mark.parametrize(
        "program", programs, ids=lambda program: f"{program.schedule}-{program.placement.name}-"
        f"{program.placement.direction}-{'train' if program.has_backward else 'evaluate'}")


each_small = each(SMALL)
each_that_trains = each([program for program in SMALL if program.has_backward])
each_split = each([program for program in SMALL if program.is_split])
each_of_two_pipes = each([program for program in SMALL if program.placement.pipes == 2])


def each_action(program):
    return [(rank, index) for rank, row in enumerate(program.rows) for index in range(len(row))]


def edited(program, rank, row):
    return replace(program, rows=(*program.rows[:rank], tuple(row), *program.rows[rank + 1:]))


@each_small
def test_no_action_can_be_left_out(program):
    for rank, index in each_action(program):
        row = program.rows[rank]
        assert fault(edited(program, rank, row[:index] + row[index + 1:])) == f"rank {rank}: {row[index]} is missing"


@each_small
def test_no_action_can_be_done_twice(program):
    for rank, index in each_action(program):
        row = program.rows[rank]
        assert fault(edited(program, rank, (*row, row[index]))) == f"rank {rank}: duplicate {row[index]}"


@each_small
def test_no_action_can_be_done_by_another_rank(program):
    for rank, index in each_action(program):
        row, other = program.rows[rank], (rank + 1) % program.placement.ranks
        moved = edited(program, rank, row[:index] + row[index + 1:])
        moved = edited(moved, other, (*moved.rows[other], row[index]))
        first = fault(moved)
        assert first in (f"rank {rank}: {row[index]} is missing",
                         f"rank {other}: {row[index]} belongs to rank {rank} in placement "
                         f"'{program.placement.name}'")


@each_that_trains
def test_no_backward_can_be_of_another_kind(program):
    for rank, index in each_action(program):
        row = program.rows[rank]
        stage, kind, micro_batch = row[index]
        for other in {"B", "I", "W"} - {kind} if kind in ("B", "I", "W") else ():
            message = fault(edited(program, rank, (*row[:index], Action(stage, other, micro_batch), *row[index + 1:])))
            if kind == "B":
                assert message == f"rank {rank}: {stage}{'W' if other == 'I' else 'I'}{micro_batch} is missing"
            elif other == "B":
                half = "W" if kind == "I" else "I"
                assert message == (f"rank {rank}: duplicate {stage}{half}{micro_batch}, "
                                   f"{stage}B{micro_batch} does the same")
            else:
                assert message == f"rank {rank}: duplicate {stage}{other}{micro_batch}"


@each_of_two_pipes
def test_no_action_can_be_of_the_other_pipe(program):
    for rank, index in each_action(program):
        row = program.rows[rank]
        stage, kind, micro_batch = row[index]
        moved = Action(stage, kind, micro_batch + 1 if micro_batch + 1 < program.micro_batches else micro_batch - 1)
        message = fault(edited(program, rank, (*row[:index], moved, *row[index + 1:])))
        if program.placement.mirror(rank) == rank:
            assert message == f"rank {rank}: duplicate {moved}"
        else:
            assert message == (f"rank {rank}: {moved} belongs to rank {program.placement.mirror(rank)} in placement "
                               f"'{program.placement.name}'")


@each_that_trains
def test_no_two_gradients_of_a_stage_can_be_swapped_within_a_pipe(program):
    swaps = 0
    for rank, row in enumerate(program.rows):
        adds = [index for index, action in enumerate(row) if action.kind in ("B", "W")]
        for one, other in itertools.combinations(adds, 2):
            if (row[one].stage == row[other].stage
                    and (row[one].micro_batch - row[other].micro_batch) % program.placement.pipes == 0):
                swapped = list(row)
                swapped[one], swapped[other] = row[other], row[one]
                assert f"rank {rank}: wrong order" in fault(edited(program, rank, swapped))
                swaps += 1
    assert swaps >= program.placement.stages


@each_split
def test_no_weight_gradient_can_come_before_its_input_gradient(program):
    for rank, index in each_action(program):
        row = program.rows[rank]
        if row[index].kind == "W":
            half = row.index(row[index]._replace(kind="I"))
            early = list(row)
            early.insert(half, early.pop(index))
            assert fault(edited(program, rank, early)) == (
                f"rank {rank}: wrong order, {row[index]} comes before {row[half]}")


@each_small
def test_no_two_messages_of_a_channel_can_be_swapped_on_one_side(program):
    routes, swaps = program.placement.routes, 0
    for rank, row in enumerate(program.rows):
        channels = {}
        for index, (stage, kind, micro_batch) in enumerate(row):
            if not row[index].is_compute:
                route = routes[micro_batch % len(routes)]
                peer = route[stage + 1] if kind in ("SEND_F", "RECV_B") else route[stage - 1]
                channels.setdefault((kind[:4], peer), []).append(index)
        for indices in channels.values():
            for one, other in itertools.pairwise(indices):
                swapped = list(row)
                swapped[one], swapped[other] = row[other], row[one]
                message = fault(edited(program, rank, swapped))
                assert "both sides need one order" in message or "wrong order" in message
                swaps += 1
    assert swaps > 5


@settings(max_examples=60, deadline=None)
@given(programs())
def test_every_program_verifies_for_training_and_for_evaluation(program):
    verify(program)
    evaluation = forward_only(program)
    verify(evaluation)
    assert not evaluation.has_backward
    assert evaluation.compute_rows() == tuple(
        tuple(action for action in row if action.kind == "F") for row in program.compute_rows())


def mutations(row, program):
    """One change: two actions change places, one moves to another place, or one becomes another one."""
    places = st.integers(0, len(row) - 1)

    def swapped(one, other):
        result = list(row)
        result[one], result[other] = row[other], row[one]
        return result

    def moved(one, other):
        result = list(row)
        result.insert(other, result.pop(one))
        return result

    def changed(place, kind, step):
        stage, old_kind, micro_batch = row[place]
        result = list(row)
        result[place] = Action(stage, kind or old_kind, (micro_batch + step) % program.micro_batches)
        return result

    return (st.builds(swapped, places, places) | st.builds(moved, places, places)
            | st.builds(changed, places, st.sampled_from([None, "F", "B", "I", "W", "SEND_B", "RECV_F"]),
                        st.integers(0, 2)))


@settings(max_examples=200, deadline=None)
@given(programs(ranks=4, reuse=3, micro_batches=4), st.data())
def test_what_the_verifier_accepts_is_what_can_be_executed(program, data):
    # Sometimes a change does no harm.
    rank = data.draw(st.integers(0, program.placement.ranks - 1))
    row = data.draw(mutations(program.rows[rank], program))
    assume(tuple(row) != program.rows[rank])
    mutated = edited(program, rank, row)
    mutated = replace(mutated, slots=assign_slots(mutated.rows, program.placement), max_in_flight=100)
    try:
        replay(mutated)
        runs = True
    except ReplayError:
        runs = False
    try:
        verify(mutated)
        verified = True
    except ProgramError:
        verified = False
    assert verified == runs
