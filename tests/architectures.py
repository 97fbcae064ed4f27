"""Small models of all kinds that transformers can make: each decodes what `generate` does, or is refused in one line.

    python tests/architectures.py             # the whole list, as a Markdown table
    python tests/architectures.py gpt2 bloom  # some of it

`tests/test_architectures.py` holds the same list to what stands in it.
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

from specdec import method, rejection
from specdec.core import Request, SamplingParams
from specdec.drafter import Init
from specdec.engine import Engine
from specdec.target import CausalLM
from specdec.training.data import Sample
from specdec.training.features import Online

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


CASES = [
    # ------------------------------------------------ dense, rotary positions
    Case("llama"),
    Case(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        name="llama3 rope",
    ),
    Case(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
        name="yarn",
    ),
    Case("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, name="dynamic NTK"),
    Case("mistral", WINDOW),
    Case("ministral", MIXED),
    Case("ministral3"),
    Case("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    Case("qwen3"),
    Case("gemma"),
    Case("gemma2", {"query_pre_attn_scalar": 16, **WINDOW}),
    Case("gemma3_text", {"query_pre_attn_scalar": 16, **MIXED}),
    Case(
        "gemma3n_text",
        {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
            **MIXED,
        },
    ),
    Case(
        "gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 0, **MIXED}
    ),
    Case("gemma4_unified_text", MIXED),
    Case("vaultgemma", {"query_pre_attn_scalar": 16, **MIXED}),
    Case("phi", {"partial_rotary_factor": 0.5, "head_dim": None}),
    Case("phi3", {"head_dim": None, **WINDOW}),
    Case(
        "phi3",
        {
            "head_dim": None,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 128,
            },
        },
        name="longrope",
    ),
    Case("cohere"),
    Case("cohere2", MIXED),
    Case("cohere_compass_text", MIXED),
    Case("olmo"),
    Case("olmo2"),
    Case("olmo3", MIXED),
    Case(
        "granite",
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25},
    ),
    Case("granite_swa", MIXED),
    Case("glm"),
    Case("glm4"),
    Case("starcoder2", WINDOW),
    Case("stablelm", {"head_dim": None}),
    Case("nemotron"),
    Case("persimmon", {"head_dim": None, "num_key_value_heads": None}),
    Case("gpt_neox", {"head_dim": None}),
    Case("gptj", {"n_head": 4, "n_embd": 64, "n_layer": 2, "n_positions": 512, "rotary_dim": 8}),
    Case("codegen", {"n_head": 4, "n_embd": 64, "n_layer": 2, "n_positions": 512, "n_ctx": 512, "rotary_dim": 8}),
    Case("smollm3", {"head_dim": None, "no_rope_layers": [1, 0]}),
    Case("exaone4", MIXED),
    Case("seed_oss"),
    Case("helium"),
    Case("apertus"),
    Case("arcee"),
    Case("bitnet"),
    Case("ernie4_5"),
    Case("hunyuan_v1_dense", {"head_dim": 16}),
    Case("hyperclovax"),
    Case("jais2"),
    Case("nanochat"),
    Case("cwm", {**MIXED, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    Case("lfm2", {"layer_types": ["full_attention", "full_attention"], "head_dim": None}),
    Case("lfm2", {"layer_types": ["conv", "full_attention"], "head_dim": None}, name="conv"),
    Case("diffllama"),
    Case("doge"),
    Case("falcon", {"new_decoder_architecture": True, "head_dim": None}),
    Case("falcon", {"alibi": True, "head_dim": None}, name="alibi"),
    Case("beam", MIXED),
    Case("dory", MIXED),
    Case("hrm_text"),
    Case("apertus1p5_text"),
    Case("exaone"),
    Case("internlm3"),
    Case("iquestcoder"),
    # ------------------------------------------------ learned or other positions
    Case("gpt2"),
    Case("gpt_bigcode", {"multi_query": True}),
    Case("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 24, "num_heads": 4}),
    Case("gpt_neox_japanese"),
    Case("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.25}),
    Case("opt", {"ffn_dim": 128, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "init_std": 0.25}, name="projected"),
    Case("biogpt"),
    Case("ctrl", {"n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 128, "n_positions": 512}),
    Case("openai-gpt", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    Case("bloom", {"n_head": 4, "n_layer": 2}),
    Case("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    Case("xglm", {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 128}),
    Case("cpmant", {"dim_model": 64, "num_attention_heads": 4, "dim_head": 16, "dim_ff": 128}),
    Case("trocr", {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}),
    Case("bert", DECODER),
    Case("bert", {**DECODER, "is_decoder": False}, name="encoder"),
    Case("bert-generation", DECODER),
    Case("roberta", DECODER),
    Case("camembert", DECODER),
    Case("electra", {**DECODER, "embedding_size": 64}),
    Case("ernie", DECODER),
    Case("data2vec-text", DECODER),
    Case("xlm-roberta", DECODER),
    Case("xlm-roberta-xl", DECODER),
    Case("roberta-prelayernorm", DECODER),
    Case("roc_bert", {**DECODER, "pronunciation_vocab_size": 320, "shape_vocab_size": 320}),
    Case("xmod", {**DECODER, "languages": ["en_XX"], "default_language": "en_XX"}),
    Case("megatron-bert", DECODER),
    Case("rembert", DECODER),
    Case("roformer", DECODER),
    Case("big_bird", DECODER),
    Case("modernbert-decoder", WINDOW),
    Case("bart", BART),
    Case("mbart", BART),
    Case("pegasus", BART),
    Case("marian", {**BART, "decoder_start_token_id": 258}),
    Case("blenderbot", BART),
    Case("blenderbot-small", BART),
    Case("mvp", BART),
    Case("plbart", BART),
    Case("bigbird_pegasus", BART),
    Case(
        "prophetnet", {"num_hidden_layers": None, "num_decoder_layers": 2, "num_encoder_layers": 2, "is_encoder_decoder": False}
    ),
    Case("whisper", BART),
    # ------------------------------------------------ mixtures of experts
    Case("mixtral", {**MOE, **WINDOW}),
    Case("qwen2_moe", MOE),
    Case("qwen3_moe", MOE),
    Case("olmoe", MOE),
    Case("flex_olmo", MOE),
    Case("granitemoe", MOE),
    Case("granitemoeshared", {**MOE, "shared_intermediate_size": 32}),
    Case("granitemoe_swa", {**MOE, **MIXED}),
    Case("phimoe", {**MOE, "head_dim": None}),
    Case("jetmoe", {**MOE, "kv_channels": 16, "num_key_value_heads": 2}),
    Case("afmoe", {**MOE, **MIXED, "num_dense_layers": 1}),
    Case("dots1", {**MOE, "num_key_value_heads": 4, **MIXED}),
    Case(
        "ernie4_5_moe",
        {
            **MOE,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
            "head_dim": None,
        },
    ),
    Case("exaone_moe", {**MOE, **MIXED}),
    Case("glm4_moe", MOE),
    Case("solar_open", MOE),
    Case("hunyuan_v1_moe", {**MOE, "moe_topk": 2}),
    Case("hy_v3", MOE),
    Case("minimax_m2", {**MOE, "rotary_dim": 8}),
    Case("minimax_m3_vl_text", MOE),
    Case("laguna", MOE),
    Case("mellum", MOE),
    Case("aria_text", {**MOE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    Case("cohere2_moe", {**MOE, **MIXED}),
    Case("kolibri1", {**MOE, **MIXED}),
    Case("sarvam_moe", MOE),
    Case(
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "head_dim": None,
        },
    ),
    Case("gpt_oss", {**MOE, **MIXED}),
    Case("flint", MOE),
    Case("mimo_v2_flash", {**MOE, **MIXED, "v_head_dim": 8}),
    Case("llama4_text", {**MOE, "attention_chunk_size": 24, "intermediate_size_mlp": 64}),
    Case("llama4_text", {**MOE, "layer_types": ["full_attention", "full_attention"], "intermediate_size_mlp": 64}, name="full"),
    # ------------------------------------------------ compressed keys and values
    Case("deepseek_v2", {**MOE, **MLA}),
    Case("deepseek_v3", {**MOE, **MLA}),
    Case("glm4_moe_lite", {**MOE, **MLA}),
    Case("youtu", MLA),
    Case("minicpm3", MLA),
    Case(
        "longcat_flash",
        {
            **MLA,
            **MOE,
            "num_layers": 1,
            "num_hidden_layers": None,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "num_key_value_heads": None,
        },
    ),
    Case("axk1", {**MOE, **MLA}),
    Case("sarvam_mla", {**MOE, **MLA}),
    Case("deepseek_v32", {**MOE, **MLA}),
    Case("glm_moe_dsa", {**MOE, **MLA}),
    Case("deepseek_v4", {**MOE, **MLA}),
    Case("axk2", {**MOE, **MLA}),
    Case("hy_v4", {**MOE, **MLA}),
    # ------------------------------------------------ a state beside attention
    Case("mamba", {"head_dim": None}),
    Case("falcon_mamba", {"head_dim": None}),
    Case("rwkv", {"attention_hidden_size": 64}),
    Case("recurrent_gemma"),
    Case("jamba", {**MOE}),
    Case("bamba"),
    Case("falcon_h1"),
    Case("granitemoehybrid", MOE),
    Case("minimax", MOE),
    Case("nemotron_h"),
    Case("olmo_hybrid"),
    Case("qwen3_next", MOE),
    Case("qwen3_5_text"),
    Case("qwen3_5_moe_text", MOE),
    Case("lfm2_moe", {**MOE, "layer_types": ["conv", "full_attention"], "head_dim": None}),
    Case("lfm2_moe", {**MOE, "layer_types": ["full_attention", "full_attention"], "head_dim": None}, name="full"),
    Case("lfm3"),
    Case("kimi_linear", {**MOE, **MLA}),
    Case("lara_mini", MOE),
    Case("zaya", {**MOE, "num_hidden_layers": 4}),
    Case("bailing_hybrid", MOE),
    Case("xlstm", {"head_dim": None}),
    Case("inkling_text", MOE),
    Case("qwen4_exp_text", MOE),
    # ------------------------------------------------ other
    Case("xlm", {"emb_dim": 64, "n_layers": 2, "n_heads": 4}),
    Case("xlnet", {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "max_position_embeddings": None}),
]


@dataclass
class Outcome:
    """What came of a case. refused, no_states: the whole lines; wrong: the method and rows that differ from `generate`."""

    refused: str = ""
    no_states: str = ""
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0


def make(case: Case, directory: Path) -> None:
    """A random model; its initialisation is wide, so that greedy ties are rare."""
    given = {key: value for key, value in (SMALL | case.config).items() if value is not None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(case.model_type, **given)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # biases and scales, which are made neutral
            noise = torch.randn_like(parameter)
            parameter.data += 0.1 * noise if parameter.ndim == 1 else 0.0
        model.save_pretrained(directory)


def prompts() -> list[list[int]]:
    """Repetitive, so that lookups draft; on both sides of the windows, of a prefill chunk and of each other."""
    rng = np.random.default_rng(7)
    phrase = rng.integers(97, 123, 7).tolist()
    return [(rng.integers(97, 123, 3).tolist() + phrase * 10)[:length] for length in (3, 20, 41, 64)]


MAX_TOKENS = (20, 14, 9, 12)


def generated(directory: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for ids, most in zip(prompts(), MAX_TOKENS, strict=True):
        given = torch.tensor([ids])
        out = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=most, pad_token_id=258
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
    source = Online(target, [0, 1])
    ids = np.array(prompts()[3])
    batch = source([Sample("a", ids, np.arange(len(ids)) > 4)])
    eagle3: Any = method.find("eagle3")
    checkpoint = eagle3.fresh(target, {"eagle_aux_hidden_state_layer_ids": [0, 1, target.num_layers]}, Init())
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


def table(cases: list[Case]) -> str:
    """Every case as a line of a Markdown table."""
    lines = ["| model_type | decodes | hidden states |", "|---|---|---|"]
    for case in cases:
        with tempfile.TemporaryDirectory() as directory:
            outcome = try_out(case, Path(directory))
        if outcome.refused:
            lines.append(f"| {case.label} | refused: {outcome.refused.partition(': ')[2]} | |")
            continue
        decodes = f"NOT as generate: {', '.join(outcome.wrong)}" if outcome.wrong else "as generate"
        states = f"no: {outcome.no_states.partition(': ')[2]}" if outcome.no_states else "yes"
        lines.append(f"| {case.label} | {decodes} | {states} |")
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = [case for case in CASES if not sys.argv[1:] or case.model_type in sys.argv[1:]]
    print(table(chosen))
