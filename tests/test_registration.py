"""Arming: from whichever import comes first, at no cost, and untouched DeepSpeed without the section."""

import os
import subprocess
import sys

import pytest

CHECK = """
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.engine import DeepSpeedEngine
print("armed" if "__new__" in vars(DeepSpeedEngine) else "not armed")
"""


def python(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("imports", ["", "import torch", "import deepspeed", "import deepspeed; import deepspeed_prt",
                                     "import deepspeed_prt", "import deepspeed_prt; import torch"])
def test_armed_whichever_import_comes_first(imports):
    assert python(imports + CHECK) == "armed"


def test_an_import_arms_where_autoloading_is_off():
    assert python("import deepspeed" + CHECK, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "not armed"
    assert python("import deepspeed; import deepspeed_prt" + CHECK, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "armed"
    assert python("import deepspeed_prt; import deepspeed" + CHECK, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "armed"


def test_arming_loads_nothing():
    loaded = python("import torch, sys; print(sorted(m for m in sys.modules if m.startswith('deepspeed')))")
    assert loaded == "['deepspeed_prt', 'deepspeed_prt.registration']"


def test_the_core_loads_neither_torch_nor_deepspeed():
    code = "import deepspeed_prt.cli, sys; print([m for m in ('torch', 'deepspeed', 'matplotlib') if m in sys.modules])"
    assert python(code) == "[]"
