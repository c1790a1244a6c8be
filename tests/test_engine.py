"""PRTPipelineEngine against the stock engine: the same losses and weights."""

import pytest

from . import training
from .training import assert_same, config


@pytest.mark.parametrize("gas", [1, 2, 4, 7])
@pytest.mark.parametrize(("ranks", "prt"), [
    (2, {"reuse": 2}),
    (2, {"reuse": 2, "placement": "wave"}),
    (4, {"reuse": 3}),
    (4, {"reuse": 3, "placement": "wave"}),
])
def test_weights_are_bit_identical(world, ranks, prt, gas):
    stock = world(ranks).run(training.train, "blocks", ranks, config(gas))
    assert_same(stock, world(ranks).run(training.train, "blocks", ranks, config(gas, prt=prt)))
