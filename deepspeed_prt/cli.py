"""``prt``: plan a pipeline before a GPU is rented."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .drawing import as_text, to_file
from .program.bounds import ideal_time, lower_bound
from .program.costs import Costs
from .program.csv_format import to_csv
from .program.orders import ORDERS
from .program.placement import DIRECTIONS, PLACEMENTS, Placement
from .program.simulator import Timeline, simulate
from .program.sources import program_from

_SPLIT = {"auto": None, "true": True, "false": False}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    sys.path.insert(0, "")  # schedules of the user's are where they are for a script: in the current directory
    try:
        return options.run(options)
    except (ValueError, ImportError, OSError) as error:
        print(f"prt {options.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prt", description="Pipeline Reuse Technology for DeepSpeed.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="make, verify and simulate a pipeline program",
        description="Make, verify and simulate the program that a \"prt\" section would run, without any GPU. "
        "Times are those of one micro-batch through all the stages of one rank.")
    plan.set_defaults(run=_plan)
    plan.add_argument("--ranks", type=int, required=True, help="pipeline ranks p, one per GPU")
    plan.add_argument("--micro-batches", type=int, required=True,
                      help="micro-batches m per step (gradient_accumulation_steps)")
    plan.add_argument("--reuse", type=int, default=1, help="stages per rank and pipe v")
    plan.add_argument("--placement", choices=PLACEMENTS, default="loop", help="which rank runs which stage")
    plan.add_argument("--schedule", default="auto",
                      help=f"auto, {', '.join(ORDERS)}, a .csv file, or package.module:function")
    plan.add_argument("--direction", choices=DIRECTIONS, default="unidirectional",
                      help="whether micro-batches enter at rank 0, or in turn at both ends")
    plan.add_argument("--split-backward", choices=list(_SPLIT), default="auto",
                      help="whether input and weight gradients are separate actions: with schedule auto in the stages "
                      "where that shortens the step, otherwise in all; auto: may also split none, and leaves named "
                      "schedules as they are")
    plan.add_argument("--forward-ms", type=_milliseconds, default=1.0, help="forward time")
    plan.add_argument("--input-grad-ms", type=_milliseconds, default=1.0, help="time of the input gradients")
    plan.add_argument("--weight-grad-ms", type=_milliseconds, default=1.0, help="time of the weight gradients")
    plan.add_argument("--latency-ms", type=_milliseconds, default=0.0, help="time of a message between ranks")
    plan.add_argument("--transfer-ms", type=_milliseconds, default=0.0,
                      help="time that a message occupies its link besides: its bytes over the bandwidth")
    plan.add_argument("--optimizer-ms", type=_milliseconds, default=0.0, help="time of the optimizer step")
    plan.add_argument("--max-in-flight", type=float, default=None,
                      help="cap on a rank's activations, in micro-batches; by default the number of ranks, "
                           "or what the schedule holds by definition")
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.add_argument("--csv", type=Path, metavar="FILE", help="also write the program, one row per rank")
    plan.add_argument("--picture", type=Path, metavar="FILE",
                      help="also draw the timeline, below that of 1F1B without reuse (.svg, .png or .pdf)")
    return parser


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in milliseconds")
    return value


def _plan(options: argparse.Namespace) -> int:
    placement = Placement(options.placement, options.ranks, options.reuse, options.direction)
    if not options.forward_ms + options.input_grad_ms + options.weight_grad_ms:
        raise ValueError("forwards and backwards take no time at all; set --forward-ms, --input-grad-ms or "
                         "--weight-grad-ms")
    times = options.forward_ms, options.input_grad_ms, options.weight_grad_ms, options.latency_ms, \
        options.transfer_ms, options.optimizer_ms
    costs = Costs.uniform(placement, *times)
    split = _SPLIT[options.split_backward]
    program = program_from(options.schedule, placement, options.micro_batches, options.max_in_flight, costs, split)
    timeline = simulate(program, costs)
    ideal = ideal_time(placement, options.micro_batches, costs)
    report: dict[str, Any] = {
        "ranks": options.ranks,
        "reuse": options.reuse,
        "direction": options.direction,
        "placement": options.placement,
        "schedule": program.schedule,
        "micro_batches": options.micro_batches,
        "makespan_ms": timeline.makespan,
        "ideal_ms": ideal,
        "ratio": timeline.makespan / ideal,
        "bubble_fraction": timeline.bubble_fraction,
        "lower_bound_ms": lower_bound(placement, options.micro_batches, costs, split is not False,
                                      program.max_in_flight),
        "peak_in_flight": [program.peak_in_flight(rank) for rank in range(options.ranks)],
        "actions": [[str(action) for action in row] for row in program.rows],
    }
    if options.csv:
        to_csv(program, options.csv)
    if options.picture:
        plain = Placement("loop", options.ranks, 1)
        plain_costs = Costs.uniform(plain, *times)
        title = f"{program.schedule}, reuse {options.reuse}, {options.placement}, {options.direction}"
        to_file({"1f1b, reuse 1": (simulate(program_from("1f1b", plain, options.micro_batches), plain_costs), plain),
                 title: (timeline, placement)}, options.picture)
    if options.json:
        print(json.dumps(report))
    else:
        _print_table(report, timeline, placement)
    return 0


def _print_table(report: dict[str, Any], timeline: Timeline, placement: Placement) -> None:
    console = Console()
    table = Table(show_header=False, title=f"{report['ranks']} ranks x {report['reuse']} stages in a "
                                           f"{report['placement']}, {report['direction']}, "
                                           f"{report['micro_batches']} micro-batches, {report['schedule']}")
    peaks = report["peak_in_flight"]
    for name, value in (
        ("step", f"{report['makespan_ms']:.3f} ms"),
        ("without bubble", f"{report['ideal_ms']:.3f} ms"),
        ("ratio", f"{report['ratio']:.5f}"),
        ("bubble", f"{100 * report['bubble_fraction']:.2f} %"),
        ("lower bound", f"{report['lower_bound_ms']:.3f} ms"),
        ("over the bound", f"{max(0.0, 100 * (report['makespan_ms'] / report['lower_bound_ms'] - 1)):.2f} %"),
        ("in flight per rank", f"{max(peaks):g} micro-batches at most, {min(peaks):g} at least"),
        ("actions", f"{sum(map(len, report['actions']))}"),
    ):
        table.add_row(name, value)
    console.print(table)
    for line in as_text(timeline, placement, max(console.width - len(f"rank {placement.ranks - 1} "), 20)):
        console.print(line, no_wrap=True, crop=True)
    console.print("digits: forward of that micro-batch; letters: backward (a is micro-batch 0); capitals: weight "
                  "gradients, where they are apart; dots: idle; colours: the rank's stages", style="dim")


if __name__ == "__main__":
    sys.exit(main())
