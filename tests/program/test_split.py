"""The split pass: rows with whole backwards in, rows with their halves out."""

import pytest
from hypothesis import given, settings

from deepspeed_prt.program.actions import parse_row
from deepspeed_prt.program.split import split_backwards

from .common import lines, programs, rows_of, table_of


@pytest.mark.parametrize(("row", "split"), [
    ("", ""),
    ("0F0", "0F0"),
    ("0F0 0B0", "0F0 0I0 0W0"),
    ("0F0 0F1 0B0 0F2 0B1 0B2", "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"),
    ("0F0 0I0 0F1 0W0 0B1", "0F0 0I0 0F1 0W0 0I1 0W1"),  # what is split already stays
    ("1RECV_B0 1B0 1SEND_B0", "1RECV_B0 1I0 1W0 1SEND_B0"),
])
def test_each_backward_becomes_its_halves_in_its_place(row, split):
    assert table_of(split_backwards([parse_row(row)])) == [split]


def test_every_rank():
    assert table_of(split_backwards(rows_of("""
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """))) == lines("""
        0F0 3F0 3I0 3W0 0I0 0W0
        1F0 2F0 2I0 2W0 1I0 1W0
    """)


@settings(max_examples=30, deadline=None)
@given(programs())
def test_a_second_time_changes_nothing(program):
    once = split_backwards(program.compute_rows())
    assert split_backwards(once) == once
    has_whole = any(action.kind == "B" for row in program.rows for action in row)
    assert (once == program.compute_rows()) == (not has_whole)
