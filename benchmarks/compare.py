"""Run every contender in turn on the same work, and compare.

    python benchmarks/compare.py                              # layers that sleep, 8 ranks
    python benchmarks/compare.py --micro-batches 8 16 --only "deepspeed 1F1B" --only unidirectional
    python benchmarks/compare.py --real                       # the example BERT, 2 ranks

Each rank is a process of its own, and all contenders share them. Times count only on a machine that does nothing else.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for benchmarks, examples and tests, whatever the current directory is

from benchmarks.contenders import Contender, contenders  # noqa: E402
from benchmarks.report import Row, print_tables  # noqa: E402
from benchmarks.runs import Announce, Comparison, run_emulated, run_real, start  # noqa: E402
from benchmarks.settings import Emulation, Reviews  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes (default: 8; 2 with --real)")
    parser.add_argument("--micro-batches", type=int, nargs="+", metavar="M",
                        help="micro-batches a step, a table for each (default: 8; 4 with --real)")
    parser.add_argument("--steps", type=int, help="timed steps (default: 4; with --real 10 in each round)")
    parser.add_argument("--only", action="append", metavar="SUBSTRING",
                        help="only contenders whose names contain it; may be repeated")
    parser.add_argument("--rounds", type=int,
                        help="how often all contenders take turns, so that a machine that gets slower or faster does "
                        "so for all of them; of layers that sleep the middle round counts (default: 1; 5 with --real)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to this file")
    emulated = parser.add_argument_group("layers that sleep", "times of one micro-batch through all layers of a rank")
    for kind in ("forward", "input-grad", "weight-grad"):
        emulated.add_argument(f"--{kind}-ms", type=float, default=80.0, metavar="MS", help="(default: %(default)s)")
    emulated.add_argument("--latency-ms", type=float, default=0.0, metavar="MS",
                          help="a message counts as arrived that much later (default: %(default)s)")
    emulated.add_argument("--width", type=int, default=64,
                          help="floats a row that cross between layers (default: %(default)s)")
    emulated.add_argument("--layers", type=int, help="layers of the model (default: 8 a rank)")
    real = parser.add_argument_group("real compute")
    real.add_argument("--real", action="store_true", help="train the example BERT instead")
    real.add_argument("--cache-dir", type=Path, default=ROOT / ".cache" / "bert_imdb",
                      help="keeps the vocabulary and the token ids (default: the example's)")
    options = parser.parse_args()
    for name, emulated_default, real_default in (("ranks", 8, 2), ("micro_batches", [8], [4]), ("steps", 4, 10),
                                                 ("rounds", 1, 5)):
        if getattr(options, name) is None:
            setattr(options, name, real_default if options.real else emulated_default)
    for name in ("ranks", "steps", "rounds", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} has to be at least 1")
    if min(options.micro_batches) < 1:
        parser.error("--micro-batches have to be at least 1")
    if min(options.forward_ms, options.input_grad_ms, options.weight_grad_ms, options.latency_ms) < 0:
        parser.error("times cannot be negative")
    if options.layers is None:
        options.layers = 8 * options.ranks
    if options.layers < options.ranks or options.layers % options.ranks:
        parser.error(f"{options.layers} layers are not the same number on each of {options.ranks} ranks")
    return options


def chosen(options: argparse.Namespace) -> list[Contender]:
    """The contenders that the user asks for."""
    everyone = contenders(3, (1, 2, 3)) if options.real else contenders(4, (1, 2, 4, 8))
    some = [contender for contender in everyone
            if options.only is None or any(part in contender.name for part in options.only)]
    if not some:
        names = "\n  ".join(contender.name for contender in everyone)
        raise SystemExit(f"no contender's name contains {' or '.join(map(repr, options.only))}; there are\n  {names}")
    return some


def comparisons(options: argparse.Namespace, announce: Announce) -> Iterator[Comparison]:
    """One for each number of micro-batches."""
    who = chosen(options)
    emulation = Emulation(options.ranks, options.layers, options.width, options.forward_ms, options.input_grad_ms,
                          options.weight_grad_ms, options.latency_ms)
    step_ms = None if options.real else emulation.ideal_ms(max(options.micro_batches))
    with closing(start(options.ranks, step_ms, options.steps)) as world:
        for micro_batches in options.micro_batches:
            if options.real:
                yield run_real(world, who, Reviews(options.cache_dir), micro_batches, options.steps, options.rounds,
                               announce)
            else:
                yield run_emulated(world, who, emulation, micro_batches, options.steps, options.rounds, announce)


def main() -> None:
    options = parse_arguments()
    settings: dict[str, Any] = {
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "versions": {name: version(name) for name in ("torch", "deepspeed", "deepspeed-prt")},
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    turns = (len(chosen(options)) + 1) * options.rounds
    rows: list[Row] = []
    bounds = []
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("starting", total=turns * len(options.micro_batches))
        results = comparisons(options, lambda name: progress.update(bar, description=name, advance=1))
        for micro_batches, result in zip(options.micro_batches, results, strict=True):
            print_tables(result.rows, title(options, micro_batches, result))
            rows += result.rows
            bounds.append({"micro_batches": micro_batches, "ideal_ms": result.ideal_ms, "alone_ms": result.alone_ms})
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"settings": settings, "bounds": bounds, "rows": rows}, indent=1),
                                encoding="utf-8")


def title(options: argparse.Namespace, micro_batches: int, result: Comparison) -> str:
    """What a table is of."""
    sizes = f"{options.ranks} ranks, {micro_batches} micro-batches"
    if options.real:
        return f"the example BERT, {sizes}; to ideal: median step over {result.ideal_ms:.1f} ms"
    return (f"{options.layers} layers that sleep, {sizes}; to ideal: least step over {result.ideal_ms:.1f} ms\n"
            f"the layers alone: {result.alone_ms / result.ideal_ms:.3f} to ideal")


if __name__ == "__main__":
    main()
