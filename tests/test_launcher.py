"""The real launcher: an unmodified script, started as users start it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .training import config

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

SCRIPT = textwrap.dedent("""
    import argparse
    import time
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--fail-on", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
        def forward(self, x):
            if torch.distributed.get_rank() == args.fail_on:
                raise ZeroDivisionError("a bad layer")
            return torch.tanh(self.linear(x))

    net = PipelineModule([LayerSpec(Block) for _ in range(8)], num_stages=torch.distributed.get_world_size(),
                         loss_fn=torch.nn.functional.mse_loss, seed_layers=True, partition_method="uniform")
    engine, _, _, _ = deepspeed.initialize(args=args, model=net,
                                           model_parameters=[p for p in net.parameters() if p.requires_grad])
    def batches():
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(2, 8, generator=generator), torch.randn(2, 8, generator=generator)
    data = batches()
    for step in range(3):
        loss = engine.train_batch(data_iter=data)
        if torch.distributed.get_rank() == 0:
            print(f"LOSS {loss.item()!r}", flush=True)
    if not hasattr(engine, "placement"):
        time.sleep(0.1)  # stock ranks abort in some runs if they end right after a collective (pytorch#190489)
""")

ENDING = textwrap.dedent("""
    import atexit
    import os
    import threading
    import time

    steps = []
    atexit.register(lambda: print("STEPS", len(steps) - steps_at_the_end))

    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "-", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed()
    net = PipelineModule([torch.nn.Linear(2, 2)], num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    deepspeed.initialize(model=net, config=CONFIG, model_parameters=list(net.parameters()))

    def work():
        while True:
            steps.append(None)
            time.sleep(0.001)

    threading.Thread(target=work, daemon=True).start()
    steps_at_the_end = len(steps)
""")


def launch(tmp_path: Path, ds_config: dict, *arguments: str) -> subprocess.CompletedProcess:
    script, config_file = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text(SCRIPT)
    config_file.write_text(json.dumps(ds_config))
    launcher = Path(sys.executable).with_name("deepspeed")
    environment = {**os.environ, "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([launcher, "--num_gpus", "2", script, "--deepspeed_config", config_file, *arguments],
                          capture_output=True, text=True, check=False, timeout=240, env=environment)


def losses(done: subprocess.CompletedProcess) -> list[str]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split()[-1] for line in done.stdout.splitlines() if "LOSS" in line]


def test_an_unmodified_script(tmp_path):
    stock = launch(tmp_path, config(4))
    ours = launch(tmp_path, config(4, prt={"reuse": 2}))
    assert losses(stock) == losses(ours) and len(losses(ours)) == 3
    said = [line for line in (ours.stdout + ours.stderr).splitlines() if "deepspeed_prt: 2 ranks x 2 stages" in line]
    assert len(said) == 1
    assert "deepspeed_prt" not in stock.stdout + stock.stderr.replace(str(tmp_path), "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_ends_the_run(tmp_path, rank):
    done = launch(tmp_path, config(4, prt={"reuse": 2}), "--fail-on", str(rank))
    assert done.returncode != 0
    assert "ZeroDivisionError: a bad layer" in done.stderr


def test_a_wrong_section_ends_the_run(tmp_path):
    done = launch(tmp_path, config(4, prt={"reuse": 99}))
    assert done.returncode != 0
    assert "8 layers cannot fill 2 ranks x 99 stages = 198 stages; use reuse <= 4" in done.stderr


@pytest.mark.parametrize("example", ["bert_imdb", "resnet_mini_imagenet"])
def test_an_example_without_steps(example):
    command = [sys.executable, str(EXAMPLES / example / "train.py"), "--steps", "0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "--steps has to be at least 1" in result.stderr


def test_threads_get_time_when_the_script_ends(tmp_path):
    """Those of gloo abort the process if they need the interpreter when it is gone."""
    script = tmp_path / "ends.py"
    script.write_text(ENDING.replace("CONFIG", repr(config(1, prt={}))))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("STEPS")[1]) > 5
