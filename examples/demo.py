"""Train the same script twice, with stock DeepSpeed and with PRT, and compare.

    python examples/demo.py

Two processes, real reviews, no GPU needed. The exit status is 1 if a run fails or if the losses differ.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.simulator import simulate

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "bert_imdb" / "train.py"
CONFIGS = {"stock": ROOT / "ds_configs" / "stock.json", "PRT": ROOT / "ds_configs" / "prt_uni.json"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--model", default="tiny", help="tiny, base or large (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="training steps of each run (default: %(default)s)")
    return parser.parse_args()


def run(name: str, args: argparse.Namespace, result: Path) -> dict[str, Any]:
    """Run the script under the DeepSpeed launcher, its output on this terminal, and read its results.

    Raises:
        SystemExit: the run failed.
    """
    # The launcher of this environment, also where the environment is not activated.
    launcher = shutil.which("deepspeed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if launcher is None:
        raise SystemExit("The command deepspeed is missing; install this package first: pip install -e '.[examples]'")
    command = [launcher, "--num_gpus", str(args.ranks), str(SCRIPT), "--model", args.model, "--steps", str(args.steps),
               "--deepspeed_config", str(CONFIGS[name]), "--json", str(result)]
    print(f"\n== {name}: {' '.join(['deepspeed', *command[1:]])}", flush=True)
    # The launcher starts "python3", which must be the interpreter of this environment as well.
    path = os.pathsep.join([str(Path(launcher).parent), os.environ["PATH"]])
    status = subprocess.run(command, env={**os.environ, "PATH": path}).returncode
    if status != 0 or not result.exists():
        raise SystemExit(f"The {name} run failed with exit status {status}; its output is above.")
    return json.loads(result.read_text(encoding="utf-8"))


def predicted_bubble(config: dict[str, Any], ranks: int) -> float:
    """The idle part of all ranks' time, for stages of equal cost whose backward takes twice as long as the forward."""
    micro_batches = config["gradient_accumulation_steps"]
    section = config.get("prt")
    if section is None:
        return (ranks - 1) / (micro_batches + ranks - 1)
    placement = Placement(section.get("placement", "loop"), ranks, section["reuse"])
    program = build(section.get("schedule", "auto"), placement, micro_batches, section.get("max_in_flight"))
    return simulate(program, Costs.uniform(placement)).bubble_fraction


def comparison(results: dict[str, dict[str, Any]], ranks: int) -> Table:
    """The two runs side by side."""
    configs = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in CONFIGS.items()}
    stages = {name: ranks * config.get("prt", {}).get("reuse", 1) for name, config in configs.items()}
    stock, prt = results["stock"], results["PRT"]
    reviews = f"{stock['eval_samples']} held-out reviews of IMDB train"
    rows = [
        ("stages on ranks", *(f"{stages[name]} on {ranks}" for name in results)),
        ("mean loss, first 5 steps", *(f"{mean(run['losses'][:5]):.4f}" for run in results.values())),
        ("mean loss, last 5 steps", *(f"{mean(run['losses'][-5:]):.4f}" for run in results.values())),
        (f"accuracy on {reviews}", *(f"{run['accuracy']:.4f}" for run in results.values())),
        ("time of a step, median", *(f"{run['step_ms_median']:.1f} ms" for run in results.values())),
        ("samples per second", *(f"{run['samples_per_s']:.1f}" for run in results.values())),
        ("bubble, predicted for equal stages",
         *(f"{100 * predicted_bubble(configs[name], ranks):.1f} %" for name in results)),
        # Also counts what is not the schedule: other programs on these cores, the optimizer step, messages.
        ("time without work, measured", *(f"{100 * (1 - run['busy']):.1f} %" for run in results.values())),
    ]
    table = Table(title=f"BERT on IMDB, {ranks} processes, {len(stock['losses'])} steps")
    for heading in ("", *(f"DeepSpeed, {name}" if name == "stock" else f"DeepSpeed with {name}" for name in results)):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*row)
    table.caption = f"PRT trains {prt['samples_per_s'] / stock['samples_per_s']:.2f} times as many samples per second"
    return table


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run(name, args, Path(folder) / f"{name}.json") for name in CONFIGS}
    console = Console()
    console.print(comparison(results, args.ranks))
    stock, prt = (run["losses"] for run in results.values())
    different = [step for step, (a, b) in enumerate(zip(stock, prt, strict=True)) if a != b]
    if different:
        step = different[0]
        raise SystemExit(f"The losses differ at {len(different)} of {len(stock)} steps, first at step {step}: "
                         f"{stock[step]!r} with stock DeepSpeed, {prt[step]!r} with PRT.")
    console.print(f"All {len(stock)} losses are equal, bit for bit.")


if __name__ == "__main__":
    main()
