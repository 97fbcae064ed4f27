"""Compiled kernels against their readable references, and the same bits whatever stands beside a row."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)

from specdec.model import arena, fused, kernels, packed_linear
from specdec.model.attention import SlotAttention
from specdec.model.contract import ATTENTION
from specdec.model.kv import CAUSAL, Block, ForwardBatch, SlotCache, Tree, Visibility
from specdec.model.packed_linear import PackedEmbedding, PackedLinear
from specdec.model.target import CausalLM

SHAPES = [
    (16, 7),
    (64, 32),
    (192, 576),
    (50, 33),
    (40, 1100),
]  # [out, in]; some do not fill their last panel, one takes several blocks
ROWS = (1, 2, 3, 5, 6, 7, 8, 12, 13, 33)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def linear(shape: tuple[int, int], dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(sum(shape))
    return nn.Linear(shape[1], shape[0], bias=bias, dtype=dtype).requires_grad_(False)


def packed(plain: nn.Linear) -> PackedLinear:
    return PackedLinear.of(plain, arena.Arena(packed_linear.panel_bytes(plain)))


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_its_reference_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    plain = linear(shape, dtype)
    layer = packed(plain)
    x = torch.randn(13, shape[1]).to(dtype)
    expected = kernels.product_reference(x.float().numpy(), plain.weight.float().numpy(), plain.bias.float().numpy())
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), torch.from_numpy(expected[:rows]).to(dtype)), rows


@pytest.mark.parametrize("shape", SHAPES)
def test_threads_change_no_bits(shape: tuple[int, int], two_threads: None) -> None:
    layer = packed(linear(shape))
    x = torch.randn(9, shape[1])
    together = layer(x)
    torch.set_num_threads(1)
    assert torch.equal(layer(x), together)


def test_a_packed_layer_has_what_a_plain_one_has() -> None:
    plain = linear((50, 33))
    layer = packed(plain)
    assert torch.equal(layer.weight, plain.weight)
    assert layer.bias is not None
    assert torch.equal(layer.bias, plain.bias)
    assert packed(linear((50, 33), bias=False)).bias is None
    assert layer(torch.zeros(0, 33)).shape == (0, 50)
    assert layer(torch.zeros(2, 3, 33)).shape == (2, 3, 50)


def test_layers_that_lie_together_are_one_product() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = linear((64, 24))
            self.b = linear((32, 24))
            self.c = linear((32, 24))

    parts: Any = Parts()
    x = torch.randn(5, 24)
    expected = torch.cat([parts.a(x), parts.b(x)], -1)
    packed_linear.pack(parts)
    joined = PackedLinear.joined((parts.a, parts.b))
    assert joined is not None
    torch.testing.assert_close(joined(x), expected)
    assert torch.equal(joined(x), torch.cat([parts.a(x), parts.b(x)], -1))
    assert joined.panels.data_ptr() == parts.a.panels.data_ptr(), "a view"
    assert PackedLinear.joined((parts.a, parts.c)) is None, "b lies between them"
    assert PackedLinear.joined((parts.b, parts.a)) is None
    assert PackedLinear.joined((parts.a, linear((32, 24)))) is None


@pytest.mark.parametrize("scaled", [False, True])
def test_a_tied_embedding_is_not_held_twice(scaled: bool) -> None:
    class Scaled(nn.Embedding):
        embed_scale = torch.tensor(8.0)

        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) * self.embed_scale

    class Odd(nn.Embedding):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) + 1

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = (Scaled if scaled else nn.Embedding)(50, 24)
            self.odd = Odd(50, 24)
            self.head = linear((50, 24), bias=False)
            self.embed.weight = self.head.weight
            self.odd.weight = self.head.weight

    model: Any = Tied()
    ids = torch.tensor([[0, 49, 17]])
    expected = model.embed(ids)
    packed_linear.pack(model)
    assert type(model.embed) is PackedEmbedding
    assert torch.equal(model.embed(ids), expected)
    assert type(model.odd) is Odd, "it does more than look up and scale"


def test_an_arena_hands_out_what_it_has() -> None:
    region = arena.Arena(arena.padded(4 * 10) + arena.padded(2 * 3))
    a = region.take((2, 5), torch.float32)
    b = region.take((3,), torch.bfloat16)
    assert a.data_ptr() % arena.ALIGNMENT == b.data_ptr() % arena.ALIGNMENT == 0
    a.fill_(1)
    assert b.float().tolist() == [0, 0, 0]
    with pytest.raises(AssertionError, match="full"):
        region.take((1,), torch.float32)


def test_a_system_without_huge_pages_is_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arena, "SYSTEM_SETTING", tmp_path / "none")
    assert not arena.has_huge_pages()
    (tmp_path / "none").write_text("always madvise [never]")
    assert not arena.has_huge_pages()
    arena.note_ordinary_pages.cache_clear()
    assert arena.Arena(100).take((25,), torch.float32).sum() == 0
    assert capsys.readouterr().err == ""
    for _ in range(2):
        arena.Arena(arena.WORTH_A_NOTE + 1)
    note = capsys.readouterr().err
    assert note.startswith("note: no huge pages")
    assert note.count("\n") == 1


# ---------------------------------------------------------------- attention

START = np.array([3, 70, 0, 140])
COUNT = np.array([4, 1, 0, 6])
TREES = np.full((4, 6), -1)
TREES[0, :4] = [-1, 0, 0, 2]
TREES[3] = [-1, 0, 1, 0, -1, 4]


def attention(
    visibility: Visibility, heads: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[SlotAttention, Tensor]:
    """A forward over a filled cache, and its queries. heads: query heads, KV heads, width of keys, of values."""
    num_heads, kv_heads, key_width, value_width = heads
    torch.manual_seed(3)
    cache = SlotCache([(kv_heads, key_width, value_width)], dtype, torch.device("cpu"))
    cache.reserve(4, 256)
    cache.key_RHSD[0].normal_()
    cache.value_RHSD[0].normal_()
    batch = ForwardBatch(cache, 0, START, COUNT, visibility)
    return SlotAttention(batch), torch.randn(batch.num_tokens, num_heads, key_width)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("visibility", [CAUSAL, Tree(TREES), Block()], ids=["causal", "tree", "block"])
@pytest.mark.parametrize("heads", [(4, 2, 16, 16), (3, 1, 48, 32), (2, 2, 96, 128)], ids=str)
def test_attention_is_that_of_torch(
    heads: tuple[int, int, int, int], visibility: Visibility, window: int | None, softcap: float | None
) -> None:
    """Whose own mask is that of the batch."""
    kernel, query_NHW = attention(visibility, heads)
    assert kernel.by_kernel
    plain, _ = attention(visibility, heads)
    plain.by_kernel = False
    torch.testing.assert_close(
        kernel.attend(0, query_NHW, None, window, softcap),
        plain.attend(0, query_NHW, None, window, softcap),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("visibility", [CAUSAL, Tree(TREES)], ids=["causal", "tree"])
def test_attention_over_bfloat16_is_that_over_the_same_numbers_in_float32(visibility: Visibility) -> None:
    heads = (4, 2, 96, 128)
    half, query_NHW = attention(visibility, heads, torch.bfloat16)
    full, _ = attention(visibility, heads)
    full.cache.key_RHSD[0].copy_(half.cache.key_RHSD[0])
    full.cache.value_RHSD[0].copy_(half.cache.value_RHSD[0])
    assert half.by_kernel
    assert torch.equal(half.attend(0, query_NHW), full.attend(0, query_NHW))
    assert half.attend(0, query_NHW.bfloat16()).dtype == torch.bfloat16


def test_threads_change_no_bits_of_attention(two_threads: None) -> None:
    kernel, query_NHW = attention(CAUSAL, (4, 2, 32, 32))
    together = kernel.attend(0, query_NHW)
    torch.set_num_threads(1)
    assert torch.equal(kernel.attend(0, query_NHW), together)


def test_queries_may_be_a_part_of_something_wider() -> None:
    kernel, query_NHW = attention(CAUSAL, (4, 2, 32, 32))
    wide_NHW = torch.randn(len(query_NHW), 9, 32)
    wide_NHW[:, 2:6] = query_NHW
    assert torch.equal(kernel.attend(0, wide_NHW[:, 2:6]), kernel.attend(0, query_NHW))


def test_an_exponential() -> None:
    x = -np.concatenate([np.linspace(0, 90, 2001), [1e4, np.inf]]).astype(np.float32)
    y = np.array([kernels._exp(value) for value in x])
    np.testing.assert_allclose(y[x > -87], np.exp(x[x > -87].astype(np.float64)), rtol=3e-7)
    assert (y[x <= -87] < 1e-37).all()
    assert np.isnan(kernels._exp(np.float32(np.nan)))


# ---------------------------------------------------------------- fused layers


def test_a_rotation_is_that_of_transformers() -> None:
    heads_NHW = torch.randn(5, 3, 24)
    angle = torch.randn(5, 12).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    expected = apply_rotary_pos_emb(heads_NHW, heads_NHW, cos, sin, unsqueeze_dim=1)[0]
    wide = torch.cat([heads_NHW, torch.ones(5, 3, 8)], 2)  # the last 8 numbers of a head are not turned
    wide = torch.cat([wide, torch.ones(5, 2, 32)], 1)
    kernels.rotate(wide.data_ptr(), cos.data_ptr(), sin.data_ptr(), 5, 3, 32, 24, wide.stride(0))
    torch.testing.assert_close(wide[:, :3, :24], expected, rtol=1e-6, atol=1e-6)
    assert (wide[:, :3, 24:] == 1).all()
    assert (wide[:, 3:] == 1).all()


def test_a_norm_is_that_of_transformers() -> None:
    plain = LlamaRMSNorm(40, 1e-5).requires_grad_(False)
    plain.weight.normal_()
    norm = fused.fused_norm(plain)
    assert norm is not None
    x = 30 * torch.randn(2, 7, 40)
    torch.testing.assert_close(norm(x), plain(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(norm(x)[0, 3], norm(x[0, 3])), "a row has the same bits alone"
    half = fused.fused_norm(LlamaRMSNorm(40, 1e-5).bfloat16())
    assert half is not None
    assert torch.equal(half(x.bfloat16()), half(x.bfloat16().float()).bfloat16()), "rounded at its end"
    assert fused.fused_norm(nn.LayerNorm(40)) is None


def test_a_gated_layer_is_that_of_transformers_or_stays() -> None:
    from transformers import LlamaConfig

    class Other(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.01

    for kind in (LlamaMLP, Other):
        torch.manual_seed(0)
        root: Any = nn.ModuleDict({"mlp": kind(LlamaConfig(hidden_size=32, intermediate_size=64))}).requires_grad_(False)
        x = torch.randn(1, 4, 32)
        expected = root["mlp"](x)
        packed_linear.pack(root)
        fused.fuse(root)
        assert (type(root["mlp"]) is fused.FusedMLP) == (kind is LlamaMLP)
        torch.testing.assert_close(root["mlp"](x), expected)


@pytest.mark.parametrize(("activation", "plain"), [("silu", F.silu), ("gelu_tanh", partial(F.gelu, approximate="tanh"))])
def test_a_gate_is_that_of_torch(activation: str, plain: Callable[[Tensor], Tensor]) -> None:
    wide = torch.cat([4 * torch.randn(7, 96), torch.tensor([[-100.0, -1e-30, 0.0, 1e-30, 100.0, 3.0]]).repeat(7, 16)], 1)
    wide = torch.cat([wide, torch.ones(7, 8)], 1)
    gated = torch.empty(7, 96)
    number = kernels.ACTIVATIONS.index(activation)
    kernels.gate(wide.data_ptr(), gated.data_ptr(), 7, 96, wide.stride(0), number)
    exact = plain(wide[:, :96].double()) * wide[:, 96:192].double()  # in float32 torch's own gelu is 0 from -5.6 on
    torch.testing.assert_close(gated.double(), exact, rtol=2e-5, atol=1e-9)
    alone = torch.empty(1, 96)
    kernels.gate(wide[3].data_ptr(), alone.data_ptr(), 1, 96, wide.stride(0), number)
    assert torch.equal(alone[0], gated[3]), "a row has the same bits alone"


@pytest.mark.parametrize("visibility", [CAUSAL, Tree(TREES)], ids=["causal", "tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "qwen3"])
def test_a_layer_in_one_call_is_that_of_its_parts(name: str, dtype: torch.dtype, visibility: Visibility) -> None:
    """Which transformers' own class adds up. What the layer writes to the cache is the same too."""
    target = CausalLM(f"tiny-{name}", dtype, "cpu")
    if dtype == torch.bfloat16 and packed_linear.has_bfloat16_products():
        pytest.skip("oneDNN has these layers")
    layer: Any = target.layers[1]
    assert type(layer) is fused.FusedLayer
    results = []
    for compute in (layer.compute, partial(layer.plain[0])):
        torch.manual_seed(1)
        cache = target.new_cache()
        cache.reserve(4, 256)
        for stored in (cache.key_RHSD[1], cache.value_RHSD[1]):
            stored.normal_()
        batch = ForwardBatch(cache, 0, START, COUNT, visibility)
        x = torch.randn(1, batch.num_tokens, target.hidden_size).to(dtype)
        angle = torch.randn(1, batch.num_tokens, layer.rotary_width // 2).repeat(1, 1, 2)
        y = compute(x, position_embeddings=(angle.cos(), angle.sin()), attention=SlotAttention(batch))
        results.append((y, cache.key_RHSD[1], cache.value_RHSD[1]))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == dtype
        gap = (ours.float() - expected.float()).abs().max() / expected.float().abs().max()
        assert gap < (1e-5 if dtype == torch.float32 else 2**-7)


def llama_layer(kind: Any = LlamaDecoderLayer, change: Callable[[Any], Any] | None = None, **config: Any) -> Any:
    """A small decoder layer that `change` has changed, in a list, packed and fused."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2} | config
    llama_config = LlamaConfig(**sizes)
    llama_config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    root: Any = nn.ModuleList([kind(llama_config, 0).requires_grad_(False)])
    if change is not None:
        change(root[0])
    packed_linear.pack(root)
    fused.fuse(root)
    return root[0]


class Scaled(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, **kwargs) + 0.01 * hidden_states


class Clamped(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, **kwargs).clamp(-1e3, 1e3)


def test_a_layer_that_adds_up_otherwise_stays() -> None:
    """Also where random numbers do not show it."""
    assert type(llama_layer()) is fused.FusedLayer
    assert type(fused.plain_layer(llama_layer())) is LlamaDecoderLayer
    for kind in (Scaled, Clamped):
        assert type(llama_layer(kind)) is kind


class ClampedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=1e3)) * self.up_proj(x))


class EpsOutside(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon))


class NormOfTwo(LlamaRMSNorm):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) * y


class ByPosition(LlamaAttention):
    def forward(self, hidden_states: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        out, weights = super().forward(hidden_states, **kwargs)
        assert position_ids is not None
        return torch.where((position_ids % 7 == 3).unsqueeze(-1), 2 * out, out), weights


def small_gates(layer: Any) -> None:
    layer.mlp.gate_proj.weight *= 1e-3


def other_part(name: str, make: Callable[[Any], nn.Module]) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, make(layer.self_attn.config))


@pytest.mark.parametrize(
    ("stays", "change", "config"),
    [
        ("mlp", other_part("mlp", ClampedMLP), {}),
        ("mlp", small_gates, {"hidden_act": "gelu"}),  # and not the approximation, which is the same near 0
        ("input_layernorm", other_part("input_layernorm", lambda config: EpsOutside(64, 1e-6)), {}),
        ("self_attn", other_part("self_attn", lambda config: ByPosition(config, 0)), {}),
        ("more", other_part("more", lambda config: NormOfTwo(64)), {}),
    ],
    ids=["mlp with a limit", "exact gelu", "norm", "attention by position", "norm of two"],
)
def test_a_part_that_computes_more_stays(stays: str, change: Callable[[Any], None], config: dict[str, Any]) -> None:
    layer = llama_layer(change=change, **config)
    assert type(layer) is LlamaDecoderLayer
    assert not type(getattr(layer, stays)).__name__.startswith("Fused")


def hooked(linear: nn.Linear) -> None:
    linear.register_forward_hook(lambda module, args, out: 0.5 * out)


def hooked_before(linear: nn.Linear) -> None:
    linear.register_forward_pre_hook(lambda module, args: (0.5 * args[0],))


def patched(linear: nn.Linear) -> None:
    forward = linear.forward
    linear.forward = lambda x: 0.5 * forward(x)  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [hooked, hooked_before, patched])
def test_a_linear_layer_that_does_more_is_not_packed(change: Callable[[nn.Linear], None]) -> None:
    plain = linear((64, 64))
    x = torch.randn(3, 64)
    root = nn.Sequential(plain)
    change(plain)
    expected = plain(x)
    packed_linear.pack(root)
    assert torch.equal(root(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_another_type_are_not_packed(dtype: torch.dtype) -> None:
    root = nn.Sequential(linear((64, 64), dtype), linear((64, 64)))
    packed_linear.pack(root)
    assert [type(layer) for layer in root] == [nn.Linear, PackedLinear]


def test_layers_without_gradients_refuse_to_lose_them() -> None:
    x = torch.randn(1, 2, 64, requires_grad=True)
    layer = llama_layer()
    for module in (layer, fused.plain_layer(layer).input_layernorm, packed(linear((64, 64)))):
        with pytest.raises(AssertionError, match="for inference"):
            module(x)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"])
def test_a_copied_layer_has_addresses_of_its_own(copied_by: Callable[[Any], Any]) -> None:
    layer: Any = CausalLM("tiny-llama", "float32", "cpu").layers[0]
    copied = copied_by(layer)
    for name in ("qkv", "down", "norm_before_mlp"):
        assert copied.about[name] != layer.about[name]
    assert copied.about["hidden"] == layer.about["hidden"]
    assert copied.about["qkv"] == copied.plain[0].self_attn.qkv.panels.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [3, 300])
def test_threads_and_the_number_of_tokens_choose_the_kernel_of_a_layer(count: int, dtype: str, two_threads: None) -> None:
    """With two threads, and in a prefill, the parts are called one by one; both come to the same bits, but for the attention of
    a long prompt, which is torch's."""
    target = CausalLM("tiny-llama", dtype, "cpu")
    logits = []
    for num_threads in (2, 1):
        torch.set_num_threads(num_threads)
        cache = target.new_cache()
        cache.reserve(1, count)
        tokens = torch.arange(count) % 256
        logits.append(target.forward(cache, tokens, np.array([0]), np.array([count]), last_only=True).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert count == 300 or torch.equal(*logits)
