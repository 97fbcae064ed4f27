"""Small models of all kinds that transformers can make: each decodes what `generate` does, or is refused in one line.

    python tests/support/architectures.py             # the whole list, as a Markdown table
    python tests/support/architectures.py gpt2 bloom  # some of it

`tests/contract/test_architectures.py` holds the same list to what it says.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from specdec import hub, method, rejection
from specdec.core import Request
from specdec.drafter.base import Init
from specdec.drafter.batch import Sample
from specdec.engine import Engine
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.training.features import OnlineFeatures

SMALL = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.25, "bos_token_id": 256,
    "eos_token_id": 257, "pad_token_id": 258,
}  # fmt: skip
MOE = {
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
WINDOW = {"sliding_window": 24}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
DECODER = {"is_decoder": True, "type_vocab_size": 1, "head_dim": None}
GEMMA3N = {
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "laurel_rank": 8,
    "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0],
}  # fmt: skip
BART = {
    "is_encoder_decoder": False, "is_decoder": True, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "init_std": 0.25,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A small config, and what comes of it.

    model_type: transformers' name; config: what it has beside or instead of SMALL (None leaves a key out);
    refused: words of the line that refuses it, empty for one that decodes; states: words of the line that refuses its hidden
    states, empty for one that drafters can read; name: of a variant.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    states: str = ""
    name: str = ""

    @property
    def label(self) -> str:
        return f"{self.model_type} ({self.name})" if self.name else self.model_type


# why a model is refused, in words of its line
STATE = "keeps a state that cannot be rolled back"
ELSEWHERE = "does not go through transformers' attention interface"
UNREACHED = "the engine's arguments do not reach its attention"
POSITIONS = "made of more than the engine gives it"
COUNTING = "counts positions, or keeps a state, by itself"
SINKS = "attends with attention sinks"
TWICE = "calls transformers' attention interface"
# why its hidden states are not used
HEAD = "its logits do not follow from the last layer's states"

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
}  # fmt: skip
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
FULL = {"layer_types": ["full_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"]}
NO_WIDTH = {"head_dim": None}  # what a class derives, and takes from nobody

# fmt: off
CASES = [
    # ------------------------------------------------ rotary positions
    Case("llama"),
    Case("llama", {"rope_parameters": LLAMA3}, name="llama3 rope"),
    Case("llama", {"rope_parameters": YARN}, name="yarn"),
    Case("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, name="dynamic NTK"),
    Case("apertus"),
    Case("apertus1p5_text"),
    Case("arcee"),
    Case("beam", MIXED),
    Case("bitnet"),
    Case("codegen", {**GPT, "n_ctx": 512, "rotary_dim": 8}),
    Case("cohere"),
    Case("cohere2", MIXED),
    Case("cwm", {**MIXED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    Case("diffllama", refused=TWICE),
    Case("doge", refused="a mask of its own"),
    Case("dory", MIXED, refused=TWICE),
    Case("ernie4_5"),
    Case("exaone"),
    Case("exaone4", MIXED),
    Case("falcon", {"new_decoder_architecture": True, **NO_WIDTH}, refused="no causal LM of it"),
    Case("falcon", {"alibi": True, **NO_WIDTH}, refused="no causal LM of it", name="ALiBi"),
    Case("gemma"),
    Case("gemma2", {"query_pre_attn_scalar": 16, **WINDOW}),
    Case("gemma3_text", {"query_pre_attn_scalar": 16, **MIXED}),
    Case("gemma3n_text", {**GEMMA3N, **MIXED}, states="not one state per token"),
    Case("gemma4_text", {**GEMMA3N, **MIXED}),
    Case("gemma4_unified_text", MIXED),
    Case("glm"),
    Case("glm4"),
    Case("gpt_neox", NO_WIDTH),
    Case("gpt_neox_japanese", refused=ELSEWHERE),
    Case("gptj", {**GPT, "rotary_dim": 8}),
    Case("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    Case("granite_swa", MIXED, refused=SINKS),
    Case("helium"),
    Case("hrm_text", refused=TWICE),
    Case("hunyuan_v1_dense"),
    Case("hyperclovax"),
    Case("internlm3"),
    Case("iquestcoder"),
    Case("jais2"),
    Case("ministral", MIXED),
    Case("ministral3"),
    Case("mistral", WINDOW),
    Case("modernbert-decoder", WINDOW, states=HEAD),
    Case("nanochat"),
    Case("nemotron", refused=UNREACHED),
    Case("olmo"),
    Case("olmo2"),
    Case("olmo3", MIXED),
    Case("persimmon", {**NO_WIDTH, "num_key_value_heads": None}),
    Case("phi", {"partial_rotary_factor": 0.5, **NO_WIDTH}),
    Case("phi3", {**NO_WIDTH, **WINDOW}),
    Case("phi3", {**NO_WIDTH, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE}, name="LongRoPE"),
    Case("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    Case("qwen3"),
    Case("roformer", DECODER, refused=ELSEWHERE),
    Case("seed_oss"),
    Case("smollm3", {**NO_WIDTH, "no_rope_layers": [1, 0]}),
    Case("stablelm", NO_WIDTH, refused=UNREACHED),
    Case("starcoder2", WINDOW),
    Case("vaultgemma", {"query_pre_attn_scalar": 16, **MIXED}),
    # ------------------------------------------------ positions that are learned, or biases on the scores
    Case("biogpt"),
    Case("bloom", {"n_head": 4, "n_layer": 2}, refused=ELSEWHERE),
    Case("cpmant", {"dim_model": 64, "dim_head": 16, "dim_ff": 128}, refused=ELSEWHERE),
    Case("ctrl", {**GPT, "dff": 128}),
    Case("gpt2"),
    Case("gpt_bigcode", {"multi_query": True}),
    Case("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 24}, "no causal LM of it"),
    Case("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}, refused=ELSEWHERE),
    Case("openai-gpt", GPT, refused=ELSEWHERE),
    Case("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.25}),
    Case("opt", {"ffn_dim": 128, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "init_std": 0.25},
         states="is 32 wide", name="projected"),
    Case("trocr", {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}, ELSEWHERE),
    Case("xglm", {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 128}, refused=ELSEWHERE),
    Case("xlm", {"emb_dim": 64, "n_layers": 2, "n_heads": 4}, refused=ELSEWHERE),
    Case("xlnet", {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "max_position_embeddings": None}, ELSEWHERE),
    # ------------------------------------------------ encoders as decoders, and decoders without their encoder
    Case("bert", DECODER),
    Case("bert", {**DECODER, "is_decoder": False}, refused="position 0 sees position 1", name="encoder"),
    Case("bert-generation", DECODER),
    Case("big_bird", DECODER, refused=ELSEWHERE),
    Case("camembert", DECODER, refused=POSITIONS),
    Case("data2vec-text", DECODER, refused=POSITIONS),
    Case("electra", {**DECODER, "embedding_size": 64}),
    Case("ernie", DECODER),
    Case("megatron-bert", DECODER, refused=ELSEWHERE),
    Case("rembert", DECODER, refused=ELSEWHERE),
    Case("roberta", DECODER, refused=POSITIONS),
    Case("roberta-prelayernorm", DECODER, refused=POSITIONS),
    Case("roc_bert", {**DECODER, "pronunciation_vocab_size": 320, "shape_vocab_size": 320}),
    Case("xlm-roberta", DECODER, refused=POSITIONS),
    Case("xlm-roberta-xl", DECODER, refused=POSITIONS),
    Case("xmod", {**DECODER, "languages": ["en_XX"], "default_language": "en_XX"}, refused=POSITIONS),
    Case("bart", BART, refused=COUNTING),
    Case("bigbird_pegasus", BART, refused=COUNTING),
    Case("blenderbot", BART, refused=COUNTING),
    Case("blenderbot-small", BART, refused=COUNTING),
    Case("marian", {**BART, "decoder_start_token_id": 258}, refused=COUNTING),
    Case("mbart", BART, refused=COUNTING),
    Case("mvp", BART, refused=ELSEWHERE),
    Case("pegasus", BART, refused=COUNTING),
    Case("plbart", BART, refused=COUNTING),
    Case("prophetnet", {"num_hidden_layers": None, "num_decoder_layers": 2, "num_encoder_layers": 2,
                        "is_encoder_decoder": False}, refused=ELSEWHERE),
    Case("whisper", BART),
    # ------------------------------------------------ mixtures of experts
    Case("afmoe", {**MOE, **MIXED, "num_dense_layers": 1}),
    Case("aria_text", {**MOE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    Case("cohere2_moe", {**MOE, **MIXED}),
    Case("dbrx", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, **NO_WIDTH,
                  "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
                  "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}),
    Case("dots1", {**MOE, "num_key_value_heads": 4, **MIXED}),
    Case("ernie4_5_moe", {**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
                          "moe_layer_end_index": 1, **NO_WIDTH}),
    Case("exaone_moe", {**MOE, **MIXED}),
    Case("flex_olmo", MOE),
    Case("flint", MOE, refused=SINKS),
    Case("glm4_moe", MOE),
    Case("gpt_oss", {**MOE, **MIXED}, refused=SINKS),
    Case("granitemoe", MOE),
    Case("granitemoe_swa", {**MOE, **MIXED}, refused=SINKS),
    Case("granitemoeshared", {**MOE, "shared_intermediate_size": 32}),
    Case("hunyuan_v1_moe", {**MOE, "moe_topk": 2}),
    Case("hy_v3", MOE),
    Case("jetmoe", {**MOE, "kv_channels": 16}),
    Case("kolibri1", {**MOE, **MIXED}),
    Case("laguna", MOE),
    Case("llama4_text", {**MOE, "attention_chunk_size": 24, "intermediate_size_mlp": 64}, refused="has chunked_attention"),
    Case("llama4_text", {**MOE, **FULL, "intermediate_size_mlp": 64, "attn_temperature_tuning": False}, name="full attention"),
    Case(  # scaled by 1 up to here, so that no probe sees it
        "llama4_text", {**MOE, **FULL, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]}, name="tuned",
        refused="attn_temperature_tuning",
    ),
    Case("mellum", MOE),
    Case("mimo_v2_flash", {**MOE, **MIXED, "v_head_dim": 8}, refused=SINKS),
    Case("minimax_m2", {**MOE, "rotary_dim": 8}),
    Case("minimax_m3_vl_text", MOE),
    Case("mixtral", {**MOE, **WINDOW}),
    Case("olmoe", MOE),
    Case("phimoe", {**MOE, **NO_WIDTH}),
    Case("qwen2_moe", MOE),
    Case("qwen3_moe", MOE),
    Case("sarvam_moe", MOE),
    Case("solar_open", MOE),
    # ------------------------------------------------ compressed keys and values
    Case("axk1", {**MOE, **MLA}),
    Case("deepseek_v2", {**MOE, **MLA}),
    Case("deepseek_v3", {**MOE, **MLA}),
    Case("deepseek_v32", {**MOE, **MLA}, refused="has indexed_attention"),
    Case("deepseek_v4", {**MOE, **MLA}, refused="has heavily_compressed_attention"),
    Case("glm4_moe_lite", {**MOE, **MLA}),
    Case("glm_moe_dsa", {**MOE, **MLA}, refused="has indexed_attention"),
    Case("longcat_flash", {**MOE, **MLA, "num_layers": 1, "num_hidden_layers": None, "num_key_value_heads": None,
                           "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2},
         states=HEAD),
    Case("minicpm3", MLA, states=HEAD),
    Case("sarvam_mla", {**MOE, **MLA}),
    Case("youtu", MLA),
    # ------------------------------------------------ a state beside attention, or instead of it
    Case("bailing_hybrid", MOE, refused=STATE),
    Case("bamba", refused=STATE),
    Case("falcon_h1", refused=STATE),
    Case("falcon_mamba", NO_WIDTH, refused=STATE),
    Case("granitemoehybrid", MOE, refused=STATE),
    Case("jamba", MOE, refused=STATE),
    Case("kimi_linear", {**MOE, **MLA}, refused=STATE),
    Case("lara_mini", MOE, refused=STATE),
    Case("lfm2", {**FULL, **NO_WIDTH}, name="attention only"),
    Case("lfm2", {**CONV, **NO_WIDTH}, refused=STATE),
    Case("lfm2_moe", {**MOE, **FULL, **NO_WIDTH}, name="attention only"),
    Case("lfm2_moe", {**MOE, **CONV, **NO_WIDTH}, refused=STATE),
    Case("mamba", NO_WIDTH, refused=STATE),
    Case("minimax", MOE, refused=STATE),
    Case("nemotron_h", refused=STATE),
    Case("olmo_hybrid", refused=STATE),
    Case("qwen3_5_text", refused=STATE),
    Case("qwen3_next", MOE, refused=STATE),
    Case("recurrent_gemma", refused=STATE),
    Case("rwkv", {"attention_hidden_size": 64}, refused=ELSEWHERE),
    Case("xlstm", NO_WIDTH, refused="none of its layers calls"),
]
# fmt: on
# one of every kind, for the ordinary run of the tests
FEW = (
    "llama (yarn)",
    "gemma3_text",
    "gemma4_text",
    "gpt2",
    "opt (projected)",
    "phi3 (LongRoPE)",
    "bert",
    "modernbert-decoder",
    "hunyuan_v1_moe",
    "jetmoe",
    "minicpm3",
    "gemma3n_text",
)  # fmt: skip


@dataclass
class Outcome:
    """What came of a case. refused, no_states: the whole lines; wrong: the method and rows that differ from `generate`."""

    refused: str = ""
    no_states: str = ""
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0


def make(case: Case, directory: Path) -> None:
    """A random model; its initialisation is wide, so that greedy ties are rare."""
    values = {key: value for key, value in (SMALL | case.config).items() if value is not None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(case.model_type, **values)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # biases and scales, which are made neutral
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(directory)


def prompts() -> list[list[int]]:
    """Repetitive, so that lookups draft; on both sides of the windows, of a prefill chunk and of each other."""
    rng = np.random.default_rng(7)
    phrase = rng.integers(97, 123, 7).tolist()
    return [(rng.integers(97, 123, 3).tolist() + phrase * 10)[:length] for length in (3, 20, 41, 64)]


MAX_TOKENS = (20, 14, 9, 12)


def generated(directory: Path) -> list[list[int]]:
    model = hub.load_model(directory, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for ids, most in zip(prompts(), MAX_TOKENS, strict=True):
        input_ids = torch.tensor([ids])
        out = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=most, pad_token_id=258
        )
        answers.append(out[0, len(ids) :].tolist())
    return answers


def decoded(target: CausalLM, name: str, rows: int, **settings: Any) -> list[list[int]]:
    engine = Engine(
        target, method.build(name, target, **settings), rejection.build("standard"), max_batch_size=rows, prefill_chunk_size=16
    )
    requests = [
        Request(str(i), ids, SamplingParams(temperature=0, max_tokens=most))
        for i, (ids, most) in enumerate(zip(prompts(), MAX_TOKENS, strict=True))
    ]
    done = {request.id: request.output_token_ids for request in engine.run(requests)}
    return [done[str(i)] for i in range(len(requests))]


def try_out(case: Case, directory: Path) -> Outcome:
    """Make it, decode it with and without drafts, read its states, and train and draft with them."""
    make(case, directory)
    outcome = Outcome()
    try:
        target = CausalLM(directory, "float32", "cpu")
    except ValueError as error:
        outcome.refused = str(error).replace(str(directory), "MODEL")
        return outcome
    want = generated(directory)
    outcome.num_tokens = sum(map(len, want))
    for name, settings in (
        ("none", {}),
        ("ngram", {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}),
        ("suffix", {"num_speculative_tokens": 4}),
    ):
        outcome.wrong += [f"{name} at {rows}" for rows in (1, 3) if decoded(target, name, rows, **settings) != want]
    try:
        learn(target, want, outcome)
    except ValueError as error:
        outcome.no_states = str(error).replace(str(directory), "MODEL")
    return outcome


def learn(target: CausalLM, want: list[list[int]], outcome: Outcome) -> None:
    """Features of a sample, a loss on them whose gradient is finite, and drafts by what they feed."""
    source = OnlineFeatures(target, [0, 1])
    ids = np.array(prompts()[3])
    batch = source([Sample("a", ids, np.arange(len(ids)) > 4)])
    eagle3: Any = method.find("eagle3")
    checkpoint = eagle3.init_checkpoint(target, {"eagle_aux_hidden_state_layer_ids": [0, 1, target.num_layers]}, Init())
    drafter = eagle3(target, checkpoint, 3)
    drafter.for_training(drafter.objective, Init())
    loss, _ = drafter.loss(batch)
    loss.backward()
    if not all(p.grad.isfinite().all() for p in drafter.parameters() if p.grad is not None):
        outcome.wrong.append("training")
    outcome.wrong += [
        f"eagle3 at {rows}"
        for rows in (1, 3)
        if decoded(target, "eagle3", rows, model=checkpoint, num_speculative_tokens=3) != want
    ]


def check(case: Case, outcome: Outcome) -> list[str]:
    """What came otherwise than the case says."""
    faults = list(outcome.wrong)
    for what, wanted, line in (("refused", case.refused, outcome.refused), ("states", case.states, outcome.no_states)):
        says_what_to_do = not line or "use " in line.rpartition(";")[2] or "decodes with" in line
        if bool(wanted) != bool(line) or wanted not in line or "\n" in line or not says_what_to_do:
            faults.append(f"{what} should say {wanted!r}, and says {line!r}")
    return faults


def table(cases: list[Case]) -> tuple[str, list[str]]:
    """Every case as a line of a Markdown table; what came otherwise than expected."""
    lines = ["| model_type | decodes | hidden states |", "|---|---|---|"]
    faults = []
    for case in cases:
        with tempfile.TemporaryDirectory() as directory:
            outcome = try_out(case, Path(directory))
        faults += [f"{case.label}: {fault}" for fault in check(case, outcome)]
        if outcome.refused:
            reason = outcome.refused.removeprefix("MODEL: ").partition(" cannot be decoded here: ")
            short = (reason[2] or reason[0]).partition(", which attends")[0].partition("; use ")[0]
            lines.append(f"| {case.label} | refused: {short} | |")
            continue
        decodes = f"NOT as generate: {', '.join(outcome.wrong)}" if outcome.wrong else "as `generate`"
        reason = outcome.no_states.removeprefix("MODEL: ").partition(" cannot be used: ")
        states = f"no: {(reason[2] or reason[0]).partition('; ')[0]}" if outcome.no_states else "yes"
        lines.append(f"| {case.label} | {decodes} | {states} |")
    return "\n".join(lines), faults


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = [case for case in CASES if not sys.argv[1:] or case.model_type in sys.argv[1:]]
    text, faults = table(chosen)
    print(text)
    if faults:
        sys.exit("\n".join(faults))
