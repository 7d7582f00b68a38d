# Everything a developer or a newcomer runs. `make demo` shows the main job; `make check` is what CI runs.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
# Where to take torch from, such as the index of PyTorch with builds for CPUs alone (docs/install.md); empty: where all is.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
STAMP := $(VENV)/.installed
XLA_VENV := .venv-xla
XLA_STAMP := $(XLA_VENV)/.installed
FORMATTED := checks healthd packages tests
# Python starts several times faster where it may keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install speed demo demo-more test test-system test-xla test-all nightly check format lint types bench docs dashboards pins clean

# A target that a newcomer needs has a line here: `## [GROUP] text`. CONTRIBUTING.md lists the others.
help: ## [Start] list the main targets
	@awk -F':.*## ' '/^[a-z-]+:.*## \[/ { group = $$2; sub(/^\[/, "", group); text = group; sub(/\].*/, "", group); sub(/^[^]]*\] /, "", text); \
	  if (!(group in lines)) order[++groups] = group; lines[group] = lines[group] sprintf("  %-16s %s\n", $$1, text) } \
	  END { for (i = 1; i <= groups; i++) printf "%s%s\n%s", (i == 1 ? "" : "\n"), order[i], lines[order[i]] }' $(MAKEFILE_LIST)
	@echo; echo "CONTRIBUTING.md lists all targets."

# Run a command that is silent for long; show its last line every eight seconds, and all of them if it fails.
define noisy
( $(1) ) > $(VENV)/install.log 2>&1 & job=$$!; seconds=0; \
while kill -0 $$job 2>/dev/null; do sleep 1; seconds=$$((seconds + 1)); \
  [ $$((seconds % 8)) -ne 0 ] || echo "  $$seconds s: $$(grep -v -i warning $(VENV)/install.log | tail -n 1 | tr -s ' ' | cut -c 1-90)"; done; \
wait $$job || { cat $(VENV)/install.log; exit 1; }
endef

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "healthd needs Python 3.11 or newer; name one with make PYTHON=..."; exit 1; }
	@echo "Installing into $(VENV) (once; PyTorch is the large part) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(call noisy,test -z "$(TORCH_INDEX)" || $(PIP) --index-url "$(TORCH_INDEX)" "$$(grep '^torch==' requirements.txt)"; \
	  $(PIP) -r requirements.txt && $(PIP) --no-deps --no-build-isolation -e .)
	@touch $@

install: $(STAMP) ## [Start] make a local environment in .venv

speed: $(STAMP) ## [Start] show U, the unit of time for tests and figures, and the load of this machine
	@$(BIN)/python -m tests.speed

demo: $(STAMP) ## [Start] three nodes, an aggregator and a gate on this machine (KEEP=1 leaves them running)
	@$(BIN)/healthd demo $(if $(KEEP),--keep)

demo-more: $(STAMP) ## [Start] more of it: a spare, a device that cannot train, why a job died
	@$(BIN)/healthd demo --more $(if $(KEEP),--keep)

# CI names a directory for results: there a test that fails is run once more, and tests/ci.py counts all runs together.
TESTS_RESULTS ?=
PYTEST = $(BIN)/python -m pytest $(if $(TESTS_RESULTS),--reruns 1 --reruns-delay 2 --junitxml=$(TESTS_RESULTS)/$@.xml)
# Tests marked `nightly` take minutes; `make nightly` sets NIGHTLY and runs them too.
LATER = $(if $(NIGHTLY),,or nightly)
# Four at a time on two cores, since most tests wait for something now and then.
WORKERS := $$(( $$(nproc) * 2 ))

test: $(STAMP) ## [Test] all tests that need neither root nor other programs (ARGS="-k gate" runs a part)
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m "not (system or xla or gpu or images or kubernetes)" $(ARGS)

test-system: $(STAMP) ## [Test] with root: real Slurm, Prometheus, PostgreSQL, Chromium, network namespaces
	@$(PYTEST) -n 2 --dist loadfile -m "system and not (xla or images or kubernetes $(LATER))" $(ARGS) tests

.PHONY: test-images
test-images: $(STAMP) # every image recipe built and started (root, buildah, debootstrap; four minutes)
	@$(PYTEST) -m "images" tests/deploy

.PHONY: test-kubernetes
test-kubernetes: $(STAMP) ## [Test] with root: a real Kubernetes of three nodes (docs/kubernetes_tests.md)
	@$(PYTEST) -m "kubernetes and not (images $(LATER))" --ignore tests/kubernetes/test_jobs.py $(ARGS) tests/kubernetes tests/integrations

.PHONY: test-kubernetes-jobs
test-kubernetes-jobs: $(STAMP) # Jobs while a real Kubernetes changes under them: updates, drains, dead kubelets (not a part of test-all)
	@$(PYTEST) -m "kubernetes" $(ARGS) tests/kubernetes/test_jobs.py

# The demonstration's images, anew when what is in them has changed.
KUBERNETES_IMAGES := build/kubernetes-images
$(KUBERNETES_IMAGES)/built: $(STAMP) $(shell find checks healthd deploy/container setup.py -type f -not -name '*.pyc')
	@echo "Building the images healthd and healthd-torch into $(KUBERNETES_IMAGES) (minutes; PyTorch is the large part) ..."
	@TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m tests.kubernetes.demo --build $(KUBERNETES_IMAGES)
	@touch $@

.PHONY: demo-kubernetes
demo-kubernetes: $(STAMP) $(KUBERNETES_IMAGES)/built # gated jobs that train a model, on a real Kubernetes of three nodes (root; docs/kubernetes_tests.md)
	@$(BIN)/python -m tests.kubernetes.demo --images $(KUBERNETES_IMAGES)

.PHONY: kubernetes-programs
kubernetes-programs: # build the programs of test-kubernetes into build/kubernetes (Go 1.26; a quarter of an hour)
	@tests/kubernetes/programs/build build/kubernetes

test-all: test test-system test-xla test-kubernetes ## [Test] all of these

# What takes hours, and what CI leaves out. A part that fails does not hide the next.
nightly: $(STAMP) $(XLA_STAMP) ## [Test] hours: everything at full size, images, drills, soaks, 2,000 simulated schedules
	@TESTS_PROFILE=thorough $(MAKE) --keep-going NIGHTLY=1 test-all test-images test-kubernetes-jobs drill bench-short bench-localize soak
	@$(MAKE) simulate SEED=1000000 SCHEDULES=2000
	@$(MAKE) soak-fleet MINUTES=10

$(XLA_STAMP): requirements-xla.txt
	@echo "Installing PyTorch/XLA into $(XLA_VENV) (once; about 7 GB) ..."
	@test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	@$(call noisy,$(XLA_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -r requirements-xla.txt)
	@touch $@

test-xla: $(STAMP) $(XLA_STAMP) ## [Test] every probe and collective on real PyTorch/XLA (on its CPU device; 7 GB)
	@$(PYTEST) -m xla $(ARGS) tests/checks tests/cli tests/runner

check: format-check lint types test ## [Test] format, lint, strict types and `make test`: what a change needs

.PHONY: format-check
format-check: $(STAMP)
	@$(BIN)/ruff format --check $(FORMATTED)

format: $(STAMP) ## [Write] format the code
	@$(BIN)/ruff format $(FORMATTED)
	@$(BIN)/ruff check --fix $(FORMATTED)

lint: $(STAMP)
	@$(BIN)/ruff check $(FORMATTED)

types: $(STAMP)
	@$(BIN)/mypy

bench: $(STAMP) ## [Measure] the measured figures, as ratios in one run
	@$(BIN)/python -m tests.benchmarks

.PHONY: bench-short
bench-short: $(STAMP) # can every figure still be measured? small sizes, no aims (a minute or two)
	@$(BIN)/python -m tests.benchmarks --short $(patsubst %,--skip %,$(SKIP))

.PHONY: bench-localize
bench-localize: $(STAMP) # localisation over simulated fleets (a quarter of an hour; the table of docs/localisation_rules.md)
	@$(BIN)/python -m tests.benchmarks.localize

.PHONY: soak
soak: $(STAMP) # faults at random in links and processes of six real daemons: who is named? (root; about ten minutes)
	@$(BIN)/python -m tests.netns.soak

SEED ?= 0
SCHEDULES ?= 100
STEPS ?= 30
.PHONY: simulate
simulate: $(STAMP) ## [Measure] a site in virtual time with random faults (SEED, SCHEDULES; docs/simulation.md)
	@$(BIN)/python -m tests.simulation --seed $(SEED) --schedules $(SCHEDULES) --steps $(STEPS) \
	  $(if $(AGGREGATORS),--aggregators $(AGGREGATORS)) $(if $(PROCESSES),--processes $(PROCESSES))

.PHONY: drill
drill: $(STAMP) ## [Measure] three aggregators, killed, frozen and cut off: is anything lost? (PostgreSQL)
	@$(BIN)/python -m tests.drill

.PHONY: drill-short
drill-short: $(STAMP) # two faults of the drill: the leader and the database are killed (half a minute; PostgreSQL)
	@$(BIN)/python -m tests.drill --short

MINUTES ?= 60
.PHONY: soak-fleet
soak-fleet: $(STAMP) # two aggregators, 500 nodes, 10,000 gates, faults: does anything grow? (MINUTES, an hour; PostgreSQL)
	@$(BIN)/python -m tests.drill.soak --minutes $(MINUTES)

docs: $(STAMP) ## [Write] the generated pages, and the walks of docs/architecture.md
	@$(BIN)/python -m docs.generate
	@$(BIN)/python -m tests.walks

.PHONY: readme
readme: $(STAMP) # the output of the demonstration in README.md
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m docs.readme

.PHONY: site
site: $(STAMP) ## [Write] the documentation as a site in build/site; a dead link fails
	@$(BIN)/python -m docs.site build/site-pages
	@SITE_VERSION="$$(cat build/site-pages/version.txt)" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Where the repository is: links of the package's description lead there.
REPOSITORY_URL ?=
VERSION = $$($(BIN)/python -c 'import healthd; print(healthd.__version__)')
.PHONY: tag-is-version
tag-is-version: # fails unless TAG is v and the version of the package, as of the charts
	@$(PYTHON) -m deploy.release.tag "$(TAG)"

.PHONY: release
release: $(STAMP) # the files of a release in dist (docs/release.md)
	@rm -rf dist build/lib
	@REPOSITORY_URL="$(REPOSITORY_URL)" $(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")' >/dev/null
	@cd packages/healthd-steps && $(abspath $(BIN))/python -c 'from setuptools import build_meta as b; b.build_sdist("../../dist"); b.build_wheel("../../dist")' >/dev/null
	@$(BIN)/python -m deploy.release.sbom "$(VERSION)" > dist/healthd-$(VERSION).cdx.json
	@rm -rf build/charts && mkdir -p build/charts && cp -r deploy/helm/healthd deploy/helm/healthd-job build/charts
	@test -z "$(REPOSITORY_URL)" || for chart in build/charts/*; do \
	  printf 'home: %s\nsources: [%s]\n' "$(REPOSITORY_URL)" "$(REPOSITORY_URL)" >> $$chart/Chart.yaml; done
	@$(BIN)/helm package --destination dist build/charts/* >/dev/null
	@$(BIN)/python -m deploy.release.krew "$(VERSION)" dist "$(REPOSITORY_URL)"
	@awk '/^## /{seen++} seen==1' CHANGELOG.md > dist/NOTES.md
	@cd dist && sha256sum -- $$(ls) > SHA256SUMS && ls -1

FOR_PYTHON ?= 3.12
.PHONY: offline-bundle
offline-bundle: $(STAMP) # wheels and install.sh for machines without a network, in build/offline (FOR_PYTHON=3.12)
	@$(BIN)/python -m deploy.offline.bundle build/offline --python $(FOR_PYTHON)

.PHONY: lines
lines: # lines and files of Python, room by room
	@git ls-files '*.py' | grep -v migrations/versions/ | xargs wc -l | awk '$$2 != "total" { \
	  n = split($$2, part, "/"); room = n > 2 ? part[1] "/" part[2] : n > 1 ? part[1] : "."; \
	  if (n == 2 && part[1] != "tests") room = part[1]; lines[room] += $$1; files[room]++; all[part[1]] += $$1; count[part[1]]++ } \
	  END { for (room in lines) printf "%-28s %7d lines %5d files\n", room, lines[room], files[room] | "sort"; close("sort"); \
	  printf "%-28s %7d lines %5d files\n", "product (checks, healthd)", all["checks"] + all["healthd"], count["checks"] + count["healthd"]; \
	  printf "%-28s %7d lines %5d files\n", "tests", all["tests"], count["tests"] }'

.PHONY: man
man: $(STAMP) # a man page for each command, in build/man
	@$(BIN)/python -m docs.man build/man

dashboards: $(STAMP) # the Grafana dashboards of deploy/grafana from their code
	@$(BIN)/python -m deploy.grafana.build

.PHONY: first-hour
first-hour: $(STAMP) # walk the documented ways from nothing to a gated job, with a stop-watch (about ten minutes; the Slurm guide as root)
	@$(BIN)/python -m tests.first_hour

.PHONY: screenshots
screenshots: $(STAMP) # pictures of the page in docs/pictures, of a real fleet by a real browser (needs chromium; two minutes)
	@$(BIN)/python -m tests.ui.pictures

pins: # write requirements.txt anew from what is installed
	@( echo "# The whole local environment, pinned, so that tomorrow's clone behaves as today's. Made by 'make pins'."; \
	   $(BIN)/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+cpu//' ) > requirements.txt

clean: ## [Start] remove the local environment and what tools left
	rm -rf $(VENV) $(XLA_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
