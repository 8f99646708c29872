# `make train` installs the run's packages in .venv and runs; `make test` adds those of the tests. `make test-install`
# makes and removes an environment for each extra; ARGS="--extra recommendation --python python3.13" selects one.
# Modules are compiled when first imported: most of the packages' never are.
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= diffusion,recommendation,logging,environments,test,oracles,docs
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check
# uv takes .4 of pip's CPU time. pip installs from an index that its variables name, and where uv fails. Both take the
# versions of constraints.txt.
UV     := $(if $(PIP_INDEX_URL)$(PIP_EXTRA_INDEX_URL),false,$(BIN)/python -m uv pip install --python $(BIN)/python --quiet)
INSTALL = $(UV) -c constraints.txt -e ".[$(1)]" || $(PIP) -c constraints.txt -e ".[$(1)]"

# With it each process would compile every module that it imports, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test docs tutorial test-install lint clean

$(VENV)/.train: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	-$(PIP) uv
	$(call INSTALL,diffusion)
	touch $@

$(VENV)/.installed: $(VENV)/.train
	$(call INSTALL,$(EXTRAS))
	touch $@

train: $(VENV)/.train
	@$(BIN)/python -m grpo_jax.train $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# Warnings are errors (with --quiet mkdocs would not count them). Links, anchors and the site are checked, without the
# network.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	SITE=site $(BIN)/python -m pytest -q -m wide tests/pages/test_site.py

test-install:
	$(PYTHON) scripts/test_install.py $(ARGS)

tutorial: $(VENV)/.installed
	$(BIN)/python docs/make_tutorial.py $(ARGS)

lint: $(VENV)/.installed
	$(call INSTALL,lint)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

clean:
	rm -rf $(VENV) build dist site *.egg-info
