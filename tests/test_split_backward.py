"""The split backward of modules, against autograd's whole one, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deepspeed_prt.split_backward import SplitBackward, accumulate


class Twice(nn.Module):
    """One linear layer called twice, and a norm."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.linear(torch.tanh(self.linear(x))))


class Images(nn.Module):

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
                                  nn.GroupNorm(2, 4))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Tokens(nn.Module):
    """An embedding, and a linear layer whose weight is computed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.linear(self.embedding(x))


class Transposed(nn.Module):
    """transformers' linear layers, whose weights are transposed."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Conv1D(12, 8), Conv1D(8, 12)

    def forward(self, x):
        return self.down(torch.relu_(self.up(x)))


CASES = {
    "transposed": (Transposed, lambda: torch.randn(2, 5, 8)),
    "twice": (Twice, lambda: torch.randn(2, 5, 8)),
    "in_place": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8, bias=False),
                                       nn.ReLU(inplace=True)),
                 lambda: torch.randn(2, 5, 8)),
    "images": (Images, lambda: torch.randn(2, 3, 6, 6)),
    "tokens": (Tokens, lambda: torch.randint(10, (2, 4))),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(8, 8, 3), nn.Conv1d(8, 4, 3, stride=2, groups=2)),
               lambda: torch.randn(2, 8, 9)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_hooks(case):
    torch.manual_seed(0)
    make, draw = CASES[case]
    whole, inputs = make(), [draw() for _ in range(3)]
    split, splitter = copy.deepcopy(whole), SplitBackward()
    fired = []
    for parameter in split.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)

    def run(module, x):
        x = x.clone().requires_grad_(x.is_floating_point())
        y = module(x)
        y.backward(torch.full_like(y, 0.3))
        return x.grad

    expected = [run(whole, x) for x in inputs]
    actual, pending = [], []
    with splitter.installed([split], []):
        for x in inputs:
            pending.append(splitter.collect())
            actual.append(run(split, x))
    assert not fired and all(parameter.grad is None for parameter in split.parameters())
    for deferred in pending:
        accumulate(deferred)
    assert len(fired) == 3 * len(list(split.parameters())), "once for each micro-batch"
    for theirs, mine in zip(expected, actual, strict=True):
        assert (theirs is None) == (mine is None) and (mine is None or torch.equal(theirs, mine))
    for (name, theirs), mine in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert torch.equal(theirs.grad, mine.grad), name
    assert all("forward" not in module.__dict__ for module in split.modules())


def test_tied_and_frozen_weights_and_others_forwards_are_left_alone():
    layer = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    layer[1].weight.requires_grad_(False)
    layer[1].bias.requires_grad_(False)
    layer[2].forward = lambda x: x + layer[2].bias
    splitter = SplitBackward()
    with splitter.installed([layer], [layer[0].weight]):
        deferred = splitter.collect()
        layer[2](layer[1](layer[0](torch.randn(2, 4)))).sum().backward()
    assert not deferred and layer[0].weight.grad is not None and layer[2].bias.grad is not None
