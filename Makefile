# Everything is set up by the first command that needs it; a second run starts in seconds.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
COURSE := $(VENV)/.course

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-fast test-clients bench report notebooks notebooks-build lint format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv and install sixstage into it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else \
	  f"sixstage needs Python 3.10 to 3.13, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing sixstage into $(VENV) (PyTorch is most of it: a minute or two)"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

$(COURSE): $(STAMP)
	@echo "installing JupyterLab into $(VENV)"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev,course]'
	$(BIN)/jupyter labextension disable --level=sys_prefix '@jupyterlab/apputils-extension:announcements'
	@touch $(COURSE)

demo: $(STAMP)  ## run the same real chats through every stage; writes reports/demo.html
	$(BIN)/sixstage demo

# Two processes at once (threads that wait sleep, or they would take the cores from each other); then, one after the
# other, the tests that compare times.
test: $(STAMP)  ## run all tests, the slow ones too
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not timing'
	$(BIN)/python -m pytest -m timing

test-fast: $(STAMP)  ## run the tests that take seconds
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 -m 'not slow and not model135 and not timing'

test-clients: $(STAMP)  ## install well-known OpenAI clients, each by itself, and run them against the server
	$(BIN)/python -m pytest -m clients tests/clients

notebooks: $(COURSE)  ## open the workshops in JupyterLab
	$(BIN)/jupyter lab --allow-root --LabApp.default_url=/lab/tree/stage1_naive/workshop.ipynb

notebooks-build: $(STAMP)  ## make the workshops' notebooks from their sources, outputs included
	$(BIN)/sixstage notebooks

serve: $(STAMP)  ## serve the default model under the OpenAI API, on http://127.0.0.1:8000/v1
	$(BIN)/sixstage serve

bench: $(STAMP)  ## compare the stages side by side, a fresh process each; writes reports/bench.html
	$(BIN)/sixstage bench

report: $(STAMP)  ## make one page of what demo and bench have written; writes reports/index.html
	$(BIN)/sixstage report reports/*.json -o reports/index.html

lint: $(STAMP)  ## ruff, formatting and types, as CI checks them
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  ## let ruff mend style and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove the virtual environment and the reports (the model cache stays)
	rm -rf $(VENV) reports
