"""Foreign checkpoints: what is written comes back the same, whatever does not fit is refused by name, the lint knows the
engines' rules, and the public `speculators` package computes the same drafts from what we write."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import checkpoint, hub
from specdec.chain import ChainDrafter, Init
from specdec.checkpoint import foreign, mlp_speculator, native
from specdec.checkpoint.native import Checkpoint
from specdec.config import CONF
from specdec.method.eagle import Eagle
from specdec.method.eagle3 import Eagle3
from specdec.target import CausalLM

VOCAB, HIDDEN = 320, 64  # of the tiny models
REDUCED = np.r_[10:200:2, 200:320]
FROZEN = Init(train_lm_head=False)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip


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
    "mlp": Variant("mlp", {"tie_weights": False}, engines=("vllm",)),
    "mlp-tied": Variant("mlp", {"tie_weights": True, "scale_input": True, "n_predict": 4}, engines=("vllm",)),
    "mlp-one-head": Variant("mlp", {"tie_weights": True, "n_predict": 1, "inner_dim": HIDDEN}, engines=("vllm",)),
}  # fmt: skip
PAIRS = [(name, engine) for name, variant in VARIANTS.items() for engine in variant.engines]
EAGLE3_DEEP = {"num_hidden_layers": 24}  # a target whose default layers the engines would guess


@cache
def loaded(name: str = "tiny-llama") -> CausalLM:
    return CausalLM(name, "float32", "cpu")


def trained(variant: str, **of_target: Any) -> Checkpoint:
    """A drafter whose weights were moved as if by training; of_target: facts to alter."""
    made = _trained(variant)
    return replace(made, tensors=dict(made.tensors or {}), config=dict(made.config), target=made.target | of_target)


@cache
def _trained(name: str) -> Checkpoint:
    own, noise = VARIANTS[name], torch.Generator().manual_seed(5)
    target = loaded(own.target)
    if own.kind == "mlp":
        config = {
            "n_predict": 3, "inner_dim": 48, "tie_weights": False, "scale_input": False, "own_embedding": True,
            "own_lm_head": True, "draft_vocab_size": VOCAB,
        } | own.architecture  # fmt: skip
        table = mlp_speculator.shapes(config, HIDDEN)
        made = Checkpoint("mlp", config, native.facts(target), {key: torch.zeros(shape) for key, shape in table.items()})
    else:
        kind: type[ChainDrafter] = Eagle if own.kind == "eagle" else Eagle3
        made = kind.fresh(target, own.architecture, own.init, REDUCED if own.reduced else None)
        if own.kind == "peagle":
            taps = len(made.config["eagle_aux_hidden_state_layer_ids"])
            assert made.tensors is not None
            made.tensors["mask_hidden"] = torch.zeros(1, 1, taps * HIDDEN)
            made = replace(made, method="peagle", config=made.config | {"mask_token_id": 259})
    assert made.tensors is not None
    for _, tensor in sorted(made.tensors.items()):
        if tensor.is_floating_point():
            tensor += 0.15 * torch.randn(tensor.shape, generator=noise)
    return made


def written(directory: Path, name: str, engine: str, **of_target: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    target = loaded(VARIANTS[name].target) if "gemma" in name else None
    checkpoint.write(trained(name, **of_target), directory, engine, target)
    return directory


def edited(directory: Path, tensors: Callable[[dict[str, Tensor]], Any] | None = None, **keys: Any) -> Path:
    """Change a written directory: tensors in place, or a new dict of them; keys of config.json, None meaning that it goes."""
    if tensors is not None:
        held = load_file(directory / "model.safetensors")
        made = tensors(held)
        held = made if isinstance(made, dict) else held
        save_file({key: tensor.contiguous().clone() for key, tensor in held.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | keys
    config = {key: value for key, value in config.items() if keys.get(key, 0) is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def same(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert (ours.method, ours.config, ours.target) == (theirs.method, theirs.config, theirs.target)
    assert ours.tensors is not None
    assert theirs.tensors is not None
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in ours.tensors.items():
        assert tensor.dtype == theirs.tensors[key].dtype, key
        assert tensor.numpy().tobytes() == theirs.tensors[key].numpy().tobytes(), key


@pytest.fixture
def one_line() -> Iterator[Any]:
    """Catches an error, and holds it to be one line that contains the given words."""

    def refuse(action: Any, *words: str) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            action()
        message = str(caught.value)
        assert "\n" not in message, message
        for word in words:
            assert word in message, message
        return message

    return refuse


# ------------------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_what_is_written_comes_back(name: str, engine: str, tmp_path: Path) -> None:
    came = checkpoint.load(written(tmp_path, name, engine))
    same(came, trained(name))
    assert (came.embedding is not None) == ("gemma" in name), "the embedding is written only where engines would scale another"
    if VARIANTS[name].kind in ("eagle", "eagle3"):
        drafter = {"eagle": Eagle, "eagle3": Eagle3}[VARIANTS[name].kind](loaded(VARIANTS[name].target), came, 2)
        assert drafter.config == came.config


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_float_type_comes_back(engine: str, dtype: torch.dtype, tmp_path: Path) -> None:
    half = trained("eagle3-reduced")
    assert half.tensors is not None
    half.tensors = {key: t.to(dtype) if t.is_floating_point() else t for key, t in half.tensors.items()}
    checkpoint.write(half, tmp_path, engine)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
    came = checkpoint.load(tmp_path)
    assert came.tensors is not None
    assert all(torch.equal(tensor, half.tensors[key]) for key, tensor in came.tensors.items())
    assert {tensor.dtype for tensor in came.tensors.values()} == {dtype, torch.int64}


def test_vllm_and_sglang_get_the_same_eagle3_directory(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", "eagle3-reduced", "vllm"), written(tmp_path / "b", "eagle3-reduced", "sglang")
    assert {path.name: path.read_bytes() for path in a.iterdir()} == {path.name: path.read_bytes() for path in b.iterdir()}


def test_default_layers_are_not_written_and_come_back(tmp_path: Path) -> None:
    """Both engines guess the same layers, and read a list that says them differently."""
    made = trained("eagle3-layers", **EAGLE3_DEEP)
    made.config["eagle_aux_hidden_state_layer_ids"] = [2, 12, 21]
    checkpoint.write(made, tmp_path, "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    assert "eagle_config" not in config
    assert "eagle_aux_hidden_state_layer_ids" not in config
    same(checkpoint.load(tmp_path), made)
    edited(tmp_path, specdec=None)
    assert checkpoint.load(tmp_path).config["eagle_aux_hidden_state_layer_ids"] is None, "the depth is not known"


def test_a_native_checkpoint_is_read_first(tmp_path: Path) -> None:
    made = trained("eagle3")
    native.save(tmp_path, made, {}, "")
    same(checkpoint.load(tmp_path), made)


def test_the_head_of_the_target_is_no_draft_vocabulary(tmp_path: Path) -> None:
    """SGLang takes the target's head where draft_vocab_size is null and the drafter's where it is a number."""
    config = json.loads((written(tmp_path / "a", "eagle3-target-head", "sglang") / "config.json").read_text())
    assert config["draft_vocab_size"] is None
    own = written(tmp_path / "b", "eagle3", "sglang")
    assert json.loads((own / "config.json").read_text())["draft_vocab_size"] == VOCAB
    assert "lm_head.weight" in load_file(own / "model.safetensors"), "a trained head is kept (vllm-ascend#11374)"


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
    told = config.pop("specdec")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eagle", "model": config, "specdec": told}))
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


def test_an_mlp_that_shares_with_its_target_is_written_whole(tmp_path: Path, one_line: Any) -> None:
    config = {
        "n_predict": 2, "inner_dim": HIDDEN, "tie_weights": False, "scale_input": True, "own_embedding": False,
        "own_lm_head": False, "draft_vocab_size": VOCAB,
    }  # fmt: skip
    table = mlp_speculator.shapes(config, HIDDEN)
    made = Checkpoint("mlp", config, native.facts(loaded()), {key: torch.ones(shape) for key, shape in table.items()})
    one_line(lambda: checkpoint.write(made, tmp_path, "vllm"), "target=")
    checkpoint.write(made, tmp_path, "vllm", loaded())
    came = checkpoint.load(tmp_path)
    assert came.tensors is not None
    assert came.config == config | {"own_embedding": True, "own_lm_head": True}
    for i in range(2):
        assert torch.equal(came.tensors[f"emb.{i}.weight"], loaded().model.get_input_embeddings().weight)
        assert torch.equal(came.tensors[f"head.{i}.weight"], loaded().head_rows()[0])
    made.config["draft_vocab_size"] = 215
    one_line(lambda: checkpoint.write(made, tmp_path, "vllm", loaded()), "215", "no d2t")


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
    head = Eagle.fresh(loaded(), {}, Init())
    one_line(lambda: checkpoint.write(head, tmp_path, "vllm"), "output layer of its own", "train_lm_head=false")
    both = trained("eagle3-fc-norm")
    both.config["norm_before_fc"] = True
    one_line(lambda: checkpoint.write(both, tmp_path, "speculators"), "norm_before_fc and fc_norm")
    one_line(lambda: checkpoint.write(trained("eagle3-gemma3"), tmp_path, "vllm"), "target=")
    unknown = replace(trained("eagle3"), target={})
    one_line(lambda: checkpoint.write(unknown, tmp_path, "vllm"), "does not tell hidden_size")


def test_directories_of_this_machine_stay_here(tmp_path: Path) -> None:
    for engine in ("vllm", "speculators"):
        directory = tmp_path / engine
        directory.mkdir()
        checkpoint.write(trained("eagle3", name="/home/somebody/models/Llama-3"), directory, engine)
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


def test_options_of_the_speculators_format(tmp_path: Path, one_line: Any) -> None:
    def bad(keys: dict[str, Any], *words: str) -> None:
        edited(written(tmp_path, "eagle3-reduced", "speculators"), **keys)
        one_line(lambda: checkpoint.load(tmp_path), *words)

    layer = json.loads((written(tmp_path, "eagle3", "speculators") / "config.json").read_text())["transformer_layer_config"]
    bad({"norm_before_residual": None}, "norm_before_residual is missing")
    bad({"transformer_layer_config": layer | {"model_type": "gemma3"}}, "'gemma3'")
    bad({"transformer_layer_config": layer | {"attention_bias": True}}, "attention_bias=True")
    bad({"speculators_model_type": "peagle"}, "'peagle'")
    bad({"speculators_model_type": "dflash"}, "dflash", "cannot be imported")


def test_only_layers_inside_eagle_config_leave_theirs(tmp_path: Path) -> None:
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


def test_facts_that_nobody_told_are_not_compared(tmp_path: Path, one_line: Any) -> None:
    came = checkpoint.load(edited(written(tmp_path, "eagle3", "vllm"), specdec=None))
    assert came.target == {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    came.check("eagle3", loaded("tiny-qwen3"))
    came.target["vocab_size"] = 100
    one_line(lambda: came.check("eagle3", loaded()), "vocab_size 100")


def test_bad_directories(tmp_path: Path, one_line: Any) -> None:
    def refused(*words: str) -> None:
        one_line(lambda: checkpoint.load(tmp_path), *words)

    one_line(lambda: foreign.read_config(tmp_path), "no config.json")
    refused("config.json")
    (tmp_path / "config.json").write_text("[1]")
    refused("no mapping")
    (tmp_path / "config.json").write_text("{")
    refused("cannot be read")
    written(tmp_path, "eagle3", "vllm")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for cut in (0, 5, 500, len(whole) - 10):
        (tmp_path / "model.safetensors").write_bytes(whole[:cut])
        refused("model.safetensors cannot be read", "fetch it again")
    (tmp_path / "model.safetensors").unlink()
    refused("no weights")
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"):
        (tmp_path / name).write_bytes(pickle.dumps({"fc.weight": 1}))
        refused(name, "refused: pickled weights can run code; convert to safetensors")
        (tmp_path / name).unlink()
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(whole)
    refused("2 safetensors files")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "medusa", "medusa_num_heads": 3}, ("medusa", "cannot be imported")),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}}, ("dflash", "cannot be imported")),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}, ("deepseek", "cannot be imported")),
        ({"architectures": ["BertModel"], "model_type": "bert"}, ("known format", "'bert'")),
    ],
)  # fmt: skip
def test_formats_that_we_know_of(config: dict[str, Any], words: tuple[str, ...], tmp_path: Path, one_line: Any) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    one_line(lambda: checkpoint.load(tmp_path), *words)
