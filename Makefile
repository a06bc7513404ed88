# One environment, made on first use; every target below needs only Python >= 3.10 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help env train dino vtab-mini test test-timm test-timm-all bench gpu-check lint format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env: $(STAMP)  ## make the environment
$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit("violin-timm needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=") if sys.version_info < (3, 10) else 0'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing violin-timm, PyTorch and timm into $(VENV) (once; about two minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $(STAMP)

train: $(STAMP)  ## train a Violin on scikit-learn's digits (about 4 minutes on two cores)
	$(BIN)/violin train --config configs/quick/digits.yaml --experiment digits $(ARGS)

# k-NN and logistic regression learn from the same 10,000 images; all but those of the test split were trained on
DINO := output/dino/quick
EVAL := --device cpu --workers 0 --results $(DINO)/table.json --checkpoint $(DINO)/last.pth.tar
dino: $(STAMP)  ## DINO on Fashion-MNIST, then k-NN and a linear classifier (about 10 minutes on two cores)
	$(BIN)/violin dino --config configs/quick/dino_fashion.yaml --output output/dino --experiment quick --resume auto $(ARGS)
	@for weights in untrained teacher; do \
		$(BIN)/violin knn $(EVAL) --weights $$weights --title $$weights --k 20 --pixels \
			--gallery-split 'train[:10000]' --query-split test && \
		$(BIN)/violin linear $(EVAL) --weights $$weights --title $$weights --closed --blocks 1 --patch-mean \
			--train-split 'train[:10000]' --val-split test $$(test $$weights = untrained || echo --table) || exit 1; \
	done

# one thread: on so small a model a second gains little, and loses much where the cores are busy
PRETRAINED := output/train/fashion_plain/result.json
$(PRETRAINED): | $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/violin train --config configs/quick/fashion_plain.yaml --experiment fashion_plain --resume auto

vtab-mini: $(STAMP) $(PRETRAINED)  ## VTAB-1K's protocol in small, on a plain ViT pretrained here (under 25 minutes)
	$(BIN)/violin vtab --config configs/quick/vtab_mini.yaml $(ARGS)

test: $(STAMP)  ## run the tests, two files at a time
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

test-timm: $(STAMP)  ## run timm's own model tests on the small variants
	$(BIN)/python scripts/test_timm.py --models small $(ARGS)

test-timm-all: $(STAMP)  ## run timm's own model tests on every variant (slow)
	$(BIN)/python scripts/test_timm.py --models all $(ARGS)

bench: $(STAMP)  ## time and memory beside timm's plain models (about 10 minutes on two quiet cores)
	$(BIN)/violin benchmark --suite issue --threads 2 $(ARGS)

gpu-check:  ## CUDA tests, a minute of training and the benchmark on one GPU (under 8 minutes)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu_check.py $(ARGS)

lint: $(STAMP)  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## put the code in format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .cache build *.egg-info
