"""How the program changes while training: batches are measured, other orders are tried, and the fastest one stays."""

from collections.abc import Callable, Sequence
from typing import Any

from .control import Control
from .planning import Planner, describe
from .profile import Profile, measured_costs, shortest_batch
from .program.costs import Costs
from .program.program import Program

_MEASURED = range(1, 3)
"""The batches that are measured; shapes are agreed and memory is allocated in the first one."""

_ROUNDS = 2
"""How many batches each order is tried for; of each the shortest counts, as one may have been disturbed.

Those of the order so far are measured as well.
"""


class Replanning:
    """Plans once more, for what batches took, and goes on with a new order only if it turns out to be the fastest.

    The first rank decides for all; placement stays, and with it what each rank computes.

    Args:
        planner: makes and keeps the programs.
        control: brings decisions to all ranks.
        new_profile: makes what times some batches.
    """

    def __init__(self, planner: Planner, control: Control, new_profile: Callable[[], Profile]) -> None:
        self._planner = planner
        self._control = control
        self._new_profile = new_profile
        self._measured = new_profile()
        self._batches = 0
        self._contest: _Contest | None = None

    def profile(self, program: Program) -> Profile | None:
        """What is to time the next batch, trained by ``program``; None if nothing is."""
        if self._contest is not None:
            return self._contest.profile if program is self._contest.program else None
        return self._measured if self._batches in _MEASURED else None

    def batch_trained(self, program: Program) -> bool:
        """Note that ``program`` has trained a batch; returns whether another one is to train the next.

        A collective over the world, where there is something to decide.

        Raises:
            Exception: planning failed, here on the first rank.
            RankFailedError: planning failed, there.
        """
        if self._contest is not None:
            return program is self._contest.program and self._go_on(self._contest)
        self._batches += 1
        return self._batches == _MEASURED.stop and self._plan_again(program)

    def _plan_again(self, program: Program) -> bool:
        measurements = self._control.gather(self._measured.measurement())

        def decide() -> tuple[Costs, list[Program]]:
            costs = measured_costs(program, measurements)
            return costs, self._planner.choose(program, costs)

        costs, others = self._decided(decide)
        self._planner.adopt(costs, program)
        if others:
            self._contest = _Contest([program, *others], [self._measured, *(self._new_profile() for _ in others)])
            self._planner.use(self._contest.program)
        return True

    def _go_on(self, contest: "_Contest") -> bool:
        """Change the order, or end with the fastest one."""
        contest.batches += 1
        contest.turn = (contest.turn + 1) % len(contest.programs)
        if contest.batches == _ROUNDS * len(contest.programs):
            self._end(contest)
        else:
            self._planner.use(contest.program)
        return True

    def _end(self, contest: "_Contest") -> None:
        tried = [profile.batches[-_ROUNDS:] for profile in contest.profiles]
        measurements, per_rank = zip(*self._control.gather((self._measured.measurement(), tried)), strict=True)
        times = [shortest_batch(of_program) for of_program in zip(*per_rank, strict=True)]
        costs, contest.turn = self._decided(
            lambda: (measured_costs(contest.programs[0], measurements), times.index(min(times))))
        self._contest = None
        if not contest.program.is_split and any(program.is_split for program in contest.programs):
            self._planner.split = False
        self._planner.adopt(costs, contest.program)
        if self._control.global_rank == 0:
            others = "; ".join(f"{time:.1f} ms ({describe(program)})"
                               for program, time in list(zip(contest.programs, times, strict=True))[1:])
            what = f"changed to {describe(contest.program)}" if contest.turn else "stays with the order it had"
            print(f"deepspeed_prt: {what}: a step took {times[0]:.1f} ms before, {others}", flush=True)

    def _decided(self, decide: Callable[[], Any]) -> Any:
        """What the first rank decides; if that fails, it fails on all."""
        decision, failure = None, None
        if self._control.global_rank == 0:
            try:
                decision = decide()
            except Exception as error:
                failure = error
        self._control.agree(failure, "planning with measured costs")
        return self._control.share(decision)


class _Contest:
    """Programs that take turns, the one so far being the last to do so."""

    def __init__(self, programs: Sequence[Program], profiles: Sequence[Profile]) -> None:
        self.programs = programs
        self.profiles = profiles
        self.turn = 1
        self.batches = 0

    @property
    def program(self) -> Program:
        return self.programs[self.turn]

    @property
    def profile(self) -> Profile:
        return self.profiles[self.turn]
