"""The training programs of an engine: planned for equal stages first, then for what they were measured to take."""

from collections.abc import Sequence

from .config import PRTConfig
from .profile import Measurement, measured_costs
from .program.costs import Costs
from .program.placement import Placement
from .program.program import Program
from .program.simulator import simulate
from .program.sources import program_from

_TRIALS, _TRIED_VISITS = 100, 60_000
"""How many variations of schedules to try, and of how many (stage, micro-batch) pairs at most in all: seconds."""

_GAIN = 0.01
"""The part of a step that another order has to promise to save."""


class Planner:
    """Makes the program of each number of micro-batches, once.

    Args:
        section: says which schedule, and within which cap.
    """

    placement: Placement

    def __init__(self, section: PRTConfig) -> None:
        self._section = section
        self._programs: dict[int, Program] = {}
        self.costs: Costs | None = None

    def program(self, micro_batches: int) -> Program:
        """The verified program.

        Raises:
            ValueError: the schedule cannot be made for these sizes.
            ProgramError: the program does not verify.
        """
        if micro_batches not in self._programs:
            self._programs[micro_batches] = self._make(micro_batches, self.costs)
        return self._programs[micro_batches]

    def choose(self, program: Program, measurements: Sequence[Measurement]) -> tuple[Costs, Program | None]:
        """The costs of the stages, and the program for them if it promises to save enough of what ``program`` takes."""
        costs = measured_costs(program, measurements)
        if self._section.schedule != "auto":
            return costs, None
        visits = self.placement.stages * program.micro_batches
        better = self._make(program.micro_batches, costs, min(_TRIALS, _TRIED_VISITS // visits))
        before, after = (simulate(candidate, costs).makespan for candidate in (program, better))
        if after >= before * (1 - _GAIN):
            return costs, None
        print(f"deepspeed_prt: tries schedule {better.schedule} with {_describe(costs)}; predicted step "
              f"{before:.1f} -> {after:.1f} ms", flush=True)
        return costs, better

    def adopt(self, costs: Costs, program: Program) -> None:
        """Go on with what was chosen; other numbers of micro-batches are planned anew."""
        self.costs = costs
        self._programs = {}
        self.use(program)

    def use(self, program: Program) -> None:
        """Train batches of this many micro-batches by ``program`` from now on."""
        self._programs[program.micro_batches] = program

    def _make(self, micro_batches: int, costs: Costs | None, trials: int = 0) -> Program:
        section = self._section
        return program_from(section.schedule, self.placement, micro_batches, section.max_in_flight, costs,
                            section.split, trials)


def _describe(costs: Costs) -> str:
    """Costs in words, without those of every stage."""
    mean = [sum(times) / len(times) for times in (costs.forward, costs.input_grad, costs.weight_grad)]
    return "F {:.1f}, I {:.1f}, W {:.1f} ms a stage and {:.1f} ms a message".format(*mean, costs.latency)
