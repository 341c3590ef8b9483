# `make` lists the commands of every day, `make targets` the rest.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SEED ?= $(shell date +%s)
NODE = $(shell $(BIN)/python -c 'from leasehold_lab.standins.node import find_node; print(*find_node().node)')
NPM = $(shell $(BIN)/python -c 'from leasehold_lab.standins.node import find_node; print(*find_node().npm)')

# Python keeps what it has compiled: else each of the many processes of the tests would compile it again.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help targets changelog demo quick test test-more check prove bench chaos fuzz fuzz-c mutants lock soak chaos-spark dist sizes api site sbom audit

help: # five commands of every day
	@echo 'Python 3.11 and make are enough; each target fetches what it needs once.'
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  make targets     list the other targets, which maintainers need'

targets: # the rest
	@awk -F ':[^#]*#: ' '/^[a-z-]+:.*#: / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Every download is pinned by its digest, the tools that build wheels included.
$(READY): pyproject.toml lab/pyproject.toml requirements.lock requirements-build.lock requirements-amqp.lock
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo 'Setting up .venv (a few minutes the first time) ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-build.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation --require-hashes -r requirements.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation --require-hashes -r requirements-amqp.lock \
		|| echo 'The AMQP engine could not be built (is there a C compiler?): tests of Event Hubs will be skipped.'
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation --no-deps -e . -e lab
	@touch $@

demo: $(READY) ## watch a fleet lose a worker and nothing else, on this machine
	$(BIN)/leasehold demo

# The rules of the house are left to `make check`.
quick: $(READY) ## the inner loop: format, lint, types and the tests that need no service
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest -q --quick --shuffle $(SEED) --ignore tests/test_house.py -n 5 --hypothesis-profile quick

# What `make check` runs is not run again.
test: $(READY) ## run every test that needs no opt-in, but for those of `make check`
	$(BIN)/pytest -m 'not more' --ignore tests/test_house.py --ignore tests/docs/test_site.py -n 4 \
		--dist loadgroup --no-loadscope-reorder --hypothesis-profile repeatable --max-worker-restart 0

test-more: $(READY) ## run the opt-in tests, and say what could not be had
	$(BIN)/pytest -m more -n 4 --dist loadgroup --no-loadscope-reorder --hypothesis-profile repeatable --max-worker-restart 0

check: $(READY) ## format, lint, types, import contracts, rules of the house, growth of cost, the site of docs/
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	@set -e; for conftest in $$(find tests -mindepth 2 -name conftest.py); do MYPYPATH=tests $(BIN)/mypy $$conftest; done
	$(BIN)/python tests/docs/snippet_types.py
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/growth.py --check
	$(BIN)/pytest -q tests/test_house.py tests/docs/test_site.py

site: $(READY) #: build the site of docs/ into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

prove: $(READY) #: follow every interleaving of small fleets over the real plan (ten minutes); writes specs/proof.md
	$(BIN)/python -m leasehold_lab.checker --full --write specs/proof.md
	$(BIN)/python tests/balancer/planned_moves.py

soak: $(READY) #: simulate ten thousand fleets with every fault on, and let every call meet every fault
	$(BIN)/python tests/proving/every_call.py
	$(BIN)/python tests/proving/soak.py 10000

SECONDS = 600
ENGINE = hypothesis
fuzz: $(READY) #: give every parser what nobody would write, for SECONDS=600; what breaks one is kept; ENGINE=atheris
	@if [ $(ENGINE) = atheris ]; then $(BIN)/uv pip install -q --python $(BIN)/python --only-binary :all: --require-hashes \
		-r requirements-atheris.lock || true; fi
	$(BIN)/python lab/fuzz/long_fuzz.py $(SECONDS) --engine $(ENGINE)

# Python's own allocator hides what is read behind a value: plain malloc leaves the sanitizer's guards around each.
SANITIZED = -g -fsanitize=address,undefined -fno-sanitize-recover=all
fuzz-c: $(READY) #: the same for the scan in C alone, under the sanitizers of addresses and of undefined behaviour (gcc)
	CFLAGS='$(SANITIZED)' LD_PRELOAD=$$(cc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		$(BIN)/python lab/fuzz/long_fuzz.py $(SECONDS) cbor-answers

ONLY =
mutants: $(READY) #: plant small faults into named modules, and say which of them no test sees; ONLY=codecs for a part
	$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation --require-hashes -r requirements-mutants.lock
	$(BIN)/python lab/mutation/mutants.py $(if $(ONLY),--only $(ONLY),--write specs/mutants.md)

bench: $(READY) #: measure every claim of speed beside a named peer
	@met=true; for script in $$(grep -l __main__ benchmarks/*.py); do echo "== $$script"; $(BIN)/python "$$script" || met=false; done; $$met

CHAOS = 'kinesis dynamodb' 'event-hubs azblob' 'kinesis sqlite' 'event-hubs dynamodb' 'kinesis dynamodb --consumer multilang' \
	'kinesis s3' 'kinesis dynamodb --layout sessions' 'kinesis postgres --layout sessions' 'kinesis dynamodb --to postgres'
chaos: $(READY) #: one fault after another on worker processes and their services (25 minutes); SEED=7 repeats a run
	@good=true; for run in $(CHAOS); do set -- $$run; source=$$1; store=$$2; shift 2; \
		$(BIN)/python lab/chaos/plain_workers.py --seed $(SEED) --seconds 110 --source $$source --store $$store $$* || good=false; \
	done; $$good

chaos-spark: $(READY) #: kill, steal, split and block under applications of Spark (two hours)
	$(BIN)/python lab/spark/spark_flights.py
	$(BIN)/python lab/spark/spark_flights.py --source event-hubs
	$(BIN)/python lab/spark/spark_kills.py
	$(BIN)/python lab/spark/spark_kills.py --source event-hubs
	$(BIN)/python lab/spark/spark_kills.py --drawn --kills 40
	$(BIN)/python lab/spark/spark_kills.py --cluster --kills 40
	$(BIN)/python lab/spark/spark_pipeline_kills.py --java
	$(BIN)/python lab/spark/spark_pipeline_kills.py --cluster
	$(BIN)/python lab/spark/spark_pipeline_kills.py --pyspark 4.0
	$(BIN)/python lab/spark/spark_pipeline_kills.py --pyspark 4.1
	$(BIN)/python lab/spark/spark_pipeline_kills.py --pyspark 4.0 --pyspark '' --pyspark 4.1 --executors
	$(BIN)/python lab/spark/spark_copies.py
	$(BIN)/python lab/spark/spark_blocked.py
	$(BIN)/pytest -q -n 0 -m '' tests/docs/spark_page.py

dist: $(READY) #: build into dist/ what an index takes: sources, a plain wheel, a compiled one for each Python here
	$(BIN)/python tests/releasing.py dist

sizes: $(READY) #: install each extra into an empty environment, and say how large it is
	$(BIN)/python benchmarks/extra_sizes.py

api: $(READY) #: write specs/public-api/now.txt: the public names and their signatures
	$(BIN)/python tests/public_api.py

VERSION =
changelog: $(READY) #: show what changelog.d/ adds to CHANGELOG.md; VERSION=0.2.0 moves it there
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation --require-hashes -r requirements-changelog.lock
	@$(BIN)/towncrier build $(if $(VERSION),--version $(VERSION),--draft --version next)

sbom: $(READY) #: write the parts lists of all locked packages (CycloneDX) to build/sbom
	$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation --require-hashes -r requirements-supply.lock
	$(BIN)/python tests/supply/supply.py sbom build/sbom

audit: $(READY) #: hold what is installed against the locks, digests and licences; needs no network
	$(BIN)/python tests/supply/supply.py audit

lock: $(READY) #: pin the newest dependencies that pyproject.toml and package.json allow
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-package leasehold --no-emit-package leasehold-lab \
		--all-extras --group test -o requirements.lock pyproject.toml
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		-c requirements.lock --group build -o requirements-build.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		-c requirements.lock --group amqp -o requirements-amqp.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		-c requirements.lock --group supply -o requirements-supply.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		-c requirements.lock --group mutants -o requirements-mutants.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		-c requirements.lock --group atheris -o requirements-atheris.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		-c requirements.lock --group changelog -o requirements-changelog.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		-c requirements.lock --group lambda -o requirements-lambda.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--group spark-40 -o requirements-spark-4.0.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--group spark-41 -o requirements-spark-4.1.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--group async-kinesis -o benchmarks/async-kinesis.lock
	@set -e; trees=lab/leasehold_lab/standins/node; \
	for tree in $$trees/aws $$trees/azure tests/javascript/event_processor tests/javascript/multilang \
		tests/javascript/pyright tests/javascript/axe; do \
		cd $(CURDIR)/$$tree; rm -f package-lock.json; \
		$(NPM) install --package-lock-only --ignore-scripts --omit-lockfile-registry-resolved --no-audit --no-fund; \
		$(NODE) $(CURDIR)/$$trees/bare.cjs; done
