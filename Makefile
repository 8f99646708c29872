# `make train` and `make test` create the environment they need (in .venv) and run.
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= diffusion,cartpole,recommendation,logging,test,oracles
BIN    := $(VENV)/bin

.PHONY: train test lint clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

train: $(VENV)/.installed
	$(BIN)/python -m grpo_jax.train $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[lint]"
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

clean:
	rm -rf $(VENV) build dist *.egg-info
