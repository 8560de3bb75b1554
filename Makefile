# dejax: one virtual environment, made on first use from the package registry; stamps keep later calls from
# installing again.
#
#   make demo              install into .venv and train on the standard library's code graph, three times
#   make demo CUDA=13      the same with jax's CUDA 13 wheels (or CUDA=12)
#   make test              lint, format, types, doctests and a sample of the tests, on one jax: what a change should pass
#   make test-all          the same with the tests in full, and those that cover the code on the oldest supported jax: what CI runs
#   make docs              build the documentation site and serve it at http://127.0.0.1:8000/
#   make test-fast         the tests of `make test` alone
#   make test-slow         the tests that take long: the same contracts over more cases
#   make test-gpu          the tests on a GPU, room by room, with the Python at hand (ROOM=offload: only tests/offload)
#   make test-gpus         the tests that need several devices on all GPUs of this machine
#   make asan              the CPU handlers under AddressSanitizer
#   make tsan              the offload store under ThreadSanitizer, with many threads
#   make soak              offload under random faults, 10,000 steps
#   make lint types venv clean

PYTHON ?= python3
VENV ?= .venv
VENV_NEXT ?= .venv-next
JOBS ?= 2
CUDA ?=
DEMO_ARGS ?= --seeds 3

BIN := $(VENV)/bin
EXTRA := $(if $(CUDA),cuda$(CUDA))
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard native/* native/*/* native/*/*/* dejax/include/*)
PIP := -m pip --disable-pip-version-check --no-input install --quiet
# The dependencies of some extras. They are installed while the extension compiles, and without bytecode, which Python
# makes of what is imported.
LIST := import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*p["dependencies"], *(r for e in sys.argv[1:] for r in p["optional-dependencies"][e]), sep="\n")
define install
	$(BIN)/python -c '$(LIST)' $(1) > $(VENV)/requirements.txt
	$(BIN)/python $(PIP) --no-deps --editable . & \
	$(BIN)/python $(PIP) --no-compile --requirement $(VENV)/requirements.txt; listed=$$?; wait $$! && exit $$listed
endef
# worksteal: neighbouring tests run in one process and share what they have compiled.
PYTEST := -m pytest -n $(JOBS) --dist worksteal -q --durations=15
# Most of the tests' time is XLA's compilation for the CPU, which the level halves. Without the three passes, which change
# no result, programs of interpreted kernels compile in 6 to 9 % less time.
QUICK_COMPILE := --xla_backend_optimization_level=0 \
	--xla_disable_hlo_passes=while-loop-invariant-code-motion,while-loop-constant-sinking,reshape-mover
QUICK = XLA_FLAGS="$(XLA_FLAGS) $(QUICK_COMPILE)"
# `$(call tests,folder of python,arguments)` runs tests. jaxlib 0.10 can do without its fusion emitters, and then compiles
# in a third less time. Not where different programs are to give the same bits.
SAME_BITS := tests/offload tests/examples/test_train_gpt.py
NO_EMITTERS = $(if $(filter 0.10.%,$(shell \
	$(1)/python -c 'from importlib.metadata import version; print(version("jaxlib"))')),--xla_cpu_use_fusion_emitters=false)
define tests
	$(if $(NO_EMITTERS),XLA_FLAGS="$(XLA_FLAGS) $(QUICK_COMPILE) $(NO_EMITTERS)" \
	$(1)/python $(PYTEST) $(2) $(SAME_BITS:%=--ignore=%) tests && passed=0 || passed=1; )$(QUICK) \
	$(1)/python $(PYTEST) $(2) $(if $(NO_EMITTERS),$(SAME_BITS) && exit $$passed,tests)
endef

# A Python >= 3.12 gets the newest jax; pip gives 3.11 jax 0.10. The first that runs, of PATH, then of pyenv: a pyenv
# shim may lie on PATH for a version that is not switched on.
PYTHON_NEXT ?= $(shell for v in 3.12 3.13 3.14; do \
	for python in $$(command -v python$$v) $(HOME)/.pyenv/versions/$$v*/bin/python$$v; do \
	"$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$python" && exit; \
	done; done)
# Where .venv has the newest jax already, .venv-next gets the oldest that is supported.
PINS_NEXT ?= $(shell $(PYTHON) -c 'import sys; print("jax==0.10.2 jaxlib==0.10.2" if sys.version_info >= (3, 12) else "")')

.PHONY: venv venv-test demo docs site test test-all test-fast test-slow test-gpu test-gpus test-here test-next doctest lint types format asan tsan soak clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

venv: $(VENV)/.installed$(EXTRA)
venv-test: $(VENV)/.installed-test

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dejax needs Python >= 3.11, but $(PYTHON) is " + sys.version.split()[0] + "; give another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed$(EXTRA): $(BUILD_INPUTS) | $(BIN)/python
	$(call install,all $(EXTRA))
	@touch $@

$(VENV)/.installed-test: $(BUILD_INPUTS) | $(BIN)/python
	$(call install,test $(EXTRA))
	@touch $@ $(VENV)/.installed$(EXTRA)

$(VENV)/.installed-docs: $(BUILD_INPUTS) | $(VENV)/.installed-test
	$(BIN)/python -c '$(LIST)' docs > $(VENV)/requirements.txt
	$(BIN)/python $(PIP) --requirement $(VENV)/requirements.txt
	@touch $@

site: $(VENV)/.installed-docs
	JAX_PLATFORMS=cpu $(BIN)/python docs/site/build.py

docs: $(VENV)/.installed-docs
	JAX_PLATFORMS=cpu $(BIN)/python docs/site/build.py --serve

demo: venv
	$(BIN)/python examples/entity_classification.py $(DEMO_ARGS)

# The markers (pyproject.toml) choose the tests. --keep-going: a long line does not hide whether the tests pass.
test: venv-test
	@$(BIN)/python -c 'import jax, sys; print("Python", sys.version.split()[0], "with jax", jax.__version__)'
	@$(MAKE) --no-print-directory --keep-going lint types doctest test-fast
	@echo "make test: all passed"

test-all: venv-test
	@$(MAKE) --no-print-directory --keep-going lint types doctest site test-here test-next
	@echo "make test-all: all passed"

test-fast: venv-test
	$(call tests,$(BIN),-m "not slow and not full and not long" --hypothesis-profile=quick)

test-slow: venv-test
	$(call tests,$(BIN),-m slow)

# Tests on GPUs run with a Python that has dejax installed editable, and jax with CUDA. A room is a folder of tests/, or `top`,
# the files beside the folders. A room that takes longer than nine minutes fails. Each prints counts, the reasons of tests
# that run on CPUs only, and failures as they happen; all of that is in build/test-gpu/ROOM.log, too.
PY ?= python3
JOBS_GPU ?= 14
ROOM ?= top $(filter-out __pycache__ golden,$(patsubst tests/%/,%,$(wildcard tests/*/)))
GPU_PYTEST = timeout --signal=INT --kill-after=30 540 $(PY) -m pytest -p no:benchmark -p no:cacheprovider \
	-n $(JOBS_GPU) --dist worksteal -v --tb=short --failures-at-once --durations=10
define test_rooms
	@$(PY) -c 'import jax; assert jax.default_backend() == "gpu", jax.devices(); print("jax", jax.__version__, jax.devices())'
	@mkdir -p build/test-gpu; failed=; for room in $(ROOM); do \
	log=build/test-gpu/$$room.log; paths=tests/$$room; [ $$room != top ] || paths=$$(ls tests/test_*.py); \
	{ $(GPU_PYTEST) $(1) $$paths; echo "status $$?"; } 2>&1 | tee $$log; \
	tail -n 1 $$log | grep -q "^status [05]$$" || failed="$$failed $$room"; done; \
	echo "failed rooms:$${failed:- none}"; test -z "$$failed"
endef

test-gpu:
	$(call test_rooms,-m "not slow")

test-gpus:
	$(call test_rooms,-m "devices and not slow")

# Offload with random faults for many steps: each right or an exception, and in the end nothing left.
soak: venv-test
	DEJAX_SOAK_STEPS=10000 $(BIN)/python -m pytest -q -s -p no:cacheprovider tests/offload/test_store.py -k soak

doctest: venv-test
	XLA_FLAGS="$(XLA_FLAGS) $(QUICK_COMPILE) $(call NO_EMITTERS,$(BIN))" $(BIN)/python $(PYTEST) -p no:cacheprovider --doctest-modules dejax

lint: venv-test
	$(BIN)/ruff check . && checked=0 || checked=1; $(BIN)/ruff format --check . && exit $$checked

format: venv-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv-test
	$(BIN)/mypy

# `make test-all` runs at both ends of the declared range of jax: on the newest everything but the slow tests; on the
# oldest the tests that together execute each line of dejax (tests/choose_oldest.py): what differs there is jax's API.
ALL := not slow
ON_OLDEST := oldest_jax
NEXT_IS_OLDEST := $(strip $(PINS_NEXT))
HERE := $(if $(strip $(PYTHON_NEXT)),$(if $(NEXT_IS_OLDEST),$(ALL),$(ON_OLDEST)),$(ALL))
NEXT := $(if $(NEXT_IS_OLDEST),$(ON_OLDEST),$(ALL))

test-here: venv-test
	$(BIN)/python -c 'import jax, sys; print("Python", sys.version.split()[0], "with jax", jax.__version__)'
	$(call tests,$(BIN),-m "$(HERE)")

ifeq ($(strip $(PYTHON_NEXT)),)
test-next:
	@echo "make test-all: no Python >= 3.12 found, so no second jax is tested (give one: make test-all PYTHON_NEXT=...)"
else
$(VENV_NEXT)/.installed-test: $(BUILD_INPUTS)
	test -x $(VENV_NEXT)/bin/python || $(PYTHON_NEXT) -m venv $(VENV_NEXT)
	$(VENV_NEXT)/bin/python $(PIP) --editable '.[test]' $(PINS_NEXT)
	@touch $@

test-next: $(VENV_NEXT)/.installed-test
	$(VENV_NEXT)/bin/python -c 'import jax, sys; print("Python", sys.version.split()[0], "with jax", jax.__version__)'
	$(call tests,$(VENV_NEXT)/bin,-m "$(NEXT)")
endif

# A copy of the package with an instrumented extension, in build/asan. A forked child has no sanitizer runtime to speak to.
asan: venv-test
	PYTHON=$(abspath $(BIN))/python sh tests/native/asan.sh

tsan:
	sh tests/native/tsan.sh

clean:
	rm -rf $(VENV) $(VENV_NEXT) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
