"""Foreign checkpoints: what is written comes back the same, whatever does not fit is refused by name, the lint knows the
engines' rules, and the public `speculators` package computes the same drafts from what we write."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import checkpoint, hub, method
from specdec.checkpoint import causal_lm, hf_common, lint, mlp_speculator, native
from specdec.checkpoint import mtp as shipped
from specdec.checkpoint.native import Checkpoint
from specdec.drafter import unroll
from specdec.drafter.autoregressive import AutoregressiveDrafter
from specdec.drafter.base import Drafter, Init
from specdec.drafter.batch import Sample
from specdec.method.eagle import Eagle
from specdec.method.eagle3 import Eagle3
from specdec.model.target import CausalLM
from specdec.speculative_config import SpeculativeConfig
from specdec.training.features import OnlineFeatures
from support.cli import EVAL, OFFLINE, TRAIN, Cli, call, rows_of
from support.targets import changed, random_target

VOCAB = 320  # of the tiny models
HIDDEN = 64
REDUCED = np.r_[10:200:2, 200:320]
FROZEN = Init(train_lm_head=False)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip


DEEP: dict[str, Any] = {"num_hidden_layers": 2, "block_size": 5}


@dataclass(frozen=True)
class Variant:
    """A drafter, and the engines that can be given it."""

    kind: str = "eagle3"
    architecture: dict[str, Any] = field(default_factory=dict)
    init: Init = field(default_factory=Init)
    reduced: bool = False
    target: str = "tiny-llama"
    engines: tuple[str, ...] = ("vllm", "sglang", "speculators")


VARIANTS = {
    "eagle": Variant("eagle", init=FROZEN, engines=("vllm", "sglang")),
    "eagle-geometry": Variant(
        "eagle", {"geometry": {"intermediate_size": 96, "rope_parameters": LLAMA3}}, FROZEN, engines=("vllm", "sglang")
    ),
    "eagle-gemma3": Variant("eagle", init=FROZEN, target="tiny-gemma3", engines=("vllm",)),
    "eagle3": Variant(),
    "eagle3-reduced": Variant(reduced=True),
    "eagle3-target-head": Variant(init=FROZEN),
    "eagle3-frozen-head": Variant(init=FROZEN, reduced=True),
    "eagle3-qwen3-layer": Variant(architecture={"layer_type": "qwen3"}, reduced=True, engines=("vllm", "speculators")),
    "eagle3-norm-before-residual": Variant(architecture={"norm_before_residual": True}, engines=("vllm", "speculators")),
    "eagle3-norm-before-fc": Variant(architecture={"norm_before_fc": True}),
    "eagle3-fc-norm": Variant(architecture={"fc_norm": True}, reduced=True),
    "eagle3-norm-output": Variant(architecture={"norm_output": True}),
    "eagle3-layers": Variant(architecture={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, reduced=True),
    "eagle3-two-layers": Variant(architecture={"num_hidden_layers": 2}, reduced=True),
    "eagle3-geometry": Variant(
        architecture={
            "geometry": {
                "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24,
                "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_parameters": LLAMA3,
            }
        }
    ),
    "eagle3-gemma3": Variant(target="tiny-gemma3", reduced=True, engines=("vllm", "speculators")),
    "peagle": Variant("peagle", reduced=True, engines=("vllm", "speculators")),
    "peagle-qwen3-layer": Variant("peagle", {"layer_type": "qwen3", "fc_norm": True}, engines=("vllm", "speculators")),
    "dflash": Variant("dflash", DEEP, FROZEN, engines=("vllm", "speculators")),
    "dflash-mixed": Variant(
        "dflash", DEEP | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}, reduced=True,
        engines=("vllm", "speculators"),
    ),
    "dflash-window": Variant(
        "dflash", DEEP | {"sliding_window": 5, "sliding_window_non_causal": True}, FROZEN, engines=("vllm", "speculators")
    ),
    "dflash-causal": Variant("dflash", DEEP | {"causal": True}, engines=("vllm",)),
    "dflash-anchor": Variant("dflash", DEEP | {"sample_from_anchor": True}, FROZEN, engines=("deepspec", "speculators")),
    "dflash-gemma3": Variant("dflash", DEEP, reduced=True, target="tiny-gemma3", engines=("vllm",)),
    "dspark": Variant("dspark", DEEP | {"markov_rank": 8}, FROZEN, engines=("vllm", "deepspec", "speculators")),
    "dspark-gated": Variant(
        "dspark", DEEP | {"markov_rank": 8, "markov_head_type": "gated", "confidence_head_with_markov": False}, reduced=True,
        engines=("vllm", "speculators"),
    ),
    "dspark-window": Variant(
        "dspark", DEEP | {"markov_rank": 8, "sliding_window": 5, "sliding_window_non_causal": True}, FROZEN,
        engines=("vllm", "speculators"),
    ),
    "dspark-rnn": Variant(
        "dspark", DEEP | {"markov_rank": 8, "markov_head_type": "rnn", "enable_confidence_head": False}, FROZEN,
        engines=("vllm", "deepspec", "speculators"),
    ),
    "mlp": Variant("mlp", {"tie_weights": False}, engines=("vllm",)),
    "mlp-tied": Variant("mlp", {"tie_weights": True, "scale_input": True, "n_predict": 4}, engines=("vllm",)),
    "mlp-one-head": Variant("mlp", {"tie_weights": True, "n_predict": 1, "inner_dim": HIDDEN}, engines=("vllm",)),
}  # fmt: skip
COPYING = ("speculators", "deepspec")  # engines whose directories hold the target's embedding and output layer
PAIRS = [(name, engine) for name, variant in VARIANTS.items() for engine in variant.engines]
CLAIMS = [
    (name, kind, engine)
    for name, module in checkpoint.formats().items()
    for kind, engines in module.WRITES.items()
    for engine in engines
    if issubclass(method.find(kind), Drafter)  # a causal LM is copied as it is
]
EAGLE3_DEEP = {"num_hidden_layers": 24}  # a target whose default layers the engines would guess


@pytest.mark.parametrize("name", checkpoint.formats())
def test_a_format_declares_everything(name: str) -> None:
    module = checkpoint.formats()[name]
    protocol = checkpoint.Format
    expected = {key for key in (*vars(protocol), *protocol.__annotations__) if not key.startswith("_")}
    assert expected <= set(vars(module))
    for kind, engines in module.WRITES.items():
        assert method.is_trained(kind)
        assert set(engines.values()) <= set(lint.ENGINES)
        for engine in engines:
            claimants = [key for key, other in checkpoint.formats().items() if engine in other.WRITES.get(kind, {})]
            assert claimants == [name], f"which of them writes {kind} for {engine}?"


@cache
def loaded(name: str = "tiny-llama") -> CausalLM:
    return CausalLM(name, "float32", "cpu")


def trained(variant: str, **of_target: Any) -> Checkpoint:
    """A drafter whose weights were moved as if by training; of_target: facts to alter."""
    drafter = _trained(variant)
    return replace(drafter, tensors=dict(drafter.tensors or {}), config=dict(drafter.config), target=drafter.target | of_target)


@cache
def _trained(name: str) -> Checkpoint:
    variant = VARIANTS[name]
    generator = torch.Generator().manual_seed(5)
    target = loaded(variant.target)
    if variant.kind == "mlp":
        config = {
            "n_predict": 3, "inner_dim": 48, "tie_weights": False, "scale_input": False, "own_embedding": True,
            "own_lm_head": True, "draft_vocab_size": VOCAB,
        } | variant.architecture  # fmt: skip
        table = mlp_speculator.shapes(config, HIDDEN)
        drafter = Checkpoint("mlp", config, native.facts(target), {key: torch.zeros(shape) for key, shape in table.items()})
    else:
        kind: type[AutoregressiveDrafter] = Eagle3 if variant.kind == "peagle" else method.find(variant.kind)
        drafter = kind.init_checkpoint(target, variant.architecture, variant.init, REDUCED if variant.reduced else None)
        if variant.kind == "peagle":
            taps = len(drafter.config["eagle_aux_hidden_state_layer_ids"])
            assert drafter.tensors is not None
            drafter.tensors["mask_hidden"] = torch.zeros(1, 1, taps * HIDDEN)
            drafter = replace(drafter, method="peagle", config=drafter.config | {"mask_token_id": 259})
    assert drafter.tensors is not None
    for _, tensor in sorted(drafter.tensors.items()):
        if tensor.is_floating_point():
            tensor += 0.15 * torch.randn(tensor.shape, generator=generator)
    return drafter


def written(directory: Path, name: str, engine: str, **of_target: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    target = loaded(VARIANTS[name].target) if "gemma" in name or engine in COPYING else None
    checkpoint.write(trained(name, **of_target), directory, engine, target)
    return directory


def edited(directory: Path, tensors: Callable[[dict[str, Tensor]], Any] | None = None, **keys: Any) -> Path:
    """Change a written directory: tensors in place, or a new dict of them; keys of config.json, None meaning that it goes."""
    if tensors is not None:
        held = load_file(directory / "model.safetensors")
        replaced = tensors(held)
        held = replaced if isinstance(replaced, dict) else held
        save_file({key: tensor.contiguous().clone() for key, tensor in held.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | keys
    config = {key: value for key, value in config.items() if keys.get(key, 0) is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def same(read: Checkpoint, expected: Checkpoint) -> None:
    assert (read.method, read.config, read.target) == (expected.method, expected.config, expected.target)
    assert read.tensors is not None
    assert expected.tensors is not None
    assert read.tensors.keys() == expected.tensors.keys()
    for key, tensor in read.tensors.items():
        assert tensor.dtype == expected.tensors[key].dtype, key
        assert tensor.numpy().tobytes() == expected.tensors[key].numpy().tobytes(), key


# ------------------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_what_is_written_comes_back(name: str, engine: str, tmp_path: Path) -> None:
    came = checkpoint.load(written(tmp_path, name, engine))
    same(came, trained(name))
    copied = {"embed_tokens.weight"} if "gemma" in name or engine in COPYING else set()
    copied |= {"lm_head.weight"} if engine in COPYING and not trained(name).config["own_lm_head"] else set()
    assert set(came.copies or {}) == copied
    drafter = method.find(came.method)(loaded(VARIANTS[name].target), came, 1)
    assert drafter.config == came.config


PUBLIC = {
    "z-lab": (
        "dflash",
        {"tie_word_embeddings": True, "dtype": "float32", "num_target_layers": 4},
        {"sample_from_anchor": None, "causal": None},
        (),
    ),
    "DeepSpec's DFlash": ("dflash-anchor", {"sample_from_anchor": None, "num_anchors": 512}, {}, ()),
    "DeepSpec's DSpark": ("dspark", {"sample_from_anchor": None, "num_anchors": 512, "use_cache": True}, {}, ()),
    "SpecForge's DSpark": (
        "dspark",
        {"architectures": ["DSparkDraftModel"], "sample_from_anchor": None},
        {"projector_type": "dspark"},
        ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head",
         "confidence_head_with_markov"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", PUBLIC)
def test_published_layouts_draft_as_ours(layout: str, tmp_path: Path) -> None:
    """With the keys that their authors write, and none of ours: the logits of every block are those of the native drafter."""
    name, top, nested, moved = PUBLIC[layout]
    native_drafter = trained(name)
    written(tmp_path, name, "deepspec" if "deepspec" in VARIANTS[name].engines else "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    inside = (config.get("dflash_config") or {}) | nested | {key: config[key] for key in moved}
    inside = {key: value for key, value in inside.items() if value is not None}
    edited(tmp_path, specdec=None, dflash_config=inside or None, **dict.fromkeys(moved), **top)
    came = checkpoint.load(tmp_path)
    assert came.method == native_drafter.method
    assert checkpoint.method_of(tmp_path) == came.method
    batch = OnlineFeatures(loaded(), (2,))([Sample("", np.arange(100, 140), np.ones(40, dtype=bool))])
    logits = []
    for each in (came, native_drafter):
        drafter: Any = method.find(each.method)(loaded(), each, 1)
        assert drafter.hidden_layers == (2,)
        plan = drafter.plan(batch, drafter.num_steps(0.0), 0)
        with torch.no_grad():
            logits.append([drafter.draft_logits(state) for state in drafter.unrolled(batch, plan)])
    for a, b in zip(*logits, strict=True):
        assert torch.equal(a, b)


def test_layouts_of_blocks_that_are_refused(tmp_path: Path, one_line: Any) -> None:
    def bad(name: str, engine: str, keys: dict[str, Any], *words: str) -> None:
        edited(written(tmp_path, name, engine), **keys)
        one_line(lambda: method.find(VARIANTS[name].kind)(loaded(), checkpoint.load(tmp_path), 1), *words)

    inside = json.loads((written(tmp_path, "dflash", "vllm") / "config.json").read_text())["dflash_config"]
    bad("dflash", "vllm", {"dflash_config": inside | {"mask_token_id": 9999}}, "mask_token_id=9999", "0..319")
    bad("dflash", "vllm", {"dflash_config": inside | {"target_layer_ids": [3, 1]}}, "target_layer_ids", "ascending")
    bad("dflash", "vllm", {"dflash_config": inside | {"target_layer_ids": [8]}}, "9", "0..4")
    bad("dflash", "vllm", {"dflash_config": inside | {"attention_sink_bias": True}}, "attention_sink_bias")
    bad("dflash", "vllm", {"mask_token_id": 5}, "mask_token_id", "which is it?")
    bad("dflash", "vllm", {"block_size": None}, "block_size")
    bad("dflash", "vllm", {"num_key_value_heads": 1}, "k_proj", "[32, 64]", "[16, 64]")
    bad("dflash", "vllm", {"conv_kernel_size": 2}, "conv_kernel_size")
    bad("dflash", "vllm", {"use_sliding_window": True, "sliding_window": 5, "layer_types": None}, "layer_types")
    bad("dspark", "vllm", {"markov_head_type": "wide"}, "markov_head_type", "vanilla")
    bad("dspark", "vllm", {"markov_rank": 4}, "confidence_head.proj.weight", "[1, 72]", "[1, 68]")
    bad("dspark", "speculators", {"sample_from_anchor": None}, "sample_from_anchor is missing")
    bad("dspark", "speculators", {"speculators_model_type": "dflash"}, "'dflash'", "dspark")
    for name, engine, words in (
        ("dflash-anchor", "vllm", ("sample_from_anchor", "deepspec")),
        ("dflash", "deepspec", ("from the anchor", "format=vllm")),
        ("dflash-causal", "speculators", ("causal",)),
        ("dflash-gemma3", "speculators", ("scale",)),
    ):
        one_line(lambda n=name, e=engine: written(tmp_path / "x", n, e), *words)


@pytest.mark.parametrize(("name", "kind", "engine"), CLAIMS)
def test_a_format_holds_what_it_claims_to(name: str, kind: str, engine: str, tmp_path: Path) -> None:
    """With an untrained drafter of the method, so that a new format is tested without a line here. An engine may want copies
    of the target's tensors beside those of the drafter."""
    drafter = method.find(kind)
    architecture = {"sample_from_anchor": True} if engine == "deepspec" else {}
    saved = drafter.init_checkpoint(loaded(), architecture, drafter.init_type(train_lm_head=False))
    checkpoint.write(saved, tmp_path, engine, loaded())
    again = checkpoint.load(tmp_path)
    assert checkpoint.format_of(tmp_path, hf_common.read_config(tmp_path)) is checkpoint.formats()[name]
    assert again.method == checkpoint.method_of(tmp_path) == kind
    assert again.tensors is not None
    for key, tensor in saved.tensors.items():
        assert torch.equal(again.tensors[key], tensor), key
    drafter(loaded(), again, 1)


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_float_type_comes_back(engine: str, dtype: torch.dtype, tmp_path: Path) -> None:
    half = trained("eagle3-reduced")
    assert half.tensors is not None
    half.tensors = {key: t.to(dtype) if t.is_floating_point() else t for key, t in half.tensors.items()}
    checkpoint.write(half, tmp_path, engine, loaded())
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
    came = checkpoint.load(tmp_path)
    assert came.tensors is not None
    assert all(torch.equal(tensor, half.tensors[key]) for key, tensor in came.tensors.items())
    assert {tensor.dtype for tensor in came.tensors.values()} == {dtype, torch.int64}


@pytest.mark.parametrize("name", ["eagle", "eagle-geometry", "eagle3", "eagle3-geometry", "eagle3-qwen3-layer"])
def test_transformers_reads_the_layer_as_we_mean_it(name: str, tmp_path: Path) -> None:
    """Engines build the layer from what transformers makes of config.json."""
    shape = hub.load_config(written(tmp_path, name, "vllm"))
    for key, value in trained(name).config["geometry"].items():
        assert getattr(shape, key) == value, key


def test_vllm_and_sglang_get_the_same_eagle3_directory(tmp_path: Path) -> None:
    a = written(tmp_path / "a", "eagle3-reduced", "vllm")
    b = written(tmp_path / "b", "eagle3-reduced", "sglang")
    assert {path.name: path.read_bytes() for path in a.iterdir()} == {path.name: path.read_bytes() for path in b.iterdir()}


def test_default_layers_are_not_written_and_come_back(tmp_path: Path) -> None:
    """Both engines guess the same layers, and read a list that says them differently."""
    drafter = trained("eagle3-layers", **EAGLE3_DEEP)
    drafter.config["eagle_aux_hidden_state_layer_ids"] = [2, 12, 21]
    checkpoint.write(drafter, tmp_path, "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    assert "eagle_config" not in config
    assert "eagle_aux_hidden_state_layer_ids" not in config
    same(checkpoint.load(tmp_path), drafter)
    edited(tmp_path, specdec=None)
    assert checkpoint.load(tmp_path).config["eagle_aux_hidden_state_layer_ids"] is None, "the depth is not known"


def test_a_native_checkpoint_is_read_first(tmp_path: Path) -> None:
    drafter = trained("eagle3")
    native.save(tmp_path, drafter, {}, "")
    same(checkpoint.load(tmp_path), drafter)


def test_the_head_of_the_target_is_no_draft_vocabulary(tmp_path: Path) -> None:
    """SGLang takes the target's head where draft_vocab_size is null and the drafter's where it is a number."""
    config = json.loads((written(tmp_path / "a", "eagle3-target-head", "sglang") / "config.json").read_text())
    assert config["draft_vocab_size"] is None
    directory = written(tmp_path / "b", "eagle3", "sglang")
    assert json.loads((directory / "config.json").read_text())["draft_vocab_size"] == VOCAB
    assert "lm_head.weight" in load_file(directory / "model.safetensors"), "a trained head is kept (vllm-ascend#11374)"


def test_eagle1_has_no_random_bias_in_sglang(tmp_path: Path) -> None:
    held = load_file(written(tmp_path, "eagle", "sglang") / "model.safetensors")
    assert not held["fc.bias"].any()
    assert "lm_head.weight" not in held
    assert "layers.0.input_layernorm.weight" not in held


def test_a_second_layer_has_its_first_norm_under_both_names(tmp_path: Path) -> None:
    held = load_file(written(tmp_path / "raw", "eagle3-two-layers", "sglang") / "model.safetensors")
    assert torch.equal(held["layers.1.hidden_norm.weight"], held["layers.1.input_layernorm.weight"])
    held = load_file(written(tmp_path / "packaged", "eagle3-two-layers", "speculators") / "model.safetensors")
    assert "layers.1.hidden_norm.weight" not in held


def test_older_names_are_read(tmp_path: Path) -> None:
    written(tmp_path, "eagle3-fc-norm", "vllm")
    low = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high", "layers.0": "midlayer"}

    def renamed(held: dict[str, Tensor]) -> dict[str, Tensor]:
        for new, old in low.items():
            held = {key.replace(new, old): tensor for key, tensor in held.items()}
        return held

    edited(tmp_path, renamed, fc_norm=None, use_aux_norm=True)
    same(checkpoint.load(tmp_path), trained("eagle3-fc-norm"))


def test_the_official_eagle3_config_is_read(tmp_path: Path) -> None:
    """architectures of a plain Llama, and rope in the words of transformers 4."""
    written(tmp_path, "eagle3-reduced", "vllm")
    edited(tmp_path, architectures=["LlamaForCausalLM"], rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e5)
    rope = checkpoint.load(tmp_path).config["geometry"]["rope_parameters"]
    assert rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


def test_a_config_inside_another_is_read(tmp_path: Path) -> None:
    written(tmp_path, "eagle", "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    specdec_keys = config.pop("specdec")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eagle", "model": config, "specdec": specdec_keys}))
    same(checkpoint.load(tmp_path), trained("eagle"))


def test_shards_are_read_and_all_needed(tmp_path: Path, one_line: Any) -> None:
    held = load_file(written(tmp_path, "eagle3-reduced", "vllm") / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    placed = {key: parts[i % 2] for i, key in enumerate(held)}
    for part in parts:
        save_file({key: held[key] for key, of in placed.items() if of == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    same(checkpoint.load(tmp_path), trained("eagle3-reduced"))
    (tmp_path / parts[1]).unlink()
    one_line(lambda: checkpoint.load(tmp_path), parts[1], "fetch all shards")
    save_file({"fc.weight": held["fc.weight"]}, tmp_path / parts[1])
    one_line(lambda: checkpoint.load(tmp_path), "its file lacks it")


def test_tied_copies_of_an_mlp_are_read_if_equal(tmp_path: Path, one_line: Any) -> None:
    written(tmp_path, "mlp-tied", "vllm")

    def copied(held: dict[str, Tensor]) -> None:
        tied = (("emb", "weight", 0), ("head", "weight", 0), ("ln", "weight", 0), ("ln", "bias", 0), ("proj", "weight", 1))
        for kind, part, first in tied:
            for i in range(first + 1, 4):
                held[f"speculator.{kind}.{i}.{part}"] = held[f"speculator.{kind}.{first}.{part}"]

    edited(tmp_path, copied)
    same(checkpoint.load(tmp_path), trained("mlp-tied"))
    edited(tmp_path, lambda held: held["speculator.head.2.weight"].add_(1))
    one_line(lambda: checkpoint.load(tmp_path), "head.2.weight", "tie_weights")


def test_an_mlp_that_shares_with_its_target_is_written_completely(tmp_path: Path, one_line: Any) -> None:
    config = {
        "n_predict": 2, "inner_dim": HIDDEN, "tie_weights": False, "scale_input": True, "own_embedding": False,
        "own_lm_head": False, "draft_vocab_size": VOCAB,
    }  # fmt: skip
    table = mlp_speculator.shapes(config, HIDDEN)
    drafter = Checkpoint("mlp", config, native.facts(loaded()), {key: torch.ones(shape) for key, shape in table.items()})
    one_line(lambda: checkpoint.write(drafter, tmp_path, "vllm"), "target=")
    checkpoint.write(drafter, tmp_path, "vllm", loaded())
    came = checkpoint.load(tmp_path)
    assert came.tensors is not None
    assert came.config == config | {"own_embedding": True, "own_lm_head": True}
    for i in range(2):
        assert torch.equal(came.tensors[f"emb.{i}.weight"], loaded().model.get_input_embeddings().weight)
        assert torch.equal(came.tensors[f"head.{i}.weight"], loaded().head_rows()[0])
    drafter.config["draft_vocab_size"] = 215
    one_line(lambda: checkpoint.write(drafter, tmp_path, "vllm", loaded()), "215", "no d2t")


@pytest.mark.parametrize(
    ("name", "engine", "words"),
    [
        ("eagle", "speculators", ("no eagle drafters", "native, vllm, sglang")),
        ("peagle", "sglang", ("no peagle drafters", "vllm")),
        ("mlp", "sglang", ("no mlp drafters",)),
    ],
)
def test_an_engine_without_such_drafters_is_refused(
    name: str, engine: str, words: tuple[str, ...], tmp_path: Path, one_line: Any
) -> None:
    one_line(lambda: checkpoint.write(trained(name), tmp_path, engine), *words)


def test_what_a_format_has_no_place_for_is_refused(tmp_path: Path, one_line: Any) -> None:
    head = Eagle.init_checkpoint(loaded(), {}, Init())
    one_line(lambda: checkpoint.write(head, tmp_path, "vllm"), "output layer of its own", "train_lm_head=false")
    both = trained("eagle3-fc-norm")
    both.config["norm_before_fc"] = True
    one_line(lambda: checkpoint.write(both, tmp_path, "speculators", loaded()), "norm_before_fc and fc_norm")
    one_line(lambda: checkpoint.write(trained("eagle3-gemma3"), tmp_path, "vllm"), "target=")
    unknown = replace(trained("eagle3"), target={})
    one_line(lambda: checkpoint.write(unknown, tmp_path, "vllm"), "does not tell hidden_size")


def test_directories_of_this_machine_stay_here(tmp_path: Path) -> None:
    for engine in ("vllm", "speculators"):
        directory = tmp_path / engine
        directory.mkdir()
        checkpoint.write(trained("eagle3", name="/home/somebody/models/Llama-3"), directory, engine, loaded())
        assert "somebody" not in (directory / "config.json").read_text()
        assert checkpoint.load(directory).target["name"] == "Llama-3"


# ------------------------------------------------------------------------------------------------------ what does not fit


def keys_of(name: str) -> list[str]:
    return sorted(trained(name).tensors or {})


@pytest.mark.parametrize("key", keys_of("eagle3-two-layers"))
@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_a_renamed_key_fails_by_name(engine: str, key: str, tmp_path: Path, one_line: Any) -> None:
    """speculators#1114: a converter that only warns saves random weights."""
    written(tmp_path, "eagle3-two-layers", engine)
    edited(tmp_path, lambda held: {f"x{name}" if name == key else name: tensor for name, tensor in held.items()})
    if engine == "vllm" and key == "layers.1.input_layernorm.weight":
        edited(tmp_path, lambda held: {name: t for name, t in held.items() if name != "layers.1.hidden_norm.weight"})
    one_line(lambda: checkpoint.load(tmp_path), f"x{key}")
    edited(tmp_path, lambda held: {name: tensor for name, tensor in held.items() if name != f"x{key}"})
    one_line(lambda: checkpoint.load(tmp_path), key)


@pytest.mark.parametrize("name", ["eagle", "peagle", "mlp-tied"])
def test_a_missing_key_fails_by_name(name: str, tmp_path: Path, one_line: Any) -> None:
    for key in keys_of(name):
        written(tmp_path, name, "vllm")
        prefix = mlp_speculator.PREFIX if name.startswith("mlp") else ""
        edited(tmp_path, lambda held, key=prefix + key: {other: t for other, t in held.items() if other != key})
        one_line(lambda: checkpoint.load(tmp_path), key)


def test_a_wrong_shape_or_type_fails_by_name(tmp_path: Path, one_line: Any) -> None:
    def bad(change: Callable[[dict[str, Tensor]], Any], *words: str) -> None:
        written(tmp_path, "eagle3-reduced", "vllm")
        edited(tmp_path, change)
        one_line(lambda: checkpoint.load(tmp_path), *words)

    bad(lambda held: held.update({"norm.weight": torch.ones(63)}), "norm.weight", "[63]", "[64]")
    bad(lambda held: held.update({"norm.weight": torch.ones(64, dtype=torch.int64)}), "norm.weight", "int64")
    bad(lambda held: held.update({"d2t": held["d2t"].float()}), "d2t", "integers")
    bad(lambda held: held.update({"d2t": torch.from_numpy(REDUCED)}), "d2t", "list of ids")
    bad(lambda held: held.update({"d2t": held["d2t"] * 0 - 1}), "d2t", "0..319")
    bad(lambda held: held.update({"t2d": ~held["t2d"]}), "t2d and d2t")
    bad(lambda held: held.update({"embed_tokens.weight": torch.ones(100, 64)}), "embed_tokens.weight", "[100, 64]")
    bad(lambda held: held.update({"fc.bias": torch.ones(64)}), "fc.bias")


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("eagle3", {"attention_bias": True}, ("attention_bias=True",)),
        ("eagle3", {"mlp_bias": True}, ("mlp_bias=True",)),
        ("eagle3", {"hidden_act": "gelu"}, ("hidden_act='gelu'",)),
        ("eagle3", {"bias": True}, ("bias=True",)),
        ("eagle3", {"partial_rotary_factor": 0.25}, ("partial_rotary_factor=0.25",)),
        ("eagle3", {"rope_parameters": {"rope_theta": 1.0, "mrope_section": [1]}}, ("mrope_section",)),
        ("eagle3", {"tie_word_embeddings": True}, ("tie_word_embeddings=True",)),
        ("eagle3", {"target_hidden_size": 128}, ("target_hidden_size=128",)),
        ("eagle3", {"logit_scale": 0.5}, ("logit_scale=0.5",)),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, ("use_aux_hidden_state=False",)),
        ("eagle3", {"eagle_config": {"something": 3}}, ("eagle_config.something=3",)),
        ("eagle3", {"quantization_config": {"bits": 4}}, ("quantization_config",)),
        ("eagle3", {"layer_types": ["sliding_attention"], "sliding_window": 2048}, ("sliding_window=2048",)),
        ("eagle3", {"norm_befor_fc": True}, ("norm_befor_fc", "norm_before_fc")),
        ("eagle3", {"auto_map": {"AutoModel": "x.Y"}}, ("asks for code", "auto_map")),
        ("eagle3", {"trust_remote_code": True}, ("asks for code",)),
        ("eagle3", {"num_hidden_layers": "one"}, ("num_hidden_layers",)),
        ("eagle3", {"vocab_size": 400}, ("vocab_size", "400")),
        ("eagle3", {"num_aux_hidden_states": 3}, ("num_aux_hidden_states=3",)),
        ("eagle3-layers", {"eagle_aux_hidden_state_layer_ids": [3, 1, 0]}, ("[3, 1, 0]", "ascending")),
        ("eagle3-layers", {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}, ("[1, 1, 3]", "distinct")),
        ("eagle3-layers", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, ("[1, 2, 3]", "SGLang")),
        ("eagle", {"add_para_norm": True}, ("add_para_norm=True",)),
        ("eagle", {"num_hidden_layers": 2}, ("num_hidden_layers=2",)),
        ("eagle", {"truncated_vocab_size": 100}, ("truncated_vocab_size=100",)),
        ("peagle", {"ptd_token_id": None}, ("mask token", "None")),
        ("peagle", {"ptd_token_id": 320}, ("mask token", "320")),
        ("mlp", {"n_predict": 2}, ("unknown tensor",)),
        ("mlp", {"inner_dim": 32}, ("[", "config asks for")),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_represented_is_named(
    name: str, keys: dict[str, Any], words: tuple[str, ...], tmp_path: Path, one_line: Any
) -> None:
    edited(written(tmp_path, name, "vllm"), **keys)
    one_line(lambda: checkpoint.load(tmp_path), *words)


@pytest.mark.parametrize(
    ("name", "engine", "keys", "words"),
    [
        ("eagle3", "vllm", {"eagle_config": [1]}, ("eagle_config", "a mapping")),
        ("eagle3", "vllm", {"architectures": "LlamaForCausalLMEagle3"}, ("architectures", "a list of words")),
        ("eagle3", "vllm", {"rms_norm_eps": float("inf")}, ("rms_norm_eps", "a number")),
        ("eagle3", "vllm", {"norm_output": "false"}, ("norm_output", "true or false")),
        ("eagle3", "vllm", {"num_hidden_layers": 10**9}, ("num_hidden_layers", "1..1000")),
        ("eagle3", "vllm", {"vocab_size": -1}, ("vocab_size", "-1")),
        ("eagle3-layers", "vllm", {"eagle_aux_hidden_state_layer_ids": [[1]]}, ("layer_ids", "a list of integers")),
        ("eagle3", "speculators", {"speculators_config": {"verifier": "a/b"}}, ("verifier", "a mapping")),
        ("eagle3", "speculators", {"specdec": {"copies": 1}}, ("copies", "a list of words")),
        ("mlp-tied", "vllm", {"n_predict": 10**9}, ("n_predict", "1..1000")),
    ],
)  # fmt: skip
def test_a_key_of_another_kind_is_named(
    name: str, engine: str, keys: dict[str, Any], words: tuple[str, ...], tmp_path: Path, one_line: Any
) -> None:
    edited(written(tmp_path, name, engine), **keys)
    one_line(lambda: checkpoint.load(tmp_path), *words)
    assert not verdict(tmp_path)


def test_options_of_the_speculators_format(tmp_path: Path, one_line: Any) -> None:
    def bad(keys: dict[str, Any], *words: str) -> None:
        edited(written(tmp_path, "eagle3-reduced", "speculators"), **keys)
        one_line(lambda: checkpoint.load(tmp_path), *words)

    layer = json.loads((written(tmp_path, "eagle3", "speculators") / "config.json").read_text())["transformer_layer_config"]
    bad({"norm_before_residual": None}, "norm_before_residual is missing")
    bad({"transformer_layer_config": layer | {"model_type": "gemma3"}}, "'gemma3'")
    bad({"transformer_layer_config": layer | {"attention_bias": True}}, "attention_bias=True")
    bad({"speculators_model_type": "peagle"}, "'peagle'")
    bad({"speculators_model_type": "xpress"}, "xpress", "cannot be imported")


def test_only_layers_inside_eagle_config_are_read_as_outputs(tmp_path: Path) -> None:
    """SGLang and Model-Optimizer count by output; vLLM's V1 runner would be off by one."""
    edited(written(tmp_path, "eagle3-layers", "vllm"), eagle_aux_hidden_state_layer_ids=None)
    same(checkpoint.load(tmp_path), trained("eagle3-layers"))


def test_an_embedding_must_be_the_targets(tmp_path: Path, one_line: Any) -> None:
    written(tmp_path, "eagle3", "vllm")
    rows = loaded().model.get_input_embeddings().weight.detach()
    edited(tmp_path, lambda held: held.update({"embed_tokens.weight": rows.bfloat16()}))
    Eagle3(loaded(), checkpoint.load(tmp_path), 1)
    edited(tmp_path, lambda held: held.update({"embed_tokens.weight": torch.randn_like(rows)}))
    one_line(lambda: Eagle3(loaded(), checkpoint.load(tmp_path), 1), "embed_tokens.weight", "tiny-llama")


def test_unknown_facts_are_not_compared(tmp_path: Path, one_line: Any) -> None:
    came = checkpoint.load(edited(written(tmp_path, "eagle3", "vllm"), specdec=None))
    assert came.target == {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    came.check("eagle3", loaded("tiny-qwen3"))
    came.target["vocab_size"] = 100
    one_line(lambda: came.check("eagle3", loaded()), "vocab_size 100")


def test_bad_directories(tmp_path: Path, one_line: Any) -> None:
    def refused(*words: str) -> None:
        one_line(lambda: checkpoint.load(tmp_path), *words)

    one_line(lambda: hf_common.read_config(tmp_path), "no config.json")
    refused("config.json")
    (tmp_path / "config.json").write_text("[1]")
    refused("no mapping")
    (tmp_path / "config.json").write_text("{")
    refused("cannot be read")
    written(tmp_path, "eagle3", "vllm")
    data = (tmp_path / "model.safetensors").read_bytes()
    for cut in (0, 5, 500, len(data) - 10):
        (tmp_path / "model.safetensors").write_bytes(data[:cut])
        refused("model.safetensors cannot be read", "fetch it again")
    (tmp_path / "model.safetensors").unlink()
    refused("no weights")
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"):
        (tmp_path / name).write_bytes(pickle.dumps({"fc.weight": 1}))
        refused(name, "refused: pickled weights can run code; convert to safetensors")
        (tmp_path / name).unlink()
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    refused("2 safetensors files")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "hydra", "hydra_num_heads": 3}, ("hydra", "cannot be imported")),
        ({"architectures": ["DFlash2DraftModel"], "model_type": "qwen3"}, ("DFlash2DraftModel", "cannot be imported")),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}, ("deepseek", "cannot be imported")),
        ({"architectures": ["BertModel"], "model_type": "bert"}, ("known format", "'bert'")),
    ],
)  # fmt: skip
def test_formats_that_we_know_of(config: dict[str, Any], words: tuple[str, ...], tmp_path: Path, one_line: Any) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    one_line(lambda: checkpoint.load(tmp_path), *words)


# ------------------------------------------------------------------------------------------------------------------- lint

LOADS = {"eagle": {"vllm"}, "eagle3": {"vllm", "sglang"}, "peagle": {"vllm"}, "mlp": {"vllm_0_32"}} | {
    "dflash": {"vllm"}, "dspark": {"vllm"},
}  # fmt: skip
ONE_ENGINE = {"eagle3-qwen3-layer", "eagle3-norm-before-residual"}  # not in SGLang


def severities_of(directory: Path, target: str | None = None) -> dict[tuple[str, str], list[str]]:
    """(engine, rule) -> severities."""
    severities: dict[tuple[str, str], list[str]] = {}
    for one in lint.check(directory, target):
        assert "\n" not in one.text
        severities.setdefault((one.engine, one.rule), []).append(one.severity)
    return severities


def verdict(directory: Path, target: str | None = None) -> set[str]:
    return {engine for engine, loads in lint.loads(lint.check(directory, target)).items() if loads}


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_what_is_written_loads_where_it_should(name: str, engine: str, tmp_path: Path) -> None:
    written(tmp_path, name, engine)
    kind = VARIANTS[name].kind
    target = VARIANTS[name].target
    if engine == "speculators":
        expected = {"vllm", "speculators"}
    elif engine == "sglang" and kind == "eagle":
        expected = {"sglang"}
    elif engine == "deepspec":
        expected = {"vllm", "deepspec"}
    else:
        expected = LOADS[kind]
    if name == "dflash-anchor":
        expected = expected - {"vllm"}  # which fills in
    looked_at = {"vllm", "sglang", "speculators"} | ({"vllm_0_32"} if kind == "mlp" else set())
    looked_at |= {"deepspec"} if kind in ("dflash", "dspark") and engine != "speculators" else set()
    assert {one.engine for one in lint.check(tmp_path, target)} == looked_at, (
        "of others nothing is known, and nothing is claimed"
    )
    if name in ONE_ENGINE or "gemma" in name:
        expected = expected - {"sglang"}
    assert verdict(tmp_path, target) == expected, lint.check(tmp_path, target)
    for one in lint.check(tmp_path, target):
        if one.engine in expected:
            calm = {"norm_output", "verifier", "parallel_drafting", "positions", "embedding"}
            assert one.severity == "ok" or (one.severity == "warning" and one.rule in calm), one


def test_a_native_directory_is_for_export(tmp_path: Path) -> None:
    native.save(tmp_path, trained("eagle3"), {}, "")
    assert not verdict(tmp_path)
    assert severities_of(tmp_path)["vllm", "format"] == ["error"]


def test_what_cannot_be_read_loads_nowhere(tmp_path: Path) -> None:
    written(tmp_path, "eagle3", "vllm")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert not verdict(tmp_path)
    assert "cannot be read" in lint.check(tmp_path)[0].text


def put(**tensors: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    """Add tensors, whose names are written with __ for dots."""
    return lambda held: held.update({key.replace("__", "."): tensor for key, tensor in tensors.items()})


def without(*names: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda held: {key: tensor for key, tensor in held.items() if key not in names}


IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = {"model_type": "llama", "hidden_size": 64}
# written variant (@ for another engine than vLLM), change of its tensors and of its config, rule, engines with ! for an error
# and ? for a warning, and the target that it is compared with
Case = tuple[Any, ...]
BOTH = "vllm! sglang!"
RULES: dict[str, Case] = {
    # EAGLE-1
    "lm_head in EAGLE-1": ("eagle", put(lm_head__weight=torch.ones(VOCAB, HIDDEN)), {}, "lm_head", "vllm! sglang?"),
    "first norm in EAGLE-1": (
        "eagle", put(layers__0__input_layernorm__weight=torch.ones(HIDDEN)), {},
        "input_layernorm", "vllm! sglang?",
    ),
    "bias that vLLM drops": ("eagle", put(fc__bias=torch.ones(HIDDEN)), {}, "fc.bias", "vllm!"),
    "bias that SGLang draws": ("eagle @ sglang", without("fc.bias"), {}, "fc.bias", "sglang!"),
    "architecture of EAGLE-1": ("eagle", None, {}, "architecture", "sglang!"),
    "architecture of EAGLE-1, other": ("eagle @ sglang", None, {}, "architecture", "vllm!"),
    "prefix in EAGLE-1": ("eagle", lambda held: {f"model.{k}": t for k, t in held.items()}, {}, "prefix", BOTH),
    "width of EAGLE-1": ("eagle", None, {}, "hidden_size", BOTH, "other width"),
    # layer ids
    "ids for SGLang alone": ("eagle3-layers", None, {IDS: None}, "layer_ids", "vllm!"),
    "ids for vLLM alone": ("eagle3-layers", None, {"eagle_config": None}, "layer_ids", "sglang!"),
    "ids counted alike": ("eagle3-layers", None, {"eagle_config": {IDS: [0, 1, 3]}}, "layer_ids", "sglang!"),
    "ids not ascending": ("eagle3-layers", None, {IDS: [3, 1, 0], "eagle_config": {IDS: [2, 0, -1]}}, "layer_ids", BOTH),
    "ids not distinct": ("eagle3-layers", None, {IDS: [1, 1, 3], "eagle_config": {IDS: [0, 0, 2]}}, "layer_ids", BOTH),
    "ids outside": (
        "eagle3-layers", None, {IDS: [0, 1, 5], "eagle_config": {IDS: [-1, 0, 4]}},
        "layer_ids", BOTH, "tiny-llama",
    ),
    "ids of the last layer": (
        "eagle3-layers", None, {IDS: [0, 1, 4], "eagle_config": {IDS: [-1, 0, 3]}},
        "layer_ids", "sglang!", "tiny-llama",
    ),
    "ids left to a default that is none": (
        "eagle3-layers", None, {IDS: None, "eagle_config": None},
        "layer_ids", BOTH, "tiny-llama",
    ),
    "ids and columns": (
        "eagle3-layers", None, {IDS: [0, 1], "eagle_config": {IDS: [-1, 0]}, "num_aux_hidden_states": 2},
        "layer_ids", BOTH,
    ),
    "count of ids": ("eagle3", None, {"num_aux_hidden_states": 3}, "num_aux_hidden_states", BOTH),
    # vocabulary
    "d2t that is not needed": ("eagle3", put(d2t=torch.zeros(VOCAB, dtype=torch.int64)), {}, "d2t", "vllm! sglang?"),
    "d2t that is needed": ("eagle3-reduced", without("d2t", "t2d"), {}, "d2t", BOTH),
    "d2t of ids": ("eagle3-reduced", put(d2t=torch.from_numpy(REDUCED)), {}, "d2t", BOTH),
    "d2t twice the same": ("eagle3-reduced", put(d2t=-torch.arange(len(REDUCED))), {}, "d2t", BOTH),
    "d2t of floats": ("eagle3-reduced", lambda held: held.update(d2t=held["d2t"].float()), {}, "d2t", BOTH),
    "t2d of another": ("eagle3-reduced", lambda held: held.update(t2d=~held["t2d"]), {}, "t2d", "vllm? sglang?"),
    "t2d for the package": ("eagle3-reduced @ speculators", without("t2d"), {}, "t2d", "speculators!"),
    "head that is needed": ("eagle3-reduced", without("lm_head.weight"), {}, "lm_head", BOTH),
    "rows of the head": ("eagle3-reduced", put(lm_head__weight=torch.ones(VOCAB, HIDDEN)), {}, "shape", BOTH),
    "head that SGLang replaces": ("eagle3", None, {"draft_vocab_size": 0}, "lm_head", "sglang!"),
    "head that SGLang draws": ("eagle3", without("lm_head.weight"), {}, "lm_head", "sglang!"),
    "no word about the vocabulary": ("eagle3", None, {"draft_vocab_size": None}, "vocabulary", "sglang!"),
    "vocabulary of another target": ("eagle3", None, {}, "vocabulary", BOTH, "other vocabulary"),
    "embedding as the head": ("eagle3", None, {"tie_word_embeddings": True}, "lm_head", "sglang!"),
    # meaning of flags
    "residual not said": ("eagle3", None, {"norm_before_residual": None}, "norm_before_residual", "vllm? sglang?"),
    "residual not said, packaged": (
        "eagle3 @ speculators", None, {"norm_before_residual": None},
        "norm_before_residual", "vllm? speculators?",
    ),
    "residual in SGLang": ("eagle3-norm-before-residual", None, {}, "norm_before_residual", "sglang!"),
    "norm_output": ("eagle3-norm-output", None, {}, "norm_output", "vllm? sglang?"),
    "both norms": ("eagle3-fc-norm @ speculators", None, {"norm_before_fc": True}, "norms", "speculators! vllm?"),
    "qwen3 in SGLang": ("eagle3-qwen3-layer", None, {}, "qwen3", "sglang!"),
    "qwen3 under another name": ("eagle3-qwen3-layer", None, {"architectures": ["LlamaForCausalLMEagle3"]}, "qwen3", "vllm!"),
    "architecture of EAGLE-3": ("eagle3", None, {"architectures": ["Eagle3LlamaForCausalLM"]}, "architecture", "sglang!"),
    # layers, names, shapes, values
    "second layer for SGLang": ("eagle3-two-layers", without("layers.1.hidden_norm.weight"), {}, "layers", "sglang!"),
    "second layer for vLLM": ("eagle3-two-layers", without("layers.1.input_layernorm.weight"), {}, "layers", "vllm!"),
    "second layer of two minds": (
        "eagle3-two-layers", put(layers__1__hidden_norm__weight=torch.ones(HIDDEN)), {},
        "layers", BOTH,
    ),
    "prefix in EAGLE-3": ("eagle3", lambda held: {f"model.{k}": t for k, t in held.items()}, {}, "prefix", "vllm!"),
    "unknown name": ("eagle3", put(norm2__weight=torch.ones(HIDDEN)), {}, "names", "vllm! sglang?"),
    "bias in EAGLE-3": ("eagle3", put(fc__bias=torch.ones(HIDDEN)), {}, "names", BOTH),
    "missing name": ("eagle3", without("norm.weight"), {}, "names", BOTH),
    "wrong shape": ("eagle3", put(norm__weight=torch.ones(63)), {}, "shape", BOTH),
    "nan": ("eagle3", put(norm__weight=torch.full((HIDDEN,), torch.nan)), {}, "finite", BOTH),
    "zeros": ("eagle3", put(fc__weight=torch.zeros(HIDDEN, 2 * HIDDEN)), {}, "finite", BOTH),
    "types": ("eagle3", put(norm__weight=torch.ones(HIDDEN).half()), {}, "dtype", "vllm? sglang?"),
    "type that is not the one": ("eagle3", None, {"torch_dtype": "bfloat16"}, "dtype", "vllm?"),
    "width of the target": ("eagle3", None, {}, "hidden_size", BOTH, "other width"),
    # embedding, positions
    "embedding that cannot be compared": (
        "eagle3", put(embed_tokens__weight=torch.randn(VOCAB, HIDDEN)), {},
        "embedding", "vllm? sglang?",
    ),
    "embedding of its own": (
        "eagle3", put(embed_tokens__weight=torch.randn(VOCAB, HIDDEN)), {},
        "embedding", "vllm? sglang!", "tiny-llama",
    ),
    "embedding never loaded": ("eagle3", put(embed_tokens__weight=torch.ones(VOCAB, HIDDEN)), {}, "embedding", BOTH),
    "embedding for the package": ("eagle3 @ speculators", without("embed_tokens.weight"), {}, "embedding", "speculators!"),
    "head for the package": ("eagle3-target-head @ speculators", without("lm_head.weight"), {}, "lm_head", "speculators!"),
    "positions not said": ("eagle3", None, {"max_position_embeddings": None}, "positions", "vllm? sglang?"),
    "few positions": ("eagle3", None, {"max_position_embeddings": 2048}, "positions", "vllm? sglang?", "tiny-llama"),
    "rope not said": ("eagle3", None, {"rope_theta": None}, "rope", "vllm? sglang?"),
    # P-EAGLE
    "mask token": ("peagle", None, {"ptd_token_id": None}, "mask_token_id", "vllm!"),
    "mask token, packaged": ("peagle @ speculators", None, {"mask_token_id": None}, "mask_token_id", "vllm! speculators!"),
    "mask_hidden": ("peagle", without("mask_hidden"), {}, "mask_hidden", "vllm!"),
    "P-EAGLE in SGLang": ("peagle", None, {}, "peagle", "sglang!"),
    "P-EAGLE's serve command": ("peagle", None, {}, "parallel_drafting", "vllm?"),
    # speculators
    "keys of the package": (
        "eagle3 @ speculators", None, {"speculators_config": {"verifier": {"name_or_path": "a/b"}}},
        "keys", "vllm! speculators!",
    ),
    "no verifier": ("eagle3 @ speculators", None, {"speculators_config": {}}, "verifier", "vllm!"),
    "layer of another kind": (
        "eagle3 @ speculators", None, {"transformer_layer_config": LAYER | {"model_type": "gemma3"}},
        "keys", "vllm! speculators!",
    ),
    # MLP
    "MLP today": ("mlp", None, {}, "format", "vllm! sglang! speculators!"),
    "tree of the MLP": ("mlp", None, {"top_k_tokens_per_head": [1]}, "keys", "vllm_0_32!"),
    "positions of the MLP": ("mlp", None, {}, "positions", "vllm_0_32?"),
    "tied MLP": ("mlp-tied", put(speculator__ln__1__bias=torch.ones(48)), {}, "tied", "vllm_0_32!"),
    "names of the MLP": ("mlp", without("speculator.head.1.weight"), {}, "names", "vllm_0_32!"),
}  # fmt: skip


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories that say they are another target."""
    directories = {}
    for name, keys in {"other width": {"hidden_size": 128}, "other vocabulary": {"vocab_size": 400}}.items():
        directory = tmp_path_factory.mktemp("target")
        config = json.loads((hub.tiny() / "config.json").read_text()) | keys
        (directory / "config.json").write_text(json.dumps(config))
        directories[name] = str(directory)
    return directories


@pytest.mark.parametrize("rule", RULES)
def test_the_lint_finds(rule: str, tmp_path: Path, targets: dict[str, str]) -> None:
    name, change, keys, rule_name, marks, *target_name = RULES[rule]
    expected = {mark[:-1]: {"!": "error", "?": "warning"}[mark[-1]] for mark in marks.split()}
    written(tmp_path, *([*name.split(" @ "), "vllm"][:2]))
    about = targets.get(target_name[0], target_name[0]) if target_name else None
    before = severities_of(tmp_path, None)
    edited(tmp_path, change, **keys)
    if rule == "head that SGLang replaces":  # null, which `edited` takes for leaving the key out
        config = json.loads((tmp_path / "config.json").read_text()) | {"draft_vocab_size": None}
        (tmp_path / "config.json").write_text(json.dumps(config))
    after = severities_of(tmp_path, about)
    for key, severity in expected.items():
        assert severity in after.get((key, rule_name), []), (key, lint.check(tmp_path, about))
        if change is not None or keys or target_name:
            worse = after[key, rule_name].count(severity) > before.get((key, rule_name), []).count(severity)
            assert worse, f"{key} said it of the whole directory too"
    for engine, loads in lint.loads(lint.check(tmp_path, about)).items():
        assert not (loads and expected.get(engine) == "error")


def test_a_wider_target_is_recognised(tmp_path: Path, targets: dict[str, str]) -> None:
    """fc reads states of the target's width where target_hidden_size says so."""
    edited(written(tmp_path, "eagle3", "vllm"), put(fc__weight=torch.ones(HIDDEN, 2 * 128)), target_hidden_size=128)
    assert verdict(tmp_path, targets["other width"]) == {"vllm", "sglang"}
    assert not verdict(tmp_path, "tiny-llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"target_hidden_size": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert severities_of(tmp_path)["sglang", "hidden_size"] == ["error"]


def test_one_tapped_layer_is_not_fused_in_sglang(tmp_path: Path) -> None:
    one = Eagle3.init_checkpoint(loaded(), {"eagle_aux_hidden_state_layer_ids": [3]}, Init())
    checkpoint.write(one, tmp_path, "vllm")
    assert verdict(tmp_path) == {"vllm"}
    assert severities_of(tmp_path)["sglang", "layer_ids"] == ["error"]


def test_a_verifier_is_a_hub_id(tmp_path: Path) -> None:
    """vLLM takes a packaged drafter alone only where it can fetch the target; given the target, it does not mind."""
    for i, (name, severities) in enumerate({"org/model": [], "/models/llama": ["warning"], "tiny-llama": ["warning"]}.items()):
        directory = tmp_path / str(i)
        directory.mkdir()
        checkpoint.write(trained("eagle3"), directory, "speculators", loaded(), name)
        assert severities_of(directory).get(("vllm", "verifier"), []) == severities
        assert verdict(directory) == {"vllm", "speculators"}


# ------------------------------------------------------------------------------------------------- the speculators package

PACKAGED = [name for name, variant in VARIANTS.items() if variant.kind == "eagle3" and "speculators" in variant.engines]


def package(directory: Path) -> Any:
    """The drafter as the public package loads it, in float32 and with readable attention."""
    speculators = pytest.importorskip("speculators")
    loguru = pytest.importorskip("loguru")
    loguru.logger.disable("speculators")
    shape = speculators.SpeculatorModelConfig.from_pretrained(directory)
    shape.transformer_layer_config._attn_implementation = "eager"
    return speculators.SpeculatorModel.from_pretrained(directory, config=shape).float().eval()


def packaged(directory: Path, name: str) -> Path:
    directory.mkdir(exist_ok=True)
    target = loaded(VARIANTS[name].target)
    checkpoint.write(trained(name), directory, "speculators", target, str(target.path))
    return directory


@pytest.mark.parametrize("name", PACKAGED)
def test_the_package_drafts_the_same(name: str, tmp_path: Path) -> None:
    """Logits of three unrolled steps over a document, against ours."""
    package_drafter = package(packaged(tmp_path, name))
    target = loaded(VARIANTS[name].target)
    ours: Any = Eagle3(target, trained(name), 3)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40)
    logits = []
    num_steps = 3
    batch = OnlineFeatures(target, ours.hidden_layers)([Sample("", tokens, np.ones(40, dtype=bool))])
    plan = unroll.plan(batch.length_B, batch.mask_N, num_steps)
    package_drafter.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    with torch.no_grad():
        package_drafter(
            hidden_states=batch.hidden(ours.hidden_layers)[:-1].flatten(1).unsqueeze(0),
            input_ids=torch.from_numpy(tokens[1:]).unsqueeze(0),
            document_ids=torch.zeros(1, 39, dtype=torch.int64),
            position_ids=torch.arange(39).unsqueeze(0),
            ttt_steps=num_steps,
        )
        for k, (state, step) in enumerate(zip(ours.unrolled(batch, plan), plan.steps, strict=True)):
            rows = torch.from_numpy(np.flatnonzero(step.rows < 39 - k))
            wanted = ours.draft_logits(state)[rows]
            gap = (wanted - logits[k][torch.from_numpy(step.rows)[rows]]).abs().max()
            assert len(rows) > 30
            assert gap < 1e-4 * max(1, wanted.abs().max()), (k, gap)


@pytest.mark.parametrize("name", ["peagle", "peagle-qwen3-layer"])
def test_the_package_drafts_the_same_in_one_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P-EAGLE: logits of every row and depth, mask places included, none of them left out."""
    package_drafter = package(packaged(tmp_path, name))
    target = loaded()
    depths = 4
    core = importlib.import_module("speculators.models.peagle.core")
    sampled: list[tuple[Tensor, Tensor]] = []
    sample = core.generate_cod_sample_indices
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **how: sampled.append(sample(**how)) or sampled[0])
    logits: list[Tensor] = []
    package_drafter.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))

    ours: Any = method.find("peagle")(target, trained(name), depths)
    ours.objective = ours.objective_type(num_depths=depths, down_sample_ratio=1.0)
    tokens = np.random.default_rng(0).integers(0, VOCAB - 1, 40)
    batch = OnlineFeatures(target, ours.hidden_layers)([Sample("", tokens, np.ones(40, dtype=bool))])
    plan = ours.plan(batch, depths, 0)
    with torch.no_grad():
        package_drafter(
            hidden_states=batch.hidden(ours.hidden_layers)[:-1].flatten(1).unsqueeze(0),
            input_ids=torch.from_numpy(tokens[1:]).unsqueeze(0),
            document_ids=torch.zeros(1, 39, dtype=torch.int64),
            loss_mask=torch.ones(1, 39),
            verifier_last_hidden_states=batch.hidden([target.num_layers])[:-1].flatten(1).unsqueeze(0),
            num_depths=depths,
            down_sample_ratio=1.0,
            loss_config=importlib.import_module("speculators.losses").resolve_loss_config("kl_div", "eager"),
        )
        anchor, depth = sampled[0]
        place = {(int(a), int(d)): i for i, (a, d) in enumerate(zip(anchor, depth, strict=True))}
        for d, (state, step) in enumerate(zip(ours.unrolled(batch, plan), plan.steps, strict=True)):
            both = [(i, place[row, d]) for i, row in enumerate(step.rows.tolist()) if (row, d) in place]
            assert len(both) > 30, d
            wanted = ours.draft_logits(state)[[i for i, _ in both]]
            gap = (wanted - logits[0][[i for _, i in both]]).abs().max()
            assert gap < 1e-4 * max(1, wanted.abs().max()), (d, gap)


BLOCKS = [
    name for name, variant in VARIANTS.items() if variant.kind in ("dflash", "dspark") and "speculators" in variant.engines
]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_package_drafts_the_same_blocks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DFlash and DSpark: logits, and confidence, of every token of the blocks at some anchors. A window that reaches over the
    document: the package counts it from the anchor, and engines count it from each token."""
    wide = trained(name)
    if wide.config["sliding_window"]:
        wide.config["sliding_window"] = 64
    target = loaded(VARIANTS[name].target)
    checkpoint.write(wide, tmp_path, "speculators", target, str(target.path))
    package_drafter = package(tmp_path)
    size = wide.config["block_size"]
    ours: Any = method.find(wide.method)(target, wide, 1)
    anchors = [1, 2, 7, 20, 33]
    module = f"speculators.models.{wide.method}.core"
    core = importlib.import_module(module)
    chosen = torch.tensor(anchors), torch.ones(len(anchors), dtype=torch.bool)
    monkeypatch.setattr("speculators.models.dflash.core.select_anchors", lambda *of: chosen)
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(core, "compute_metrics", lambda *of, **named: seen.append(of) or (torch.zeros(()), {}))
    tokens = np.random.default_rng(0).integers(0, VOCAB - 1, 40)
    batch = OnlineFeatures(target, ours.hidden_layers)([Sample("", tokens, np.ones(40, dtype=bool))])
    plan = ours.plan(batch, ours.num_steps(0.0), 0)
    with torch.no_grad():
        package_drafter(
            hidden_states=batch.hidden(ours.hidden_layers).flatten(1).unsqueeze(0),
            input_ids=torch.from_numpy(tokens).unsqueeze(0),
            loss_mask=torch.ones(1, 40),
            verifier_last_hidden_states=batch.hidden([target.num_layers]).flatten(1).unsqueeze(0),
            document_ids=torch.zeros(1, 40, dtype=torch.int64),
            max_anchors=len(anchors),
        )
        ((logits, _, confidence, *_),) = seen
        of_package = logits[0].unflatten(0, (len(anchors), size))
        for k, (state, step) in enumerate(zip(ours.unrolled(batch, plan), plan.steps, strict=True)):
            rows = torch.from_numpy(np.searchsorted(step.rows, anchors))
            wanted = ours.draft_logits(state[rows])
            got = of_package[:, k + ours.first_offset]
            assert (wanted - got).abs().max() < 1e-4 * max(1, wanted.abs().max()), k
            if wide.config.get("enable_confidence_head"):
                prev = batch.token_N[torch.tensor(anchors) + k]
                got = confidence[0].unflatten(0, (len(anchors), size))[:, k + ours.first_offset]
                assert (ours.confidence(state[rows][:, : ours.width], prev) - got).abs().max() < 1e-4, k


@pytest.mark.parametrize("name", [*PACKAGED, "peagle", "peagle-qwen3-layer", *BLOCKS])
def test_what_the_package_writes_is_read(name: str, tmp_path: Path) -> None:
    """Ours -> the package's own save -> ours: nothing was lost or made up on the way."""
    package_drafter = package(packaged(tmp_path / "ours", name))
    package_drafter.save_pretrained(tmp_path / "theirs")
    came = checkpoint.load(tmp_path / "theirs")
    drafter = trained(name)
    same(came, drafter)
    came.check(drafter.method, loaded(VARIANTS[name].target))


def test_the_packages_converter_keeps_every_tensor(tmp_path: Path) -> None:
    """Raw EAGLE-3 -> `speculators convert` -> ours."""
    converter = pytest.importorskip("speculators.convert.eagle.eagle3_converter")
    pytest.importorskip("loguru").logger.disable("speculators")
    drafter = trained("eagle3-layers")
    target = str(loaded().path)
    ids = drafter.config["eagle_aux_hidden_state_layer_ids"]
    written(tmp_path / "raw", "eagle3-layers", "vllm")
    converter.Eagle3Converter().convert(
        tmp_path / "raw", tmp_path / "packaged", target, validate=False, eagle_aux_hidden_state_layer_ids=ids
    )
    came = checkpoint.load(tmp_path / "packaged")
    assert came.tensors is not None
    assert came.config == drafter.config
    for key, tensor in (drafter.tensors or {}).items():
        assert torch.equal(came.tensors[key], tensor), key


# ------------------------------------------------------------------------------------------------------------------- share


@pytest.fixture
def share(tmp_path: Path) -> Cli:
    return partial(call, "share", cwd=tmp_path, folder=TRAIN)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run, whose best checkpoint was measured."""
    folder = tmp_path_factory.mktemp("run")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one two three " * 3}]
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"messages": [{**messages[0], "content": f"hello {i}"}, messages[1]]}) + "\n" for i in range(12))
    )
    done = call(
        "eagle", "model=tiny", "model.dtype=float32", "model.device=cpu", "data=jsonl", f"data.path={folder}/data.jsonl",
        "data.held_out=2", "train.max_steps=2", "train.global_batch_size=2", "train.micro_batch_size=2", "train.eval_every=1",
        "train.mixed_precision=no", "train.drafter.draft_vocab_size=100", "eval.num_prompts=1", "eval.max_tokens=8",
        f"out_dir={folder}/out", cwd=folder, folder=TRAIN,
    )  # fmt: skip
    assert done.code == 0, done.err
    return folder / "out"


@pytest.fixture(scope="module")
def evaluation(run: Path) -> Path:
    out_dir = run.parent / "evaluation"
    small = ("model=tiny", "limit=2", "sampling.max_tokens=8", f"out_dir={out_dir}")
    done = call("run", *small, "method=eagle3", f"checkpoint={run}", "method.num_speculative_tokens=4", cwd=run, folder=EVAL)
    assert done.code == 0, done.err
    return out_dir


FILES = {"config.json", "model.safetensors", "provenance.json", "README.md"}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators", "native"])
def test_a_run_is_shared(engine: str, run: Path, share: Cli, tmp_path: Path) -> None:
    done = share(f"checkpoint={run}", f"format={engine}", "out_dir=shared", "serve_target=org/model")
    assert done.code == 0, done.err
    out = tmp_path / "shared"
    assert {path.name for path in out.iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["shared"], "nothing temporary stays"
    came = checkpoint.load(out)
    drafter = native.load(run)
    same(came, drafter)
    card = (out / "README.md").read_text()
    row = next(
        row
        for row in rows_of(run / "metrics.jsonl")
        if row["step"] == json.loads((out / "provenance.json").read_text())["step"]
    )
    assert f"| all | {row['mean_acceptance_length']:.3f} |" in card
    assert "base_model: org/model\n" in card
    assert (out / "model.safetensors").stat().st_size > 1000
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() in card
    vllm = (
        """vllm serve org/model --speculative-config '{"method": "eagle3", "model": "shared", "num_speculative_tokens": 3}'\n"""
    )
    sglang = (
        "python -m sglang.launch_server --model-path org/model --speculative-algorithm EAGLE3 --speculative-draft-model-path "
        "shared --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4\n"
    )
    assert (vllm in card) == (engine != "native")
    assert (sglang in card) == (engine in ("vllm", "sglang"))
    assert (sglang if engine == "sglang" else vllm if engine != "native" else "python eval/run.py method=eagle3") in done.out
    for name in ("README.md", "config.json", "provenance.json"):
        assert str(tmp_path.parent.parent) not in (out / name).read_text(), "no directories of this machine"


def test_measured_numbers_are_those_of_the_evaluation(run: Path, evaluation: Path, share: Cli, tmp_path: Path) -> None:
    done = share(f"checkpoint={run}", "out_dir=shared", f"eval={evaluation}", "dtype=bfloat16")
    assert done.code == 0, done.err
    overall = json.loads((evaluation / "summary.json").read_text())["overall"]
    card = (tmp_path / "shared" / "README.md").read_text()
    assert f"| all | {overall['mean_acceptance_length']:.3f} | {overall['tokens_per_step']:.3f} |" in card
    assert '"num_speculative_tokens": 4}' in card
    assert "eval/run.py" in card
    assert "Lossless" in card
    held = load_file(tmp_path / "shared" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16, torch.int64, torch.bool}


def test_a_drafter_of_another_format_becomes_native(share: Cli, tmp_path: Path) -> None:
    written(tmp_path / "theirs", "eagle3-layers", "vllm")
    rows = loaded().model.get_input_embeddings().weight.detach()
    edited(tmp_path / "theirs", put(embed_tokens__weight=rows), specdec=None)
    assert "give target=" in share("checkpoint=theirs", "format=native", "out_dir=ours").error
    assert not (tmp_path / "ours").exists()
    done = share("checkpoint=theirs", "format=native", "out_dir=ours", "target=tiny-llama")
    assert done.code == 0, done.err
    same(native.load(tmp_path / "ours"), trained("eagle3-layers"))
    assert "Not measured" in (tmp_path / "ours" / "README.md").read_text()


@pytest.mark.parametrize("name", ["eagle", "peagle", "mlp-tied"])
def test_other_methods_are_shared(name: str, share: Cli, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    native.save(tmp_path / "ours", trained(name), {}, "")
    done = share("checkpoint=ours", "format=vllm", "out_dir=shared")
    assert done.code == 0, done.err
    method = {"eagle": '"method": "eagle"', "peagle": '"method": "eagle3"', "mlp-tied": '"method": "mlp_speculator"'}[name]
    assert method in done.out
    assert ('"parallel_drafting": true' in done.out) == (name == "peagle")
    assert ("0.33 has no MLP" in (tmp_path / "shared" / "README.md").read_text()) == (name == "mlp-tied")


def test_what_an_engine_would_not_load_leaves_nothing_behind(share: Cli, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    native.save(tmp_path / "ours", trained("eagle3-norm-before-residual"), {}, "")
    done = share("checkpoint=ours", "format=sglang", "out_dir=shared")
    assert "sglang would not load" in done.err
    assert "norm_before_residual" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    assert share("checkpoint=ours", "format=vllm", "out_dir=shared").code == 0


def test_lint_alone(share: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "good", "eagle3", "vllm")
    done = share("lint=good")
    assert done.code == 0, done.err
    assert "vLLM 0.32, 0.33: loads" in done.out
    edited(written(tmp_path / "bad", "eagle3", "vllm"), without("norm.weight"))
    done = share("lint=bad")
    assert done.code == 1
    assert "norm.weight" in done.out
    monkeypatch.setenv("COLUMNS", "80")
    lines = share("lint=bad").out.splitlines()
    assert "  vLLM 0.32, 0.33: does not load" in lines, "the reason stands below, at 80 columns too"
    assert max(map(len, lines)) <= 80
    assert "writes nothing" in share("lint=good", "out_dir=x").error
    assert "nowhere" in share("lint=nowhere").error
    assert "fc.weight" not in share("lint=good", "target=tiny-llama").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "checkpoint is missing"),
        (("checkpoint=ours",), "out_dir is missing"),
        (("checkpoint=ours", "out_dir=x", "format=tgi"), "format='tgi'"),
        (("checkpoint=ours", "out_dir=ours"), "there already"),
        (("checkpoint=ours", "out_dir=x", "push=here"), "org/name"),
        (("checkpoint=ours", "out_dir=x", "eval=ours"), "eval/run.py"),
        (("checkpoint=ours", "out_dir=x", "num_speculative_tokens=0"), "num_speculative_tokens=0"),
        (("checkpoint=ours", "out_dir=x", "dtype=int8"), "int8"),
        (("checkpoint=ours", "out_dir=x", "target=tiny-gemma2"), "tiny-gemma2"),
        (("checkpoint=nowhere", "out_dir=x"), "nowhere"),
        (("checkpoint=ours", "out_dir=x", "outt=y"), "outt"),
    ],
)
def test_what_share_refuses(arguments: tuple[str, ...], words: str, share: Cli, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    native.save(tmp_path / "ours", trained("eagle3"), {}, "")
    assert words in share(*arguments).error
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_push_that_fails_is_one_line_and_keeps_the_files(share: Cli, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    native.save(tmp_path / "ours", trained("eagle3"), {}, "")
    error = share("checkpoint=ours", "out_dir=shared", "push=org/name").error
    assert "push=org/name" in error
    assert "hf auth login" in error
    assert {path.name for path in (tmp_path / "shared").iterdir()} == FILES
    assert '"model": "org/name"' in (tmp_path / "shared" / "README.md").read_text()


def test_a_push_uploads_the_directory(share: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, repository: str, **how: Any) -> str:
            seen.append((repository, how))
            return f"https://hub/{repository}"

        def upload_folder(self, **how: Any) -> None:
            seen.append((how["repo_id"], {"files": {path.name for path in Path(how["folder_path"]).iterdir()}}))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    (tmp_path / "ours").mkdir()
    native.save(tmp_path / "ours", trained("eagle3"), {}, "")
    done = share("checkpoint=ours", "out_dir=shared", "push=org/name", "private=true")
    assert done.code == 0, done.err
    assert seen == [("org/name", {"private": True, "exist_ok": True}), ("org/name", {"files": FILES})]
    assert "https://hub/org/name" in done.out


def test_share_is_a_program(tmp_path: Path) -> None:
    """As a process of its own: the exit code and the one line."""
    written(tmp_path / "bad", "eagle3", "vllm")
    (tmp_path / "bad" / "model.safetensors").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, str(TRAIN / "share.py"), "lint=bad"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, **OFFLINE},
    )
    assert done.returncode == 1
    assert "cannot be read" in done.stdout
    assert done.stderr == ""


# ------------------------------------------------------------------------------- modules of a target, and draft models


def trained_by(script: str, folder: Path, conversations: Path, *more: str) -> Path:
    """A run of three steps on the tiny model."""
    small = (
        "model=tiny",
        "model.device=cpu",
        "model.dtype=float32",
        "data.held_out=2",
        "train.max_steps=3",
        "eval.num_prompts=0",
    )
    arguments = ("data=jsonl", f"data.path={conversations}", f"out_dir={folder / 'run'}", *more)
    done = call(script, *small, *arguments, cwd=folder, folder=TRAIN)
    assert done.code == 0, done.err
    return folder / "run"


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [{"prompt": f"number {i}", "response": f"{i} is the number, and {i + 1} comes next"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("script", "engines"), [("draft_model", {"vllm", "sglang"}), ("pard", {"vllm"})])
def test_a_draft_model_is_shared_as_it_is(
    script: str, engines: set[str], tmp_path: Path, conversations: Path, share: Cli
) -> None:
    """Byte for byte; the lint says who loads it, the card how it is served, and it says its own method."""
    run = trained_by(script, tmp_path, conversations, "train.drafter.layer_ids=[0,1]")
    done = share(f"checkpoint={run}", "format=vllm", f"out_dir={tmp_path / 'shared'}")
    assert done.code == 0, done.err
    spec = {"method": "draft_model", "model": "shared"} | ({"parallel_drafting": True} if script == "pard" else {})
    command = re.search(r"vllm serve TARGET --speculative-config '(.*)'", (tmp_path / "shared" / "README.md").read_text())
    assert command is not None
    assert "TARGET: the directory or hub id of tiny-llama." in (tmp_path / "shared" / "README.md").read_text()
    assert spec.items() <= json.loads(command[1]).items()
    before, after = (load_file(path / "model.safetensors") for path in (run / "last", tmp_path / "shared"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert checkpoint.method_of(tmp_path / "shared") == checkpoint.method_of(run) == script
    verdict = lint.loads(lint.check(tmp_path / "shared", "tiny-llama"))
    assert {engine for engine, whether in verdict.items() if whether} == engines
    refused = share(f"checkpoint={run}", "format=speculators", f"out_dir={tmp_path / 'other'}")
    assert refused.code == 1
    assert f"speculators has no {script} drafters" in refused.err
    assert not (tmp_path / "other").exists()


def test_a_draft_model_must_fit_its_target(tmp_path: Path, conversations: Path) -> None:
    run = trained_by("pard", tmp_path, conversations, "train.drafter.layer_ids=[0,1]")
    config = json.loads((run / "last" / "config.json").read_text())
    for change, rule in (({"vocab_size": 100}, "vocabulary"), ({"pard_token": 10**6}, "pard_token")):
        (run / "last" / "config.json").write_text(json.dumps(config | change))
        findings = lint.check(run / "last", "tiny-llama")
        assert any(f.engine == "vllm" and f.severity == "error" and f.rule == rule for f in findings), findings


def test_modules_of_a_target_that_no_engine_has_a_class_for(tmp_path: Path, conversations: Path, share: Cli) -> None:
    """MTP trained for a Llama: refused with the reason, and nothing is left behind; its own format is fine."""
    options = ("train.drafter.draft_vocab_size=null", "train.init.train_lm_head=false")
    run = trained_by("mtp", tmp_path, conversations, *options)
    refused = share(f"checkpoint={run}", "format=vllm", f"out_dir={tmp_path / 'shared'}")
    assert refused.code == 1
    assert "model_type 'llama' has no class" in " ".join(refused.out.replace("│", " ").split())
    assert not (tmp_path / "shared").exists()
    assert share(f"checkpoint={run}", "format=native", f"out_dir={tmp_path / 'native'}").code == 0
    assert checkpoint.method_of(tmp_path / "native") == "mtp"


def test_a_drafter_names_its_method(tmp_path: Path, run: Path, conversations: Path, share: Cli) -> None:
    """Where the command line has no method=, in our format and in a foreign one; where it has one, that counts."""
    assert share(f"checkpoint={run}", "format=vllm", f"out_dir={tmp_path / 'raw'}").code == 0
    pard = trained_by("pard", tmp_path, conversations, "train.drafter.layer_ids=[0,1]")
    small = ("model=tiny", "limit=2", "sampling.max_tokens=8", "method.num_speculative_tokens=2")
    for directory, name in ((run, "eagle3"), (tmp_path / "raw", "eagle3"), (pard, "pard")):
        out_dir = tmp_path / f"out-{directory.name}"
        done = call("run", *small, f"checkpoint={directory}", f"out_dir={out_dir}", cwd=tmp_path, folder=EVAL)
        assert done.code == 0, done.err
        summary = json.loads((out_dir / "summary.json").read_text())
        assert summary["method"] == name
        assert summary["lossless_said"].startswith("yes")
    done = call("run", *small, "method=mlp", f"checkpoint={pard}", f"out_dir={tmp_path / 'no'}", cwd=tmp_path, folder=EVAL)
    assert done.code == 1
    assert "method=pard" in done.err
    done = call("run", *small, f"checkpoint={tmp_path / 'nowhere'}", f"out_dir={tmp_path / 'no'}", cwd=tmp_path, folder=EVAL)
    assert done.code == 1
    assert "nowhere: no such directory" in done.err


# ------------------------------------------------------------------------------------------- what is held against a table

MODULES = [
    "deepseek-moe", "deepseek-2-dense-q-lora", "deepseek-2-moe", "qwen3-next-moe", "qwen3-next-dense",
]  # fmt: skip


@pytest.fixture(scope="module")
def ships(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("ships")
    return lambda name: random_target(name, root)


def of(findings: list[lint.Finding], engine: str, severity: str = "error") -> str:
    """What was said about one engine, in one text."""
    return " ".join(f"[{one.rule}] {one.text}" for one in findings if (one.engine, one.severity) == (engine, severity))


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_held_against_the_targets_layer(name: str, ships: Callable[[str], Path], tmp_path: Path) -> None:
    """Every tensor that is missing, renamed or of another shape is found by name; the published ones are as wanted."""
    config = json.loads((ships(name) / "config.json").read_text())
    counts = {"num_nextn_predict_layers": len(shipped.traces(config, set(hf_common.shapes_of(ships(name)))))}
    complete = changed(ships(name), tmp_path / "whole", lambda held: None)
    edited(complete, **counts)
    assert verdict(complete) == {"vllm", "sglang"}, lint.check(complete)
    assert "names and shapes as vLLM 0.32, 0.33 wants" in of(lint.check(complete), "vllm", "ok")
    names = sorted(shipped.module_tensors(complete, config))
    optional = ("embed_tokens.weight", "shared_head.head.weight")
    for i, key in enumerate(names):
        if key.endswith(optional) or (".experts." in key and ".experts.1." not in key):
            continue

        def spoil(held: dict[str, Tensor], key: str = key, how: int = i % 3) -> None:
            tensor = held.pop(key)
            if how:
                held[key if how == 1 else key + "s"] = torch.cat([tensor, tensor])

        bad = changed(complete, tmp_path / f"bad-{i}", spoil)
        assert f"{key}" in of(lint.check(bad), "vllm"), (key, lint.check(bad))
        assert not {"vllm", "sglang"} & verdict(bad)


def test_modules_that_the_config_counts_otherwise(ships: Callable[[str], Path], tmp_path: Path) -> None:
    complete = ships("deepseek-moe")
    two = edited(changed(complete, tmp_path / "two", lambda held: None), num_nextn_predict_layers=2)
    assert "num_nextn_predict_layers=2 in config.json, and the weights hold 1" in of(lint.check(two), "vllm")
    dropped = changed(complete, tmp_path / "dropped", lambda held: [held.pop(key) for key in list(held) if ".layers.3." in key])
    assert "[num_nextn_predict_layers]" in of(lint.check(dropped), "vllm")
    assert not verdict(dropped)
    packed = edited(changed(complete, tmp_path / "packed", lambda held: None), quantization_config={"quant_method": "fp8"})
    findings = lint.check(packed)
    assert "[not compared]" in of(findings, "vllm", "warning")
    assert not of(findings, "vllm", "ok")


def test_an_output_layer_of_a_module_is_lost(ships: Callable[[str], Path], tmp_path: Path, one_line: Any) -> None:
    """Engines give modules the target's output layer."""
    key = "model.layers.3.shared_head.head.weight"
    directory = changed(ships("deepseek-moe"), tmp_path / "own", lambda held: held[key].add_(0.3))
    for engine in ("vllm", "sglang"):
        assert "[lm_head] shared_head.head is not the target's" in of(lint.check(directory), engine)
    drafter = shipped.read(directory)
    target = CausalLM(directory, "float32", "cpu")
    (tmp_path / "out").mkdir()
    one_line(lambda: checkpoint.write(drafter, tmp_path / "out", "vllm", target), "train.init.train_lm_head=false")


def test_experts_of_unequal_shapes(ships: Callable[[str], Path], tmp_path: Path, one_line: Any) -> None:
    key = "model.layers.3.mlp.experts.2.up_proj.weight"
    bad = changed(ships("deepseek-moe"), tmp_path / "bad", lambda held: held.update({key: held[key][1:]}))
    one_line(lambda: shipped.read(bad), "experts.2.up_proj.weight", "expert 0 has")
    assert "experts.2.up_proj.weight" in of(lint.check(bad), "vllm")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-gemma3"])
def test_a_draft_model_is_held_against_its_config(name: str, tmp_path: Path) -> None:
    source = hub.resolve(name)
    assert verdict(source, name) == {"vllm", "sglang"}, lint.check(source, name)
    assert of(lint.check(source), "vllm", "ok")
    key = "model.layers.1.mlp.up_proj.weight"
    cases: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
        "lacks": (lambda held: held.pop(key), f"[names] the weights lack {key!r}"),
        "renamed": (lambda held: held.update({key + "s": held.pop(key)}), f"[names] the weights lack {key!r}"),
        "shape": (lambda held: held.update({key: held[key][1:]}), f"[shape] {key} is"),
        "integers": (lambda held: held.update({key: held[key].int()}), f"[dtype] {key} is int32"),
        "float8": (lambda held: held.update({key: held[key].to(torch.float8_e4m3fn)}), f"[dtype] {key} is float8_e4m3fn"),
    }
    for case, (change, words) in cases.items():
        bad = changed(source, tmp_path / case, change)
        for engine in ("vllm", "sglang"):
            assert words in of(lint.check(bad), engine), lint.check(bad)
    other = edited(changed(source, tmp_path / "other", lambda held: None), model_type="mixtral")
    assert "[not compared]" in of(lint.check(other), "vllm", "warning")
    assert not of(lint.check(other), "vllm", "ok")


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("eagle3", lambda held: held.update({"fc.weight": held["fc.weight"].int()}), "[dtype] fc.weight is int32"),
        (
            "eagle3",
            lambda held: held.update({"fc.weight": held["fc.weight"].to(torch.float8_e5m2)}),
            "[dtype] fc.weight is float8_e5m2",
        ),
        ("mlp", lambda held: held.update({"speculator.emb.0.weight": held["speculator.emb.0.weight"].long()}), "emb.0.weight"),
        ("eagle3-reduced", lambda held: held.update({"d2t": held["d2t"][:-1]}), "[d2t] d2t is"),
        ("eagle3-reduced", lambda held: held.update({"d2t": held["d2t"][None]}), "[d2t] d2t is"),
        ("eagle3-reduced", lambda held: held.update({"d2t": held["d2t"][:0]}), "[d2t] d2t is [0]"),
        ("eagle3-reduced", lambda held: held.update({"t2d": held["t2d"][:-1]}), "[t2d] t2d is"),
    ],
)
def test_types_and_maps_that_are_none(name: str, change: Any, rule: str, tmp_path: Path, one_line: Any) -> None:
    edited(written(tmp_path, name, "vllm"), change)
    engine = "vllm_0_32" if name == "mlp" else "vllm"
    assert rule in of(lint.check(tmp_path), engine), lint.check(tmp_path)
    if "float8" not in rule:  # whose values are what they are
        one_line(lambda: Eagle3(loaded(), checkpoint.load(tmp_path), 1))


def test_what_is_not_finite_is_not_loaded(tmp_path: Path, one_line: Any) -> None:
    spoiled = lambda held: held[next(key for key in sorted(held) if held[key].is_floating_point())].fill_(torch.nan)
    raw = edited(written(tmp_path / "raw", "eagle3", "vllm"), spoiled)
    one_line(lambda: checkpoint.load(raw), "holds nan or inf")
    (tmp_path / "native").mkdir()
    native.save(tmp_path / "native", trained("eagle3"), {}, "")
    held = load_file(tmp_path / "native" / "model.safetensors")
    held["norm.weight"][3] = torch.inf
    save_file(held, tmp_path / "native" / "model.safetensors")
    one_line(lambda: checkpoint.load(tmp_path / "native"), "norm.weight holds nan or inf")
    drafter = trained("eagle3")
    assert drafter.tensors is not None
    drafter.tensors["norm.weight"] = torch.full((HIDDEN,), torch.nan)
    one_line(lambda: Eagle3(loaded(), drafter, 1), "norm.weight holds nan or inf")
    lm = changed(hub.resolve("tiny-llama"), tmp_path / "lm", spoiled)
    one_line(lambda: causal_lm.load(lm), "holds nan or inf")


def test_a_target_that_cannot_be_read_is_no_fault_of_the_drafter(tmp_path: Path, one_line: Any, share: Cli) -> None:
    rows = loaded().model.get_input_embeddings().weight.detach()
    edited(written(tmp_path / "raw", "eagle3", "vllm"), put(embed_tokens__weight=rows))
    one_line(lambda: lint.check(tmp_path / "raw", "tiny-lama"), "target=tiny-lama")
    assert "target=tiny-lama cannot be read" in share("lint=raw", "target=tiny-lama").error
    cut = changed(hub.resolve("tiny-llama"), tmp_path / "cut", lambda held: None)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    one_line(lambda: lint.check(tmp_path / "raw", cut), f"target={cut} cannot be read")


def test_num_depths_of_a_peagle_comes_back(tmp_path: Path, one_line: Any) -> None:
    drafter = trained("peagle")
    drafter.config["num_depths"] = 4
    for engine in ("vllm", "speculators"):
        (tmp_path / engine).mkdir()
        checkpoint.write(drafter, tmp_path / engine, engine, loaded(), None, 4)
        same(checkpoint.load(tmp_path / engine), drafter)
        config = json.loads((tmp_path / engine / "config.json").read_text())
        assert config["specdec"]["num_depths"] == 4
        del config["specdec"]["num_depths"]
        (tmp_path / engine / "config.json").write_text(json.dumps(config | {"num_depths": 4}))
        same(checkpoint.load(tmp_path / engine), drafter)
        edited(tmp_path / engine, num_depths=0)
        one_line(lambda engine=engine: checkpoint.load(tmp_path / engine), "num_depths", "1..")
    section = json.loads((tmp_path / "speculators" / "config.json").read_text())["speculators_config"]
    assert section["proposal_methods"][0]["speculative_tokens"] == 4
    edited(written(tmp_path / "eagle3", "eagle3", "vllm"), num_depths=4)
    one_line(lambda: checkpoint.load(tmp_path / "eagle3"), "num_depths=4", "P-EAGLE")


def test_what_a_pard_says_of_itself_is_looked_at(tmp_path: Path, one_line: Any) -> None:
    lm = edited(changed(hub.resolve("tiny-llama"), tmp_path / "lm", lambda held: None), pard_token=259)
    for value in ({"num_depths": "four"}, {"num_depths": 0}, {"num_depths": True}, [4]):
        edited(lm, specdec=value)
        one_line(lambda: causal_lm.load(lm, None, "pard"), "should be an integer of 1 or more")
        one_line(lambda: method.build("pard", loaded(), model=str(lm), num_speculative_tokens=2))
    edited(lm, specdec=None, pard_token="x")
    one_line(lambda: causal_lm.load(lm, None, "pard"), "pard_token", "token id")


def test_default_layers_that_are_not_three(tmp_path: Path, one_line: Any) -> None:
    edited(written(tmp_path, "eagle3-layers", "vllm"), eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    one_line(lambda: checkpoint.load(tmp_path), "[2, 2, 1] of 4 layers", "write the ids")
    edited(tmp_path, specdec=None)
    one_line(lambda: Eagle3(loaded(), checkpoint.load(tmp_path), 1), "[2, 2, 1] of 4 layers", "write the ids")


def test_a_drafter_is_no_draft_model(tmp_path: Path, one_line: Any) -> None:
    (tmp_path / "native").mkdir()
    native.save(tmp_path / "native", trained("eagle3"), {}, "")
    written(tmp_path / "raw", "eagle3", "vllm")
    for kind in ("native", "raw"):
        directory = tmp_path / kind
        one_line(lambda directory=directory: causal_lm.load(directory), "drafter of method 'eagle3'", "method=eagle3")
        for name in ("draft_model", "pard"):
            build = partial(method.build, name, loaded(), model=str(directory), num_speculative_tokens=2)
            one_line(build, "drafter of method 'eagle3'")


def test_a_trained_embedding_is_not_supported(tmp_path: Path, one_line: Any) -> None:
    edited(written(tmp_path, "eagle3", "vllm"), put(embed_tokens__weight=torch.randn(VOCAB, HIDDEN)))
    one_line(lambda: Eagle3(loaded(), checkpoint.load(tmp_path), 1), "a trained embedding is not supported")


# ------------------------------------------------------------------------------------------------ whose numbers, what command


def test_an_evaluation_must_be_of_this_drafter(run: Path, evaluation: Path, share: Cli, tmp_path: Path) -> None:
    """By its run, its best or last, the step, or a link to one of them; not another drafter's, nor another method's."""
    summary = json.loads((evaluation / "summary.json").read_text())
    step = (run / "best").resolve()
    (tmp_path / "link").symlink_to(run)

    def shared(i: int, **changes: Any) -> Any:
        (tmp_path / f"eval-{i}").mkdir()
        changed_summary = summary | changes
        (tmp_path / f"eval-{i}" / "summary.json").write_text(json.dumps(changed_summary))
        return share(f"checkpoint={run}", f"out_dir=out-{i}", f"eval=eval-{i}")

    def of_model(name: Any) -> dict[str, Any]:
        return {"speculative_config": summary["speculative_config"] | {"model": str(name)}}

    for i, name in enumerate((run, run / "best", step, tmp_path / "link", "link/best")):
        done = shared(i, **of_model(name))
        assert done.code == 0, done.err
    (tmp_path / "copy").mkdir()
    native.save(tmp_path / "copy", native.load(run), {}, "")
    for i, name in enumerate((tmp_path / "copy", "nowhere"), 10):
        assert f"is of the drafter {name}" in shared(i, **of_model(name)).error
    assert "method 'eagle'" in shared(20, method="eagle").error
    assert "is of the drafter None" in shared(21, speculative_config={}).error
    assert not list(tmp_path.glob("out-1?")) + list(tmp_path.glob("out-2?"))


@pytest.mark.parametrize(("name", "key", "most"), [("peagle", "num_depths", 4), ("mlp", "n_predict", 3)])
def test_more_tokens_than_a_drafter_has(name: str, key: str, most: int, share: Cli, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    drafter = trained(name)
    drafter.config[key] = most
    native.save(tmp_path / "ours", drafter, {}, "")
    error = share("checkpoint=ours", "out_dir=x", f"num_speculative_tokens={most + 1}").error
    assert f"num_speculative_tokens={most + 1} is over the {most} of this drafter ({key})" in error
    done = share("checkpoint=ours", "out_dir=x", f"num_speculative_tokens={most}")
    assert done.code == 0, done.err
    assert f'"num_speculative_tokens": {most}' in done.out


def test_modules_draft_one_token_each(share: Cli, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    config = {"num_modules": 2, "own_lm_head": False, "draft_vocab_size": VOCAB}
    native.save(
        tmp_path / "ours", Checkpoint("mtp", config, native.facts(loaded()), {key: torch.ones(1) for key in "ab"}), {}, ""
    )
    error = share("checkpoint=ours", "format=native", "out_dir=x", "num_speculative_tokens=3").error
    assert "num_speculative_tokens=3 is over the 2 of this drafter (num_modules)" in error
    native.save(tmp_path / "ours", Checkpoint("peagle", {"num_depths": "x"}, {}, {"a": torch.ones(1)}), {}, "")
    assert "num_depths is 'x'" in share("checkpoint=ours", "format=native", "out_dir=x").error


def test_the_speculators_format_says_how_many_tokens(share: Cli, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    native.save(tmp_path / "ours", trained("eagle3"), {}, "")
    for i, (arguments, count) in enumerate((((), 3), (("num_speculative_tokens=7",), 7))):
        done = share("checkpoint=ours", "format=speculators", f"out_dir=out-{i}", *arguments)
        assert done.code == 0, done.err
        config = json.loads((tmp_path / f"out-{i}" / "config.json").read_text())
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == count
        assert f'"num_speculative_tokens": {count}' in done.out


@pytest.mark.parametrize("start", ["a run", "weights alone", "a speculators directory"])
def test_every_export_of_a_drafter_drafts_as_many_tokens(start: str, run: Path, share: Cli, tmp_path: Path) -> None:
    """As it was trained to be served, as its config says, or as is usual: in commands, cards and configs alike."""
    source = run
    count = 3
    if start != "a run":
        (tmp_path / "ours").mkdir()
        native.save(tmp_path / "ours", trained("eagle3"), {"identity": {"eval": {"num_speculative_tokens": None}}}, "")
        source = tmp_path / "ours"
    if start == "a speculators directory":
        assert share(f"checkpoint={source}", "format=speculators", "out_dir=theirs", "num_speculative_tokens=6").code == 0
        source = tmp_path / "theirs"
        count = 6
    for format in ("vllm", "sglang", "speculators"):
        done = share(f"checkpoint={source}", f"format={format}", f"out_dir={format}", "target=tiny-llama")
        assert done.code == 0, done.err
        card = (tmp_path / format / "README.md").read_text()
        named = re.findall(r'num_speculative_tokens": (\d+)|num-steps (\d+)', done.out + card)
        assert {a or b for a, b in named} == {str(count)}
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == count


def test_a_serve_command_names_a_target_that_engines_find(share: Cli, tmp_path: Path) -> None:
    """They take a name of ours, or the last part of a directory, for a hub id."""
    shutil.copytree(hub.resolve("tiny-llama"), tmp_path / "models" / "mine")
    for name, here, card in (
        ("tiny-llama", str(hub.resolve("tiny-llama")), "TARGET"),
        (str(tmp_path / "models" / "mine"), str(tmp_path / "models" / "mine"), "TARGET"),
        ("models/mine", "models/mine", "TARGET"),
        ("org/model", "org/model", "org/model"),
        ("gone/with/it", "TARGET", "TARGET"),
    ):
        shutil.rmtree(tmp_path / "ours", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "ours").mkdir()
        drafter = trained("eagle3")
        native.save(tmp_path / "ours", replace(drafter, target=drafter.target | {"name": name}), {}, "")
        done = share("checkpoint=ours", "out_dir=out")
        assert done.code == 0, done.err
        assert f"vllm serve {here} --speculative-config" in done.out
        assert f"vllm serve {card} --speculative-config" in (tmp_path / "out" / "README.md").read_text()
        assert f"--model-path {card} " in (tmp_path / "out" / "README.md").read_text()


def test_a_command_names_the_directory_as_on_the_command_line(share: Cli, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    native.save(tmp_path / "ours", trained("eagle3"), {}, "")
    for out in ("some/where", str(tmp_path / "far")):
        done = share("checkpoint=ours", f"out_dir={out}")
        assert f'"model": "{out}"' in done.out
        assert f'"model": "{Path(out).name}"' in (tmp_path / out / "README.md").read_text()
    assert f"checkpoint={tmp_path}/n " in share("checkpoint=ours", "format=native", f"out_dir={tmp_path}/n").out


def test_a_draft_model_for_another_target_has_no_numbers(conversations: Path, share: Cli, tmp_path: Path) -> None:
    """What its run measured is of another target; its provenance stays in either format."""
    run = trained_by("draft_model", tmp_path, conversations, "train.drafter.layer_ids=[0,1]", "eval.num_prompts=1")
    done = share(f"checkpoint={run}", "format=native", "out_dir=out", "target=tiny-qwen3")
    assert done.code == 0, done.err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Not measured." in card
    assert "measured on tiny-llama, which says nothing about tiny-qwen3" in card
    provenance = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert provenance["identity"]["target"] == "tiny-llama"
    assert provenance["shared"]["command"]


# ------------------------------------------------------------------------- what a checkpoint may not say


def test_a_checkpoint_names_a_method_that_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_line: Any) -> None:
    """A downloaded directory called like a module, whose config.json says custom_class, would have that module imported."""
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Class: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    directory = native_eagle3(Path("trap.Class"))
    for name in ("custom_class", "ngram", "none", "nope"):
        rewrite_config(directory, {"method": name})
        action = lambda: SpeculativeConfig(model="trap.Class", num_speculative_tokens=2).resolve().build(loaded())
        one_line(action, "trap.Class", f"config.json names method {name!r}, which has no checkpoints")
        assert not (tmp_path / "ran").exists()
    rewrite_config(directory, {"method": "eagle3"})
    assert (
        SpeculativeConfig(model="trap.Class", num_speculative_tokens=2).resolve().build(loaded())[0].num_speculative_tokens == 2
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648 in config.json is outside 1..1000"),
        ({"num_hidden_layers": 500}, "num_hidden_layers is 500"),
        ({"num_hidden_layers": "1"}, "num_hidden_layers is '1'"),
        ({"geometry": {"intermediate_size": 2**40}}, "intermediate_size is 1099511627776"),
        ({"geometry": {"num_attention_heads": 0}}, "num_attention_heads is 0"),
        ({"own_lm_head": "yes"}, "own_lm_head is 'yes'"),
        ({"num_depths": 2**31}, "num_depths is 2147483648"),
    ],
)
def test_sizes_are_held_against_the_tensors(change: dict[str, Any], words: str, tmp_path: Path, one_line: Any) -> None:
    """Before a module of that size is made, which would take for ever or all memory."""
    directory = native_eagle3(tmp_path / "drafter")
    rewrite_config(directory, {"drafter": json.loads((directory / "config.json").read_text())["drafter"] | change})
    began = time.monotonic()
    one_line(lambda: native.load(directory), str(directory), words)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("engine", [None, "vllm", "speculators"])
@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_weights_labelled_as_integers_are_refused(engine: str | None, dtype: str, tmp_path: Path, one_line: Any) -> None:
    directory = native_eagle3(tmp_path / "drafter") if engine is None else written(tmp_path, "eagle3", engine)
    path = directory / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["fc.weight"]["dtype"] = dtype
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    kind = {"I32": "int32", "U32": "uint32"}[dtype]
    one_line(lambda: checkpoint.load(directory), f"fc.weight is {kind}, and should be a weight")


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_an_adapter_beside_a_drafter_is_not_passed_over(engine: str | None, tmp_path: Path, one_line: Any) -> None:
    directory = native_eagle3(tmp_path / "drafter") if engine is None else written(tmp_path, "eagle3", engine)
    (directory / hub.ADAPTER).write_text("{}")
    one_line(lambda: checkpoint.load(directory), str(directory), hub.ADAPTER, "merge it")


@pytest.mark.parametrize("placed", [5, [1], {"fc.weight": 5}])
def test_an_index_gives_each_tensor_a_file(placed: Any, tmp_path: Path, one_line: Any) -> None:
    directory = written(tmp_path, "eagle3", "vllm")
    (directory / hf_common.INDEX).write_text(json.dumps({"weight_map": placed}))
    one_line(lambda: checkpoint.load(directory), str(directory), hf_common.INDEX, "weight_map")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, '"\\ud800"', "\0", '{"a": ' + "9" * 5000 + "}"])
def test_json_that_no_parser_reads(text: str, tmp_path: Path, one_line: Any) -> None:
    directory = native_eagle3(tmp_path / "drafter")
    (directory / "config.json").write_text(text)
    for action in (native.load, checkpoint.load, checkpoint.method_of, hf_common.read_config):
        one_line(lambda action=action: action(directory), str(directory), "config.json cannot be read")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("num_speculative_tokens=1.5", "num_speculative_tokens=1.5"),
        ("num_speculative_tokens=true", "num_speculative_tokens=True"),
        ("format=5", "format=5"),
        ("target=[a]", "target=['a']"),
        ("private=yes", "private='yes'"),
        ("out_dir=''", "out_dir=''"),
    ],
)
def test_share_checks_the_types_of_its_keys(argument: str, words: str, share: Cli) -> None:
    assert words in share("checkpoint=org/x", *([] if argument.startswith("out_dir=") else ["out_dir=y"]), argument).error


def native_eagle3(directory: Path) -> Path:
    directory.mkdir(parents=True)
    native.save(directory, Eagle3.init_checkpoint(loaded(), {}, Init()), {}, "")
    return directory


def rewrite_config(directory: Path, change: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
