# Every target sets up what it needs: a virtual environment in .venv with the package and all extras.
.DEFAULT_GOAL := help
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1

.PHONY: help venv test demo bench lint picture clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

venv: .venv/installed  ## create .venv and install the package with all extras

.venv/installed: setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --upgrade pip setuptools wheel
	.venv/bin/pip install --quiet torch torchvision
	.venv/bin/pip install --quiet --editable '.[examples,plot,dev]'
	touch $@

test: venv  ## run all tests (8 to 16 minutes on 2 cores)
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m pytest tests

demo: venv  ## train BERT on real reviews, stock DeepSpeed against reuse, and compare
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python examples/demo.py

bench: venv  ## compare with other pipeline schedules on emulated devices; results in outputs/bench.json
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python benchmarks/compare.py --micro-batches 8 16 \
		--json outputs/bench.json

lint: venv  ## ruff, and mypy (strict for the program core)
	.venv/bin/ruff check .
	.venv/bin/mypy

picture: venv  ## draw docs/timeline.png, the README's picture
	.venv/bin/prt plan --ranks 4 --micro-batches 8 --reuse 3 --picture docs/timeline.png

clean:  ## remove what the targets made
	rm -rf .venv .cache build outputs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
