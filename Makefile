# Tasks of a contributor. `make` lists them; each runs in .venv, which `make .venv` creates.
.PHONY: help test system lint types docs format
python := .venv/bin/python

help:  ## List the tasks
	@grep -E '^[.a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv: pyproject.toml requirements/dev.lock  ## Create or update the environment
	python3 -m venv .venv
	PIP_CONSTRAINT=requirements/dev.lock .venv/bin/pip install -q -e '.[dev]'
	@touch .venv

test: .venv  ## Run the fast tier
	$(python) -m pytest

system: .venv  ## Run the slow tier; tests without their Debian packages are skipped
	$(python) -m pytest -m 'slow and not nightly'

lint: .venv  ## Check style and format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv  ## Fix style and format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

types: .venv  ## Check types
	.venv/bin/mypy

docs: .venv  ## Build the documentation into build/site
	.venv/bin/mkdocs build --strict --site-dir build/site
