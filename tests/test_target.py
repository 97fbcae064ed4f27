"""The target over its slot cache: equal to transformers' own forward, and the same bits in any company."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from specdec import hub
from specdec.linear import PackedLinear, can_pack
from specdec.target import CausalLM

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=hub.TINY)
def model(request: pytest.FixtureRequest) -> CausalLM:
    return CausalLM(f"tiny-{request.param}", "float32", "cpu")


def tokens_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count)


def forward(model: CausalLM, cache, rows: list[np.ndarray], start: list[int], **options):
    flat = torch.from_numpy(np.concatenate(rows))
    return model.forward(cache, flat, np.array(start), np.array([len(row) for row in rows]), **options)


def test_logits_are_those_of_transformers(model: CausalLM) -> None:
    """Past the sliding window, prefilled in chunks, then in ragged steps, with a rejected draft in between."""
    theirs = hub.load_model(model.path, dtype=torch.float32, attn_implementation="eager")
    ids = tokens_of(90)
    with torch.no_grad():
        want = theirs(torch.from_numpy(ids)[None]).logits[0]
    cache = model.new_cache()
    cache.reserve(2, 128)
    model.prefill(cache, 0, ids[:50], 0, chunk=16)
    model.prefill(cache, 1, ids[:60], 0, chunk=64)
    forward(model, cache, [tokens_of(5, 1), tokens_of(3, 2)], [50, 60])  # rejected: overwritten below
    out = forward(model, cache, [ids[50:57], ids[60:62]], [50, 60])
    torch.testing.assert_close(out.logits, torch.cat([want[50:57], want[60:62]]), rtol=1e-4, atol=1e-3)


def test_tapped_states_are_those_of_transformers(model: CausalLM) -> None:
    """Id i is what enters layer i; the last id is what leaves the last layer, before the final norm."""
    theirs = hub.load_model(model.path, dtype=torch.float32, attn_implementation="eager")
    ids = tokens_of(20)
    entering = {}
    for i, layer in enumerate(theirs.model.layers):
        layer.register_forward_pre_hook(lambda _, args, kwargs, i=i: entering.update({i: args[0]}), with_kwargs=True)
    theirs.model.norm.register_forward_pre_hook(lambda _, args: entering.update({len(theirs.model.layers): args[0]}))
    with torch.no_grad():
        theirs(torch.from_numpy(ids)[None])
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
    prompt, tail = tokens_of(length, seed=1), tokens_of(12, seed=2)

    def run(count: int, mate: int) -> torch.Tensor:
        cache = model.new_cache()
        cache.reserve(2, 2048)
        model.prefill(cache, 0, prompt, 0, chunk=64)
        rows, start = [tail[:count]], [length]
        if mate:
            model.prefill(cache, 1, tokens_of(mate), 0, chunk=512)
            rows, start = [*rows, tail[:1]], [*start, mate]
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
    packed = PackedLinear(plain)
    x = torch.randn(2, 40, shape[1], dtype=dtype)
    loose = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(packed(x), plain(x), **loose)
    many = packed(x[0])
    for count in (1, 2, 3, 4, 7, 8, 16, 33):
        assert torch.equal(packed(x[0, :count]), many[:count])


def test_models_that_cannot_roll_back_are_refused(tmp_path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4, hidden_size=64, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        CausalLM(tmp_path, "float32", "cpu")
