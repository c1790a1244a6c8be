"""Costs that explain a measured batch."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from .costs import Costs
from .program import Program
from .simulator import simulate

_STEPS = 8
"""Of bisection, to a 256th of where it starts: closer than batches are alike."""

MOST_SPLITTING = 0.25
"""The part by which two halves may take longer than a whole backward; stages that differ can make it seem more."""


def costs_of_stages(program: Program, forward: Sequence[float], input_grad: Sequence[float],
                    weight_grad: Sequence[float]) -> Costs:
    """Costs of the stages of a measured program, in which a whole backward has been measured as an ``input_grad``.

    Where some stages split and others do not, these would take as much longer with halves as the backwards of those do,
    compared to their forwards; and the halves would share that time as they do there. The first stage, which often
    needs no input gradient, and the last one, with the loss, are no measure for others.
    """
    stages = range(program.placement.stages)
    split = sorted(program.split_stages)
    whole = [stage for stage in stages if stage not in program.split_stages]
    if not split or not whole:
        return Costs(tuple(forward), tuple(input_grad), tuple(weight_grad))

    def per_forward(some: Sequence[int]) -> float:
        # A stage of one identity may seem to take no time.
        return median([(input_grad[stage] + weight_grad[stage]) / forward[stage] for stage in some
                       if stage in stages[1:-1] and forward[stage] > 0] or [0.0])

    of_whole = per_forward(whole)
    splitting = min(max(per_forward(split) / of_whole - 1, 0.0), MOST_SPLITTING) if of_whole > 0 else 0.0
    of_input, of_weight = (sum(times[stage] for stage in split) for times in (input_grad, weight_grad))
    share = of_input / (of_input + of_weight) if of_input > 0 else 0.5
    of_inputs, of_weights = list(input_grad), list(weight_grad)
    for stage in whole:
        both = (input_grad[stage] + weight_grad[stage]) * (1 + splitting)
        of_inputs[stage], of_weights[stage] = share * both, (1 - share) * both
    return Costs(tuple(forward), tuple(of_inputs), tuple(of_weights), splitting=splitting)


def fit_latency(program: Program, costs: Costs, makespan: float) -> Costs:
    """``costs`` with the latency of a message with which ``program`` takes ``makespan``.

    It is 0 where the program takes longer without any.
    """
    def excess(latency: float) -> float:
        return simulate(program, replace(costs, latency=latency)).makespan - makespan

    low, high = 0.0, max(costs.forward)
    if excess(low) >= 0 or program.placement.ranks == 1:
        return replace(costs, latency=0.0)
    while excess(high) < 0:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if excess(middle) < 0:
            low = middle
        else:
            high = middle
    return replace(costs, latency=(low + high) / 2)
