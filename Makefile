# The one door to the project: `make` alone says what there is.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
NODE = $(shell $(BIN)/python -c 'from adapters.local.node import find_node; print(*find_node().node)')
NPM = $(shell $(BIN)/python -c 'from adapters.local.node import find_node; print(*find_node().npm)')

.DEFAULT_GOAL := help
.PHONY: help demo test test-more check prove bench chaos lock soak

help: ## say what there is
	@echo 'Python 3.11 and make are enough; each target fetches what it needs once.'
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Every download is pinned by its digest, the tools that build wheels included.
$(READY): pyproject.toml requirements.lock requirements-build.lock requirements-amqp.lock
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo 'Setting up .venv (a few minutes the first time) ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-build.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation --require-hashes -r requirements.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation --require-hashes -r requirements-amqp.lock \
		|| echo 'The AMQP engine could not be built (is there a C compiler?): tests of Event Hubs will be skipped.'
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation --no-deps -e .
	@touch $@

demo: $(READY) ## watch a fleet lose a worker and nothing else, on this machine
	$(BIN)/leasehold demo

test: $(READY) ## run every test that needs no opt-in
	$(BIN)/pytest -m 'not more' -n 2 --dist loadgroup

test-more: $(READY) ## run the opt-in tests, and say what could not be had
	$(BIN)/pytest -m more

check: $(READY) ## format, lint, types, import contracts, rules of the house
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	@set -e; for conftest in tests/*/conftest.py; do $(BIN)/mypy $$conftest; done
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/test_house.py

prove: $(READY) ## follow every interleaving of small fleets over the real plan (ten minutes); writes specs/proof.md
	$(BIN)/python -m adapters.checker --full --write specs/proof.md
	$(BIN)/python -m adapters.checker.moves

soak: $(READY) ## simulate ten thousand fleets with every fault on
	$(BIN)/python -m adapters.simulator.soak 10000

bench: $(READY) ## measure every claim of speed beside a named peer
	@met=true; for script in $$(grep -l __main__ benchmarks/*.py); do echo "== $$script"; $(BIN)/python "$$script" || met=false; done; $$met

chaos: $(READY) ## kill, steal, split and block under applications of Spark (an hour)
	$(BIN)/python tests/integration/spark_flights.py
	$(BIN)/python tests/integration/spark_flights.py --source event-hubs
	$(BIN)/python tests/integration/spark_kills.py
	$(BIN)/python tests/integration/spark_kills.py --source event-hubs
	$(BIN)/python tests/integration/spark_blocked.py

lock: $(READY) ## pin the newest dependencies that pyproject.toml and package.json allow
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--all-extras --group test -o requirements.lock pyproject.toml
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		-c requirements.lock --group build -o requirements-build.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		-c requirements.lock --group amqp -o requirements-amqp.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--group async-kinesis -o benchmarks/async-kinesis.lock
	@set -e; for tree in aws azure; do cd $(CURDIR)/adapters/local/node/$$tree; rm -f package-lock.json; \
		$(NPM) install --package-lock-only --ignore-scripts --omit-lockfile-registry-resolved --no-audit --no-fund; \
		$(NODE) ../bare.cjs; done
