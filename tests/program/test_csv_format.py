"""CSV files: written, read, and read by torch."""

import csv
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.actions import Action, Kind, format_row
from deepspeed_prt.program.build import build
from deepspeed_prt.program.csv_format import read_compute_rows, read_rows, to_csv
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import complete, forward_only

from .common import BI, lines, programs, table_of

TWO = Placement("loop", 2, 1)


def test_a_file_is_one_line_per_rank(tmp_path):
    to_csv(build("1f1b", TWO, 1), tmp_path / "one.csv")
    assert (tmp_path / "one.csv").read_text().splitlines() == ["0F0,0SEND_F0,0RECV_B0,0B0",
                                                              "1RECV_F0,1F0,1B0,1SEND_B0"]


def test_a_file_of_a_split_program_in_both_directions(tmp_path):
    to_csv(build("zero_bubble", Placement("loop", 2, 1, BI), 2), tmp_path / "two.csv")
    assert (tmp_path / "two.csv").read_text().splitlines() == [
        "1RECV_F1,0F0,0SEND_F0,1F1,0RECV_B0,1I1,1SEND_B1,0I0,1W1,0W0",
        "1RECV_F0,0F1,0SEND_F1,1F0,0RECV_B1,1I0,1SEND_B0,0I1,1W0,0W1"]


@settings(max_examples=30, deadline=None)
@given(program=programs(), evaluates=st.booleans())
def test_round_trip(tmp_path_factory, program, evaluates):
    program = forward_only(program) if evaluates else program
    path = tmp_path_factory.mktemp("csv") / "program.csv"
    to_csv(program, path)
    assert read_rows(path) == program.rows
    assert read_compute_rows(path) == program.compute_rows()
    again = complete(program.schedule, read_compute_rows(path), program.placement, program.micro_batches,
                     program.max_in_flight)
    assert again == program


ONE_F_ONE_B = lines("""
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
""")


def test_a_file_of_compute_actions_is_enough(tmp_path):
    path = tmp_path / "compute.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert table_of(read_compute_rows(path)) == ONE_F_ONE_B


def test_sends_and_receives_in_the_file_are_left_out(tmp_path):
    path = tmp_path / "late.csv"
    path.write_text("0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n")
    assert table_of(read_compute_rows(path)) == ONE_F_ONE_B


def test_empty_cells_and_padding_are_skipped(tmp_path):
    # As a spreadsheet writes a timeline: idle steps are empty cells.
    path = tmp_path / "sparse.csv"
    path.write_text("0F0, 0F1 ,,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,\r\n")
    assert table_of(read_compute_rows(path)) == ONE_F_ONE_B


def test_split_backwards_are_read(tmp_path):
    path = tmp_path / "split.csv"
    path.write_text("0F0,0I0,0W0\n")
    assert read_rows(path) == ((Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)), )


@pytest.mark.parametrize(("text", "line", "cell"), [
    ("0F0,0b0\n1F0,1B0\n", 1, "0b0"),
    ("0F0,0B0\n1F0,oops\n", 2, "oops"),
    ("0F0,0B0\n\n1F0,1B0 1B1\n", 3, "1B0 1B1"),
    ("0F0;0B0\n", 1, "0F0;0B0"),
])
def test_a_bad_cell_is_named_with_its_file_and_line(tmp_path, text, line, cell):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_compute_rows(path)
    assert str(error.value).startswith(f"{path}, line {line}: {cell!r} is not an action")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 999), st.sampled_from(get_args(Kind)), st.integers(0, 999))
def test_torch_reads_our_notation_and_we_read_torchs(stage, kind, micro_batch):
    from torch.distributed.pipelining.schedules import _Action
    action = Action(stage, kind, micro_batch)
    theirs = _Action.from_str(str(action))
    assert (theirs.stage_index, str(theirs.computation_type.value), theirs.microbatch_index) == action
    assert str(theirs) == str(action)
    assert theirs.is_compute_op == action.is_compute


def test_torch_reads_a_whole_file(tmp_path):
    from torch.distributed.pipelining.schedules import _Action
    program = build("zero_bubble", Placement("wave", 3, 2, BI), 5)
    to_csv(program, tmp_path / "program.csv")
    with (tmp_path / "program.csv").open(newline="") as file:
        theirs = [[_Action.from_str(cell) for cell in cells] for cells in csv.reader(file)]
    assert [[str(action) for action in row] for row in theirs] == [[str(action) for action in row]
                                                                   for row in program.rows]


def test_blank_lines_are_no_ranks(tmp_path):
    path = tmp_path / "program.csv"
    path.write_text("0F0,0B0\n\n1F0,1B0\n\n")
    assert [format_row(row) for row in read_rows(path)] == ["0F0 0B0", "1F0 1B0"]


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="there is no CSV file"):
        read_rows(tmp_path / "no.csv")


def test_a_spreadsheets_byte_order_mark(tmp_path):
    path = tmp_path / "program.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8-sig")
    assert [format_row(row) for row in read_rows(path)] == ["0F0 0B0", "1F0 1B0"]
