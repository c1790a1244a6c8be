"""Costs that explain a measured batch."""

from dataclasses import replace

from .costs import Costs
from .program import Program
from .simulator import simulate

_STEPS = 8
"""Of bisection, to a 256th of where it starts: closer than batches are alike."""


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
