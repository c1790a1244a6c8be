"""``prt plan``: what is printed for which arguments, without any process or GPU."""

import json
import re
import sys

import pytest

from deepspeed_prt.cli import main
from deepspeed_prt.program.build import build
from deepspeed_prt.program.csv_format import read_rows
from deepspeed_prt.program.placement import Placement

from .program.common import BI, table_of

KEYS = ["ranks", "reuse", "direction", "placement", "schedule", "micro_batches", "makespan_ms", "ideal_ms", "ratio",
        "bubble_fraction", "lower_bound_ms", "peak_in_flight", "actions"]


def plan(capsys, arguments):
    """The report of a plan."""
    assert main(["plan", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


words = str.split


def refusal(capsys, arguments):
    """What a plan that cannot be made says; nothing is printed but one line."""
    assert main(["plan", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("arguments", [
    "--ranks 1 --micro-batches 1",
    "--ranks 2 --micro-batches 3 --schedule 1f1b",
    "--ranks 2 --micro-batches 3 --reuse 2 --placement wave --schedule zbv",
    "--ranks 3 --micro-batches 4 --direction bidirectional --split-backward false",
])
def test_the_keys_are_always_the_same(capsys, arguments):
    assert list(plan(capsys, arguments)) == KEYS


def test_a_whole_report(capsys):
    assert plan(capsys, "--ranks 2 --micro-batches 2 --schedule 1f1b") == {
        "ranks": 2, "reuse": 1, "direction": "unidirectional", "placement": "loop", "schedule": "1f1b",
        "micro_batches": 2, "makespan_ms": 9, "ideal_ms": 6, "ratio": 1.5, "bubble_fraction": pytest.approx(1 / 3),
        "lower_bound_ms": 7, "peak_in_flight": [2, 1],
        "actions": [
            words("0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1"),
            words("1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"),
        ],
    }


def test_a_schedule_in_the_current_directory(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_order.py").write_text("def order(*sizes):\n    return ['0F0 0B0', '1F0 1B0']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert plan(capsys, "--ranks 2 --micro-batches 1 --schedule my_order:order")["makespan_ms"] == 6
    assert "schedule 'my_order:order', for 2 ranks with reuse 1 in a loop and 2 micro-batches: rank 0: 0F1 is missing" \
        in refusal(capsys, "--ranks 2 --micro-batches 2 --schedule my_order:order")


def test_both_directions(capsys):
    report = plan(capsys, "--ranks 2 --micro-batches 2 --direction bidirectional --schedule 1f1b")
    assert report["direction"] == BI
    assert (report["makespan_ms"], report["ideal_ms"], report["bubble_fraction"]) == (6, 6, 0)
    assert report["actions"] == [
        words("1RECV_F1 0F0 0SEND_F0 1F1 0RECV_B0 1B1 1SEND_B1 0B0"),
        words("1RECV_F0 0F1 0SEND_F1 1F0 0RECV_B1 1B0 1SEND_B0 0B1"),
    ]


# Eight ranks, eight micro-batches, reuse 4 in a loop; 24 ms without any bubble.
@pytest.mark.parametrize(("direction", "split", "makespan", "bound", "kinds"), [
    ("unidirectional", "false", 29.25, 29.25, "FB"),
    ("unidirectional", "true", 25.75, 25.75, "FBIW"),
    ("unidirectional", "auto", 25.75, 25.75, "FBIW"),
    ("bidirectional", "false", 27.0, 27.0, "FB"),
    ("bidirectional", "true", 24.75, 24.75, "FBIW"),
    ("bidirectional", "auto", 24.75, 24.75, "FBIW"),
])
def test_whole_and_split_backwards(capsys, direction, split, makespan, bound, kinds):
    report = plan(capsys, f"--ranks 8 --micro-batches 8 --reuse 4 --direction {direction} --split-backward {split}")
    assert report["makespan_ms"] == pytest.approx(makespan, rel=1e-9)
    assert report["lower_bound_ms"] == pytest.approx(bound, rel=1e-9)
    assert report["ratio"] == pytest.approx(makespan / 24, rel=1e-9)
    words = {re.sub(r"\d+", "", action) for row in report["actions"] for action in row}
    assert words == {*kinds, "SEND_F", "RECV_F", "SEND_B", "RECV_B"}


def test_a_schedule_that_is_split_on_demand(capsys):
    whole, split = (plan(capsys, f"--ranks 2 --micro-batches 2 --schedule 1f1b --split-backward {split}")
                    for split in ("auto", "true"))
    assert (whole["makespan_ms"], split["makespan_ms"]) == (9, 8)
    assert split["actions"][0] == words("0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0 0I1 0W1")


def test_times(capsys):
    report = plan(capsys, "--ranks 2 --micro-batches 1 --schedule 1f1b --forward-ms 1 --input-grad-ms 2 "
                          "--weight-grad-ms 4 --latency-ms 8")
    assert (report["makespan_ms"], report["ideal_ms"]) == (1 + 8 + 1 + 6 + 8 + 6, 7)


def test_the_cap(capsys):
    sizes = "--ranks 4 --micro-batches 8"
    assert plan(capsys, f"{sizes} --schedule zero_bubble")["peak_in_flight"] == [4] * 4
    assert plan(capsys, f"{sizes} --schedule zero_bubble --max-in-flight 2")["peak_in_flight"] == [2] * 4
    assert plan(capsys, f"{sizes} --schedule half_memory")["peak_in_flight"] == [3] * 4


def test_the_program_as_a_file_that_is_a_schedule(capsys, tmp_path):
    path = tmp_path / "program.csv"
    sizes = "--ranks 2 --micro-batches 3 --reuse 2 --placement wave --direction bidirectional"
    first = plan(capsys, f"{sizes} --csv {path}")
    program = build("auto", Placement("wave", 2, 2, BI), 3)
    assert read_rows(path) == program.rows
    assert [" ".join(row) for row in first["actions"]] == table_of(program.rows)
    assert plan(capsys, f"{sizes} --schedule {path}") == {**first, "schedule": str(path)}


@pytest.mark.parametrize(("arguments", "title", "timeline"), [
    ("--schedule 1f1b", "2 ranks x 1 stages in a loop, unidirectional, 2 micro-batches, 1f1b", """
        rank 0  0000 1111 ···· ···· aaaa aaaa ···· bbbb bbbb
        rank 1  ···· 0000 aaaa aaaa 1111 bbbb bbbb ···· ····
    """),
    ("--schedule zero_bubble", "2 ranks x 1 stages in a loop, unidirectional, 2 micro-batches, zero_bubble", """
        rank 0  0000 1111 ···· aaaa AAAA bbbb BBBB
        rank 1  ···· 0000 aaaa 1111 bbbb AAAA BBBB
    """),
    ("--schedule zero_bubble --direction bidirectional",
     "2 ranks x 1 stages in a loop, bidirectional, 2 micro-batches, zero_bubble", """
        rank 0  0000 1111 bbbb aaaa BBBB AAAA
        rank 1  1111 0000 aaaa bbbb AAAA BBBB
    """),
])
def test_a_table_and_a_timeline(capsys, monkeypatch, arguments, title, timeline):
    rows = [row.split(maxsplit=2) for row in timeline.strip().splitlines()]
    monkeypatch.setenv("COLUMNS", str(len("rank 0 ") + len(rows[0][2].replace(" ", ""))))
    assert main(["plan", "--ranks", "2", "--micro-batches", "2", *arguments.split()]) == 0
    out = capsys.readouterr().out
    assert title in " ".join(out.split())
    assert re.findall(r"^rank \d .*$", out, re.MULTILINE) == [f"rank {rank} {row.replace(' ', '')}"
                                                              for _, rank, row in rows]


def test_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.svg"
    plan(capsys, f"--ranks 2 --micro-batches 2 --direction bidirectional --schedule zero_bubble --picture {path}")
    drawn = path.read_text()
    assert drawn.startswith("<?xml")
    assert "1f1b, reuse 1" in drawn
    assert "zero_bubble, reuse 1, loop, bidirectional" in drawn


@pytest.mark.parametrize(("arguments", "message"), [
    ("--ranks 1 --micro-batches 2 --direction bidirectional",
     "prt plan: a bidirectional pipeline needs at least 2 ranks to run in both directions, got 1; "
     "use direction 'unidirectional'\n"),
    ("--ranks 2 --micro-batches 2 --schedule zero_bubble --split-backward false",
     "prt plan: schedule 'zero_bubble' splits the backward, which split_backward false forbids; leave split_backward "
     "out or choose another schedule\n"),
    ("--ranks 2 --micro-batches 2 --reuse 3 --schedule zbv",
     "prt plan: schedule 'zbv' is for placement 'wave' with reuse 2, got 'loop' with reuse 3: use schedule "
     "'zero_bubble'\n"),
    ("--ranks 2 --micro-batches 0", "prt plan: a batch needs at least 1 micro-batch, got 0\n"),
    ("--ranks 2 --micro-batches 2 --max-in-flight 0.5",
     "prt plan: max_in_flight 0.5 is too small: a rank holds at least 1 micro-batch\n"),
    ("--ranks 2 --micro-batches 4 --schedule gpipe --max-in-flight 2",
     "prt plan: rank 0 holds 4 micro-batches in flight, more than max_in_flight 2; raise max_in_flight or choose "
     "another schedule\n"),
    ("--ranks 2 --micro-batches 2 --schedule none.csv", "prt plan: there is no CSV file 'none.csv'\n"),
    ("--ranks 2 --micro-batches 2 --csv no/such/folder.csv",
     "prt plan: [Errno 2] No such file or directory: 'no/such/folder.csv'\n"),
    ("--ranks 2 --micro-batches 2 --forward-ms 0 --input-grad-ms 0 --weight-grad-ms 0",
     "prt plan: forwards and backwards take no time at all; set --forward-ms, --input-grad-ms or --weight-grad-ms\n"),
])
def test_refusals(capsys, arguments, message):
    assert refusal(capsys, arguments) == message


@pytest.mark.parametrize("arguments", [
    "--ranks 2", "--ranks 2 --micro-batches 2 --direction both", "--ranks 2 --micro-batches 2 --split-backward maybe",
    "--ranks 2 --micro-batches 2 --placement spiral", "--ranks 2 --micro-batches 2 --forward-ms -1",
    "--ranks 2 --micro-batches 2 --latency-ms nan", "--ranks 2 --micro-batches 2 --latency-ms soon"])
def test_arguments_that_there_are_not(capsys, arguments):
    with pytest.raises(SystemExit) as error:
        main(["plan", *arguments.split()])
    assert error.value.code == 2
    assert "usage: prt plan" in capsys.readouterr().err
