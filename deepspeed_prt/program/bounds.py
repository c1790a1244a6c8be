"""What no schedule can beat, from the placement and the costs alone."""

from .costs import Costs
from .placement import Placement


def ideal_time(placement: Placement, micro_batches: int, costs: Costs) -> float:
    """The time of a step without any bubble: the work of the busiest rank."""
    return max(_work(rank, placement, micro_batches, costs) for rank in range(placement.ranks)) + costs.optimizer


def _work(rank: int, placement: Placement, micro_batches: int, costs: Costs) -> float:
    """The time that all the compute actions of a rank take, with whole backwards."""
    total = 0.0
    for pipe in range(placement.pipes):
        taking_it = len(range(pipe, micro_batches, placement.pipes))
        total += taking_it * sum(costs.work(stage) for stage in placement.stages_of(rank, pipe))
    return total


def lower_bound(placement: Placement, micro_batches: int, costs: Costs, split: bool) -> float:
    """A makespan that no order can beat.

    Before a rank starts, a micro-batch has to come through the stages below its first one. With whole backwards
    (``split`` false), the gradient of its last backward has to go back through them as well; split ones can end with
    the weight gradients of any stage, so that only the shortest such wait counts. Nor is any batch shorter than one
    micro-batch's way there and back.
    """
    way_back = tuple(map(min, costs.input_grad, costs.backward)) if split else costs.backward
    arrival = [0.0]
    departure = [0.0]
    for stage in range(placement.stages):
        hop = costs.hop * placement.is_remote(stage + 1)
        arrival.append(arrival[-1] + costs.forward[stage] + hop)
        departure.append(departure[-1] + way_back[stage] + hop)
    pipes = range(min(placement.pipes, micro_batches))
    bound = 0.0
    for rank in range(placement.ranks):
        first_stages = [placement.stages_of(rank, pipe)[0] for pipe in pipes]
        head = min(arrival[stage] for stage in first_stages)
        tail = 0.0 if split else min(departure[stage] for stage in first_stages)
        bound = max(bound, head + _work(rank, placement, micro_batches, costs) + tail)
    last_weight_grad = costs.backward[0] - way_back[0]
    return max(bound, arrival[-1] + departure[-1] + last_weight_grad) + costs.optimizer
