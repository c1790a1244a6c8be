"""The split backward of modules, against autograd's whole one, bit for bit."""

import copy
import gc
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.utils.checkpoint import checkpoint
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


class SequenceFirst(nn.Module):
    """Linear layers on inputs that are no rows in memory, as of a transformer whose batch comes second."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.down(torch.tanh(self.up(x.transpose(0, 1))).transpose(0, 1))).transpose(0, 1)


class Slopes(nn.Module):
    """Takes the slope of a layer inside of a backward, as the recomputation of a checkpoint is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def slope(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            slope, = torch.autograd.grad(self.linear(z).tanh().sum(), z)
        return slope + self.linear(x)

    def forward(self, x):
        return checkpoint(self.slope, x, use_reentrant=False)


class Forgetful(nn.Module):
    """Changes in place what no gradient needs any more."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.linear.weight.requires_grad_(False)

    def forward(self, x):
        hidden = self.embedding(x)
        outputs = self.linear(hidden)
        with torch.no_grad():
            self.embedding.weight[0].zero_()
            hidden.zero_()
        return outputs


def biases_only(module):
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return module


CASES = {
    "slopes": (Slopes, lambda: torch.randn(2, 8)),
    "forgetful": (Forgetful, lambda: torch.randint(10, (2, 4))),
    "biases_of_conv1d": (lambda: biases_only(nn.Conv1d(8, 8, 3)), lambda: torch.randn(2, 8, 9)),
    "biases_of_conv2d": (lambda: biases_only(Images()), lambda: torch.randn(2, 3, 6, 6)),
    "complex": (lambda: nn.Linear(8, 8, dtype=torch.complex64), lambda: torch.randn(2, 8, dtype=torch.complex64)),
    "no_features": (lambda: nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 8)), lambda: torch.randn(2, 8)),
    "transposed": (Transposed, lambda: torch.randn(2, 5, 8)),
    "twice": (Twice, lambda: torch.randn(2, 5, 8)),
    "sequence_first": (SequenceFirst, lambda: torch.randn(4, 5, 8)),
    "more_dimensions_first": (SequenceFirst, lambda: torch.randn(4, 3, 5, 8)),
    "biases_of_sequence_first": (lambda: biases_only(SequenceFirst()), lambda: torch.randn(4, 5, 8)),
    "more_dimensions": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
                        lambda: torch.randn(4, 3, 5, 8)),
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
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(fired.append)

    def run(module, x):
        x = x.clone().requires_grad_(x.is_floating_point() or x.is_complex())
        y = module(x)
        y.backward(y.detach() / 3)
        return x.grad

    expected = [run(whole, x) for x in inputs]
    actual, pending = [], []
    with splitter.installed([split], []):
        for x in inputs:
            pending.append(splitter.collect())
            actual.append(run(split, x))
    are_split = case not in ("complex", "no_features", "biases_of_sequence_first")
    assert not are_split or not fired and all(parameter.grad is None for parameter in split.parameters())
    for deferred in pending:
        if are_split:
            accumulate(deferred)
    trained = [parameter for parameter in split.parameters() if parameter.requires_grad]
    assert len(fired) == 3 * len(trained), "once for each micro-batch"
    for theirs, mine in zip(expected, actual, strict=True):
        assert (theirs is None) == (mine is None) and (mine is None or torch.equal(theirs, mine))
    for (name, theirs), mine in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert (theirs.grad is None and mine.grad is None) or torch.equal(theirs.grad, mine.grad), name
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


def test_what_is_held_between_the_halves():
    """Of a layer that trains its bias only, no input; of one that trains all, that and nothing of the weight."""
    splitter = SplitBackward()
    layers = nn.Sequential(biases_only(nn.Linear(8, 8)), nn.Linear(8, 8))
    x = torch.randn(2, 8)
    input_of_first = weakref.ref(x)
    with splitter.installed([layers], []):
        deferred = splitter.collect()
        layers(x).sum().backward()
    del x
    gc.collect()
    assert input_of_first() is None and len(deferred) == 2
    accumulate(deferred)
    assert layers[0].weight.grad is None and layers[0].bias.grad is not None and layers[1].weight.grad is not None


@pytest.mark.parametrize("is_input", [True, False])
def test_what_is_changed_between_the_halves_is_noticed(is_input):
    splitter, layer, x, gradient = SplitBackward(), nn.Linear(8, 8), torch.randn(2, 8), torch.randn(2, 8)
    with splitter.installed([layer], []):
        deferred = splitter.collect()
        layer(x).backward(gradient)
        (x if is_input else gradient).mul_(2)
        with pytest.raises(RuntimeError, match="the input of a Linear, or its output's gradient, was changed in place"):
            accumulate(deferred)


def test_calls_that_are_none_are_torchs_errors():
    splitter, layer = SplitBackward(), nn.Linear(8, 8)
    with splitter.installed([layer], []):
        x = torch.zeros(1, 8)
        for arguments, keywords in (((), {}), ((x, 1), {}), ((), {"foo": x}), ((None, ), {})):
            with pytest.raises(TypeError):
                layer(*arguments, **keywords)
        assert torch.equal(layer(input=x), layer(x))


def test_forward_mode_differentiation():
    splitter, layers = SplitBackward(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    x, tangent = torch.randn(2, 8), torch.randn(2, 8)
    tangents = []
    for installed in (False, True):
        with splitter.installed([layers] if installed else [], []), forward_ad.dual_level():
            outputs = layers(forward_ad.make_dual(x, tangent))
            tangents.append(forward_ad.unpack_dual(outputs).tangent)
    assert torch.equal(*tangents)
