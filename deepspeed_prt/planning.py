"""The training programs of an engine: planned for equal stages first, then for what they were measured to take."""

from typing import Any

from .config import PRTConfig
from .control import Control
from .errors import PRTConfigError, as_config_errors
from .program.calibration import MOST_SPLITTING
from .program.costs import Costs
from .program.orders import ORDERS
from .program.placement import Placement
from .program.program import Program
from .program.simulator import simulate
from .program.sources import is_users_own, program_from

_TRIALS, _TRIED_VISITS = 200, 60_000
"""How many variations of schedules to try, and of how many (stage, micro-batch) pairs at most in all: seconds."""

_GAIN = 0.01
"""The part of a step that another order has to promise to save."""


class Planner:
    """Makes the program of each number of micro-batches, once.

    Args:
        section: says which schedule, and within which cap.
        control: compares what ranks make of an order of the user's.

    Attributes:
        placement: to be set before anything is planned.
        split: whether backwards are split; None leaves it to the search.
        costs: what the stages take, once that is known.
    """

    placement: Placement

    def __init__(self, section: PRTConfig, control: Control) -> None:
        self._section = section
        self._control = control
        self._programs: dict[int, Program] = {}
        self.split = section.split
        self.costs: Costs | None = None

    def program(self, micro_batches: int) -> Program:
        """The verified program; to make one of the user's is a collective over the world.

        Raises:
            PRTConfigError: it cannot be made for these sizes, does not verify, or is not the same on all ranks.
        """
        if micro_batches not in self._programs:
            # An order by name, made for measured costs as they are, may well be longer than one for equal stages.
            trials = 1 if self.costs is not None and self._section.schedule != "auto" else 0
            make = self._make_alike if is_users_own(self._section.schedule) else self._make
            with as_config_errors():
                self._programs[micro_batches] = make(micro_batches, self.costs, self.split, trials)
        return self._programs[micro_batches]

    def choose(self, program: Program, costs: Costs) -> list[Program]:
        """The programs that may be faster than ``program`` where the stages take ``costs``.

        These are the best one (of those with its name, where the user gave one), if it promises to save enough; and
        with ``"auto"``, where backwards need not be split, the best that splits none: halves take longer than the
        whole, but how much longer is only seen by trying; a step is longer by ``MOST_SPLITTING`` of it at most.
        """
        is_auto = self._section.schedule == "auto"
        if not is_auto and not (self._section.schedule in ORDERS and ORDERS[self._section.schedule].uses_costs):
            return []
        before = simulate(program, costs).makespan
        visits = self.placement.stages * program.micro_batches
        best = self._make(program.micro_batches, costs, self.split, min(_TRIALS, _TRIED_VISITS // visits))
        candidates = [best]
        if is_auto and self.split is None and best.is_split:
            candidates.append(self._make(program.micro_batches, costs, split=False))
        chosen = []
        for candidate in candidates:
            after = simulate(candidate, costs).makespan
            worth = 1 + MOST_SPLITTING if program.is_split and not candidate.is_split else 1 - _GAIN
            if after < before * worth:
                print(f"deepspeed_prt: tries {describe(candidate)}, with {_describe_costs(costs)}; predicted step "
                      f"{before:.1f} -> {after:.1f} ms", flush=True)
                chosen.append(candidate)
        return chosen

    def adopt(self, costs: Costs, program: Program) -> None:
        """Go on with what was chosen; other numbers of micro-batches are planned anew."""
        self.costs = costs
        self._programs = {}
        self.use(program)

    def use(self, program: Program) -> None:
        """Train batches of this many micro-batches by ``program`` from now on."""
        self._programs[program.micro_batches] = program

    def _make(self, micro_batches: int, costs: Costs | None, split: bool | None, trials: int = 0) -> Program:
        section = self._section
        return program_from(section.schedule, self.placement, micro_batches, section.max_in_flight, costs, split,
                            trials)

    def _make_alike(self, *sizes: Any) -> Program:
        """As :meth:`_make`, of what may differ between ranks; all of them refuse it if it does."""
        program, error = None, None
        try:
            program = self._make(*sizes)
        except ValueError as caught:
            error = caught
        self._control.agree(error, "making the program")
        assert program is not None
        if program.rows != self._control.share(program.rows):
            error = PRTConfigError(f"rank {self._control.global_rank} and rank 0 made different programs; as each rank "
                                   "makes it, the schedule must not depend on the rank, on random numbers or on the "
                                   "order of a set, and a CSV file has to be the same everywhere")
        self._control.agree(error, "comparing programs")
        return program


def describe(program: Program) -> str:
    """A program in words."""
    split, stages = len(program.split_stages), program.placement.stages
    partly = f"backward split in {split} of {stages} stages"
    backward = {0: "whole backward", stages: "split backward"}.get(split, partly)
    return f"{program.schedule}, {backward}"


def _describe_costs(costs: Costs) -> str:
    """Costs in words, without those of every stage."""
    mean = [sum(times) / len(times) for times in (costs.forward, costs.input_grad, costs.weight_grad)]
    return "F {:.1f}, I {:.1f}, W {:.1f} ms a stage and {:.1f} ms a message".format(*mean, costs.latency)
