"""The benchmark runs, and reports what it promises."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import parse_arguments
from benchmarks.report import middle_round

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "compare.py"
KEYS = {"contender", "micro_batches", "refused", "ratio", "step_ms", "median_ms", "over_best_peer", "over_baseline",
        "predicted_ratio", "deviation_percent", "peak_in_flight", "peak_in_flight_min", "planned_peak_in_flight",
        "peak_activation_bytes", "slept_ms", "losses", "loss_difference"}
CONTENDERS = ("deepspeed 1F1B", "torch InterleavedZeroBubble v=4", "deepspeed_prt unidirectional v=2 whole")
REFUSED = "deepspeed DualPipeV"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = tmp_path_factory.mktemp("benchmark") / "result.json"
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--micro-batches", "3", "--layers", "8", "--steps", "2",
               "--latency-ms", "1", "--json", str(result)]
    for kind in ("forward", "input-grad", "weight-grad"):
        command += [f"--{kind}-ms", "2"]
    for name in (*CONTENDERS, REFUSED):
        command += ["--only", name]
    subprocess.run(command, check=True, capture_output=True)
    return json.loads(result.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("arguments", "message"), [
    ("--ranks 0", "--ranks has to be at least 1"),
    ("--steps 0", "--steps has to be at least 1"),
    ("--micro-batches 4 0", "--micro-batches have to be at least 1"),
    ("--latency-ms -5", "times cannot be negative"),
    ("--layers 0", "0 layers are not the same number"),
])
def test_arguments_that_make_no_sense(arguments: str, message: str, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments.split()])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in report["rows"]}


def test_every_row_has_every_key(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == [CONTENDERS[0], REFUSED, *CONTENDERS[1:]]
    assert all(row.keys() >= KEYS for row in rows.values())


def test_settings_are_kept(report: dict[str, Any]) -> None:
    assert report["settings"]["ranks"] == 2
    assert report["settings"]["weight_grad_ms"] == 2.0


@pytest.mark.parametrize("name", CONTENDERS)
def test_the_work_is_the_same(rows: dict[str, dict[str, Any]], name: str) -> None:
    row = rows[name]
    assert row["refused"] is None
    assert row["slept_ms"] == pytest.approx(18) and row["slept_ms_min"] == pytest.approx(18)
    assert row["ratio"] >= 0.9
    assert row["loss_difference"] < 1e-6


def test_ours_holds_what_its_program_says(rows: dict[str, dict[str, Any]]) -> None:
    row = rows[CONTENDERS[-1]]
    assert row["peak_in_flight"] == row["planned_peak_in_flight"]
    assert row["predicted_ratio"] > 1


def test_a_refusal_has_its_reason_and_no_times(rows: dict[str, dict[str, Any]]) -> None:
    row = rows[REFUSED]
    assert "gradient_accumulation_steps >= 2 * 2, got 3" in row["refused"]
    assert row["ratio"] is None and row["step_ms"] is None


def test_of_several_rounds_the_middle_one_counts() -> None:
    rounds = [{"ratio": ratio, "refused": None} for ratio in (1.3, 1.1, 1.2)]
    assert middle_round(rounds) == {"ratio": 1.2, "refused": None, "ratios": [1.3, 1.1, 1.2]}
    assert middle_round(rounds[:1])["ratio"] == 1.3
    refused = {"ratio": None, "refused": "too small"}
    assert middle_round([*rounds, refused]) is refused
