# dejax: a virtual environment, made on first use from the package registry; stamps keep later calls from installing
# again.
#
#   make demo              install into .venv and train on the standard library's code graph, three times
#   make demo CUDA=13      the same with jax's CUDA 13 wheels (or CUDA=12)
#   make test              lint, format, types, doctests and the suite: what a change should pass
#   make test-all          the same, each room's contract on the oldest supported jax, and the site: what CI runs
#   make test-slow         the tests that the suite leaves out: dear ones, and contracts over more cases
#   make lowering          every kernel by dejax's own lowering, JAX's taken away, compiled for an H100 and a B200 (no GPU needed)
#   make test-gpu          the suite on a GPU, room by room, with the Python at hand (ROOM=offload: only tests/offload)
#   make test-gpus         the tests that need several devices on all GPUs of this machine
#   make wheel             build a wheel, install it from the file into an empty environment, and try it in an empty folder
#   make docs              build the documentation site and serve it at http://127.0.0.1:8000/
#   make asan              the CPU handlers under AddressSanitizer
#   make tsan              the offload store under ThreadSanitizer, with many threads
#   make soak              offload under random faults, 10,000 steps
#   make lint types doctest suite contracts site wheel venv clean

# Python 3.12 and later get the newest jax: `python3`, or else the first on PATH or of pyenv (a shim of pyenv may lie on
# PATH for a version that is not switched on).
PYTHON ?= $(shell for python in python3 python3.12 python3.13 $(HOME)/.pyenv/versions/3.1[23]*/bin/python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && exit; \
	done; echo python3)
# The oldest supported jax, with the oldest supported Python where there is one.
OLDEST := jax==0.10.2 jaxlib==0.10.2
PYTHON_OLDEST ?= $(shell for python in python3.11 $(HOME)/.pyenv/versions/3.11*/bin/python3; do \
	$$python -c 'import ensurepip' 2>/dev/null && echo $$python && exit; done; echo $(PYTHON))
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
JOBS ?= 2
CUDA ?=
DEMO_ARGS ?= --seeds 3

BIN := $(VENV)/bin
EXTRA := $(if $(CUDA),cuda$(CUDA))
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard native/* native/*/* native/*/*/* dejax/include/*)
PIP := -m pip --disable-pip-version-check --no-input install --quiet
# `$(call install,folder,extras,pins)`: the dependencies of the extras are installed while the extension compiles, and
# without bytecode, which Python makes of what is imported.
LIST := import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*p["dependencies"], *(r for e in sys.argv[1:] for r in p["optional-dependencies"][e]), sep="\n")
define install
	$(1)/bin/python -c '$(LIST)' $(2) > $(1)/requirements.txt
	$(1)/bin/python $(PIP) --no-deps --editable . & \
	$(1)/bin/python $(PIP) --no-compile --requirement $(1)/requirements.txt $(3); listed=$$?; wait $$! && exit $$listed
endef
# worksteal: neighbouring tests run in one process and share what they have compiled. Most of the tests' time is XLA's
# compilation for the CPU, which the level halves. Without the three passes, which change no result, programs of
# interpreted kernels compile in 6 to 9 % less time. Bytecode is written even where the environment says not to, as images of
# containers do: each of the processes that tests start would else compile jax's source again, in 3 s of CPU time.
PYTEST := -m pytest -n $(JOBS) --dist worksteal -q --durations=15
TESTED := PYTHONDONTWRITEBYTECODE= XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=0 \
	--xla_disable_hlo_passes=while-loop-invariant-code-motion,while-loop-constant-sinking,reshape-mover"

.PHONY: venv venv-test demo docs site test test-all test-slow test-gpu test-gpus suite lowering contracts wheel doctest lint types format asan tsan soak clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

venv: $(VENV)/.installed$(EXTRA)
venv-test: $(VENV)/.installed-test

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dejax needs Python >= 3.11, but $(PYTHON) is " + sys.version.split()[0] + "; give another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed$(EXTRA): $(BUILD_INPUTS) | $(BIN)/python
	$(call install,$(VENV),all $(EXTRA))
	@touch $@

$(VENV)/.installed-test: $(BUILD_INPUTS) | $(BIN)/python
	$(call install,$(VENV),test $(EXTRA))
	@touch $@ $(VENV)/.installed$(EXTRA)

$(VENV_OLDEST)/.installed-test: $(BUILD_INPUTS)
	test -x $(VENV_OLDEST)/bin/python || $(PYTHON_OLDEST) -m venv $(VENV_OLDEST)
	$(call install,$(VENV_OLDEST),test,$(OLDEST))
	@touch $@

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

# --keep-going: a long line does not hide whether the tests pass.
test: venv-test
	@$(BIN)/python -c 'import jax, sys; print("Python", sys.version.split()[0], "with jax", jax.__version__)'
	@$(MAKE) --no-print-directory --keep-going lint types doctest suite
	@echo "make test: all passed"

test-all: venv-test
	@$(MAKE) --no-print-directory --keep-going test contracts site wheel
	@echo "make test-all: all passed"

# What a user installs, without this tree in sight. Dependencies come from the registry, as they do for a user.
wheel: $(BIN)/python
	rm -rf build/wheel && mkdir -p build/wheel/empty
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python $(PIP) --no-compile build/wheel/dejax_ml-*.whl
	cd build/wheel/empty && JAX_PLATFORMS=cpu ../venv/bin/python -m dejax && JAX_PLATFORMS=cpu ../venv/bin/python -c \
		"import dejax; from dejax import _native; assert 'site-packages' in dejax.__file__ and not _native.unavailable_reason()"

suite: venv-test
	$(TESTED) $(BIN)/python $(PYTEST) -m "not slow" tests

test-slow: venv-test
	$(TESTED) $(BIN)/python $(PYTEST) -m slow tests

$(VENV)/.installed-lowering: $(BUILD_INPUTS) | $(VENV)/.installed-test
	$(BIN)/python -c '$(LIST)' triton > $(VENV)/requirements.txt
	$(BIN)/python $(PIP) --requirement $(VENV)/requirements.txt
	@touch $@

# Compiled once: what the numpy stand-in runs is in `suite` and `test-slow`.
lowering: $(VENV)/.installed-lowering
	$(TESTED) JAX_PLATFORMS=cpu $(BIN)/python $(PYTEST) -p tests.pallas.without_pallas_lowering -m "slow or not slow" \
		tests/pallas/test_own_lowering.py tests/rgnn/lowering/test_h200.py -k "own and not printed_kernels"

contracts: $(VENV_OLDEST)/.installed-test
	@$(VENV_OLDEST)/bin/python -c 'import jax, sys; print("Python", sys.version.split()[0], "with jax", jax.__version__)'
	$(TESTED) $(VENV_OLDEST)/bin/python $(PYTEST) -m "not slow" $(wildcard tests/*/test_contract.py)

# Tests on GPUs run with a Python that has dejax installed editable, and jax with CUDA. A room is a folder of tests/, or `top`,
# the files beside the folders. A room that takes longer than nine minutes fails. Each prints counts, the reasons of tests
# that run on CPUs only, and failures as they happen; all of that is in build/test-gpu/ROOM.log, too. MARK=slow runs the rest.
PY ?= python3
JOBS_GPU ?= 14
MARK ?= not slow
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
	$(call test_rooms,-m "$(MARK)")

test-gpus:
	$(call test_rooms,-m "devices and ($(MARK))")

# Offload with random faults for many steps: each right or an exception, and in the end nothing left.
soak: venv-test
	DEJAX_SOAK_STEPS=10000 $(BIN)/python -m pytest -q -s -p no:cacheprovider tests/offload/test_store.py -k soak

doctest: venv-test
	$(TESTED) $(BIN)/python $(PYTEST) -p no:cacheprovider --doctest-modules dejax

lint: venv-test
	$(BIN)/ruff check . && checked=0 || checked=1; $(BIN)/ruff format --check . && exit $$checked

format: venv-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv-test
	$(BIN)/mypy

# A copy of the package with an instrumented extension, in build/asan. A forked child has no sanitizer runtime to speak to.
asan: venv-test
	$(BIN)/python $(PIP) nanobind
	PYTHON=$(abspath $(BIN))/python sh tests/native/asan.sh

tsan:
	sh tests/native/tsan.sh

clean:
	rm -rf $(VENV) $(VENV_OLDEST) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
