# make demo | test | test-oldest | test-eval | sanitize | lint | clean.  PYTHON=python3.12 picks the interpreter of a new .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One constraints file for everything, so that every machine gets the versions that were tested.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
TEST   := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4
NATIVE := CMakeLists.txt $(shell find src/skimkv/csrc -type f 2>/dev/null)

.PHONY: demo test test-oldest test-eval sanitize lint clean

demo: $(VENV)/.installed
	$(BIN)/skimkv demo

test: $(VENV)/.dev
	$(TEST) $(ARGS)

# The transformers seam on the oldest version that pyproject.toml admits.
test-oldest: $(VENV)/oldest/.installed
	PYTHONPATH=$(VENV)/oldest $(TEST) $(wildcard tests/test_hf*.py) $(ARGS)

# What needs the extra `eval`: lm-evaluation-harness through the adapter, and ROUGE.
test-eval: $(VENV)/.dev
	$(PIP) --editable '.[test,eval]'
	$(TEST) tests/test_lm_eval.py tests/test_tasks.py $(ARGS)

# The kernel tests on a build with AddressSanitizer and UndefinedBehaviorSanitizer, which must be loaded first.
CXX      ?= g++
RUNTIMES  = $(foreach name,asan ubsan,$(shell $(CXX) -print-file-name=lib$(name).so))
sanitize: $(VENV)/.dev
	$(PIP) cmake ninja
	$(BIN)/cmake -G Ninja -S . -B build/sanitize -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DSKIMKV_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	LD_PRELOAD="$(RUNTIMES)" ASAN_OPTIONS=detect_leaks=0 SKIMKV_LIBRARY=build/sanitize \
	    $(TEST) $(addprefix tests/test_,ops.py coded_rows.py bad_calls.py linear.py stream.py) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests
	$(BIN)/mypy --strict src

# Stamps: a second run reinstalls nothing; changed metadata, pins or native source does.
# The install is editable: changed Python needs no stamp.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) --editable '.[test,lint]'
	@touch $(VENV)/.installed $@

OLDEST = $(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/\1/p' pyproject.toml)
$(VENV)/oldest/.installed: $(VENV)/.dev
	rm -rf $(VENV)/oldest
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $(VENV)/oldest.txt
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(VENV)/oldest.txt \
	    --target $(VENV)/oldest 'transformers==$(OLDEST).*'
	@touch $@

clean:
	rm -rf $(VENV) build dist
