# The two commands of the README: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# The demo runs in the environment of developers if there is one, and otherwise makes a light one.
DEMO := $(if $(wildcard .venv/ready),.venv,.venv-demo)
PIP := pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all results docs site wheel sanitize lint clean

demo: $(DEMO)/ready
	@echo "Step 2 of 2: 42 short runs, about 2 minutes on two cores. Ctrl-C stops; the same command continues."
	$(DEMO)/bin/ghostnoise sweep demo
	$(DEMO)/bin/ghostnoise report demo
	@echo
	@echo "Open out/demo/index.html: the same results as a page, with figures."
	@echo "Next, see what ghost noise does in your own network: docs/tutorials/cifar10.md"

.venv-demo/ready: pyproject.toml constraints.txt setup.py $(wildcard src/ghostnoise/engine/native/src/*)
	@echo "Step 1 of 2: torch, ghostnoise and what experiments need, in .venv-demo; a few minutes, mostly for torch."
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/$(PIP) --progress-bar on torch setuptools
	.venv-demo/bin/$(PIP) --quiet --no-build-isolation -e '.[lab]'
	touch $@

test: .venv/ready lint
	$(BIN)/pytest -n 2

# Runs the missing experiments of results/order.txt in a clone of HEAD, and adds them to results/. Takes hours.
results:
	sh results/run.sh

# Also what takes longer.
test-all: test sanitize
	$(BIN)/pytest -n 2 -m slow

# Serves the documentation on this machine, and renews it when a page changes.
docs: .venv/ready
	$(BIN)/python docs/site/build_site.py --serve

# Builds the documentation in build/site; broken links, missing anchors and wrong docstrings are errors.
site: .venv/ready
	$(BIN)/python docs/site/build_site.py

# Runs the tests of the C++ library with AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: .venv/ready
	CXXFLAGS='-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all' \
		$(BIN)/python setup.py -q build_ext --build-lib build/sanitized
	GHOSTNOISE_NATIVE_FOLDER=build/sanitized/ghostnoise/engine/native ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
		$(BIN)/pytest -p no:xdist tests/engine/test_native_operators.py -k "not memory_does_not_grow"

# Builds the sdist, and from it the wheel, in dist/. On Linux, the wheel is tagged with the oldest glibc that its library
# needs; torch is not copied into it. Also writes the software bill of materials of the wheel.
wheel: .venv/ready
	rm -rf dist
	GHOSTNOISE_REQUIRE_NATIVE=1 GHOSTNOISE_PORTABLE=1 $(BIN)/python -m build --no-isolation --outdir dist
	if [ "$$(uname)" = Linux ]; then \
		PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --wheel-dir dist dist/*-linux_*.whl && \
		rm dist/*-linux_*.whl; fi
	$(BIN)/python tools/sbom.py dist/*.whl

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Every package with its hash, but for torch, whose build depends on the machine; it is pinned, because a newer one may
# come with gigabytes that a CPU has no use for. The last line finds all requirements installed.
.venv/ready: pyproject.toml constraints.txt requirements.lock setup.py $(wildcard src/ghostnoise/engine/native/src/*)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[lab,docs,dev]'
	touch $@

clean:
	rm -rf .venv .venv-demo build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
