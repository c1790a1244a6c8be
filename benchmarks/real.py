"""Real compute: the example BERT on the example's reviews, and what it costs without a pipeline."""

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from examples.bert_imdb.data import load, prepare, training_batches
from examples.bert_imdb.model import SIZES, bert_config, pipeline_layers

from .settings import Reviews
from .work import LEARNING_RATE, SEED, MicroBatch, Work


def prepare_reviews(reviews: Reviews) -> None:
    """Fill the cache, on one rank; the others return at once."""
    if dist.get_rank() == 0:
        prepare(*_cached(reviews))


def real_work(reviews: Reviews) -> Work:
    """Without dropout, so that all contenders compute the same."""
    train = load(*_cached(reviews)).train

    def batches() -> Iterator[MicroBatch]:
        return training_batches(train, reviews.rows, SEED, replica=0, replicas=1)

    return Work(pipeline_layers(bert_config(reviews.model, reviews.seq_len, dropout=0.0)), nn.functional.cross_entropy,
                batches, reviews.rows)


def alone(reviews: Reviews, micro_batches: int, warm_up: int, steps: int) -> dict[str, Any] | None:
    """Train on the first rank while the others wait; returns the losses, and the seconds of each step's compute.

    Only forwards and backwards are timed: their sum over the number of ranks is a step without any bubble.
    """
    if dist.get_rank() != 0:
        return None
    work = real_work(reviews)
    model = nn.Sequential(*work.build(0, len(work.layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = work.batches()
    losses, seconds = [], []
    for _ in range(warm_up + steps):
        batch = [next(batches) for _ in range(micro_batches)]
        start = time.perf_counter()
        parts = []
        for inputs, labels in batch:
            loss = work.loss(model(inputs), labels)
            (loss / micro_batches).backward()
            parts.append(loss.detach())
        seconds.append(time.perf_counter() - start)
        losses.append(torch.stack(parts).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return {"seconds": seconds[warm_up:], "losses": losses}


def _cached(reviews: Reviews) -> tuple[Any, str, int, int]:
    return reviews.cache_dir, "package", SIZES[reviews.model]["vocab_size"], reviews.seq_len
