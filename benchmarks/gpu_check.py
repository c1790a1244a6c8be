"""Compare the engine with the stock one on GPUs; see gpu_check.sh.

    benchmarks/gpu_check.sh                     # all of it
    benchmarks/gpu_check.sh --ranks 2 --precision fp16
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PRECISIONS = ("fp32", "bf16", "fp16")
MODES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "reuse 2": {"reuse": 2},
    "reuse 2, whole backward": {"reuse": 2, "split_backward": False},
    "reuse 2, both directions": {"reuse": 2, "direction": "bidirectional"},
}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Relative, of losses: sums may be ordered otherwise, and kernels chosen by shape."""
LIMIT_S, RUN_LIMIT_S = 330, 100
"""Of all runs together, and of one; NCCL that cannot connect waits for ever."""
STACKS_S = 80
"""When a run that has not ended shows where its ranks are."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="(default: all)")
    parser.add_argument("--steps", type=int, default=5, help="batches of each run (default: %(default)s)")
    parser.add_argument("--anyway", action="store_true", help="where there is no GPU, to try this script")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    import torch
    devices = torch.cuda.device_count()
    if not devices and not options.anyway:
        print("gpu_check: there is no CUDA GPU here, nothing was checked")
        return 0
    console = Console(width=130)
    has_failed = False
    deadline = time.monotonic() + LIMIT_S
    for ranks in options.ranks:
        for precision in options.precision:
            limit = min(RUN_LIMIT_S, deadline - time.monotonic())
            if limit <= 0:
                print(f"gpu_check: FAILED, all runs together take more than {LIMIT_S} s; try --ranks or --precision")
                return 1
            reports = run(ranks, precision, options.steps, devices, limit)
            if reports is None:
                has_failed = True
                continue
            table = Table(title=f"{ranks} ranks on {devices or 'no'} GPU, {precision}")
            for heading in ("mode", "last loss", "losses differ", "steps skipped", "host waits a step",
                            "peak MiB of each rank"):
                table.add_column(heading)
            stock = reports[0]["stock"]
            for mode in MODES:
                differences = [abs(mine - theirs) / abs(theirs) for report in reports
                               for mine, theirs in zip(report[mode]["losses"], stock["losses"], strict=True)]
                # Not the greatest at once, which may hide what is no number.
                difference = next((some for some in differences if not some <= TOLERANCE[precision]), max(differences))
                skipped = {report[mode]["skipped"] for report in reports}
                waits = max(report[mode]["waits"] for report in reports)
                is_right = (difference <= TOLERANCE[precision] and skipped == {stock["skipped"]}
                            and (mode == "stock" or waits == 0))
                has_failed |= not is_right
                table.add_row(mode, f"{reports[0][mode]['losses'][-1]:.6f}", f"{difference:.1e}",
                              " ".join(map(str, sorted(skipped))), f"{waits}",
                              " ".join(f"{report[mode]['peak_mib']:.1f}" for report in reports),
                              style="" if is_right else "red")
            console.print(table)
    print("gpu_check:", "FAILED" if has_failed else "passed")
    return int(has_failed)


def run(ranks: int, precision: str, steps: int, devices: int, limit: float) -> list[dict[str, Any]] | None:
    """Every rank's report; None, and its output, if a rank fails or ``limit`` seconds do not suffice."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--",
                   str(Path(__file__).with_name("gpu_check_worker.py")), precision, str(steps), folder]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PRT_CHECK_DEVICES": str(devices)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) as launcher:
            try:
                output, _ = launcher.communicate(timeout=limit)
                what = "failed"
            except subprocess.TimeoutExpired:
                launcher.terminate()  # it ends its workers, which would keep the GPU busy; killed, it could not
                output, _ = launcher.communicate()
                what = f"had no end within {limit:.0f} s"
        if launcher.returncode:
            print(f"gpu_check: {ranks} ranks, {precision} {what}:\n{output[-6000:]}")
            return None
        return [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


if __name__ == "__main__":
    sys.exit(main())
