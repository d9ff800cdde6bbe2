# Everything happens in .venv; a fresh machine needs Python 3.11+ and make.
#   make demo TORCH_INDEX=URL   takes PyTorch from another package index (see README: CPU builds)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TF_VENV := .venv-tf
GPU_VENV := run/gpu-venv
# In the slow tiers each command is started by an interpreter of its own (tests/support/warm_start.py).
COLD := PACELINE_TESTS_WARM=0
# Other load can make a test fail that depends on time. It gets a second attempt, and is listed by
# name as RERUN: a defect of that test.
RETRY := --reruns 1 -raR
PIP_ARGS := -q --disable-pip-version-check -c constraints.txt
TORCH_ARGS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)

.PHONY: demo test test-chosen test-frameworks bench-frameworks test-benchmarks test-long test-torch test-packages test-slow everything soak fuzz gpu test-versions lint types format bench picture plotly-bundle docs tutorial clean
.DELETE_ON_ERROR:

KERNEL := hatch_build.py $(wildcard src/paceline/comm/*/*.[ch]) \
  $(wildcard src/paceline/deploy/native/src/* src/paceline/deploy/native/include/* src/paceline/deploy/native/build.sh)

$(VENV)/installed: pyproject.toml constraints.txt $(KERNEL)
	@$(PYTHON) -c 'import sys; sys.exit("Paceline needs Python 3.11 or later; this is " + sys.version.split()[0] + ". HINT: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) (PyTorch takes a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install $(PIP_ARGS) $(TORCH_ARGS) torch
	@$(BIN)/pip install $(PIP_ARGS) -e '.[data,formats,examples,export,tune,dev]'
	@$(BIN)/pip install $(PIP_ARGS) --no-deps aeon  # for its data, which examples/sets.py packs
	@touch $@

# Frameworks whose scripts are recorded in the tests, or that plug in (NVIDIA's DALI, 0.3 GB);
# without them those tests are skipped.
$(VENV)/frameworks: $(VENV)/installed
	@$(BIN)/pip install $(PIP_ARGS) -e '.[frameworks]'
	@touch $@

$(VENV)/docs: $(VENV)/installed
	@$(BIN)/pip install $(PIP_ARGS) -e '.[docs]'
	@touch $@

# TensorFlow and JAX take over a gigabyte and choose versions of what they share: a place of
# their own. PyTorch is there as well, as it is wherever Paceline is.
$(TF_VENV)/installed: pyproject.toml constraints.txt $(KERNEL)
	@echo "Setting up $(TF_VENV) with TensorFlow and JAX (a minute or two) ..."
	@$(PYTHON) -m venv $(TF_VENV)
	@$(TF_VENV)/bin/pip install $(PIP_ARGS) $(TORCH_ARGS) torch
	@$(TF_VENV)/bin/pip install $(PIP_ARGS) -e '.[other-frameworks,data,formats,dev]'
	@touch $@

demo: $(VENV)/installed
	@$(BIN)/python examples/demo.py

# Three at a time, as many wait, and then by themselves those that judge measured times. FILES names
# test files or folders; only files with an `alone` mark are imported again.
QUICK := not soak and not long and not bench and not gpu
FILES ?= tests
test: $(VENV)/frameworks
	$(BIN)/pytest $(RETRY) -n 3 --dist worksteal -m "$(QUICK) and not alone" $(FILES)
	@alone=$$(grep -rl --include='test_*.py' 'mark\.alone' $(FILES)); [ -z "$$alone" ] || \
	  $(BIN)/pytest $(RETRY) -m "$(QUICK) and alone" $$alone || [ $$? = 5 ]

# The quick tests that tests/choice/select_quick.py chooses for a CI run.
test-chosen: $(VENV)/frameworks
	@mkdir -p run
	@$(BIN)/python tests/choice/select_quick.py choose run/quick-chosen.txt
	@$(MAKE) --no-print-directory test FILES="$$(tr '\n' ' ' < run/quick-chosen.txt)"

test-frameworks: $(TF_VENV)/installed
	$(TF_VENV)/bin/pytest tests/frameworks

bench-frameworks: $(TF_VENV)/installed
	$(TF_VENV)/bin/python benchmarks/compat/keras_steps.py

# PyTorch's own tests of collectives and DDP, over the exchange in shared memory: on four ranks,
# and those of groups on eight, as they ask for.
test-torch: $(VENV)/installed
	$(BIN)/pytest $(RETRY) -n 2 --durations=5 -m "" tests/comm/torchs_own.py
	WORLD_SIZE=8 $(BIN)/pytest $(RETRY) -n 2 --durations=5 -m "" -k "_group" tests/comm/torchs_own.py

# Real ssh, Slurm, MPI and Chromium for the tests that need hosts or open pages; without them those
# tests are skipped.
test-packages:
	@tests/bed/packages.sh

# Short runs of all benchmarks: they must run and write all their results.
test-benchmarks: $(VENV)/installed
	$(COLD) $(BIN)/pytest $(RETRY) -n 2 --durations=10 --junitxml=run/bench.xml -m bench

# Tests that train or measure for long, and launchers on more layouts of hosts.
test-long: $(VENV)/installed
	$(COLD) $(BIN)/pytest $(RETRY) -n 2 --dist worksteal --durations=20 --junitxml=run/long.xml -m "long and not alone"
	$(COLD) $(BIN)/pytest $(RETRY) --durations=20 --junitxml=run/long-alone.xml -m "long and alone"

soak: $(VENV)/installed
	$(COLD) $(BIN)/pytest $(RETRY) -n 2 --dist worksteal --durations=20 --junitxml=run/soak.xml -m "soak and not alone"
	$(COLD) $(BIN)/pytest $(RETRY) --durations=20 --junitxml=run/soak-alone.xml -m "soak and alone"

# The part of the benchmark, long and soak tests that tests/choice/select_slow.py chooses for a CI run.
# pytest exits with 5 where none of the chosen tests has the mark.
test-slow: $(VENV)/installed
	@mkdir -p run
	@$(BIN)/pytest -q --collect-only -m "bench or long or soak" \
	  $$(grep -rlE --include='test_*.py' 'mark\.(bench|long|soak)' tests) > run/slow-ids.txt
	@$(BIN)/python tests/choice/select_slow.py choose run/slow-ids.txt run/slow-chosen.txt
	$(COLD) $(BIN)/pytest $(RETRY) -n 2 --dist worksteal --durations=10 -m "not alone" @run/slow-chosen.txt || [ $$? = 5 ]
	$(COLD) $(BIN)/pytest $(RETRY) --durations=10 -m alone @run/slow-chosen.txt || [ $$? = 5 ]

# All tiers. Each prints its longest tests; the durations are the base of test-slow's choice.
everything: test test-benchmarks test-long soak
	$(BIN)/python tests/choice/select_slow.py measure run/*.xml

# Every GPU path on one GPU, and five measurements, in eight minutes: results.jsonl and JSON in RESULTS.
# Without a GPU it prints what it would run; DEVICE=cpu rehearses it. OFFLINE=FOLDER installs from a
# folder of tools/offline_wheels.sh, without a network, beside the PyTorch of $(PYTHON).
DEVICE ?= cuda
RESULTS ?= run/gpu
gpu: $(if $(OFFLINE),gpu-offline,$(VENV)/installed)
	$(if $(OFFLINE),$(GPU_VENV),$(VENV))/bin/python tests/gpu/run.py --device $(DEVICE) --results $(RESULTS) $(GPU_OPTIONS)

.PHONY: gpu-offline
gpu-offline:
	PYTHON=$(PYTHON) tools/offline_install.sh $(OFFLINE) $(GPU_VENV) 'paceline[data,formats]' pytest

# Python and PyTorch versions that users have: a virtual environment and the quick tests for each pair,
# in run/versions. PyTorch 2.6 and 2.11 come as CUDA builds (3 GB each), so this is not part of .ci/run.
PYTHONS ?= 3.11 3.12
TORCHES ?= 2.6 2.11 newest
test-versions:
	tools/test_versions.sh "$(PYTHONS)" "$(TORCHES)" $(VERSION_TESTS)

# Coverage-guided fuzzing of what is read from others, each target for SECONDS; what it finds lies in
# run/fuzz.
SECONDS ?= 60
fuzz: $(VENV)/installed
	cd tests && ../$(BIN)/python -m fuzz all --seconds $(SECONDS) --artifacts ../run/fuzz

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed
	$(BIN)/python benchmarks/launch/start_time.py
	$(BIN)/python benchmarks/launch/strangers.py
	$(BIN)/python benchmarks/launch/step_time.py
	$(BIN)/python benchmarks/recording/recording_cost.py
	$(BIN)/python benchmarks/recording/noise_scale_cost.py
	$(BIN)/python benchmarks/compat/horovod.py
	$(BIN)/python benchmarks/deploy/model_calls.py
	$(BIN)/python benchmarks/deploy/native_robustness.py
	$(BIN)/python benchmarks/deploy/rank_server.py
	$(BIN)/python benchmarks/deploy/solvers.py
	$(BIN)/python benchmarks/tune/trial_cost.py
	$(BIN)/python benchmarks/tune/kills.py
	$(BIN)/python benchmarks/recording/report_size.py
	$(BIN)/python benchmarks/recording/top_cost.py
	$(BIN)/python benchmarks/recording/page_size.py
	$(BIN)/python benchmarks/launch/binding.py
	$(BIN)/python benchmarks/exchange/exchange.py
	$(BIN)/python benchmarks/exchange/sockets.py
	$(BIN)/python benchmarks/exchange/exchange_hosts.py
	$(BIN)/python benchmarks/exchange/tuning.py
	$(BIN)/python benchmarks/exchange/unused.py
	$(BIN)/python benchmarks/exchange/compression.py
	$(BIN)/python benchmarks/large_batch/optimizer_time.py
	$(BIN)/python benchmarks/large_batch/norm_time.py
	$(BIN)/python benchmarks/large_batch/norm_neighbours.py
	$(BIN)/python benchmarks/large_batch/convergence.py
	$(BIN)/python benchmarks/large_batch/asynchronous.py
	$(BIN)/python benchmarks/layouts/layout_time.py
	$(BIN)/python benchmarks/layouts/tensor_time.py
	$(BIN)/python benchmarks/layouts/memory_of_layouts.py
	$(BIN)/python benchmarks/layouts/memory_prediction.py
	$(BIN)/python benchmarks/layouts/recomputation.py
	$(BIN)/python benchmarks/layouts/checkpoint_io.py
	$(BIN)/python benchmarks/layouts/peers.py
	$(BIN)/python benchmarks/layouts/pipeline_idle.py
	$(BIN)/python benchmarks/layouts/pipeline_cases.py
	$(BIN)/python benchmarks/layouts/pipeline_speed.py
	$(BIN)/python benchmarks/layouts/pipeline_memory.py
	$(BIN)/python benchmarks/data/loaders.py
	$(BIN)/python benchmarks/data/loader_storage.py
	$(BIN)/python benchmarks/data/packing.py
	$(BIN)/python benchmarks/data/packing_ranks.py
	$(BIN)/python benchmarks/data/staging.py
	$(BIN)/python benchmarks/data/patches.py
	$(BIN)/python benchmarks/launch/fault_times.py
	$(BIN)/python benchmarks/launch/host_fault_times.py
	$(BIN)/python benchmarks/scale/planted_laws.py
	$(BIN)/python benchmarks/scale/next_size.py
	$(BIN)/python benchmarks/scale/study_overhead.py
	$(BIN)/python benchmarks/verify/guard.py
	$(BIN)/python benchmarks/verify/duration.py

# The part of plotly.js that the report page carries; npm is needed for nothing else.
plotly-bundle:
	cd tools/plotly_bundle && npm ci --no-audit --no-fund && npm run build

picture: $(VENV)/installed
	$(BIN)/python docs/pictures/draw/pages.py
	$(BIN)/python docs/pictures/draw/mistakes.py

# The documentation site, in run/site; a warning is an error.
docs: $(VENV)/docs
	$(BIN)/sphinx-build -q -W --keep-going -d run/doctrees docs run/site
	@echo "open run/site/index.html"

# The commands of "Getting started", with a short diagnosis: they must run and print their tables.
tutorial: $(VENV)/installed
	@$(BIN)/python -m compileall -q src  # once, also where PYTHONDONTWRITEBYTECODE is set
	$(BIN)/python docs/run_commands.py docs/getting-started.md --short

clean:
	rm -rf $(VENV) $(TF_VENV) run
