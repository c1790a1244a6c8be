"""What no schedule can beat, from the placement, the costs and the room for activations alone."""

import math

from .costs import Costs
from .placement import Placement


def ideal_time(placement: Placement, micro_batches: int, costs: Costs) -> float:
    """The time of a step without any bubble: the work of the busiest rank."""
    busiest = max(_work(_visits(rank, placement, micro_batches), costs) for rank in range(placement.ranks))
    return busiest + costs.optimizer


def lower_bound(placement: Placement, micro_batches: int, costs: Costs, split: bool,
                max_in_flight: float = math.inf) -> float:
    """A makespan that no order can beat: the longest of what each rank needs, and one micro-batch there and back.

    Before a rank starts, a micro-batch has to come through the stages below its first one. Before its first backward,
    one has to come through all stages and back to its last one; until then the rank does no more than the forwards that
    it may hold. It holds each activation at least until the gradient is back, no more of them at once than it has room
    for. With whole backwards (``split`` false), the gradient of its last backward has to go back through the stages
    below as well; split ones can end with the weight gradients of any stage, so that only the shortest such wait
    counts.

    Args:
        placement: ranks, reuse, route and direction.
        micro_batches: m.
        costs: what actions and messages take.
        split: whether backwards may be split.
        max_in_flight: the most activations that a rank may hold, in micro-batches of a whole rank; at least 1.
    """
    way_back = tuple(map(min, costs.input_grad, costs.backward)) if split else costs.backward
    arrival = [0.0]
    departure = [0.0]
    for stage in range(placement.stages):
        hop = costs.hop * placement.is_remote(stage + 1)
        arrival.append(arrival[-1] + costs.forward[stage] + hop)
        departure.append(departure[-1] + way_back[stage] + hop)
    there_and_back = arrival[-1] + departure[-1]
    held_for = [there_and_back - arrival[stage] - departure[stage] + costs.backward[stage] - way_back[stage]
                for stage in range(placement.stages)]
    room = int(min(max_in_flight, micro_batches) * placement.reuse)
    bound = held_for[0]
    for rank in range(placement.ranks):
        visits = _visits(rank, placement, micro_batches)
        forwards = _most_forwards(visits, room, costs)
        head = min(arrival[stage] for stage, _ in visits)
        turn = min(there_and_back - departure[stage] - way_back[stage] for stage, _ in visits)
        tail = 0.0 if split else min(departure[stage] for stage, _ in visits)
        held = sum(held_for[stage] * count for stage, count in visits) / room
        bound = max(bound, head + held + tail,
                    max(head + forwards, turn) + _work(visits, costs) - forwards + tail)
    return bound + costs.optimizer


_Visits = list[tuple[int, int]]
"""Of a rank, its stages and how many micro-batches it takes through each."""


def _visits(rank: int, placement: Placement, micro_batches: int) -> _Visits:
    return [(stage, len(range(pipe, micro_batches, placement.pipes)))
            for pipe in range(min(placement.pipes, micro_batches)) for stage in placement.stages_of(rank, pipe)]


def _work(visits: _Visits, costs: Costs) -> float:
    """The time that all the compute actions of a rank take, with whole backwards."""
    return sum(count * costs.work(stage) for stage, count in visits)


def _most_forwards(visits: _Visits, room: int, costs: Costs) -> float:
    """The most time that a rank can spend on forwards before its first backward."""
    total = 0.0
    for stage, count in sorted(visits, key=lambda visit: costs.forward[visit[0]], reverse=True):
        total += min(count, room) * costs.forward[stage]
        room -= min(count, room)
    return total
