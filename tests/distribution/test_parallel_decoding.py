"""Two processes decode what one does: a target in parts, and a draft model in parts or whole.

The processes are forks that find what torchrun would tell them. Each works through the jobs, and the last job is a mistake
that only one of them meets. What they must say is made here, by one process.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from specdec import LLM, SamplingParams
from specdec.core import Context, FixedLengthPolicy
from specdec.engine import Engine
from specdec.measure.stats import Totals
from specdec.model import distributed, tensor_parallel
from specdec.model.target import CausalLM
from specdec.speculative_config import SpeculativeConfig
from support.cli import EVAL, Done, call, rows_of
from support.methods import example_settings, tiny_prompts
from support.processes import fork_ranks

MODELS = ("tiny-llama", "tiny-qwen3")
SIZE = 2
MAX_TOKENS = 12
K = {"num_speculative_tokens": 3}
LM = {"method": "draft_model", **K}
SAMPLED = {"draft_sample_method": "probabilistic"}


class Moody:
    """Drafts what chance says, and each process another number of tokens."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(os.getpid())

    def propose(self, context: Context) -> list[list[int]]:
        return [self.rng.integers(97, 123, self.rng.integers(0, most + 1)).tolist() for most in context.max_draft_B]


class Hasty(FixedLengthPolicy):
    """Decides by chance, as one does that measures times."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(os.getpid())

    def draft_lengths(self, rows: np.ndarray, most_B: np.ndarray) -> np.ndarray:
        return self.rng.integers(0, most_B + 1)

    def verify_lengths(self, rows: np.ndarray, draft: Any) -> np.ndarray:
        return self.rng.integers(0, draft.length_B.numpy() + 1)


def cases(model: str, eagle3: str, mtp: str) -> list[tuple[dict[str, Any], float, int]]:
    """(speculative_config, temperature, rows); the second model has the ones that look at other parts of it."""
    none = {"method": "none"}
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, **K}
    replicated, cut = ({**LM, "model": model, "draft_tensor_parallel_size": size} for size in (1, 2))
    of_states = {"method": "eagle3", "model": eagle3, **K}
    match = {"rejection_sample_method": "match", **SAMPLED}
    core = [none, ngram, replicated, cut, of_states]
    more = [
        {**LM, "model": model},
        {**of_states, "draft_tensor_parallel_size": 1},
        {"method": "mtp", "model": mtp, **K},  # whole layers of the target's kind
        {"method": "pard", "model": model, "pard_token": 1, "draft_tensor_parallel_size": 2, **K},
        {"method": "custom_class", "model": f"{Path(__file__).stem}.{Moody.__name__}", **K},
    ]
    if model != MODELS[0]:
        core = [cut, of_states]
        more = [none, ngram, replicated]
    trees = {"tree_topk": 2, "tree_depth": 2}
    greedy = [(settings, 0.0, 1) for settings in core] + [(settings, 0.0, 3) for settings in [*core, *more, {**cut, **trees}]]
    sampled = [none, {**cut, **match}, {**of_states, **match}, {**cut, **match, **trees}]
    return greedy + [(settings, 0.8, 3) for settings in sampled]


def answers(target: CausalLM, settings: dict[str, Any], temperature: float, rows: int, policy: Any = None) -> list[list[int]]:
    settings = {key: value for key, value in settings.items() if value is not None}
    if target.processes.size == 1:
        settings.pop("draft_tensor_parallel_size", None)
    llm = LLM.__new__(LLM)  # around a target that is there
    llm.target = target
    llm.seed = 0
    llm._counter = iter(range(99))
    llm._num_calls = 0
    built = SpeculativeConfig(**settings).resolve().build(target)
    llm.engine = Engine(target, *built, max_batch_size=rows, prefill_chunk_size=64, policy=policy)
    llm._totals = Totals(target.name, built[0].num_speculative_tokens)
    prompts = [{"prompt_token_ids": ids} for ids in tiny_prompts()[:3]]
    done = llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS), use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done]


# ---------------------------------------------------------------------------------------------- what each process does


def work(jobs: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    group = distributed.join(SIZE, torch.device("cpu"))
    result: dict[str, Any] = {"answers": {}, "same": {}, "bytes": {}}
    for model in MODELS:
        target = LLM(model, dtype="float32", device="cpu", tensor_parallel_size=SIZE).target
        result["answers"][model] = [answers(target, *case) for case in jobs["cases"][model]]
        if model == MODELS[0]:
            result["adapted"] = answers(target, {**LM, "model": model}, 0.0, 3, Hasty())
        result["same"][model] = same_bits(target)
        result["bytes"][model] = target.new_cache().bytes_to_grow(1, 100)
    result["errors"] = [error_of(lambda settings=settings: LLM(**settings, device="cpu")) for settings in jobs["errors"]]
    # without torchrun's name scripts fail as one process does, so that this one goes on
    name = os.environ.pop("TORCHELASTIC_RUN_ID")
    result["refused"] = script(jobs["refused"])
    result["ran"] = [script(jobs["run"])]
    if group.is_main:  # as if it had been interrupted
        path = Path(jobs["out_dir"]) / "requests.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]) + '{"id": ')
    result["ran"].append(script([*jobs["run"], "resume=true"]))
    (Path(jobs["told"]) / f"{group.rank}.json").write_text(json.dumps(result))
    os.environ["TORCHELASTIC_RUN_ID"] = name
    script([*jobs["run"], "resume=true", "seed=1"], catch=False)


def same_bits(target: CausalLM) -> list[bool]:
    """Of all processes' logits and tapped states: equal; and a row's the same alone and in company."""
    rng = np.random.default_rng(0)
    cache = target.new_cache()
    cache.reserve(3, 128)
    token_BM = torch.from_numpy(rng.integers(0, 256, (3, 7)))
    out = target.forward(cache, token_BM.flatten(), np.zeros(3, dtype=np.int64), np.full(3, 7), hidden_layers=(1, 4))
    alone = target.forward(cache, token_BM[1], np.zeros(1, dtype=np.int64), np.array([7]), first_row=1, hidden_layers=(1, 4))
    verdicts = []
    for expected, row in ((out.logits, alone.logits), (out.hidden_NTD, alone.hidden_NTD)):
        of_all = target.processes.join_rows(expected).chunk(SIZE)
        verdicts += [torch.equal(of_all[0], of_all[1]), torch.equal(expected[7:14], row)]
    return [*verdicts, out.logits.shape == (21, target.vocab_size)]


def error_of(function: Any) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"


def script(arguments: list[str], catch: bool = True) -> str | None:
    sys.argv = [str(EVAL / "run.py"), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if not catch:
            raise
        return str(ended.code)
    return None


# -------------------------------------------------------------------------------------------------------- and what one


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("parallel")
    wholes = {model: CausalLM(model, "float32", "cpu") for model in MODELS}
    drafters = {model: [example_settings(name, wholes[model])["model"] for name in ("eagle3", "mtp")] for model in MODELS}
    run = ["experiment=tiny", "limit=3", "sampling.max_tokens=8", "method=ngram", f"out_dir={directory / 'run'}"]
    of_two = {"model": "tiny-llama", "tensor_parallel_size": SIZE}
    return {
        "told": str(directory),
        "out_dir": str(directory / "run"),
        "wholes": wholes,
        "cases": {model: cases(model, *drafters[model]) for model in MODELS},
        "errors": [
            {"model": "tiny-gemma3", "tensor_parallel_size": SIZE},
            {"model": "tiny-llama", "tensor_parallel_size": 3},
            {**of_two, "speculative_config": {**LM, "model": "tiny-llama", "draft_tensor_parallel_size": 3}},
            {**of_two, "speculative_config": {**LM, "model": "tiny-gemma3"}},
            {**of_two, "speculative_config": {**K, "method": "ngram", "draft_tensor_parallel_size": SIZE}},
        ],
        "refused": [*run, "tensor_parallel_size=2", "method.num_speculative_tokens=0"],
        "run": [*run, "tensor_parallel_size=2"],
    }


@pytest.fixture(scope="module")
def two(jobs: dict[str, Any]) -> tuple[list[dict[str, Any]], Done]:
    """What the two processes wrote, and how they ended."""
    directory = Path(jobs["told"])
    jobs_file = directory / "jobs.json"
    jobs_file.write_text(json.dumps({key: value for key, value in jobs.items() if key != "wholes"}))
    done = fork_ranks(Path(__file__), jobs_file, cwd=directory, size=SIZE, TORCHELASTIC_RUN_ID="test")
    paths = [directory / f"{rank}.json" for rank in range(SIZE)]
    assert all(path.exists() for path in paths), done.err
    return [json.loads(path.read_text()) for path in paths], done


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_one_process(model: str, jobs: dict[str, Any], two: tuple[list[dict[str, Any]], Done]) -> None:
    """Greedy in float32, and sampled under `match`: the sums' last bits differ, which shows in no token here."""
    first, second = (result["answers"][model] for result in two[0])
    assert first == second, "every process has every answer"
    target = jobs["wholes"][model]
    plain = {temperature: answers(target, {"method": "none"}, temperature, 1) for temperature in (0.0, 0.8)}
    assert plain[0.0] != plain[0.8]
    for (settings, temperature, rows), got in zip(jobs["cases"][model], first, strict=True):
        assert got == plain[temperature], (settings, temperature, rows)
    if model == MODELS[0]:
        assert [result["adapted"] for result in two[0]] == [plain[0.0]] * SIZE


@pytest.mark.parametrize("model", MODELS)
def test_states_are_whole_and_the_same_everywhere(model: str, jobs: Any, two: tuple[list[dict[str, Any]], Done]) -> None:
    for result in two[0]:
        assert result["same"][model] == [True] * 5
        assert result["bytes"][model] * SIZE == jobs["wholes"][model].new_cache().bytes_to_grow(1, 100), (
            "each has its own heads"
        )


def test_what_cannot_be_cut(two: tuple[list[dict[str, Any]], Done]) -> None:
    first, second = (result["errors"] for result in two[0])
    assert first == second
    heads, launch, draft, draft_heads, no_model = first
    assert "num_attention_heads=4 and num_key_value_heads=1 must be multiples of 2" in heads
    assert draft_heads == heads
    assert "draft_tensor_parallel_size=1" in draft_heads
    assert "tensor_parallel_size=3, and 2 processes were started; type torchrun --nproc_per_node 3" in launch
    assert "draft_tensor_parallel_size=3 must be 1 or the target's tensor_parallel_size=2" in draft
    assert "draft_tensor_parallel_size=2 is for draft_model, pard, not for 'ngram'; leave it out" in no_model
    assert all("\n" not in error for error in first)


def test_a_run_is_written_once_and_said_once(jobs: dict[str, Any], two: tuple[list[dict[str, Any]], Done]) -> None:
    results, done = two
    for one in results:
        assert "num_speculative_tokens=0" in one["refused"]
        assert one["ran"] == [None, None]
    directory = Path(jobs["out_dir"])
    alone = directory.with_name("alone")
    arguments = [*jobs["run"][:-2], f"out_dir={alone}"]
    assert call("run", *arguments, cwd=directory.parent).code == 0
    for name in ("requests", "baseline"):
        rows, want = (sorted(rows_of(path / f"{name}.jsonl"), key=lambda row: row["id"]) for path in (directory, alone))
        assert [(row["id"], row["output_token_ids"], row["drafted"]) for row in rows] == [
            (row["id"], row["output_token_ids"], row["drafted"]) for row in want
        ]
    assert json.loads((directory / "run.json").read_text())["tensor_parallel_size"] == 2
    assert done.out.count("written to") == 2, "of two runs, the second resumed"
    assert done.out.count("lossless: yes") == 2

    # the last job: only the process that writes finds that the seed was another
    assert done.code != 0
    errors = [line for line in done.err.splitlines() if "error: " in line]
    assert len(errors) == 1, done.err
    assert errors[0].startswith("error: resume=true, but seed was 0 and is 1")
    assert "[rank" not in done.err, "no process shows a traceback"


def test_one_process_says_how_to_start_more() -> None:
    error = error_of(lambda: LLM("tiny-llama", device="cpu", tensor_parallel_size=2))
    assert error.startswith("tensor_parallel_size=2, and torchrun has not started this; type torchrun --nproc_per_node 2 ")
    assert "\n" not in error
    with pytest.raises(ValueError, match="tensor_parallel_size=0: an integer of at least 1 is needed"):
        LLM("tiny-llama", device="cpu", tensor_parallel_size=0)
    settings = {**LM, "model": "tiny-llama", "draft_tensor_parallel_size": 2}
    with pytest.raises(ValueError, match="draft_tensor_parallel_size=2 must be 1 or the target's tensor_parallel_size=1"):
        LLM("tiny-llama", device="cpu", speculative_config=settings)


class Apart(distributed.ProcessGroup):
    """One of several processes that keeps its part to itself."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    join_columns = sum


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "way", [tensor_parallel.COLUMNS, tensor_parallel.COLUMNS_GATHERED, tensor_parallel.ROWS, tensor_parallel.ROWS_SPLIT]
)
def test_parts_of_a_layer(way: str, bias: bool) -> None:
    """What three processes make of their parts is what the layer makes of the whole; 13 columns come from 5, 5 and 3."""
    torch.manual_seed(0)
    size = 3
    layer = torch.nn.Linear(6, 13 if way == tensor_parallel.COLUMNS_GATHERED else 12, bias=bias).requires_grad_(False)
    x = torch.randn(4, 6)
    zero = torch.zeros(layer.out_features)
    parts = [tensor_parallel._part(layer, way, "it", Apart(size, rank)) for rank in range(size)]
    inputs = x.chunk(size, -1) if way == tensor_parallel.ROWS else [x] * size
    if way == tensor_parallel.COLUMNS:
        got = torch.cat([part(x) for part in parts], -1)
    elif way == tensor_parallel.COLUMNS_GATHERED:
        got = torch.cat([part.part(x) for part in parts], -1)
        assert not got[:, 13:].any()
        got = got[:, :13] + (layer.bias if bias else zero)
        assert parts[0].bias is layer.bias
    else:
        got = sum(part(mine) for part, mine in zip(parts, inputs, strict=True)) - (size - 1) * (layer.bias if bias else zero)
    torch.testing.assert_close(got, layer(x))
    if way != tensor_parallel.COLUMNS_GATHERED:
        with pytest.raises(ValueError, match=r"tensor_parallel_size=5: the \d+ columns of it are no multiple of it"):
            tensor_parallel._part(layer, way, "it", Apart(5, 0))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gemma2", "phi3", "olmo2", "granite", "cohere"])
def test_plans_of_architectures(model_type: str) -> None:
    """All dense ones have a plan that is understood; a mixture of experts is refused."""
    plan = tensor_parallel.plan_of(AutoConfig.for_model(model_type), 2)
    assert tensor_parallel.shards_heads(plan) == (model_type not in ("phi3", "olmo2"))


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model_type 'mixtral': layers of kind .* cannot be cut here"):
        tensor_parallel.plan_of(AutoConfig.for_model("mixtral"), 2)


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text()))
