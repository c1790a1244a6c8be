"""The notation: strict, and it round-trips."""

from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.actions import COMPUTE_KINDS, Action, Kind, format_row, parse, parse_row

KINDS = get_args(Kind)
actions = st.builds(Action, st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(0, 10**6))


@pytest.mark.parametrize(("text", "action"), [
    ("2F0", Action(2, "F", 0)),
    ("2I0", Action(2, "I", 0)),
    ("2W0", Action(2, "W", 0)),
    ("2B0", Action(2, "B", 0)),
    ("2SEND_F0", Action(2, "SEND_F", 0)),
    ("2RECV_F0", Action(2, "RECV_F", 0)),
    ("2SEND_B0", Action(2, "SEND_B", 0)),
    ("2RECV_B0", Action(2, "RECV_B", 0)),
    ("12F345", Action(12, "F", 345)),
])
def test_stage_kind_micro_batch(text, action):
    assert parse(text) == action
    assert str(action) == text


@settings(max_examples=200, deadline=None)
@given(actions)
def test_round_trip(action):
    assert parse(str(action)) == action


@settings(max_examples=50, deadline=None)
@given(st.lists(actions, max_size=8).map(tuple))
def test_row_round_trip(row):
    assert parse_row(format_row(row)) == row


@pytest.mark.parametrize("text", [
    "", " ", "2F", "F0", "F", "20", "2f0", "2X0", "2FF0", "2F0F0", "2F0x", "x2F0", " 2F0", "2F0 ", "2F0\n", "2 F0",
    "2F 0", "-1F0", "2F-1", "+2F0", "2.0F0", "2SEND0", "2SENDF0", "2send_f0", "2SEND_I0", "2SEND_F", "SEND_F0",
    "2F0 2F1", "²F0",
])
def test_refuses_what_is_not_exactly_one_action(text):
    with pytest.raises(ValueError, match="is not an action") as error:
        parse(text)
    assert repr(text) in str(error.value)
    assert "'2F0' or '1SEND_B3'" in str(error.value), "says how to write one"


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789FBIWSENDRCV_fb -x\n", max_size=12))
def test_accepts_only_digits_kind_digits(text):
    stage = text[:len(text) - len(text.lstrip("0123456789"))]
    micro_batch = text[len(text.rstrip("0123456789")):]
    kind = text[len(stage):len(text) - len(micro_batch)]
    numbers = all(number and str(int(number)) == number for number in (stage, micro_batch))  # no leading zeros
    if numbers and kind in KINDS:
        assert parse(text) == Action(int(stage), kind, int(micro_batch))
    else:
        with pytest.raises(ValueError, match="is not an action"):
            parse(text)


def test_a_row_refuses_its_bad_word_and_names_it():
    with pytest.raises(ValueError, match="'0G1' is not an action"):
        parse_row("0F0 0G1 0B0")


def test_rows_are_separated_by_any_white_space_and_written_with_one_space():
    assert format_row(parse_row("  0F0\t0F1\n 0B0  0B1 ")) == "0F0 0F1 0B0 0B1"
    assert parse_row("") == ()
    assert format_row(()) == ""


def test_sends_and_receives_do_not_occupy_the_rank():
    assert [kind for kind in KINDS if Action(0, kind, 0).is_compute] == ["F", "B", "I", "W"]
    assert {"F", "B", "I", "W"} == COMPUTE_KINDS


@pytest.mark.parametrize("text", ["\u06622F0", "2F\u0660", "02F0", "2F00"])
def test_one_way_to_write_a_number(text):
    with pytest.raises(ValueError, match="is not an action"):
        parse(text)
