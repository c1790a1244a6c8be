"""BERT for sequence classification as a list of pipeline layers, built from transformers' own BERT modules.

One layer is one sublayer (an attention block or a feed-forward block), the finest grain at which only one activation
crosses between layers. Every layer takes and returns ``(hidden, mask)``.
"""

import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import (
    BertAttention,
    BertEmbeddings,
    BertIntermediate,
    BertOutput,
    BertPooler,
)

Activation = tuple[torch.Tensor, torch.Tensor]

CLASSES = 2

SIZES = {
    # Small enough to learn from scratch in a minute on two CPU cores; as many layers as 8 GPUs x 2 stages need.
    "tiny": {"vocab_size": 8192, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128,
             "num_hidden_layers": 8},
    # BERT-base and BERT-large of the BERT paper.
    "base": {},
    "large": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24},
}


def bert_config(size: str, seq_len: int, dropout: float) -> BertConfig:
    """The configuration of one of ``SIZES``."""
    config = BertConfig(**SIZES[size], hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
                        attn_implementation="sdpa")
    config.max_position_embeddings = max(seq_len, config.max_position_embeddings if size != "tiny" else 0)
    return config


def pipeline_layers(config: BertConfig) -> list[LayerSpec]:
    """Embeddings, two layers per encoder layer, head: 26 layers for BERT-base."""
    layers = [LayerSpec(Embeddings, config)]
    for _ in range(config.num_hidden_layers):
        layers += [LayerSpec(AttentionBlock, config), LayerSpec(FeedForwardBlock, config)]
    return [*layers, LayerSpec(Head, config)]


class Embeddings(nn.Module):
    """Token ids to ``(hidden, mask)``.

    The mask stays an integer tensor between layers: it needs no gradient, and mixed precision leaves it alone.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.pad_token_id = config.pad_token_id
        self.embeddings = BertEmbeddings(config)
        initialize(self, config)

    def forward(self, tokens: torch.Tensor) -> Activation:
        return self.embeddings(tokens), (tokens != self.pad_token_id).long()


class AttentionBlock(nn.Module):
    """Self-attention with its projection, residual connection and LayerNorm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        initialize(self, config)

    def forward(self, inputs: Activation) -> Activation:
        hidden, mask = inputs
        return self.attention(hidden, attention_mask=mask.bool()[:, None, None, :])[0], mask


class FeedForwardBlock(nn.Module):
    """The two dense layers of an encoder layer with their residual connection and LayerNorm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)
        initialize(self, config)

    def forward(self, inputs: Activation) -> Activation:
        hidden, mask = inputs
        return self.output(self.intermediate(hidden), hidden), mask


class Head(nn.Module):
    """Pooler and classifier: ``(hidden, mask)`` to logits.

    The pooler sees the mean over the review's tokens, not the first token alone: trained from scratch on a few thousand
    reviews, attention has not learned yet to gather a review in its first token.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.pooler = BertPooler(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, CLASSES)
        initialize(self, config)

    def forward(self, inputs: Activation) -> torch.Tensor:
        hidden, mask = inputs
        weights = mask.to(hidden.dtype)[:, :, None]
        mean = (hidden * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
        return self.classifier(self.dropout(self.pooler(mean)))


def initialize(layer: nn.Module, config: BertConfig) -> None:
    """Initialise as BERT does; the modules on their own come with torch's defaults."""
    for module in layer.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=config.initializer_range)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx].detach())
