"""The target over its slot cache: equal to transformers' own forward, and the same bits in any company."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, masking_utils

from specdec import config, hub, method, rejection
from specdec.checkpoint import causal_lm
from specdec.config import pages
from specdec.core import Request
from specdec.drafter.base import Init
from specdec.drafter.batch import Sample
from specdec.engine import Engine
from specdec.model import packed_linear
from specdec.model.attention import UnsupportedModel
from specdec.model.contract import Probe
from specdec.model.kv import SlotCache
from specdec.model.packed_linear import can_pack
from specdec.model.target import CausalLM, fastest_dtype
from specdec.params import SamplingParams
from specdec.training.features import OnlineFeatures
from support.architectures import CASES, LONGROPE, NO_WIDTH, Case, generated, make, prompts

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=hub.TINY)
def model(request: pytest.FixtureRequest) -> CausalLM:
    return CausalLM(f"tiny-{request.param}", "float32", "cpu")


@pytest.mark.parametrize("has_instructions", [True, False])
def test_hidden_states_are_computed_in_the_dtype_that_is_faster_here(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest = torch.bfloat16 if has_instructions else torch.float32
    with monkeypatch.context() as patch:  # not while a model is loaded, which would use the instructions
        patch.setattr(packed_linear, "has_bfloat16_products", lambda: has_instructions)
        assert fastest_dtype(torch.device("cuda")) == torch.bfloat16
        assert fastest_dtype(CPU) == fastest
    monkeypatch.setattr(pages, "fastest_dtype", lambda device: fastest)
    model = pages.Model(**config.read(config.CONF / "model" / "llama.yaml") | {"path": "tiny-llama", "device": "cpu"})
    assert model.load(fastest=True).dtype == fastest
    assert model.load().dtype == torch.float32


def tokens_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count)


def forward(model: CausalLM, cache, rows: list[np.ndarray], start: list[int], **options):
    flat = torch.from_numpy(np.concatenate(rows))
    return model.forward(cache, flat, np.array(start), np.array([len(row) for row in rows]), **options)


def test_logits_are_those_of_transformers(model: CausalLM) -> None:
    """Past the sliding window, prefilled in chunks, then in ragged steps, with a rejected draft in between."""
    reference = hub.load_model(model.path, dtype=torch.float32, attn_implementation="eager")
    ids = tokens_of(90)
    with torch.no_grad():
        want = reference(torch.from_numpy(ids)[None]).logits[0]
    cache = model.new_cache()
    cache.reserve(2, 128)
    model.prefill(cache, 0, ids[:50], 0, chunk=16)
    model.prefill(cache, 1, ids[:60], 0, chunk=64)
    forward(model, cache, [tokens_of(5, 1), tokens_of(3, 2)], [50, 60])  # rejected: overwritten below
    out = forward(model, cache, [ids[50:57], ids[60:62]], [50, 60])
    torch.testing.assert_close(out.logits, torch.cat([want[50:57], want[60:62]]), rtol=1e-4, atol=1e-3)


def test_tapped_states_are_those_of_transformers(model: CausalLM) -> None:
    """Id i is what enters layer i; the last id is what leaves the last layer, before the final norm."""
    reference = hub.load_model(model.path, dtype=torch.float32, attn_implementation="eager")
    ids = tokens_of(20)
    entering = {}
    for i, layer in enumerate(reference.model.layers):
        layer.register_forward_pre_hook(lambda _, args, kwargs, i=i: entering.update({i: args[0]}), with_kwargs=True)
    reference.model.norm.register_forward_pre_hook(lambda _, args: entering.update({len(reference.model.layers): args[0]}))
    with torch.no_grad():
        reference(torch.from_numpy(ids)[None])
    cache = model.new_cache()
    cache.reserve(1, 128)
    layers = (0, 2, model.num_layers)
    out = model.prefill(cache, 0, ids, 0, chunk=8, hidden_layers=layers)
    want = torch.stack([entering[i][0] for i in layers], 1)
    torch.testing.assert_close(out.hidden_NTD, want, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match=r"hidden layer 9 is outside 0\.\.4"):
        model.prefill(cache, 0, ids, 0, chunk=8, hidden_layers=(9,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
def test_a_row_has_the_same_bits_in_any_company(architecture: str, dtype: str) -> None:
    """Alone or beside others, one token at a time or with a draft, with few slots in use or many."""
    model = CausalLM(f"tiny-{architecture}", dtype, "cpu")
    if not can_pack(model.dtype, CPU):
        pytest.skip("this CPU has no packed linear layers")
    prompts = [tokens_of(n, seed=n) for n in (30, 30, 170, 300)]
    tail = tokens_of(12, seed=5)

    def run(rows: list[int], counts: list[int]) -> torch.Tensor:
        cache = model.new_cache()
        cache.reserve(len(rows), 512)
        for row, which in enumerate(rows):
            model.prefill(cache, row, prompts[which], 0, chunk=64)
        out = forward(model, cache, [tail[:count] for count in counts], [len(prompts[which]) for which in rows])
        return out.logits[: counts[0]]

    alone = torch.cat([run([0], [12])])
    for count in (1, 2, 3, 5, 9):
        assert torch.equal(run([0], [count]), alone[:count]), f"{count} tokens alone"
    for mates, count in itertools.product(([1], [2], [1, 2, 3]), (1, 4)):
        got = run([0, *mates], [count] + [1 + m for m in mates])
        assert torch.equal(got, alone[:count]), f"{count} tokens beside {mates}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [120, 250, 380, 508, 636, 764, 892, 1020])
def test_a_draft_across_a_border_of_slots_changes_no_bits(length: int, dtype: str) -> None:
    """The number of slots that attention looks at grows with the draft, and with batch mates."""
    model = CausalLM("tiny-llama", dtype, "cpu")
    if not can_pack(model.dtype, CPU):
        pytest.skip("this CPU has no packed linear layers")
    prompt = tokens_of(length, seed=1)
    tail = tokens_of(12, seed=2)

    def run(count: int, mate: int) -> torch.Tensor:
        cache = model.new_cache()
        cache.reserve(2, 2048)
        model.prefill(cache, 0, prompt, 0, chunk=64)
        rows = [tail[:count]]
        start = [length]
        if mate:
            model.prefill(cache, 1, tokens_of(mate), 0, chunk=512)
            rows = [*rows, tail[:1]]
            start = [*start, mate]
        return forward(model, cache, rows, start).logits[:count]

    alone = torch.cat([run(count, 0)[-1:] for count in range(1, 13)])  # each token as if it were the last
    for mate in (0, 40, 300, 1300):
        assert torch.equal(run(12, mate), alone), f"beside {mate} tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 32), (576, 1536), (192, 576), (896, 4864)])
def test_packed_linear_is_a_linear_whose_rows_are_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip("this CPU has no packed linear layers")
    torch.manual_seed(0)
    plain = torch.nn.Linear(shape[1], shape[0], bias=True, dtype=dtype).requires_grad_(False)
    layers = torch.nn.Sequential(plain)
    packed_linear.pack(layers)
    packed: Any = layers[0]
    x = torch.randn(2, 40, shape[1], dtype=dtype)
    loose = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(packed(x), plain(x), **loose)
    many = packed(x[0])
    for count in (1, 2, 3, 4, 7, 8, 16, 33):
        assert torch.equal(packed(x[0, :count]), many[:count])
    assert torch.equal(packed.weight, plain.weight), "models may read it, as routers do"


def test_models_that_cannot_roll_back_are_refused(tmp_path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4, hidden_size=64, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        CausalLM(tmp_path, "float32", "cpu")


# ------------------------------------------------------------------------------------------ LongRoPE


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of factors: one up to 70 tokens, another for the rest of 512."""
    directory = tmp_path_factory.mktemp("longrope")
    rope = {**LONGROPE, "original_max_position_embeddings": 70}
    make(Case("phi3", {**NO_WIDTH, "original_max_position_embeddings": 70, "rope_parameters": rope}), directory)
    return directory


def test_a_longrope_model_ends_where_its_first_factors_do(longrope: Path, one_line: Callable[..., str]) -> None:
    """Beyond, transformers turns every position of a forward by other factors, whatever row it is of."""
    target = CausalLM(longrope, "float32", "cpu")
    assert target.max_model_len == 70
    none = method.build("none", target)
    scheme = rejection.build("standard")
    words = ("max_model_len=71 is outside 2..70", "LongRoPE")
    one_line(lambda: Engine(target, none, scheme, max_model_len=71), *words)
    long = Request("a", list(range(70)), SamplingParams(max_tokens=1))
    one_line(lambda: Engine(target, none, scheme).add(long), "the prompt has 70 tokens", "shorten the prompt; ", "LongRoPE")
    sample = Sample("a", np.arange(71), np.ones(71, dtype=bool))
    one_line(lambda: OnlineFeatures(target, [1])([sample]), "sample a has 71 tokens", "lower data.max_length", "LongRoPE")
    drafter = method.build("draft_model", CausalLM("tiny", "float32", "cpu"), model=target, num_speculative_tokens=2)
    assert drafter.max_model_len == 70, "rows that are longer are not drafted for"


def test_a_longrope_model_decodes_what_generate_does_up_to_there(longrope: Path) -> None:
    """Prompts of 3 to 64 tokens beside each other, and answers that end at 70."""
    target = CausalLM(longrope, "float32", "cpu")
    want = [answer[: 70 - len(ids)] for ids, answer in zip(prompts(), generated(longrope), strict=True)]
    for max_model_len in (None, 70):
        engine = Engine(
            target, method.build("none", target), rejection.build("standard"), max_batch_size=3, max_model_len=max_model_len
        )
        params = [SamplingParams(temperature=0, max_tokens=len(answer)) for answer in want]
        requests = [
            Request(str(i), ids, request_params) for i, (ids, request_params) in enumerate(zip(prompts(), params, strict=True))
        ]
        done = {request.id: request.output_token_ids for request in engine.run(requests)}
        assert [done[str(i)] for i in range(len(want))] == want
    assert len(want[-1]) == 6


def test_a_longrope_draft_model_is_trained_on_samples_of_one_set_of_factors(
    longrope: Path, one_line: Callable[..., str]
) -> None:
    target = CausalLM("tiny", "float32", "cpu")
    method_class = method.find("draft_model")
    checkpoint = causal_lm.load(longrope)
    target.vocab_size = 320
    drafter: Any = method_class(target, checkpoint, 2)  # type: ignore[call-arg]
    drafter.for_training(drafter.objective, drafter.init_type())
    batches = {n: OnlineFeatures(target, [])([Sample("a", np.arange(n), np.ones(n, dtype=bool))]) for n in (70, 71)}
    drafter.loss(batches[70])[0].backward()
    one_line(lambda: drafter.loss(batches[71]), "a sample of 71 tokens", "data.max_length=70", "LongRoPE")


# ------------------------------------------------------------------------------------------ what is asked of a model


@pytest.mark.parametrize(
    ("rule", "sliding_window", "word"),
    [
        (masking_utils.causal_mask_function, None, ""),
        (masking_utils.sliding_window_causal_mask_function(24), 24, ""),
        (masking_utils.sliding_window_causal_mask_function(4096), None, "does not see"),  # the window is in the mask alone
        (masking_utils.sliding_window_causal_mask_function(25), 24, "sees"),
        (masking_utils.sliding_window_causal_mask_function(23), 24, "does not see"),
        (masking_utils.causal_mask_function, 24, "sees"),
        (masking_utils.bidirectional_mask_function, None, "position 0 sees position 1"),
        (masking_utils.sliding_window_bidirectional_mask_function(24), 24, "sees"),
        (masking_utils.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)), None, "does not see"),
        (masking_utils.packed_sequence_mask_function(torch.zeros(1, 4)), None, "cannot be read"),
    ],
)
def test_the_rule_of_a_mask_is_that_of_the_slots(rule: Any, sliding_window: int | None, word: str) -> None:
    """Far beyond the few tokens of the probe."""
    probe = Probe(SlotCache([], torch.float32, CPU), max_positions=131072)
    if not word:
        probe._check_mask(rule, sliding_window, torch.nn.Identity())
        return
    with pytest.raises(UnsupportedModel, match=word):
        probe._check_mask(rule, sliding_window, torch.nn.Identity())


def test_a_window_that_only_the_mask_knows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_line: Callable[..., str]
) -> None:
    """The probe has fewer tokens than the window, so the logits are those of transformers."""
    from transformers.models.mistral import modeling_mistral

    make(Case("mistral", {"sliding_window": 24}), tmp_path)
    assert CausalLM(tmp_path, "float32", "cpu").vocab_size == 320
    forward = modeling_mistral.MistralAttention.forward

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = self.config.sliding_window
        self.config.sliding_window = None
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config.sliding_window = held

    monkeypatch.setattr(modeling_mistral.MistralAttention, "forward", without)
    one_line(lambda: CausalLM(tmp_path, "float32", "cpu"), "model_type 'mistral'", "a mask that the engine does not know")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_that_widens_its_logits_is_taken_in_16_bits(dtype: str, tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.model_type == "beam")
    make(case, tmp_path)
    CausalLM(tmp_path, dtype, "cpu").check_states()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "break_it",
    [
        lambda interface, q, k, v, **more: interface(q, k, v, **{**more, "scaling": 2 * more["scaling"]}),
        lambda interface, q, k, v, **more: interface(q, k, v.roll(1, 2), **more),
        lambda interface, q, k, v, **more: (interface(q, k, v, **more)[0] + v.mean(2).repeat(1, 2, 1).unsqueeze(1), None),
    ],
    ids=["another scale", "another token's values", "the mean of all tokens"],
)
def test_what_attention_does_beside_the_interface_is_found(
    break_it: Any, dtype: str, monkeypatch: pytest.MonkeyPatch, one_line: Callable[..., str]
) -> None:
    """Whatever makes other logits over the slot cache than transformers' own attention."""
    from transformers import AttentionInterface

    from specdec.model import contract
    from specdec.model.attention import attention_interface

    def broken(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> Any:
        def interface(q: Any, k: Any, v: Any, **rest: Any) -> Any:
            return attention_interface(module, q, k, v, attention_mask, **rest)

        return break_it(interface, query, key, value, **more)

    for name in (contract.ATTENTION, contract.PROBE):
        monkeypatch.setitem(AttentionInterface._global_mapping, name, broken)
    one_line(lambda: CausalLM("tiny", dtype, "cpu"), "model_type 'llama' cannot be decoded here", "transformers' own attention")


def test_what_is_no_causal_lm_is_refused_for_what_it_is(tmp_path: Path, one_line: Callable[..., str]) -> None:
    """Another copy of the weights would not help."""
    AutoConfig.for_model("vit", hidden_size=64, num_hidden_layers=2, num_attention_heads=4).save_pretrained(tmp_path)
    message = one_line(lambda: CausalLM(tmp_path, "float32", "cpu"), "model_type 'vit'", "use another model")
    assert "fetch" not in message


def test_states_that_cannot_be_used_are_refused_before_a_directory_is_taken(
    tmp_path: Path, one_line: Callable[..., str]
) -> None:
    make(Case("modernbert-decoder", {"sliding_window": 24}), tmp_path)
    target = CausalLM(tmp_path, "float32", "cpu")
    words = ("hidden states of model_type 'modernbert-decoder' cannot be used", "ngram")
    one_line(lambda: OnlineFeatures(target, [1]), *words)
    for name in ("eagle", "eagle3", "mlp", "mtp", "peagle"):
        method_class: Any = method.find(name)
        one_line(lambda method_class=method_class: method_class.init_checkpoint(target, {}, Init()), *words)
    out = tmp_path / "states"
    config = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
    one_line(
        lambda: method.build("extract_hidden_states", target, shared_storage_path=str(out), draft_model_config=config), *words
    )
    assert not out.exists()


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "phi"])
def test_layers_under_other_names_make_a_draft_model(name: str, tmp_path: Path) -> None:
    """The first of two layers, trained from the target's own, and read back."""
    more = {"ffn_dim": 128, "word_embed_proj_dim": 64} if name == "opt" else {}
    make(Case(name, {**NO_WIDTH, **more}), tmp_path / "target")
    target = CausalLM(tmp_path / "target", "float32", "cpu")
    method_class = method.find("draft_model")
    drafter: Any = method_class(target, method_class.init_checkpoint(target, {"num_hidden_layers": 1}, None), 2)  # type: ignore[attr-defined, call-arg]
    drafter.for_training(drafter.objective, drafter.init_type())
    drafter.loss(OnlineFeatures(target, [])([Sample("a", np.arange(20), np.ones(20, dtype=bool))]))[0].backward()
    (tmp_path / "draft").mkdir()
    drafter.write(tmp_path / "draft", drafter.state_dict(), {}, "")
    draft = CausalLM(tmp_path / "draft", "float32", "cpu")
    assert draft.num_layers == 1
    assert torch.equal(
        draft.layers[0].state_dict()[key := next(iter(draft.layers[0].state_dict()))], target.layers[0].state_dict()[key]
    )


def test_models_may_be_loaded_by_several_threads() -> None:
    """transformers keeps what a load sets in one place."""
    names = ["tiny-llama", "tiny-gemma3", "tiny-qwen3"] * 3
    with ThreadPoolExecutor(3) as threads:
        targets = list(threads.map(lambda name: CausalLM(name, "float32", "cpu"), names))
    assert [target.name for target in targets] == names
