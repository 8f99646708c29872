# `make train` and `make test` create the environment they need (in .venv) and run; `make test-install` makes one for each
# extra and removes it again: ARGS="--extra cartpole --python python3.13" for one of them.
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= diffusion,cartpole,recommendation,logging,test,oracles
BIN    := $(VENV)/bin

.PHONY: train test test-install tutorial lint clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

train: $(VENV)/.installed
	$(BIN)/python -m grpo_jax.train $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-install:
	$(PYTHON) scripts/test_install.py $(ARGS)

tutorial: $(VENV)/.installed
	$(BIN)/python docs/make_tutorial.py $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[lint]"
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

clean:
	rm -rf $(VENV) build dist *.egg-info
