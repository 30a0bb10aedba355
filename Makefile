# The only entry points: make demo, make test, make lint, make bench, make soak, make docs,
# make install, make install-server, make clean.
PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRACES ?= $(wildcard ../shared/traces)

.PHONY: install install-server demo test lint bench soak docs clean

# pip understands --group since 25.1; a fresh environment may bring an older one.
define environment
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "HyperCache needs Python >= 3.11, $(PY) is " + sys.version.split()[0] + "; choose another: make PY=python3.12")'
	test -x $(BIN)/python || $(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
endef

install: $(STAMP)

# The group's pins and the extras' ranges must be resolved together: alone, the ranges bring the newest torch.
$(STAMP): pyproject.toml
	$(environment)
	$(BIN)/python -m pip install --quiet --editable '.[demo]' --group dev
	touch $@

# What hypercache-serve needs: no torch, and nothing to test or lint with.
install-server:
	$(environment)
	$(BIN)/python -m pip install --quiet --editable .

demo: install
	$(BIN)/hypercache demo

test: install
	$(BIN)/python -m pytest -q

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python tools/fabric_throughput.py
	$(BIN)/python tools/cache_throughput.py
	$(BIN)/hypercache benchmark $(addprefix --traces ,$(TRACES))

# A minute of everything at random through a memory and a disk that are too small.
soak: install
	$(BIN)/python -m tests.e2e.soak_tiers 60

docs: install
	$(BIN)/python tools/settings_table.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find fabrics hypercache tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
