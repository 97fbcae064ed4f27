"""The offline API: shapes and names as users of vLLM know them, and the ways to get its settings wrong."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specdec import LLM, SamplingParams, TextPrompt, TokensPrompt, hub
from specdec.core import Request
from specdec.llm import RequestOutput
from specdec.measure.stats import Counter, SpecDecodeMetrics, Vector
from specdec.method.eagle3 import Architecture
from specdec.model.target import CausalLM
from specdec.prompts import bad_words_token_ids, settled_text
from specdec.speculative_config import SpeculativeConfig

GREEDY = SamplingParams(temperature=0, max_tokens=12)
EOS = 257  # of the tiny models
PROMPTS = ["one two one two one two", "a rose is a rose is a rose", "x", "to be or not to be, to be or"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SELF = {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def ngram() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu", max_batch_size=2, speculative_config=NGRAM)


@pytest.fixture(scope="module")
def self_drafting() -> LLM:
    """The target drafts for itself, so at temperature 0 every draft is accepted."""
    return LLM("tiny", dtype="float32", device="cpu", speculative_config=SELF)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(results: list[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


# ------------------------------------------------------------------------------------ prompts and outputs


def test_the_front_door() -> None:
    import specdec

    assert specdec.LLM is LLM
    assert specdec.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = specdec.LLMM


def test_kinds_of_prompts_are_the_same_prompt(plain: LLM) -> None:
    text = PROMPTS[0]
    ids = plain.get_tokenizer()(text)["input_ids"]
    kinds = [text, [text], {"prompt": text}, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]]
    results = [generate(plain, kind) for kind in kinds]
    assert all(len(result) == 1 for result in results)
    assert all(tokens(result) == tokens(results[0]) for result in results)
    assert all(result[0].prompt_token_ids == ids for result in results)
    assert [result[0].prompt for result in results] == [text, text, text, None, None]
    (both,) = generate(plain, {"prompt": "said", "prompt_token_ids": ids})
    assert (both.prompt, tokens([both])) == ("said", tokens(results[0]))


def test_an_output_has_vllms_shape(plain: LLM) -> None:
    (result,) = generate(plain, PROMPTS[0])
    assert result.finished
    assert isinstance(result.request_id, str)
    assert isinstance(result.prompt_token_ids, list)
    (answer,) = result.outputs
    assert answer.index == 0
    assert len(answer.token_ids) == 12
    assert all(type(token) is int for token in answer.token_ids)
    assert answer.text == plain.get_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
    assert answer.finish_reason == "length"
    assert answer.stop_reason is None
    assert answer.spec_decode_metrics is None, "nothing was speculated"


def test_answers_come_in_the_order_of_the_prompts(plain: LLM, ngram: LLM) -> None:
    """Two rows for four prompts that end at different times."""
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (20, 3, 9, 1)]
    results = generate(ngram, PROMPTS, params)
    assert [result.prompt for result in results] == PROMPTS
    assert [len(ids) for ids in tokens(results)] == [20, 3, 9, 1]
    assert tokens(results) == tokens(generate(plain, PROMPTS, params))
    numbers = [int(result.request_id) for result in results]
    assert numbers == sorted(set(numbers))


def test_no_prompts_no_answers(plain: LLM) -> None:
    assert generate(plain, []) == []


def test_default_parameters_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)
    assert not params.greedy


def test_chat_is_the_template_then_generate(plain: LLM) -> None:
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    talk.append({"role": "user", "content": "Bye."})
    short = [{"role": "user", "content": "Hello."}]
    tokenizer = plain.get_tokenizer()
    (alone,) = plain.chat(talk, GREEDY, use_tqdm=False)
    rendered = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert alone.prompt == rendered
    assert alone.prompt_token_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert tokens([alone]) == tokens(generate(plain, {"prompt_token_ids": alone.prompt_token_ids}))
    several = plain.chat([talk, short], [GREEDY, SamplingParams(temperature=0, max_tokens=2)], use_tqdm=False)
    assert several[0].prompt == rendered
    assert [len(ids) for ids in tokens(several)] == [12, 2]
    assert tokens(several)[0] == tokens([alone])[0]
    (open_end,) = plain.chat(short, GREEDY, add_generation_prompt=False, use_tqdm=False)
    assert not open_end.prompt.endswith("assistant\n")
    shout = "{{ messages[0]['content'] | upper }}"
    (shouted,) = plain.chat(short, GREEDY, chat_template=shout, use_tqdm=False)
    assert shouted.prompt == "HELLO."


def test_the_eos_that_ended_it_is_in_the_ids_and_not_in_the_text(plain: LLM, self_drafting: LLM) -> None:
    """Forced by a bias, held back by min_tokens: five tokens, then the eos; under speculation too."""
    params = {"temperature": 0, "max_tokens": 30, "min_tokens": 5, "logit_bias": {EOS: 1000.0}}
    for llm in (plain, self_drafting):
        (answer,) = generate(llm, "x", SamplingParams(**params))[0].outputs
        assert len(answer.token_ids) == 6
        assert answer.token_ids[-1] == EOS
        assert EOS not in answer.token_ids[:-1]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert "</s>" not in answer.text
        raw = SamplingParams(**params, skip_special_tokens=False)
        assert "</s>" not in generate(llm, "x", raw)[0].outputs[0].text  # as in vLLM: what stopped it is not text
        kept = SamplingParams(**params, skip_special_tokens=False, include_stop_str_in_output=True)
        assert generate(llm, "x", kept)[0].outputs[0].text.endswith("</s>")
        on = params | {"ignore_eos": True, "max_tokens": 8}
        (deaf,) = generate(llm, "x", SamplingParams(**on))[0].outputs
        assert deaf.token_ids[5:] == [EOS] * 3
        assert deaf.finish_reason == "length"


def test_stop_tokens_and_stop_strings_say_what_stopped(plain: LLM, self_drafting: LLM) -> None:
    (free,) = generate(plain, PROMPTS[0], SamplingParams(temperature=0, max_tokens=30))[0].outputs
    stop_id = free.token_ids[9]
    want = free.token_ids[: free.token_ids.index(stop_id) + 1]
    word = next(c for c in free.text[3:] if c.isascii() and c.isprintable())
    for llm in (plain, self_drafting):
        by_id = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop_id])
        (answer,) = generate(llm, PROMPTS[0], by_id)[0].outputs
        assert answer.token_ids == want
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop_id)
        for kept in (False, True):
            by_text = {"stop": word, "include_stop_str_in_output": kept}
            params = SamplingParams(temperature=0, max_tokens=30, **by_text)
            (answer,) = generate(llm, PROMPTS[0], params)[0].outputs
            assert answer.text == free.text[: free.text.index(word) + len(word) * kept]
            assert (answer.finish_reason, answer.stop_reason) == ("stop", word)
            assert answer.token_ids == free.token_ids[: len(answer.token_ids)]


def test_aliases_of_hugging_face(plain: LLM) -> None:
    aliased = SamplingParams(temperature=0, max_new_tokens=7, min_new_tokens=2)
    assert aliased == SamplingParams(temperature=0, max_tokens=7, min_tokens=2)
    assert len(tokens(generate(plain, "x", aliased))[0]) == 7
    assert SamplingParams(max_tokens=4, max_new_tokens=4).max_tokens == 4
    assert SamplingParams(max_tokens=4, max_new_tokens=None).max_tokens == 4


def test_without_max_tokens_the_length_limit_ends_it() -> None:
    llm = LLM("tiny", dtype="float32", device="cpu", max_model_len=30, speculative_config=SELF)
    ids = list(range(97, 117))
    params = SamplingParams(temperature=0, max_tokens=None)
    (answer,) = generate(llm, {"prompt_token_ids": ids}, params)[0].outputs
    assert len(answer.token_ids) == 10
    assert answer.finish_reason == "length"


# -------------------------------------------------------------------------------------------------- seeds


def test_same_seed_same_tokens(plain: LLM, ngram: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=5)
    first = tokens(generate(plain, PROMPTS, params))
    assert tokens(generate(plain, PROMPTS, params)) == first
    assert tokens(generate(plain, PROMPTS, SamplingParams(temperature=1.0, max_tokens=16, seed=6))) != first
    alone = [tokens(generate(ngram, prompt, params))[0] for prompt in PROMPTS]
    assert tokens(generate(ngram, PROMPTS, params)) == alone, "alone and in a batch"
    assert tokens(generate(ngram, PROMPTS[::-1], params)) == alone[::-1]


def test_without_seeds_the_llms_seed_counts() -> None:
    def run(seed: int) -> list[list[int]]:
        llm = LLM("tiny", dtype="float32", device="cpu", seed=seed)
        return tokens(generate(llm, ["x", "x"], SamplingParams(max_tokens=8)))

    first = run(0)
    assert first[0] != first[1], "two requests have seeds of their own"
    assert run(0) == first
    assert run(1) != first


def test_match_gives_the_tokens_of_plain_sampling() -> None:
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=3)
    want = tokens(generate(LLM("tiny", dtype="float32", device="cpu"), PROMPTS, params))
    config = {**SELF, "rejection_sample_method": "match", "draft_sample_method": "probabilistic"}
    llm = LLM("tiny", dtype="float32", device="cpu", speculative_config=config)
    assert tokens(generate(llm, PROMPTS, params)) == want


# ------------------------------------------------------------------------------------------------ metrics


def test_metrics_have_vllms_fields() -> None:
    assert [field.name for field in fields(SpecDecodeMetrics)] == [
        "num_spec_tokens",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "per_step_drafted",
        "per_step_accepted",
    ]


def test_metrics_by_hand_where_every_draft_is_accepted(self_drafting: LLM) -> None:
    """16 tokens: one from prefill, three steps of 3 + 1, and 3 that are left, so the last draft has 2."""
    (answer,) = generate(self_drafting, "x", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0].outputs
    got = answer.spec_decode_metrics
    assert got == SpecDecodeMetrics(
        num_spec_tokens=3,
        num_spec_steps=4,
        num_draft_tokens=11,
        num_accepted_draft_tokens=11,
        mean_acceptance_length=1 + 11 / 4,
        draft_acceptance_rate=1.0,
        acceptance_histogram=[0, 0, 1, 3],
        per_step_drafted=[3, 3, 3, 2],
        per_step_accepted=[3, 3, 3, 2],
    )


def test_metrics_recounted_where_drafts_are_ragged(ngram: LLM) -> None:
    narrow = {97: 30.0, 98: 30.0}  # a vocabulary of two, nearly: text that repeats itself
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias=narrow)
    for result in generate(ngram, PROMPTS, params):
        (answer,) = result.outputs
        got = answer.spec_decode_metrics
        stats = result.request.stats
        steps = [(d, a) for d, a in zip(stats.drafted, stats.accepted, strict=True) if d]
        assert got.per_step_drafted == [d for d, _ in steps]
        assert got.per_step_accepted == [a for _, a in steps]
        assert got.acceptance_histogram == [sum(a == j for _, a in steps) for j in range(4)]
        assert got.num_spec_steps == len(steps) < len(stats.drafted), "some steps have no draft"
        assert got.num_draft_tokens == sum(d for d, _ in steps)
        assert got.num_accepted_draft_tokens == sum(a for _, a in steps) > 0
        assert got.mean_acceptance_length == 1 + sum(a for _, a in steps) / len(steps)
        assert got.draft_acceptance_rate == sum(a for _, a in steps) / sum(d for d, _ in steps)
        assert 1 + sum(stats.emitted) == len(answer.token_ids)
        assert all(e == a + 1 for e, a in zip(stats.emitted[:-1], stats.accepted[:-1], strict=True))


def test_metrics_where_nothing_was_drafted(ngram: LLM) -> None:
    (answer,) = generate(ngram, "x", SamplingParams(temperature=0, max_tokens=1))[0].outputs
    got = answer.spec_decode_metrics
    assert got.acceptance_histogram == [0, 0, 0, 0]
    assert (got.num_spec_steps, got.mean_acceptance_length, got.draft_acceptance_rate) == (0, 1.0, 0.0)


def test_counters_have_vllms_names_and_sum_over_requests() -> None:
    """Of the requests that have finished, in all calls; labels as in vLLM."""
    llm = LLM("tiny", dtype="float32", device="cpu", speculative_config=SELF)

    def read() -> dict[tuple[str, str | None], Any]:
        values = {}
        for metric in llm.get_metrics():
            assert metric.labels["model_name"] == "tiny"
            assert metric.labels["engine"] == "0"
            assert isinstance(metric, Counter | Vector)
            value = metric.value if isinstance(metric, Counter) else metric.values
            values[metric.name, metric.labels.get("finished_reason")] = value
        return values

    assert read() == {
        ("vllm:prompt_tokens", None): 0,
        ("vllm:generation_tokens", None): 0,
        ("vllm:request_success", "stop"): 0,
        ("vllm:request_success", "length"): 0,
        ("vllm:spec_decode_num_drafts", None): 0,
        ("vllm:spec_decode_num_draft_tokens", None): 0,
        ("vllm:spec_decode_num_accepted_tokens", None): 0,
        ("vllm:spec_decode_num_accepted_tokens_per_pos", None): [0, 0, 0],
    }
    # as above: one token from prefill, steps of 3 + 1, and a last draft of 2; then a stop at the fourth token
    first = generate(llm, "x", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    stop = first[0].outputs[0].token_ids[3]
    second = generate(llm, "x", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop_token_ids=[stop]))
    emitted = len(second[0].outputs[0].token_ids) - 1
    assert 1 <= emitted <= 3
    assert read() == {
        ("vllm:prompt_tokens", None): 2 * len(first[0].prompt_token_ids),
        ("vllm:generation_tokens", None): 16 + 1 + emitted,
        ("vllm:request_success", "stop"): 1,
        ("vllm:request_success", "length"): 1,
        ("vllm:spec_decode_num_drafts", None): 4 + 1,
        ("vllm:spec_decode_num_draft_tokens", None): 11 + 3,
        ("vllm:spec_decode_num_accepted_tokens", None): 11 + emitted,
        ("vllm:spec_decode_num_accepted_tokens_per_pos", None): [4 + 1, 4 + (emitted > 1), 3 + (emitted > 2)],
    }


def test_counters_without_speculation(plain: LLM) -> None:
    assert {metric.name for metric in plain.get_metrics()} == {
        "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success",
    }  # fmt: skip


# ---------------------------------------------------------------------------------- mistakes in a request


def test_bad_prompts(plain: LLM, one_line: Any) -> None:
    def refuse(prompt: Any, *words: str) -> None:
        one_line(lambda: generate(plain, prompt), *words)

    refuse("", "prompt is empty")
    refuse({"prompt_token_ids": []}, "prompt is empty")
    refuse(["x", ""], "prompt is empty")
    refuse({"prompt_token_ids": [1, 320]}, "320", "0..319")
    refuse({"prompt_token_ids": [-1]}, "-1", "0..319")
    refuse({"prompt_token_ids": [1] * 4096}, "4096 tokens", "max_model_len=4096", "shorten")
    refuse({"promt": "x"}, "unknown prompt key 'promt'", "did you mean 'prompt'")
    refuse({}, "'prompt' or 'prompt_token_ids'")
    one_line(lambda: generate(plain, "x", SamplingParams(logit_bias={400: 1.0})), "400", "0..319")
    one_line(lambda: generate(plain, ["x", "y"], [GREEDY]), "1 sampling_params for 2 prompts")
    one_line(lambda: plain.chat([], GREEDY), "messages=[]")
    assert len(generate(plain, "x")) == 1, "and the engine goes on"


def test_a_model_without_a_chat_template(tmp_path: Path, one_line: Any) -> None:
    base = shutil.copytree(hub.resolve("tiny"), tmp_path / "base")
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    llm = LLM(base, dtype="float32", device="cpu")
    one_line(lambda: llm.chat([{"role": "user", "content": "x"}]), "no chat template", "generate")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temprature": 1}, ["unknown sampling parameter 'temprature'", "did you mean 'temperature'"]),
        ({"max_token": 1}, ["did you mean 'max_tokens'"]),
        ({"temperature": -0.1}, ["temperature=-0.1", "greater than or equal to 0"]),
        ({"top_p": 0}, ["top_p=0", "greater than 0"]),
        ({"top_p": 1.5}, ["top_p=1.5", "less than or equal to 1"]),
        ({"top_k": -2}, ["top_k=-2"]),
        ({"min_p": 1.1}, ["min_p=1.1"]),
        ({"repetition_penalty": 0}, ["repetition_penalty=0"]),
        ({"presence_penalty": 3}, ["presence_penalty=3"]),
        ({"max_tokens": 0}, ["max_tokens=0", "greater than or equal to 1"]),
        ({"max_tokens": 3, "min_tokens": 4}, ["min_tokens=4", "max_tokens=3"]),
        ({"max_tokens": 3, "max_new_tokens": 4}, ["max_tokens=3", "max_new_tokens=4", "one of them"]),
        ({"stop": ""}, ["empty stop string"]),
        ({"stop": ["a", ""]}, ["empty stop string"]),
        ({"seed": 1.5}, ["seed=1.5"]),
        ({"logit_bias": {"x": 1.0}}, ["logit_bias"]),
    ],
)
def test_bad_sampling_parameters(values: dict[str, Any], words: list[str], one_line: Any) -> None:
    one_line(lambda: SamplingParams(**values), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "flot32"}, ["unknown dtype 'flot32'", "did you mean 'float32'"]),
        ({"device": "gpu"}, ["device='gpu'", "cpu, cuda"]),
        ({"max_batch_size": 0}, ["max_batch_size=0"]),
        ({"prefill_chunk_size": 0}, ["prefill_chunk_size=0"]),
        ({"max_model_len": 4097}, ["max_model_len=4097", "4096"]),
        ({"max_model_len": 1}, ["max_model_len=1"]),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: list[str], one_line: Any) -> None:
    one_line(lambda: LLM("tiny", **arguments), *words)


def test_a_typo_is_found_before_the_target_is_loaded(one_line: Any) -> None:
    one_line(lambda: LLM("/nowhere", speculative_config={"method": "ngrm"}), "did you mean 'ngram'")
    one_line(lambda: LLM("/nowhere", speculative_config={"methd": "ngram"}), "did you mean 'method'")


def test_what_an_error_left_behind_belongs_to_nobody(ngram: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception amid decoding, such as Ctrl-C in a notebook: the next call starts from nothing."""
    want = tokens(generate(ngram, PROMPTS))
    step = ngram.engine.step
    calls = iter(range(100))

    def interrupted() -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(ngram.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(ngram, PROMPTS)
    monkeypatch.undo()
    assert ngram.engine.num_running == 2
    assert tokens(generate(ngram, PROMPTS)) == want


def test_an_interruption_between_prefill_and_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("tiny", dtype="float32", device="cpu", speculative_config={"method": "suffix"})

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "_commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, "x")
    monkeypatch.undo()
    assert len(generate(llm, "x")) == 1


# ------------------------------------------------------------------------------------- speculative_config


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM("tiny", "float32", "cpu")


def build(target: CausalLM, config: Any) -> Any:
    return SpeculativeConfig.parse(config).resolve().build(target)


def test_json_text_is_the_object(target: CausalLM, one_line: Any) -> None:
    assert SpeculativeConfig.parse(json.dumps(NGRAM)) == SpeculativeConfig.parse(NGRAM)
    assert SpeculativeConfig.parse(None).infer_method() == "none"
    for text in ("{", '{"method": "ngram",}', "ngram", ""):
        one_line(lambda text=text: SpeculativeConfig.parse(text), "not JSON")
    for value in ("[1]", "3", '"ngram"', ["ngram"]):
        one_line(lambda value=value: SpeculativeConfig.parse(value), "must be a JSON object")
    llm = LLM("tiny", dtype="float32", device="cpu", speculative_config=json.dumps(NGRAM))
    assert llm.engine.proposer.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model": "ngram"}, "ngram"),
        ({"model": "[ngram]"}, "ngram"),
        ({"model": "specdec.method.ngram.Ngram"}, "custom_class"),
        ({"model": "some-org/some-draft"}, "draft_model"),
        ({"model": "tiny"}, "draft_model"),
        ({"model": "/a/path/to.a.model"}, "draft_model"),
        ({"model": "z-lab/Qwen3-4B-DFlash-b16"}, "dflash"),
        ({"model": "deepseek-ai/dspark_qwen3_4b_block7"}, "dspark"),
        ({"method": "ngram", "model": "some-org/EAGLE3-thing"}, "ngram"),
        ({"method": "suffix"}, "suffix"),
    ],
)
def test_an_omitted_method_is_inferred_as_in_vllm(config: dict[str, str], method: str) -> None:
    assert SpeculativeConfig(**config).infer_method() == method


def test_a_directory_with_dots_is_no_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draft.v1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert SpeculativeConfig(model="draft.v1").infer_method() == "draft_model"


def test_a_scheme_that_is_not_built(target: CausalLM, one_line: Any) -> None:
    one_line(lambda: build(target, {**NGRAM, "rejection_sample_method": "fly"}), "'fly' is not built yet", "built: ")


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle"])
def test_a_drafter_must_be_given(name: str, target: CausalLM, one_line: Any) -> None:
    config = {"method": name, "num_speculative_tokens": 3}
    one_line(lambda: build(target, config), f"method '{name}' needs model", "give the directory", "train/eagle.py")
    one_line(lambda: build(target, {"method": name}), f"'{name}' needs num_speculative_tokens")
    one_line(lambda: build(target, {**config, "model": "/no/such/drafter"}), "/no/such/drafter", "no such directory")
    one_line(lambda: build(target, {**config, "model": str(target.path)}), "a causal LM", "'llama'", "method=draft_model")


@pytest.mark.parametrize(
    ("model", "name"),
    [("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"), ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3")],
)
def test_eagle_is_recognised_by_its_name(model: str, name: str) -> None:
    assert SpeculativeConfig(model=model, num_speculative_tokens=3).infer_method() == name


def test_parallel_drafting_is_a_method_of_its_own(one_line: Any) -> None:
    for config, name in (({"method": "draft_model"}, "pard"), ({"method": "eagle3"}, "peagle"), ({"method": "pard"}, "pard")):
        assert SpeculativeConfig(**config, parallel_drafting=True).infer_method() == name
        assert SpeculativeConfig(**config, parallel_drafting=False).infer_method() == config["method"]
    one_line(lambda: SpeculativeConfig(method="mtp", parallel_drafting=True).infer_method(), "parallel_drafting", "'mtp'")


def test_what_a_directory_says_can_be_taken_back(tmp_path: Path, one_line: Any) -> None:
    """A parallel draft model drafts token by token where that is asked for; P-EAGLE cannot."""
    for name, config in (("pard", {"architectures": ["LlamaForCausalLM"], "pard_token": 3}), ("peagle", {"method": "peagle"})):
        (tmp_path / name).mkdir()
        native = {"format": "specdec-drafter", "format_version": 1} if name == "peagle" else {}
        (tmp_path / name / "config.json").write_text(json.dumps(config | native))
        save_file({"model.norm.weight": torch.ones(1)}, tmp_path / name / "model.safetensors")
        assert SpeculativeConfig(model=str(tmp_path / name)).infer_method() == name
    assert SpeculativeConfig(model=str(tmp_path / "pard"), parallel_drafting=False).infer_method() == "draft_model"
    settings = {"model": str(tmp_path / "peagle"), "parallel_drafting": False}
    one_line(lambda: SpeculativeConfig(**settings).infer_method(), "parallel_drafting=false", "in one pass only")


def test_other_names_of_a_method() -> None:
    for name, ours in (("mlp_speculator", "mlp"), ("deepseek_mtp", "mtp"), ("qwen3_next_mtp", "mtp")):
        assert SpeculativeConfig(method=name).infer_method() == ours


# Every key of vLLM's object whose feature is not built: what asks for it, and what does not.
NOT_BUILT: dict[str, tuple[list[Any], list[Any]]] = {
    "enforce_eager": ([False], [None, True]),
    "quantization": (["fp8"], [None]),
    "moe_backend": (["triton"], [None]),
    "attention_backend": (["FLASH_ATTN"], [None, "auto"]),
    "kv_cache_dtype": (["fp8"], [None, "auto"]),
    "draft_lm_head_quantization": (["fp8"], [None]),
    "code_revision": (["main"], [None]),
    "index_share_for_mtp_iteration": ([True], [None]),
    "disable_padded_drafter_batch": ([True], [False]),
    "disable_eagle_block_drop": ([True], [False]),
    "disable_lookahead_block_hashes": ([True], [False]),
    "use_local_argmax_reduction": ([True], [False]),
    "dspark_draft_topk": ([4], [None]),
    "xpress_topc": ([0, 8], [None]),
    "fly_window_size": ([2], [None]),
    "fly_entropy_threshold": ([0.5], [None]),
    "fly_entropy_top_k": ([5], [None]),
}
BUILT = {
    *("draft_model_config", "draft_tensor_parallel_size", "parallel_drafting", "use_heterogeneous_vocab"),
    *("method", "model", "num_speculative_tokens", "max_model_len", "revision"),
    *("num_speculative_tokens_per_batch_size", "enable_adaptive_verification"),
    *("prompt_lookup_max", "prompt_lookup_min"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    *("rejection_sample_method", "draft_sample_method"),
    *("synthetic_acceptance_rates", "synthetic_acceptance_length"),
}


@pytest.mark.parametrize("key", NOT_BUILT)
def test_a_key_that_is_not_built_is_never_ignored(key: str, target: CausalLM, one_line: Any) -> None:
    asking, idle = NOT_BUILT[key]
    for value in asking:
        one_line(lambda value=value: build(target, {**NGRAM, key: value}), repr(key), "not built yet")
    for value in idle:
        proposer, _ = build(target, {**NGRAM, key: value})
        assert proposer.num_speculative_tokens == 3


def test_every_key_of_vllm_is_known() -> None:
    ours = {
        *("prompt_lookup_latest", "shared_storage_path", "include_output_tokens", "pard_token", "cost_table"),
        *("posterior_threshold", "posterior_alpha"),
        *("min_score", "tree_topk", "tree_depth", "tree_builder", "speculative_token_tree", "proposers"),
    }
    known = {*SpeculativeConfig.model_fields, *SpeculativeConfig.aliases}
    assert known - ours == BUILT | set(NOT_BUILT) | {"tensor_parallel_size"}


def rates(*values: float) -> dict[str, Any]:
    return {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(values)}


def mean(length: float) -> dict[str, Any]:
    return {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # keys and names
        ({**NGRAM, "num_speculative_tokns": 3}, ["did you mean 'num_speculative_tokens'"]),
        ({**NGRAM, "promt_lookup_max": 3}, ["did you mean 'prompt_lookup_max'"]),
        ({**NGRAM, "tensor_parallel_size": 1}, ["use draft_tensor_parallel_size"]),
        ({**NGRAM, "method": "ngrm"}, ["unknown method 'ngrm'", "did you mean 'ngram'"]),
        ({**NGRAM, "rejection_sample_method": "standrad"}, ["'standrad'", "did you mean 'standard'"]),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 3}, ["'ngram' takes no setting", "suffix_decoding"]),
        (
            {**NGRAM, "draft_sample_method": "probabilistic"},
            ["draft_sample_method=probabilistic is for dflash, draft_model, dspark", "not for 'ngram'"],
        ),
        ({**SELF, "draft_sample_method": "greddy"}, ["'greddy'", "'greedy' or 'probabilistic'"]),
        ({}, ["neither method nor model"]),
        ({"num_speculative_tokens": 3}, ["neither method nor model"]),
        # K
        ({"method": "ngram"}, ["'ngram' needs num_speculative_tokens"]),
        ({"model": "tiny"}, ["'draft_model' needs num_speculative_tokens"]),
        ({**NGRAM, "num_speculative_tokens": 0}, ["num_speculative_tokens=0", "at least 1"]),
        ({**SELF, "num_speculative_tokens": -2}, ["num_speculative_tokens=-2", "at least 1"]),
        ({"method": "suffix", "num_speculative_tokens": 0}, ["num_speculative_tokens=0", "at least 1"]),
        ({**NGRAM, "num_speculative_tokens": 1.5}, ["num_speculative_tokens=1.5", "integer"]),
        ({**NGRAM, "num_speculative_tokens": "many"}, ["num_speculative_tokens='many'", "integer"]),
        ({"method": "none", "num_speculative_tokens": 3}, ["'none' takes no setting"]),
        # bounds of n-grams and suffixes
        ({**NGRAM, "prompt_lookup_min": 4}, ["prompt_lookup_min=4", "prompt_lookup_max=3"]),
        ({**NGRAM, "prompt_lookup_min": 0}, ["prompt_lookup_min=0"]),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, ["suffix_decoding_max_tree_depth=0"]),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, ["cached_requests=-1"]),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -1.0}, ["spec_factor=-1"]),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, ["min_token_prob=1.5", "[0, 1]"]),
        # draft trees
        ({**NGRAM, "tree_topk": 0}, ["tree_topk=0", "at least 1", "try 4"]),
        ({"method": "suffix", "tree_topk": -1}, ["tree_topk=-1", "at least 1", "try 4"]),
        ({**NGRAM, "tree_topk": 2, "tree_depth": 0}, ["tree_depth=0", "at least 1", "try 8"]),
        ({"method": "suffix", "tree_depth": 3}, ["tree_depth=3", "tree_topk is not set"]),
        ({**NGRAM, "method": "ngram_gpu", "tree_topk": 2}, ["'ngram_gpu' takes no setting 'tree_topk'"]),
        # synthetic acceptance
        (rates(0.5, 0.6, 0.1), ["rise", "0.5", "0.6"]),
        (rates(1.2, 0.6, 0.1), ["synthetic_acceptance_rates[0]=1.2", "[0, 1]"]),
        (rates(0.9, 0.6, -0.1), ["synthetic_acceptance_rates[2]=-0.1", "[0, 1]"]),
        (rates(0.9, 0.6, float("nan")), ["synthetic_acceptance_rates[2]=nan", "finite number"]),
        (rates(0.9, 0.6), ["2 entries", "num_speculative_tokens", "3"]),
        (rates(), ["0 entries"]),
        (mean(0.9), ["synthetic_acceptance_length=0.9", "[1, ", "4]"]),
        (mean(4.1), ["synthetic_acceptance_length=4.1", "[1, ", "4]"]),
        ({**rates(0.9, 0.6, 0.1), "synthetic_acceptance_length": 2.0}, ["exactly one", "both"]),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, ["exactly one", "neither"]),
        ({**NGRAM, "synthetic_acceptance_length": 2.0}, ["'standard' takes no synthetic_acceptance_length"]),
        ({**NGRAM, "synthetic_acceptance_rates": [0.5] * 3}, ["takes no synthetic_acceptance_rates"]),
        # the draft
        ({"method": "draft_model", "num_speculative_tokens": 3}, ["'draft_model' needs model"]),
        ({**SELF, "model": "no-such-model"}, ["'no-such-model'", "no such directory"]),
        ({**SELF, "max_model_len": 5000}, ["max_model_len=5000", "the target's 4096"]),
        ({**SELF, "max_model_len": 0}, ["max_model_len=0", "1..4096"]),
        # a class of one's own
        ({"method": "custom_class", "num_speculative_tokens": 3}, ["'custom_class' needs model"]),
    ],
)
def test_bad_settings(config: dict[str, Any], words: list[str], target: CausalLM, one_line: Any) -> None:
    one_line(lambda: build(target, config), *words)


@pytest.mark.parametrize("config", [rates(0.9, 0.6, 0.6), rates(1, 1, 1), rates(0, 0, 0), mean(1), mean(4)])
def test_good_rates(config: dict[str, Any], target: CausalLM) -> None:
    _, verifier = build(target, config)
    assert len(verifier.params["synthetic_acceptance_rates"]) == 3
    assert not verifier.lossless


def test_suffix_without_k_takes_its_depth(target: CausalLM) -> None:
    """vLLM: K defaults to suffix_decoding_max_tree_depth."""
    for depth in (24, 7):
        proposer, _ = build(target, {"method": "suffix", "suffix_decoding_max_tree_depth": depth})
        assert proposer.num_speculative_tokens == depth


def test_suffix_without_k_under_synthetic(target: CausalLM) -> None:
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    _, verifier = build(target, {"method": "suffix", **synthetic})
    assert len(verifier.params["synthetic_acceptance_rates"]) == 24


def test_greedy_drafts_may_be_said_of_every_method(target: CausalLM) -> None:
    build(target, {**NGRAM, "draft_sample_method": "greedy"})
    build(target, {"method": "suffix", "draft_sample_method": "greedy"})


def make_draft(path: Path, **facts: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, **{"vocab_size": 320, "max_position_embeddings": 64, **facts},
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def test_a_draft_with_another_vocabulary(target: CausalLM, tmp_path: Path, one_line: Any) -> None:
    draft = make_draft(tmp_path / "draft", vocab_size=400)
    one_line(lambda: build(target, {**SELF, "model": str(draft)}), "400", "320", str(draft), "equal")


def test_a_draft_of_its_own_with_a_short_context(plain: LLM, tmp_path: Path, one_line: Any) -> None:
    """A directory serves as a draft, without a tokenizer; past its 64 positions it drafts no more."""
    config = {**SELF, "model": str(make_draft(tmp_path / "draft"))}
    one_line(lambda: build(plain.target, {**config, "max_model_len": 65}), "max_model_len=65", "1..64")
    llm = LLM("tiny", dtype="float32", device="cpu", speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=60)
    (result,) = generate(llm, "a prompt of thirty characters,", params)
    assert tokens([result]) == tokens(generate(plain, "a prompt of thirty characters,", params))
    drafted = result.request.stats.drafted
    length = 30
    for d, e in zip(drafted, result.request.stats.emitted, strict=True):
        length += e
        assert d == 0 or length - e + d <= 65
    assert drafted[0] == 3
    assert drafted[-1] == 0


# ------------------------------------------------------------------------------------------- custom_class

CLASSES = """
from specdec.core import Draft

class Mine:
    def __init__(self, num_speculative_tokens):
        self.k = num_speculative_tokens

    def propose(self, context):
        return [[int(token)] * self.k for token in context.last_token_B]

class Bare:
    def propose(self, context):
        return [[1] for _ in context.rows]

class Sulks:
    def __init__(self, target):
        raise RuntimeError("not today")

class SulksAtLength:
    def __init__(self, target):
        raise RuntimeError("not today\\nnor tomorrow")

class Demands:
    def __init__(self, key): ...
    def propose(self, context): ...

class Mute:
    propose = "a string"

class Short:
    def propose(self, context):
        return []

class Greedy:
    hidden_layers = (2,)
    needs_logits = True
    def __init__(self, target):
        self.target = target
    def on_start(self, row, request):
        self.begun = (row, request.id)
    def on_finish(self, row):
        self.ended = row
    def propose(self, context):
        (hidden,) = context.hidden
        assert hidden.shape[1:] == (1, self.target.hidden_size)
        assert context.logits_BV.shape == (1, self.target.vocab_size)
        assert int(context.logits_BV.argmax()) == int(context.last_token_B)
        return [[7, 8, 9, 10, 11, 12]]

a_function = 3
"""


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"classes_of_{tmp_path.name}"  # a module is imported once, so every test has its own
    (tmp_path / f"{name}.py").write_text(CLASSES)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_thing\n")
    (tmp_path / f"{name}_garbled.py").write_text("class Mine(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def custom(model: str) -> dict[str, Any]:
    return {"method": "custom_class", "model": model, "num_speculative_tokens": 3}


def test_each_failure_has_its_own_words(classes: str, target: CausalLM, one_line: Any) -> None:
    def refuse(model: str, *words: str) -> str:
        return one_line(lambda: build(target, custom(model)), *words)

    messages = {
        refuse("Mine", "'Mine'", "dotted path"),
        refuse("no_such_module.Mine", "cannot import 'no_such_module'", "ModuleNotFoundError"),
        refuse(f"{classes}_broken.Mine", "cannot import", "no_such_thing"),
        refuse(f"{classes}_garbled.Mine", "cannot import", "SyntaxError"),
        refuse(f"{classes}.Nine", "no class 'Nine'", classes),
        refuse(f"{classes}.Sulks", "could not be constructed", "RuntimeError", "not today"),
        refuse(f"{classes}.Demands", "could not be constructed", "key"),
        refuse(f"{classes}.a_function", "could not be constructed"),
        refuse(f"{classes}.Mute", "no callable 'propose'"),
    }
    assert len(messages) == 9


def test_a_constructor_that_fails_at_length(classes: str, target: CausalLM, one_line: Any) -> None:
    one_line(lambda: build(target, custom(f"{classes}.SulksAtLength")), "not be constructed", "not today")


@pytest.mark.parametrize("name", ["Mine", "Bare"])
def test_a_custom_class_drafts(classes: str, name: str, plain: LLM) -> None:
    """Its constructor may take K, the target, or nothing; lists of tokens will do for a draft."""
    llm = LLM("tiny", dtype="float32", device="cpu", speculative_config=custom(f"{classes}.{name}"))
    results = generate(llm, PROMPTS)
    assert tokens(results) == tokens(generate(plain, PROMPTS))
    assert all(result.outputs[0].spec_decode_metrics.num_draft_tokens > 0 for result in results)


def test_a_custom_class_gets_the_whole_context(classes: str, plain: LLM) -> None:
    config = {"model": f"{classes}.Greedy", "num_speculative_tokens": 3}
    llm = LLM("tiny", dtype="float32", device="cpu", speculative_config=config)
    (result,) = generate(llm, PROMPTS[0])
    assert tokens([result]) == tokens(generate(plain, PROMPTS[0]))
    assert max(result.request.stats.drafted) == 3, "six tokens were offered, K is three"
    mine = llm.engine.proposer.inner
    assert (mine.begun, mine.ended) == ((0, result.request_id), 0)


def test_a_draft_for_the_wrong_number_of_rows(classes: str, one_line: Any) -> None:
    llm = LLM("tiny", dtype="float32", device="cpu", speculative_config=custom(f"{classes}.Short"))
    one_line(lambda: generate(llm, PROMPTS), "Short.propose", "0 drafts for", "one per row")


# ------------------------------------------------------------------------------------------ nothing is cast


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": True}, "temperature=True: input should be a valid number"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes': input should be a valid boolean"),
        ({"max_tokens": 5.0}, "max_tokens=5.0: input should be a valid integer"),
        ({"max_tokens": "5"}, "max_tokens='5'"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop": ["a", 5]}, "stop"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"seed": 2**70}, "seed=1180591620717411303424"),
        ({"stop": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_sampling_parameters_are_what_they_say(values: dict[str, Any], words: str, one_line: Any) -> None:
    one_line(lambda: SamplingParams(**values), words)


def test_an_int_is_a_float_and_numpys_numbers_are_numbers() -> None:
    params = SamplingParams(
        temperature=1, top_k=np.int64(5), top_p=np.float64(0.5), stop_token_ids=np.array([1, 2]), logit_bias={np.int32(3): 1},
        stop=("a", "b"), ignore_eos=np.bool_(True),
    )  # fmt: skip
    assert (params.temperature, type(params.temperature)) == (1.0, float)
    assert (params.top_k, type(params.top_k)) == (5, int)
    assert (params.stop_token_ids, params.logit_bias, params.stop) == ([1, 2], {3: 1.0}, ["a", "b"])
    assert params.ignore_eos is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefill_chunk_size": 1.5}, "prefill_chunk_size=1.5"),
        ({"max_batch_size": "8"}, "max_batch_size='8': input should be a valid integer"),
        ({"max_num_seqs": "8"}, "max_num_seqs='8': input should be a valid integer"),
        ({"max_batch_size": True}, "max_batch_size=True"),
        ({"num_threads": 0}, "num_threads=0: input should be greater than or equal to 1"),
        ({"seed": 2**70}, "seed=1180591620717411303424"),
        ({"dtype": torch.int64}, "dtype=torch.int64 is no type of weights; use float32, bfloat16, float16"),
        ({"model": 5}, "model="),
        ({"model": ""}, "model='' is no name of a model"),
    ],
)
def test_arguments_of_an_llm_are_what_they_say(arguments: dict[str, Any], words: str, one_line: Any) -> None:
    one_line(lambda: LLM(**({"model": "tiny", "device": "cpu"} | arguments)), words)


def test_more_rows_than_memory_has_room_for(one_line: Any) -> None:
    one_line(
        lambda: LLM("tiny", device="cpu", max_batch_size=10**12), "max_batch_size=1000000000000", "GiB", "lower max_batch_size"
    )


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (123, "prompts=123: give a string, token ids, "),
        (["a", 2], "prompt 2 is none of: a string, token ids, "),
        ([[1, 2], [3.5]], "prompt[0]=3.5 is no token id"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt key 'multi_modal_data' is not built here"),
        ({"prompt_token_ids": "123"}, "prompt_token_ids='123' must be a list of token ids"),
        ({"prompt_token_ids": [1.7]}, "prompt_token_ids[0]=1.7 is no token id"),
        ({"prompt_token_ids": [5, True]}, "prompt_token_ids[1]=True is no token id"),
        ({"prompt_token_ids": np.array([1.0])}, "prompt_token_ids[0]=1.0 is no token id"),
        ({"prompt": 5}, "prompt=5 must be a string"),
        ("a\ud800", "half of a surrogate pair, which is no text"),
    ],
)
def test_prompts_are_text_or_token_ids(plain: LLM, prompts: Any, words: str, one_line: Any) -> None:
    one_line(lambda: generate(plain, prompts), words)


def test_token_ids_in_every_form_are_the_same(plain: LLM) -> None:
    ids = [5, 6, 7]
    forms = [ids, tuple(ids), np.array(ids, dtype=np.int32), torch.tensor(ids), [np.int64(i) for i in ids]]
    outputs = tokens(generate(plain, [{"prompt_token_ids": form} for form in forms]))
    assert len({tuple(output) for output in outputs}) == 1


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [None], 5])
def test_sampling_params_are_of_their_class(plain: LLM, params: Any, one_line: Any) -> None:
    one_line(lambda: generate(plain, "a", params), "sampling_params=", "SamplingParams(...)")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "messages='hello': give a list"),
        (["hello"], "a conversation is a list"),
        ([{"content": "a"}], "needs a 'role'"),
        ([{"role": "user"}], "needs 'content'"),
        ([{"role": "user", "content": 5}], "content=5"),
    ],
)
def test_a_conversation_is_a_list_of_messages(plain: LLM, messages: Any, words: str, one_line: Any) -> None:
    one_line(lambda: plain.chat(messages, GREEDY, use_tqdm=False), words)


@pytest.mark.parametrize("template", ["{% for", "{{ 1 / 0 }}", "{{ a.b.c }}", "{{ raise_exception('no') }}"])
def test_a_template_that_fails_is_one_line(plain: LLM, template: str, one_line: Any) -> None:
    user = [{"role": "user", "content": "Hi."}]
    one_line(lambda: plain.chat(user, GREEDY, chat_template=template, use_tqdm=False), "the chat template refuses")


def test_deep_json_is_one_line(one_line: Any) -> None:
    one_line(lambda: SpeculativeConfig.parse("[" * 100_000), "speculative_config is not JSON", "recursion limit")


def test_layers_are_tapped_once(plain: LLM, one_line: Any) -> None:
    config = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 1]}}
    settings = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "shared_storage_path": "x",
        "draft_model_config": config,
    }
    one_line(lambda: SpeculativeConfig(**settings).resolve().build(plain.target), "[1, 1, 1] names a layer twice")
    one_line(lambda: Architecture(eagle_aux_hidden_state_layer_ids=[1, 1, 1]).layers(4), "[1, 1, 1] names a layer twice")


# ---------------------------------------------------------------------------------------------- several answers


def test_n_answers_have_seeds_of_their_own(plain: LLM, ngram: LLM) -> None:
    """The first is that of n=1; all of them are the same alone, in a batch, and in every run."""
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=5, n=3)
    results = generate(ngram, PROMPTS, params)
    for result, one in zip(results, generate(ngram, PROMPTS, SamplingParams(max_tokens=12, seed=5)), strict=True):
        assert [answer.index for answer in result.outputs] == [0, 1, 2]
        assert len({tuple(answer.token_ids) for answer in result.outputs}) == 3
        assert result.outputs[0].token_ids == one.outputs[0].token_ids
    assert len({result.request_id for result in results}) == len(PROMPTS)
    again = [generate(ngram, prompt, params)[0].outputs for prompt in PROMPTS]
    assert [[answer.token_ids for answer in answers] for answers in again] == [
        [answer.token_ids for answer in result.outputs] for result in results
    ]
    seedless = SamplingParams(max_tokens=12, n=2)
    first, second = generate(plain, ["x", "x"], seedless)
    assert len({tuple(answer.token_ids) for answer in (*first.outputs, *second.outputs)}) == 4
    request = generate(plain, "x", SamplingParams(max_tokens=2, n=2, prompt_logprobs=0))[0]
    assert request.prompt_logprobs == [None]


def test_several_greedy_answers_are_refused_as_in_vllm(plain: LLM, one_line: Any) -> None:
    one_line(lambda: SamplingParams(temperature=0, n=2), "n=2 at temperature 0", "use n=1")
    request = Request("0", [1], SamplingParams(n=2))
    one_line(lambda: plain.engine.add(request), "n=2", "LLM.generate")


# --------------------------------------------------------------------------------------------- log probabilities


def test_logprobs_have_vllms_shape(self_drafting: LLM) -> None:
    tokenizer = self_drafting.get_tokenizer()
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=1, logprobs=2, prompt_logprobs=1)
    (result,) = generate(self_drafting, "to be", params)
    (answer,) = result.outputs
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, place in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(place)) == token, "the sampled token comes first"
        assert {logprob.rank for logprob in place.values()} >= {1, 2}
        assert len(place) == (2 if place[token].rank <= 2 else 3)
        top = sorted(place.values(), key=lambda logprob: logprob.rank)
        assert [each.logprob for each in top] == sorted((each.logprob for each in top), reverse=True)
        assert all(each.logprob < 0 for each in top)
    assert answer.cumulative_logprob == sum(
        place[token].logprob for token, place in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    first, *others = result.prompt_logprobs
    assert first is None
    assert [next(iter(place)) for place in others] == result.prompt_token_ids[1:]
    texts = [next(iter(place.values())).decoded_token for place in others]
    assert texts == [tokenizer.decode([token]) for token in result.prompt_token_ids[1:]]
    (bare,) = generate(self_drafting, "to be", SamplingParams(temperature=0, max_tokens=3))
    assert (bare.prompt_logprobs, bare.outputs[0].logprobs, bare.outputs[0].cumulative_logprob) == (None, None, None)
    everything = generate(self_drafting, "x", SamplingParams(max_tokens=2, logprobs=-1))[0].outputs[0].logprobs
    assert [len(place) for place in everything] == [320, 320]
    assert sum(math.exp(each.logprob) for each in everything[0].values()) == pytest.approx(1, abs=1e-5)


def test_a_token_that_completes_a_character_has_its_text(plain: LLM) -> None:
    ids = plain.get_tokenizer()("xé€", add_special_tokens=False)["input_ids"]
    (result,) = generate(plain, ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert [next(iter(place.values())).decoded_token for place in result.prompt_logprobs[1:]] == ["", "é", "", "", "€"]


def test_more_logprobs_than_tokens(plain: LLM, one_line: Any) -> None:
    for key in ("logprobs", "prompt_logprobs"):
        one_line(lambda key=key: generate(plain, "x", SamplingParams(**{key: 321})), f"{key}=321", "320", "-1")
        one_line(lambda key=key: SamplingParams(**{key: -2}), f"{key}=-2")


# -------------------------------------------------------------------------------------------------- constraints


def test_bad_words_are_read_as_vllm_reads_them() -> None:
    """With a space in front too, where that is as many tokens that begin with another."""
    words = {"a": [5], " a": [6], "bc": [7, 8], " bc": [9], "d": [3, 5], " d": [3, 6], "e": [1, 2], " e": [3, 2]}

    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": words[text]}

    assert bad_words_token_ids(["a", "  bc", "d", "e"], tokenizer) == [[5], [6], [7, 8], [3, 5], [1, 2], [3, 2]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"allowed_token_ids": []}, ["allowed_token_ids=[]"]),
        ({"bad_words": ["a", " "]}, ["bad_words=['a', ' ']", "empty"]),
        ({"bad_words": "a"}, ["bad_words='a'", "list"]),
        ({"stop": "a", "detokenize": False}, ["stop=['a']", "detokenize=False"]),
        ({"n": 0}, ["n=0"]),
        ({"best_of": 2}, ["sampling parameter 'best_of' is not built here"]),
        ({"guided_decoding": {"json": {}}}, ["'guided_decoding' is not built here"]),
        ({"structured_outputs": {"json": {}}}, ["'structured_outputs' is not built here"]),
    ],
)
def test_bad_constraints(values: dict[str, Any], words: list[str], one_line: Any) -> None:
    one_line(lambda: SamplingParams(**values), *words)


def test_constraints_that_leave_nothing(plain: LLM, one_line: Any) -> None:
    (a,) = plain.get_tokenizer()("a", add_special_tokens=False)["input_ids"]
    for values in ({"bad_words": ["a"]}, {"min_tokens": 2, "stop_token_ids": [a]}):
        params = SamplingParams(allowed_token_ids=[a], **values)
        one_line(lambda params=params: generate(plain, "x", params), "leave no token", "remove one")
    one_line(lambda: generate(plain, "x", SamplingParams(allowed_token_ids=[320])), "320", "0..319")


def test_without_detokenize_there_are_only_tokens(ngram: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 6, "logprobs": 1}
    (bare,) = generate(ngram, "x", SamplingParams(**params, detokenize=False))[0].outputs
    (full,) = generate(ngram, "x", SamplingParams(**params))[0].outputs
    assert (bare.text, bare.token_ids) == ("", full.token_ids)
    assert {each.decoded_token for place in bare.logprobs for each in place.values()} == {None}


def test_what_a_record_leaves_out_at_its_default() -> None:
    """Runs from before these keys existed compare with those after."""
    assert not {"n", "logprobs", "bad_words", "allowed_token_ids", "detokenize"} & set(SamplingParams().model_dump())
    assert SamplingParams(n=2, bad_words=["a"]).model_dump().items() >= {"n": 2}.items()


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, bad_words=["b"])
    clone = params.clone()
    assert clone == params
    assert clone.stop is not params.stop
    assert clone.logit_bias is not params.logit_bias


# ------------------------------------------------------------------------------------------------------ streams

CHARACTERS = "é€😀ab "


def spelling(llm: LLM) -> dict[str, Any]:
    """Only the bytes of a few characters, of one to four bytes: many halves."""
    return {"allowed_token_ids": llm.get_tokenizer()(CHARACTERS, add_special_tokens=False)["input_ids"], "max_tokens": 60}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0},
        {"stop": ["ba", "b€", "zz"], "n": 2},
        {"stop": ["b"], "include_stop_str_in_output": True, "min_tokens": 9},
        {"detokenize": False},
        {"logprobs": 1, "prompt_logprobs": 0},
    ],
)
def test_a_stream_joined_is_what_generate_gives(plain: LLM, ngram: LLM, self_drafting: LLM, values: dict[str, Any]) -> None:
    for llm in (plain, ngram, self_drafting):
        params = SamplingParams(**({"temperature": 1.0, "seed": 3} | spelling(llm) | values))
        pieces = list(llm.stream(PROMPTS, params))
        wanted = generate(llm, PROMPTS, params)
        first_id = min(int(piece.request_id) for piece in pieces)
        assert [piece.finished for piece in pieces].count(True) == len(PROMPTS)
        for number, want in enumerate(wanted):
            of_prompt = [piece for piece in pieces if int(piece.request_id) == first_id + number]
            assert of_prompt[-1].finished
            assert of_prompt[0].prompt_token_ids == want.prompt_token_ids
            assert next((p.prompt_logprobs for p in of_prompt if p.prompt_logprobs), None) == want.prompt_logprobs
            for answer in want.outputs:
                parts = [piece.outputs[0] for piece in of_prompt if piece.outputs[0].index == answer.index]
                assert "".join(part.text for part in parts) == answer.text
                assert [token for part in parts for token in part.token_ids] == answer.token_ids
                assert all(part.text or part.finish_reason or not params.detokenize for part in parts)
                assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [answer.finish_reason]
                assert parts[-1].stop_reason == answer.stop_reason
                assert parts[-1].spec_decode_metrics == answer.spec_decode_metrics
                assert parts[-1].cumulative_logprob == answer.cumulative_logprob
                logprobs = [place for part in parts for place in part.logprobs or ()]
                assert logprobs == (answer.logprobs or [])
                if not params.stop and params.temperature and params.detokenize:
                    assert len(parts) > 3, "it does come in pieces"


def test_a_piece_holds_back_what_may_become_a_stop_string(plain: LLM) -> None:
    tokenizer = plain.get_tokenizer()

    def settled(text: str, **values: Any) -> str:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return settled_text(ids, SamplingParams(**values), tokenizer)

    assert settled("abc") == "abc"
    assert settled("abc", stop="cd") == "ab"
    assert settled("abab", stop=["abac", "x"]) == "ab"
    assert settled("abc", stop="d") == "abc"
    assert settled("ab") == "ab"
    half = tokenizer("a😀", add_special_tokens=False)["input_ids"][:-1]
    assert settled_text(half, SamplingParams(), tokenizer) == "a"


def test_a_stream_that_another_call_takes_over(plain: LLM, one_line: Any) -> None:
    stream = plain.stream("x", SamplingParams(temperature=0, **spelling(plain)))
    next(stream)
    want = generate(plain, PROMPTS)
    one_line(lambda: list(stream), "another call", "read a stream to its end")
    kept = plain.stream("x", SamplingParams(temperature=0, **spelling(plain)))
    next(kept)
    with pytest.raises(ValueError, match="token id 999999"):
        plain.generate([999999], use_tqdm=False)
    assert list(kept)[-1].finished, "a call that is refused takes nothing over"
    several = plain.stream(["x", "y"], SamplingParams(temperature=0, **spelling(plain)))
    next(several)  # of two pieces that a step gave
    generate(plain, PROMPTS)
    one_line(lambda: list(several), "another call")
    left = plain.stream("x", GREEDY)
    next(left)
    assert tokens(generate(plain, PROMPTS)) == tokens(want), "what an unread stream leaves behind belongs to nobody"
    one_line(lambda: plain.stream("", GREEDY), "prompt is empty")


# ------------------------------------------------------------------------------------------- arguments of vLLM's


def test_prompts_of_several_kinds_in_one_list(plain: LLM) -> None:
    ids = plain.get_tokenizer()("x y", add_special_tokens=False)["input_ids"]
    text = TextPrompt(prompt="x y")
    mixed = ["x y", ids, tuple(ids), np.array(ids), text, TokensPrompt(prompt_token_ids=ids)]
    results = generate(plain, mixed)
    assert len({tuple(each) for each in tokens(results)}) == 1
    for scalar in (np.array(5), torch.tensor(5)):
        with pytest.raises(ValueError, match="prompts="):
            plain.generate(scalar, use_tqdm=False)
    parts = [{"type": "text", "text": "x "}, {"type": "text", "text": "y"}]
    want, same = (plain.chat([{"role": "user", "content": each}], GREEDY, use_tqdm=False) for each in ("x y", parts))
    assert same[0].prompt == want[0].prompt, "text parts are joined"
    with pytest.raises(ValueError, match="content part of type 'image_url'"):
        plain.chat([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], GREEDY)
    for one in (ids, tuple(ids), np.array(ids), torch.tensor(ids)):
        assert tokens(generate(plain, one)) == tokens(results[:1]), "a bare list is one prompt"
    assert len(generate(plain, [ids, ids[:2]])) == 2
    assert len(generate(plain, np.array([ids, ids]))) == 2


def test_max_num_seqs_is_max_batch_size(one_line: Any) -> None:
    assert LLM("tiny", device="cpu").engine.max_batch_size == 8
    assert LLM("tiny", device="cpu", max_num_seqs=3, enforce_eager=True).engine.max_batch_size == 3
    assert LLM("tiny", device="cpu", max_num_seqs=3, max_batch_size=3).engine.max_batch_size == 3
    one_line(lambda: LLM("tiny", max_num_seqs=3, max_batch_size=8), "max_batch_size=8 and max_num_seqs=3 differ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpu_memory_utilization": 0.9}, ["LLM argument 'gpu_memory_utilization' is not built here; leave it out"]),
        ({"quantization": "fp8"}, ["'quantization' is not built here"]),
        ({"enable_lora": True}, ["'enable_lora' is not built here"]),
        ({"max_num_seq": 3}, ["unknown LLM argument 'max_num_seq'; did you mean 'max_num_seqs'"]),
        ({"rope_theta": 3}, ["unknown LLM argument 'rope_theta', or not built here; valid: "]),
        ({"mamba_block_size": 3}, ["unknown LLM argument 'mamba_block_size', or not built here; valid: "]),
    ],
)
def test_arguments_that_are_not_built(arguments: dict[str, Any], words: list[str], one_line: Any) -> None:
    one_line(lambda: LLM("/nowhere", **arguments), *words)


def test_arguments_that_ask_for_nothing() -> None:
    LLM("tiny", device="cpu", quantization=None, trust_remote_code=False)
    assert SamplingParams(best_of=None, flat_logprobs=False) == SamplingParams()


def test_tools_reach_the_template(plain: LLM, capsys: pytest.CaptureFixture[str], one_line: Any) -> None:
    user = [{"role": "user", "content": "Hi."}]
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    template = "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}"
    (result,) = plain.chat(user, GREEDY, tools=tools, chat_template=template, use_tqdm=False)
    assert result.prompt == "[look_up]Hi."
    assert "note" not in capsys.readouterr().err
    plain.chat(user, GREEDY, tools=tools, chat_template="{{ messages[0].content }}", use_tqdm=False)
    assert "the chat template does not read tools" in capsys.readouterr().err
    one_line(lambda: plain.chat(user, GREEDY, tools="look_up"), "tools='look_up'", "a list of schemas")


def test_k_has_the_command_lines_default(one_line: Any) -> None:
    assert LLM("tiny", device="cpu", speculative_config={"method": "ngram"}).engine.proposer.num_speculative_tokens == 5
    assert LLM("tiny", device="cpu", speculative_config={"model": "tiny"}).engine.proposer.num_speculative_tokens == 3
    one_line(lambda: LLM("/nowhere", speculative_config={"method": "eagle3"}), "'eagle3' needs model")
