# make demo    train a small GPT in bf16 and in FP8 and compare them (some minutes on 2 CPU cores that multiply bf16)
# make check   before each commit: lint, and the tests that need no model
# make test    lint, and the tests that find nine faults of ten (5 minutes on 2 CPU cores)
# make slow    the slow tests: machine code, several processes, training to a loss
# make weekly  the same at more sizes, models, recipes and GPUs: hours, before a release
# make compat  the tests that run on the oldest and the newest torch, too: make compat TORCH=2.11.0
# make lean    what runs first on a rented GPU, with the packages of a bare image: torch 2.11 and its Triton (20 minutes, 6 GB)
# make hosts   the tests with Trainer, TRL, Accelerate, Lightning, Axolotl and torchtitan, in an environment of their own
# make features delete each feature in turn from a copy, and run the core's tests there (some 3 minutes each)
# make mutants plant known faults one by one, and say which tests find them: make mutants ARGS="S1 S2"
# make axolotl the tests with `axolotl train` itself and the versions that it pins, in an environment of 4 GB
# make estimates  all that is estimated without a GPU anew, and the tables and pages with it (an hour of one core)
# make docs    the documentation site, into out/site; a link that leads nowhere is an error
# make dist    the wheel and the sdist, into out/dist
# make lint    ruff, mypy and import-linter alone
# make venv    the virtual environment alone; the others make it themselves
# make clean   remove the environments, caches and the demo's output
#
# TORCH=2.15.0 uses that version of torch, in an environment of its own. PYTHON chooses the interpreter that makes the
# environment, JOBS the number of test processes, TESTS what pytest runs, ARGS the demo's flags.

TORCH  ?= 2.13.0
PYTHON ?= $(shell command -v python3 || command -v python)
JOBS   ?= $(shell $(PYTHON) -c "import os; print(min(4, os.cpu_count() or 1))")
TESTS  ?= tests benchmarks/tests
ARGS   ?=
FAST   := config devices cli compat project/test_docs.py project/test_imports.py codegen/test_expected_kernels.py \
          codegen/test_scaled_mm.py features/delayed/test_te_update_rule.py reporting/test_report.py reporting/test_html.py

EXTRAS := test
VENV  := .venv-$(TORCH)
DOCS  := .venv-docs
HOSTS := VENV=.venv-hosts-$(TORCH) EXTRAS=test,hosts
LEAN  := .venv-lean
IMAGE := numpy jinja2 tabulate click tqdm matplotlib pytest hypothesis
AXOLOTL := VENV=.venv-axolotl-$(TORCH) EXTRAS=test
STAMP := $(VENV)/installed
PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check

# By file: the tests of a file share what they have compiled or started. Budgets are what a run takes on two cores, in seconds.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -q --durations=10

.PHONY: demo check test slow weekly compat estimates lean hosts hosts-venv features mutants axolotl docs docs-venv dist lint venv clean

demo: $(STAMP)
	$(PY) examples/train_gpt.py $(ARGS)

check: lint
	$(PYTEST) --budget 90 -m "not slow and not weekly and not compiled" $(addprefix tests/,$(FAST))

test: lint
	$(PYTEST) --budget 270 -m "not slow and not weekly" $(TESTS)

slow: $(STAMP)
	$(PYTEST) --budget 700 -m "slow and not weekly" $(TESTS)

weekly: $(STAMP)
	$(PYTEST) -m weekly $(TESTS)

compat: $(STAMP)
	$(PYTEST) --budget 200 -m "compat and not slow and not weekly" $(shell grep -rl --include='*.py' mark.compat tests)

lean: $(LEAN)/installed  # a checkout alone: neither the package nor the plugins of pytest that pyproject.toml configures
	OMP_NUM_THREADS=1 $(LEAN)/bin/python -m pytest -o addopts= -q -ra --durations=10 -k "sm_90 or not (sm_ or gfx)" \
	    benchmarks/tests/test_device.py tests/codegen/test_machine_code.py

$(LEAN)/installed:
	test -x $(LEAN)/bin/python || $(PYTHON) -m venv $(LEAN)
	$(LEAN)/bin/python -m pip --disable-pip-version-check install -q --no-compile torch==2.11.0 $(IMAGE)
	touch $(LEAN)/installed

estimates: $(STAMP)  # torchao's experts need Triton 3.6, and so torch 2.11
	test -x .venv-2.11.0/bin/python || $(MAKE) venv TORCH=2.11.0
	test -n "$$(ls .whl/torchao-0.18.0-*.whl 2>/dev/null)" || \
	    $(PIP) download -q --no-deps -d .whl --only-binary=:all: torchao==0.18.0
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.estimates --torchao .whl --old .venv-2.11.0/bin/python $(ARGS)

features: $(STAMP)
	$(PY) -m tests.without_features $(ARGS)

mutants: $(STAMP)
	$(PY) -m tests.mutants run $(ARGS)

hosts: hosts-venv  # one kind of export is loaded with the help of Accelerate
	$(MAKE) slow $(HOSTS) TESTS="tests/hosts tests/features/export/test_transformers.py::test_loaded_with_fine_grained_fp8"

hosts-venv:  # axolotl pins older versions of the other hosts: without its requirements
	$(MAKE) venv $(HOSTS)
	.venv-hosts-$(TORCH)/bin/python -c "import axolotl" 2>/dev/null || \
	    .venv-hosts-$(TORCH)/bin/python -m pip --disable-pip-version-check install -q --no-deps "axolotl>=0.19"

axolotl:
	$(MAKE) venv $(AXOLOTL)
	.venv-axolotl-$(TORCH)/bin/python -m pip --disable-pip-version-check install -q \
	    -c .venv-axolotl-$(TORCH)/constraints.txt "axolotl>=0.19"
	$(MAKE) slow $(AXOLOTL) JOBS=0 TESTS="$(wildcard tests/hosts/test_axolotl*.py)"

docs: docs-venv  # docstrings are read, not imported: no torch is needed
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" $(DOCS)/bin/mkdocs build --strict

docs-venv: $(DOCS)/installed

$(DOCS)/installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install -q $$(sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
	touch $(DOCS)/installed

dist:
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip --disable-pip-version-check install -q build
	rm -rf out/dist
	.venv-dist/bin/python -m build --outdir out/dist

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

venv: $(STAMP)

# torch comes first, by its exact pin; the constraint file then keeps every later requirement from replacing it.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("fp8compile needs Python 3.10 or newer: make PYTHON=...")'
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || test -n "$$CXX" || \
	    echo "note: no C++ compiler found; torch.compile needs one (g++ or clang++) to compile for a CPU" >&2
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	echo "torch==$(TORCH)" > $(VENV)/constraints.txt
	$(PIP) install -q --no-compile "torch==$(TORCH)"
	$(PIP) install -q --no-compile -c $(VENV)/constraints.txt -e ".[$(EXTRAS)]"
	touch $(STAMP)

clean:
	rm -rf .venv-* out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
