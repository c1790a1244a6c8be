"""Local search: an order is made shorter by letting neighbours on its critical path change places.

A pipeline is a job shop: ranks are machines, and micro-batches are jobs. Two actions that follow each other on the
critical path can shorten the whole by changing places only where the path comes to their rank or leaves it (Nowicki and
Smutnicki, "A fast taboo search algorithm for the job shop problem", 1996).
"""

import random
from collections.abc import Sequence

from .actions import Action
from .costs import Costs
from .program import Program, complete, peak_held
from .simulator import DeadlockError, Simulation

_GAIN = 1e-9
"""A relative difference below which makespans are equal."""


def improve(program: Program, costs: Costs, changes: int) -> Program:
    """A program with the same actions that is no longer, within the same cap; deterministic.

    Args:
        program: where to start.
        costs: what the simulation assumes.
        changes: how many changes of places to try; those that make the program no longer stay.
    """
    draw = random.Random(0)
    simulation = Simulation(program.rows, program.placement, costs)
    actions, rows = simulation.actions, simulation.rows
    held = program.max_in_flight * program.placement.reuse
    starts = simulation.starts()
    first = makespan = simulation.makespan(starts)
    candidates = _neighbours(simulation, starts)
    for _ in range(changes):
        if not candidates:
            break
        rank, index = candidates.pop(draw.randrange(len(candidates)))
        row = rows[rank]
        row[index], row[index + 1] = row[index + 1], row[index]
        if peak_held(actions[number] for number in row) <= held:
            try:
                changed = simulation.starts()
            except DeadlockError:
                changed = None
            if changed is not None and (length := simulation.makespan(changed)) <= makespan * (1 + _GAIN):
                makespan = length
                candidates = _neighbours(simulation, changed)
                continue
        row[index], row[index + 1] = row[index + 1], row[index]
    if makespan >= first * (1 - _GAIN):
        return program
    return complete(program.schedule, [tuple(actions[number] for number in row) for row in rows], program.placement,
                    program.micro_batches, program.max_in_flight)


def _neighbours(simulation: Simulation, starts: Sequence[float]) -> list[tuple[int, int]]:
    """Ranks and indices of actions on the critical path that may change places with the next one, to some effect."""
    pairs = []
    path = _critical_path(simulation, starts)
    for place, block in enumerate(path):
        rank = simulation.rank_of[block[0]]
        row = simulation.rows[rank]
        index = row.index(block[0])
        ends = {index} if place > 0 else set()
        if place < len(path) - 1:
            ends.add(index + len(block) - 2)
        pairs += [(rank, end) for end in sorted(ends) if len(block) > 1 and not _is_bound(
            simulation.actions[row[end]], simulation.actions[row[end + 1]])]
    return pairs


def _critical_path(simulation: Simulation, starts: Sequence[float]) -> list[list[int]]:
    """A longest way through the program: on each rank that it comes to, the actions that follow without a break."""
    position = {number: index for row in simulation.rows for index, number in enumerate(row)}
    ends = [start + duration for start, duration in zip(starts, simulation.durations, strict=True)]
    number = max(range(len(ends)), key=ends.__getitem__)
    path = [[number]]
    while True:
        before = position[number] - 1
        row = simulation.rows[simulation.rank_of[number]]
        if before >= 0 and ends[row[before]] == starts[number]:
            number = row[before]
            path[-1].append(number)
        elif number in simulation.sender_of:
            number = simulation.sender_of[number]
            path.append([number])
        else:
            return [block[::-1] for block in reversed(path)]


def _is_bound(action: Action, following: Action) -> bool:
    """Whether an action may need the one before it on its rank."""
    return action.micro_batch == following.micro_batch and abs(action.stage - following.stage) <= 1
