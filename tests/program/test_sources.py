"""Where a schedule comes from: a name, a CSV file, a function in this module."""

import pytest

from deepspeed_prt.program.actions import Action
from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.sources import program_from
from deepspeed_prt.program.verifier import ProgramError

from .common import BI, lines, peaks, table_of

TWO = Placement("loop", 2, 1)
NOT_A_FUNCTION = 7
CALLS = []


def one_after_the_other(placement, micro_batches, max_in_flight):
    """One micro-batch at a time, whatever the placement."""
    CALLS.append((placement, micro_batches, max_in_flight))
    rows = []
    for rank in range(placement.ranks):
        row = []
        for micro_batch in range(micro_batches):
            stages = placement.stages_of(rank, placement.pipe_of(micro_batch))
            row += [Action(stage, "F", micro_batch) for stage in stages]
            row += [Action(stage, "B", micro_batch) for stage in reversed(stages)]
        rows.append(row)
    return rows


def splits(placement, micro_batches, max_in_flight):
    return ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1W0 1I1 1W1"]


def as_strings(placement, micro_batches, max_in_flight):
    return [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def as_tuples(placement, micro_batches, max_in_flight):
    return [[(0, "F", 0), (0, "F", 1), (0, "B", 0), (0, "B", 1)], [(1, "F", 0), (1, "B", 0), (1, "F", 1), (1, "B", 1)]]


def backward_first(placement, micro_batches, max_in_flight):
    return [["0F0", "0F1", "0B0", "0B1"], ["1B0", "1F0", "1F1", "1B1"]]


def forgets_one(placement, micro_batches, max_in_flight):
    return [["0F0", "0F1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]]


def deadlocks(placement, micro_batches, max_in_flight):
    return [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]


def has_a_row_too_many(placement, micro_batches, max_in_flight):
    return [*as_strings(placement, micro_batches, max_in_flight), []]


def has_a_row_too_few(placement, micro_batches, max_in_flight):
    return ["0F0 0F1 0B0 0B1"]


def has_a_stray_weight_gradient(placement, micro_batches, max_in_flight):
    return ["0F0 0F1 0B0 0W0 0B1", "1F0 1B0 1F1 1B1"]


def has_a_stage_too_many(placement, micro_batches, max_in_flight):
    return ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 2F0"]


def returns_nothing(placement, micro_batches, max_in_flight):
    return None


def misspells(placement, micro_batches, max_in_flight):
    return [["0F0", "0F1", "0B0", "0b1"], ["1F0", "1B0", "1F1", "1B1"]]


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "gpipe", "breadth_first", "interleaved_1f1b", "zero_bubble",
                                      "half_memory"])
def test_a_name(schedule):
    assert program_from(schedule, TWO, 3) == build(schedule, TWO, 3)
    assert program_from(schedule, TWO, 3, 5) == build(schedule, TWO, 3, 5)
    costs = Costs.uniform(TWO, forward=3)
    assert program_from(schedule, TWO, 3, None, costs, True) == build(schedule, TWO, 3, None, costs, True)


def test_a_name_in_both_directions():
    both = Placement("loop", 2, 1, BI)
    assert program_from("1f1b", both, 3) == build("1f1b", both, 3)


@pytest.mark.parametrize("schedule", ["", "1F1B", "zero_babble"])
def test_an_unknown_name(schedule):
    with pytest.raises(ValueError, match=f"unknown schedule '{schedule}': use one of auto, 1f1b, interleaved_1f1b, "):
        program_from(schedule, TWO, 3)


def test_a_cap_that_an_order_does_not_keep():
    with pytest.raises(ProgramError, match="rank 0 holds 4 micro-batches in flight, more than max_in_flight 2;"):
        program_from("gpipe", TWO, 4, 2)


def test_a_csv_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    program = program_from(str(path), TWO, 2)
    assert program.rows == build("1f1b", TWO, 2).rows
    assert program.schedule == str(path)


def test_a_csv_file_is_verified(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(ProgramError, match="rank 0: 0B1 is missing"):
        program_from(str(path), TWO, 2)
    path.write_text("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    with pytest.raises(ProgramError, match="rank 0 holds 3 micro-batches in flight, more than max_in_flight 2;"):
        program_from(str(path), TWO, 3)
    assert program_from(str(path), TWO, 3, 3).peak_in_flight(0) == 3


SPLIT = lines("""
    0F0 0F1 0I0 0W0 0I1 0W1
    1F0 1I0 1F1 1W0 1I1 1W1
""")
EACH_SPLIT = lines("""
    0F0 0F1 0I0 0W0 0I1 0W1
    1F0 1I0 1W0 1F1 1I1 1W1
""")


def test_a_csv_file_with_split_backwards(tmp_path):
    path = tmp_path / "split.csv"
    path.write_text("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1W0,1I1,1W1\n")
    for split in (None, True):
        assert table_of(program_from(str(path), TWO, 2, split=split).compute_rows()) == SPLIT
    with pytest.raises(ValueError, match="split.csv' splits the backward, which split_backward false forbids; leave "
                                         "split_backward out or write B instead of I and W"):
        program_from(str(path), TWO, 2, split=False)


def test_whole_backwards_of_a_csv_file_are_split_on_demand(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert table_of(program_from(str(path), TWO, 2, split=True).compute_rows()) == EACH_SPLIT
    assert program_from(str(path), TWO, 2, split=False) == program_from(str(path), TWO, 2)


def test_a_csv_file_in_both_directions(tmp_path):
    path = tmp_path / "chimera.csv"
    path.write_text("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n")
    both = Placement("loop", 2, 1, BI)
    assert program_from(str(path), both, 2).rows == build("1f1b", both, 2).rows
    with pytest.raises(ProgramError, match="rank 0: 1F1 belongs to rank 1 in placement 'loop'"):
        program_from(str(path), TWO, 2)


@pytest.mark.parametrize(("split", "table"), [(None, SPLIT), (True, SPLIT)])
def test_a_function_with_split_backwards(split, table):
    assert table_of(program_from(f"{__name__}:splits", TWO, 2, split=split).compute_rows()) == table


def test_split_backwards_of_a_function_that_are_forbidden():
    with pytest.raises(ValueError, match="splits' splits the backward, which split_backward false forbids"):
        program_from(f"{__name__}:splits", TWO, 2, split=False)


def test_a_function_in_both_directions_split_on_demand():
    both = Placement("loop", 2, 1, BI)
    assert table_of(program_from(f"{__name__}:one_after_the_other", both, 2, split=True).compute_rows()) == lines("""
        0F0 0I0 0W0 1F1 1I1 1W1
        1F0 1I0 1W0 0F1 0I1 0W1
    """)


def test_a_function():
    placement = Placement("wave", 3, 2)
    program = program_from(f"{__name__}:one_after_the_other", placement, 4)
    assert CALLS.pop() == (placement, 4, 3), "the default cap is p"
    assert peaks(program) == [1, 1, 1]
    program_from(f"{__name__}:one_after_the_other", placement, 4, 1.5)
    assert CALLS.pop() == (placement, 4, 1.5)


@pytest.mark.parametrize("function", ["as_strings", "as_tuples"])
def test_a_function_may_write_strings_or_tuples(function):
    program = program_from(f"{__name__}:{function}", TWO, 2)
    assert program.rows == build("1f1b", TWO, 2).rows
    assert all(isinstance(action, Action) for row in program.rows for action in row)


@pytest.mark.parametrize(("function", "message"), [
    ("backward_first", "rank 1: wrong order, 1B0 comes before 1F0"),
    ("forgets_one", "rank 0: 0B1 is missing"),
    ("deadlocks", "the ranks wait for each other in a cycle: rank 0 at 0B0 waits for 1SEND_B0"),
    ("has_a_row_too_many", "a program for 2 ranks has 3 rows"),
    ("has_a_row_too_few", "a program for 2 ranks has 1 rows"),
    ("has_a_stray_weight_gradient", "rank 0: duplicate 0W0, 0B0 does the same"),
    ("has_a_stage_too_many", "rank 1: 2F0 is out of range"),
])
def test_a_function_that_makes_a_bad_program_is_refused(function, message):
    with pytest.raises(ProgramError, match=message):
        program_from(f"{__name__}:{function}", TWO, 2)


def test_a_function_that_does_not_fit_the_sizes_is_refused():
    with pytest.raises(ProgramError, match="rank 0: 0F2 is missing"):
        program_from(f"{__name__}:as_strings", TWO, 3)


def test_a_function_that_misspells_an_action():
    with pytest.raises(ValueError, match="'0b1' is not an action"):
        program_from(f"{__name__}:misspells", TWO, 2)


@pytest.mark.parametrize(("schedule", "message"), [
    ("no_such_module_anywhere:function", "cannot be loaded: No module named 'no_such_module_anywhere'"),
    (f"{__name__}.nothing:function", "cannot be loaded: No module named"),
    (f"{__name__}:no_such_function", "cannot be loaded: module .* has no attribute 'no_such_function'"),
    (f"{__name__}:", "cannot be loaded: .* write \"package.module:function\""),
    (f"{__name__}:NOT_A_FUNCTION", "is of type int, not a function"),
])
def test_a_function_that_cannot_be_had(schedule, message):
    with pytest.raises(ValueError, match=message) as error:
        program_from(schedule, TWO, 2)
    assert repr(schedule) in str(error.value)


@pytest.mark.parametrize("function", ["returns_nothing", "misspells"])
def test_what_a_function_returns_wrongly_is_said_with_its_name(function):
    with pytest.raises(ValueError, match=rf"{function}' has to return one row of actions per rank"):
        program_from(f"{__name__}:{function}", TWO, 2)


@pytest.mark.parametrize("schedule", [":function", ".relative:function"])
def test_a_path_that_is_none_is_refused(schedule):
    with pytest.raises(ValueError, match="cannot be loaded"):
        program_from(schedule, TWO, 2)


@pytest.mark.parametrize("cap", [float("nan"), 0, 0.5, -1])
def test_a_cap_that_is_too_small(cap):
    with pytest.raises(ValueError, match="is too small: a rank holds at least 1 micro-batch"):
        program_from("auto", TWO, 2, cap)


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "gpipe", f"{__name__}:one_after_the_other"])
def test_no_cap(schedule):
    assert program_from(schedule, TWO, 9, float("inf")).rows == program_from(schedule, TWO, 9, 9).rows
