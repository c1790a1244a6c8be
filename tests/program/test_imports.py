"""The program package starts without torch and without deepspeed."""

import subprocess
import sys

CODE = """
import pkgutil, sys
from importlib import import_module
import deepspeed_prt.program as package
names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    import_module(name)
print(*names)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "deepspeed", "numpy"}), "end")
"""


def test_importing_every_module_of_it_loads_neither_torch_nor_deepspeed():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    imported, loaded = done.stdout.splitlines()
    assert {"deepspeed_prt.program." + name for name in (
        "actions", "placement", "costs", "bounds", "orders", "orders.gpipe", "orders.zero_bubble", "split",
        "communication", "slots", "program", "verifier", "simulator", "search", "build", "csv_format",
        "sources")} <= set(imported.split())
    assert loaded == "end"
