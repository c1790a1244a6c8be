"""ResNet as a list of pipeline layers: torchvision's own modules, unmodified, one residual block a layer.

BatchNorm normalises each micro-batch by its own statistics and updates its running statistics once per micro-batch, in
order, exactly as in DeepSpeed's pipeline. Data-parallel replicas keep their own, of which the first's are saved. In a
bidirectional pipeline each copy of a layer sees half of the micro-batches, and the running statistics of the two copies
are averaged after each batch.
"""

from collections import OrderedDict

import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from torchvision.models import get_model

MODELS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


def pipeline_layers(name: str, classes: int) -> list[LayerSpec]:
    """Stem, one layer per residual block, head: 18 layers for ResNet-50."""
    return [LayerSpec(Layer, name, classes, index) for index in range(len(pieces(name, classes)))]


class Layer(nn.Sequential):
    """One piece of torchvision's model, with weights as torchvision initialises them."""

    def __init__(self, name: str, classes: int, index: int) -> None:
        super().__init__(pieces(name, classes)[index])
        self.to_empty(device="cpu")
        initialize(self)


def pieces(name: str, classes: int) -> list[OrderedDict[str, nn.Module]]:
    """The modules of each layer, without memory, so that a rank pays for the layers it owns and no others."""
    with torch.device("meta"):
        net = get_model(name, weights=None, num_classes=classes)
    blocks = [block for group in (net.layer1, net.layer2, net.layer3, net.layer4) for block in group]
    return [
        OrderedDict(conv1=net.conv1, bn1=net.bn1, relu=net.relu, maxpool=net.maxpool),
        *(OrderedDict(block=block) for block in blocks),
        OrderedDict(avgpool=net.avgpool, flatten=nn.Flatten(), fc=net.fc),
    ]


def initialize(layer: nn.Module) -> None:
    """Initialise as torchvision does, which covers only modules that were built with memory."""
    for module in layer.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, (nn.BatchNorm2d, nn.Linear)):
            module.reset_parameters()
