# make demo   everything from nothing: environment, library, model; then a real run
# make test   everything the tests need, then the tests
# Also: setup lib bench notebooks lint clean. Each target does what it needs first.

BUILD   := build
VENV    := .venv
CACHE   := $(CURDIR)/.cache
CXX     ?= c++
UNAME   := $(shell uname -s)
MACHINE := $(shell uname -m)
export PYFERRUM_CACHE := $(CACHE)

# The interpreter that runs the build's generators; it needs cffi. The wheel hook passes its own.
PYTHON  ?= $(VENV)/bin/python

# ---- Library

# Warnings are errors where we test, not where somebody builds with a compiler that knows new ones.
WERROR :=

CXXFLAGS := -std=c++17 -O3 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra $(WERROR) -Wno-psabi \
            -ffile-prefix-map=$(CURDIR)=.

ifeq ($(UNAME),Darwin)
  LIBRARY := pyferrum/_libs/libferrum.dylib
  LDFLAGS := -dynamiclib -install_name @rpath/libferrum.dylib -mmacosx-version-min=13.0
else
  LIBRARY := pyferrum/_libs/libferrum.so
  LDFLAGS := -shared -Wl,--no-undefined -Wl,-soname,libferrum.so -Wl,--version-script=native/exports.map -pthread -static-libstdc++ -static-libgcc
endif

CORE    := $(wildcard native/core/*.cpp)
KERNELS := causal_attention causal_attention_prepare dflash2 elementwise kv linear logits table
HOST    := $(filter-out $(KERNELS:%=native/cpu/%.cpp),$(wildcard native/cpu/*.cpp))

FLAGS_portable :=
FLAGS_avx2     := -mavx2 -mfma -mf16c
# gcc's own AVX-512 header leaves the unused operand of masked intrinsics undefined, on purpose.
FLAGS_avx512   := $(FLAGS_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -Wno-maybe-uninitialized -Wno-uninitialized
FLAGS_neon     := -DFERRUM_NEON
ifeq ($(MACHINE),x86_64)
  SETS := portable avx2 avx512
else ifneq ($(filter $(MACHINE),aarch64 arm64),)
  SETS := portable neon
else
  SETS := portable
endif

OBJECTS := $(CORE:native/%.cpp=$(BUILD)/%.o) $(HOST:native/%.cpp=$(BUILD)/%.o) $(BUILD)/fingerprint.o \
           $(foreach set,$(SETS),$(KERNELS:%=$(BUILD)/cpu/$(set)/%.o))

.DEFAULT_GOAL := lib
include native/metal/metal.mk
# An sdist has no tests.
-include tests/softmetal/softmetal.mk
-include tests/aarch64/aarch64.mk

lib: $(LIBRARY) pyferrum/_cdef.py

$(LIBRARY): $(OBJECTS) native/exports.map
	@mkdir -p $(@D)
	$(CXX) $(OBJECTS) $(LDFLAGS) -o $@

$(BUILD)/%.o: native/%.cpp Makefile
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@

# One rule per instruction set: the same kernel sources, each time into a namespace of their own.
define KERNEL_RULE
$(BUILD)/cpu/$(1)/%.o: native/cpu/%.cpp Makefile
	@mkdir -p $$(@D)
	$(CXX) $(CXXFLAGS) $(FLAGS_$(1)) -DFERRUM_CPU_ISA=$(1) -MMD -MP -c $$< -o $$@
endef
$(foreach set,$(SETS),$(eval $(call KERNEL_RULE,$(set))))

SOURCES := $(shell find native shaders -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.m' -o -name '*.metal' 2>/dev/null)

$(BUILD)/fingerprint.cpp: $(SOURCES) native/generate.py Makefile | $(PYTHON)
	@mkdir -p $(@D)
	$(PYTHON) native/generate.py fingerprint $@

$(BUILD)/fingerprint.o: $(BUILD)/fingerprint.cpp
	$(CXX) $(CXXFLAGS) -Inative/include -c $< -o $@

pyferrum/_cdef.py: native/include/ferrum.h native/include/ferrum_kernels.h native/generate.py | $(PYTHON)
	$(PYTHON) native/generate.py cdef $@

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---- Environment

# Debian: a C++ compiler and Python with venv. Installed if we may, else named once.
.PHONY: system
system:
	@missing=""; \
	command -v $(CXX) >/dev/null || missing="$$missing g++"; \
	python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing="$$missing python3 python3-venv"; \
	test -z "$$missing" && exit 0; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq $$missing; \
	elif command -v apt-get >/dev/null && sudo -n true 2>/dev/null; then sudo apt-get update -qq && sudo apt-get install -y -qq $$missing; \
	else echo "pyferrum needs these packages: $$missing (Python 3.11 or newer, a C++17 compiler)" >&2; exit 1; fi

$(VENV)/bin/python:
	@$(MAKE) --no-print-directory system
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet 'cffi>=1.17'

setup: $(VENV)/core

# Editable: the wheel hook builds the library where the package imports it from.
$(VENV)/core: pyproject.toml native/wheel_hook.py | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/core
	$(VENV)/bin/python -m pip install --quiet --editable '.[test,dev]'
	@touch $@

MODEL := $(CACHE)/SmolLM2-135M-Instruct-Q4_1.gguf
$(MODEL): | $(VENV)/core
	$(VENV)/bin/python -m pyferrum.demo_model

# ---- What people run

demo: setup lib $(MODEL)
	$(VENV)/bin/python -m pyferrum.demo

# On Linux the Metal device runs in software: its own Objective-C and shaders, the tables of cases of the CPU device, once
# as it comes and once in exact mode.
METAL_TESTS := tests/test_attention.py tests/test_dflash2.py tests/test_jit.py tests/test_linear.py tests/test_ops.py tests/test_states.py
METAL_PYTEST = PYFERRUM_DEVICE=metal $(VENV)/bin/python -m pytest -p no:faulthandler
ON_METAL    := PYFERRUM_LIBRARY=$(SOFTMETAL_LIBRARY) $(METAL_PYTEST)
# The shaders under AddressSanitizer with UBSan, and under ThreadSanitizer with a fiber per GPU thread. GNUstep's locks and
# OpenBLAS's threads would be reported too; of the cases, TSan leaves out the longest.
RUNTIME      = LD_PRELOAD=$(shell $(CLANG) -print-file-name=libclang_rt.$(1)-$(MACHINE).so) PYFERRUM_LIBRARY=$(SOFT)/libferrum-$(1).so
ON_ASAN      = ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:exitcode=55 $(call RUNTIME,asan) $(METAL_PYTEST)
ON_TSAN      = TSAN_OPTIONS=detect_deadlocks=0:exitcode=66 OPENBLAS_NUM_THREADS=1 $(call RUNTIME,tsan) $(METAL_PYTEST)
SANITIZED   := definition and not long_context and not over_spans and not pages_of_512 and not pages_of_one

ifeq ($(UNAME),Darwin)
test: $(VENV)/dev lib $(MODEL)
	$(VENV)/bin/python -m pytest
else
test: $(VENV)/dev lib $(MODEL) test-packages
	$(MAKE) --no-print-directory softmetal softmetal-strict softmetal-sanitized
	$(if $(filter x86_64,$(MACHINE)),$(MAKE) --no-print-directory aarch64)
	$(ON_METAL) -m "not invariance" $(METAL_TESTS)
	PYFERRUM_EXACT=1 $(ON_METAL) -m invariance $(METAL_TESTS)
	EMU_ORDER=7 $(ON_METAL) -k definition $(METAL_TESTS)
	$(ON_ASAN) -k "$(SANITIZED)" tests/test_attention.py tests/test_dflash2.py tests/test_linear.py
	$(ON_TSAN) -k "$(SANITIZED)" tests/test_attention.py
	$(VENV)/bin/python -m pytest
endif

TEST_PACKAGES := clang-19 libclang-rt-19-dev libobjc-12-dev libgnustep-base-dev libblocksruntime-dev libboost-context-dev
ifeq ($(MACHINE),x86_64)
  TEST_PACKAGES += g++-aarch64-linux-gnu qemu-user
endif
.PHONY: test-packages
test-packages:
	@dpkg -s $(TEST_PACKAGES) >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq $(TEST_PACKAGES) >/dev/null; \
	elif sudo -n true 2>/dev/null; then sudo apt-get update -qq && sudo apt-get install -y -qq $(TEST_PACKAGES) >/dev/null; \
	else echo "the tests need these packages: $(TEST_PACKAGES)" >&2; exit 1; fi

# Options of `python -m benchmarks compare`, such as COMPARE="--llama-python PATH --formats Q4_1 Q8_0".
bench: setup lib $(MODEL)
	$(VENV)/bin/python -m benchmarks --json $(BUILD)/bench-compare.json compare $(COMPARE)
	$(VENV)/bin/python -m benchmarks --json $(BUILD)/bench-kernels.json kernels

# Scripts are what people edit; each has a notebook beside it, and the tests run them.
notebooks: $(VENV)/dev
	$(VENV)/bin/jupytext --quiet --to ipynb --update notebooks/*.py

CPP_FILES := $(shell find native -name '*.h' -o -name '*.cpp')
lint: $(VENV)/dev lib
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)

format: $(VENV)/dev
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

clean:
	rm -rf $(BUILD) $(VENV) dist pyferrum/_libs pyferrum/_cdef.py
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: lib setup demo test bench notebooks lint format clean
