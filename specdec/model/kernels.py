"""What a CPU engine computes for few rows, from vector instructions that are written down here and compiled by numba.

*Products.* A matrix W [O, I] is kept as panels [O / 16, I, 16]: 16 of its rows side by side. A product with x [M, I] reads one
panel after the other from front to back, the order in which memory gives most, and multiplies each 16 numbers with one number
of every row of x. So every number of the result is one chain, bias + x_0 w_0 + x_1 w_1 + ..., each link a fused multiply-add.
That order does not depend on the number of rows, on how many of them share the registers, on threads, or on the machine: a row
has the same bits alone and in any batch. numba's own loops would leave the order and the registers to a vectoriser; an
`intrinsic` does not.

*Attention* is computed for each token and head by itself, over the slots that it sees in ascending order.

Arguments are addresses and numbers: numba takes them in a fraction of the time that arrays need.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"
# numba compiles these functions from the types of their arguments, and hides the first argument of an intrinsic.

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

KEY_BLOCK = 64  # slots whose keys are held near while all queries read them
MAX_WIDTH = 256  # of keys and values that `attend` takes
LANES = 16  # rows of W in a panel: one vector of AVX-512, two of AVX2
MAX_TILE = 12 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 6  # rows of x whose sums fit into the registers

_FLOAT = ir.FloatType()
_INT = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_LANE = ir.IntType(32)


def use_threads() -> bool:
    """Whether torch computes with more than one thread here. If so, numba's number is set to torch's."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return False
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    return True


@intrinsic
def _tile(
    typing: Any,
    x: Any,
    panel: Any,
    bias: Any,
    y: Any,
    num_rows: Any,
    length: Any,
    x_stride: Any,
    y_stride: Any,
    weight_size: Any,
    ahead: Any,
    ahead_step: Any,
) -> Any:
    """The product of 1 to MAX_TILE rows of x with one panel, all sums in registers.

    x, panel, bias, y: addresses; of float32, but the panel is bfloat16 if weight_size is 2.
    length: I.
    x_stride, y_stride: bytes from row to row.
    ahead, ahead_step: meanwhile memory is asked for at this address, and so many 256ths of a byte further on for every column.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, panel, bias, y, num_rows, length, x_stride, y_stride, weight_size, ahead, ahead_step = args
        start = _load(builder, bias)

        def emit(choice: int) -> None:
            count, size = divmod(choice, 8)
            xs = [
                builder.inttoptr(builder.add(x, builder.mul(x_stride, ir.Constant(_INT, m))), _FLOAT.as_pointer())
                for m in range(count)
            ]

            def link(i: Any, totals: list[Any]) -> list[Any]:
                _prefetch(builder, builder.add(ahead, builder.lshr(builder.mul(i, ahead_step), ir.Constant(_INT, 8))))
                weights = _load_weights(builder, panel, i, is_bfloat16=size == 2)
                numbers = [_broadcast(builder, builder.load(builder.gep(x, [i]), align=4)) for x in xs]
                return [builder.call(_fma(builder), [n, weights, total]) for n, total in zip(numbers, totals, strict=True)]

            for m, total in enumerate(_repeat(builder, length, [start] * count, link)):
                address = builder.add(y, builder.mul(y_stride, ir.Constant(_INT, m)))
                builder.store(total, builder.inttoptr(address, _VECTOR.as_pointer()), align=4)

        choice = builder.add(builder.mul(num_rows, ir.Constant(_INT, 8)), weight_size)
        _choose(builder, choice, [8 * count + size for size in (4, 2) for count in range(1, MAX_TILE + 1)], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for the line of memory at an address, to be near when it is read."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _LANE, _LANE, _LANE])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    builder.call(
        prefetch, [pointer, ir.Constant(_LANE, 0), ir.Constant(_LANE, 2), ir.Constant(_LANE, 1)]
    )  # read; second level; data


def _load_weights(builder: Any, panel: Any, i: Any, is_bfloat16: bool) -> Any:
    """The 16 weights of column i as float32. A bfloat16 is the upper half of a float32."""
    if not is_bfloat16:
        return builder.load(builder.gep(builder.inttoptr(panel, _VECTOR.as_pointer()), [i]), align=64)
    words = ir.VectorType(_LANE, LANES)
    halves = ir.VectorType(ir.IntType(16), LANES)
    loaded = builder.load(builder.gep(builder.inttoptr(panel, halves.as_pointer()), [i]), align=32)
    shifted = builder.shl(builder.zext(loaded, words), ir.Constant(words, [16] * LANES))
    return builder.bitcast(shifted, _VECTOR)


def _broadcast(builder: Any, number: Any) -> Any:
    """A vector with the number in every lane."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_LANE, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_LANE, LANES), [0] * LANES))


@njit(nogil=True, cache=True)
def _panel_product(x, panel, bias, y, num_rows, length, y_stride, weight_size):
    """Meanwhile each tile asks for its share of the next panel, so that memory is not idle while the sums are computed. One row
    needs no such help."""
    num_tiles = (num_rows + MAX_TILE - 1) // MAX_TILE
    rows_of_tile = (num_rows + num_tiles - 1) // num_tiles  # 8 rows are 4 and 4, not 6 and 2
    x_stride = 4 * length
    panel_size = LANES * length * weight_size
    share = panel_size // num_tiles if num_rows > 1 else 0
    for t in range(num_tiles):
        m = t * rows_of_tile
        count = min(rows_of_tile, num_rows - m)
        if count > 0:
            _tile(
                x + m * x_stride, panel, bias, y + m * y_stride, count, length, x_stride, y_stride, weight_size,
                panel + (panel_size if share else 0) + t * share, 256 * share // length,
            )  # fmt: skip


@njit(nogil=True, cache=True)
def product(x, panels, bias, y, num_rows, length, num_panels, weight_size):
    """y = x W^T + bias, by one thread.

    x: address of float32 [num_rows, length].
    panels: address of float32 or bfloat16 [num_panels, length, 16].
    bias: address of float32 [16 num_panels].
    y: address of float32 [num_rows, 16 num_panels].
    weight_size: 4 or 2, bytes of a weight.
    """
    for p in range(num_panels):
        offset = p * LANES
        panel = panels + offset * length * weight_size
        _panel_product(x, panel, bias + 4 * offset, y + 4 * offset, num_rows, length, 4 * LANES * num_panels, weight_size)


@njit(nogil=True, cache=True, parallel=True)
def product_by_threads(x, panels, bias, y, num_rows, length, num_panels, weight_size):
    """`product` by numba's threads, each of which takes a stretch of the panels."""
    for p in prange(num_panels):
        offset = p * LANES
        panel = panels + offset * length * weight_size
        _panel_product(x, panel, bias + 4 * offset, y + 4 * offset, num_rows, length, 4 * LANES * num_panels, weight_size)


def product_reference(x_MI: np.ndarray, weight_OI: np.ndarray, bias_O: np.ndarray) -> np.ndarray:
    """[M, O] the same chains. A product of two float32 is exact in float64, and its sum with a third, rounded to float32, is
    what a fused multiply-add gives, but for rare cases of double rounding."""
    sums_MO = np.broadcast_to(bias_O, (len(x_MI), len(bias_O))).astype(np.float32)
    for i in range(x_MI.shape[1]):
        sums_MO = (sums_MO + x_MI[:, i : i + 1].astype(np.float64) * weight_OI[:, i]).astype(np.float32)
    return sums_MO


# ---------------------------------------------------------------- attention


def _sum_lanes(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes, halves added to halves."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        kind = ir.VectorType(_LANE, lanes)
        low = builder.shuffle_vector(vector, vector, ir.Constant(kind, list(range(lanes))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(kind, list(range(lanes, 2 * lanes))))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(_LANE, 0))


@intrinsic
def _scores(typing: Any, query: Any, keys: Any, scores: Any, count: Any, key_stride: Any, num_chunks: Any) -> Any:
    """The products of a query with `count` keys of 16 num_chunks numbers: a chain for each of 16 lanes, then the lanes' sum.

    query, keys, scores: addresses of float32.
    key_stride: bytes from key to key.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        query, keys, scores, count, key_stride, num_chunks = args

        def emit(number: int) -> None:
            parts = [_load(builder, query, ir.Constant(_INT, c)) for c in range(number)]

            def link(i: Any, totals: list[Any]) -> list[Any]:
                key = builder.add(keys, builder.mul(i, key_stride))
                total = ir.Constant(_VECTOR, [0.0] * LANES)
                for c, part in enumerate(parts):
                    total = builder.call(_fma(builder), [part, _load(builder, key, ir.Constant(_INT, c)), total])
                pointer = builder.gep(builder.inttoptr(scores, _FLOAT.as_pointer()), [i])
                builder.store(_sum_lanes(builder, total), pointer, align=4)
                return []

            _repeat(builder, count, [], link)

        _choose(builder, num_chunks, range(1, MAX_WIDTH // LANES + 1), emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def _add_weighted(typing: Any, out: Any, weights: Any, values: Any, count: Any, value_stride: Any, num_chunks: Any) -> Any:
    """Add `count` vectors of 16 num_chunks numbers, 64 at most, to the one at `out`, each times its weight, in order.

    out, weights, values: addresses of float32.
    value_stride: bytes from vector to vector.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, weights, values, count, value_stride, num_chunks = args

        def emit(number: int) -> None:
            places = [ir.Constant(_INT, c) for c in range(number)]

            def link(i: Any, totals: list[Any]) -> list[Any]:
                weight = builder.load(builder.gep(builder.inttoptr(weights, _FLOAT.as_pointer()), [i]), align=4)
                factor = _broadcast(builder, weight)
                value = builder.add(values, builder.mul(i, value_stride))
                loaded = [_load(builder, value, place) for place in places]
                return [builder.call(_fma(builder), [factor, x, total]) for x, total in zip(loaded, totals, strict=True)]

            totals = _repeat(builder, count, [_load(builder, out, place) for place in places], link)
            for place, total in zip(places, totals, strict=True):
                builder.store(total, builder.gep(builder.inttoptr(out, _VECTOR.as_pointer()), [place]), align=4)

        _choose(builder, num_chunks, range(1, 5), emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def _as_float(typing: Any, bits: Any) -> Any:
    """The float32 of these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), generate


def _fma(builder: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")


def _load(builder: Any, address: Any, i: Any = None) -> Any:
    """Vector i behind an address of float32."""
    pointer = builder.inttoptr(address, _VECTOR.as_pointer())
    return builder.load(pointer if i is None else builder.gep(pointer, [i]), align=4)


def _repeat(builder: Any, count: Any, start: list[Any], link: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit a loop of 0 or more rounds, in each of which `link(i, totals)` makes new totals. Returns the last ones."""
    before = builder.block
    head = builder.append_basic_block("head")
    body = builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(_INT)
    totals = [builder.phi(_VECTOR) for _ in start]
    builder.cbranch(builder.icmp_signed("<", i, count), body, after)
    builder.position_at_end(body)
    results = [builder.add(i, ir.Constant(_INT, 1)), *link(i, totals)]
    for value, first, result in zip([i, *totals], [ir.Constant(_INT, 0), *start], results, strict=True):
        value.add_incoming(first, before)
        value.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return totals


def _choose(builder: Any, number: Any, numbers: Iterable[int], emit: Callable[[int], None]) -> None:
    """Emit code for each of some numbers, of which the one that is met at run time is executed."""
    done = builder.append_basic_block("done")
    cases = builder.switch(number, done)
    for case in numbers:
        block = builder.append_basic_block(f"case_{case}")
        cases.add_case(ir.Constant(_INT, case), block)
        builder.position_at_end(block)
        emit(case)
        builder.branch(done)
    builder.position_at_end(done)


@njit(nogil=True, cache=True)
def _exp(x):
    """e^x for x <= 0, to a unit in the last place or two (the polynomial of Cephes): without branches, so that a loop over it
    becomes vector instructions, and every number is computed alike."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    return y * _as_float(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(nogil=True, cache=True)
def _softmax(score_S, scaling, softcap):
    """In place; a softcap of 0 is none."""
    highest = np.float32(-np.inf)
    for j in range(len(score_S)):
        score = score_S[j] * scaling
        if softcap > 0:
            score = np.tanh(score / softcap) * softcap
        score_S[j] = score
        highest = max(highest, score)
    for j in range(len(score_S)):
        score_S[j] = _exp(score_S[j] - highest)
    total = np.float32(0.0)
    for j in range(len(score_S)):
        total += score_S[j]
    for j in range(len(score_S)):
        score_S[j] /= total


@njit(nogil=True, cache=True)
def _attend_pair(
    b, g, query, out, keys, values, row_B, token_B, count_B, num_kv_heads, group, query_stride, num_slots, first_N, seen_N,
    extra_N, extra_slots, key_width, value_width, scaling, softcap,
):  # fmt: skip
    """The tokens of one row, and the query heads that share KV head g. Keys and values are taken in blocks that stay in the
    nearest cache while all of these read them; what is added for one of them, and in which order, does not depend on others.
    """
    token = token_B[b]
    num_queries = count_B[b] * group
    line = (row_B[b] * num_kv_heads + g) * num_slots
    keys += 4 * line * key_width
    values += 4 * line * value_width
    query += 4 * g * group * key_width
    out += 4 * g * group * value_width
    out_stride = 4 * num_kv_heads * group * value_width
    last = 0
    width = 0
    for n in range(token, token + count_B[b]):
        last = max(last, first_N[n] + seen_N[n])
        width = max(width, seen_N[n] + extra_N[n + 1] - extra_N[n])
    score_QS = np.empty((num_queries, width), np.float32)

    for block in range(0, last, KEY_BLOCK):
        for q in range(num_queries):
            n = token + q // group
            begin = max(block, first_N[n])
            count = min(block + KEY_BLOCK, first_N[n] + seen_N[n]) - begin
            if count > 0:
                at = query + n * query_stride + 4 * (q % group) * key_width
                scores = score_QS.ctypes.data + 4 * (q * width + begin - first_N[n])
                _scores(at, keys + 4 * begin * key_width, scores, count, 4 * key_width, key_width // LANES)
    for q in range(num_queries):
        n = token + q // group
        at = query + n * query_stride + 4 * (q % group) * key_width
        scores = score_QS.ctypes.data + 4 * (q * width + seen_N[n])
        for i in range(extra_N[n], extra_N[n + 1]):
            key = keys + 4 * extra_slots[i] * key_width
            _scores(at, key, scores + 4 * (i - extra_N[n]), 1, 4 * key_width, key_width // LANES)
        _softmax(score_QS[q, : seen_N[n] + extra_N[n + 1] - extra_N[n]], scaling, softcap)
    for block in range(0, last, KEY_BLOCK):
        for q in range(num_queries):
            n = token + q // group
            begin = max(block, first_N[n])
            count = min(block + KEY_BLOCK, first_N[n] + seen_N[n]) - begin
            if count > 0:
                at = out + n * out_stride + 4 * (q % group) * value_width
                weights = score_QS.ctypes.data + 4 * (q * width + begin - first_N[n])
                _add_values(at, weights, values + 4 * begin * value_width, count, value_width)
    for q in range(num_queries):
        n = token + q // group
        at = out + n * out_stride + 4 * (q % group) * value_width
        weights = score_QS.ctypes.data + 4 * (q * width + seen_N[n])
        for i in range(extra_N[n], extra_N[n + 1]):
            _add_values(at, weights + 4 * (i - extra_N[n]), values + 4 * extra_slots[i] * value_width, 1, value_width)


@njit(nogil=True, cache=True)
def _add_values(out, weights, values, count, width):
    """`_add_weighted` for values of any multiple of 16 numbers."""
    for chunk in range(0, width // LANES, 4):
        offset = 4 * LANES * chunk
        _add_weighted(out + offset, weights, values + offset, count, 4 * width, min(4, width // LANES - chunk))


@njit(nogil=True, cache=True)
def attend(
    query, out, keys, values, row_B, token_B, count_B, num_kv_heads, group, query_stride, num_slots, first_N, seen_N, extra_N,
    extra_slots, key_width, value_width, scaling, softcap,
):  # fmt: skip
    """Attention of a forward's tokens over their rows' slots, by one thread.

    query: address of float32 [tokens, heads, key_width], tokens query_stride bytes apart.
    out: address of zeros, float32 [tokens, heads, value_width].
    keys, values: addresses of a layer's cache, float32 [rows, num_kv_heads, num_slots, width].
    row_B, token_B, count_B: of each row that has tokens: its place in the cache, its first token, and how many.
    group: query heads that share a KV head.
    first_N, seen_N: each token sees the slots first .. first + seen - 1,
    extra_N, extra_slots: and then extra_slots[extra_N[n] : extra_N[n + 1]].
    softcap: 0 for none.
    """
    for b in range(len(row_B)):
        for g in range(num_kv_heads):
            _attend_pair(
                b, g, query, out, keys, values, row_B, token_B, count_B, num_kv_heads, group, query_stride, num_slots, first_N,
                seen_N, extra_N, extra_slots, key_width, value_width, scaling, softcap,
            )  # fmt: skip


@njit(nogil=True, cache=True, parallel=True)
def attend_by_threads(
    query, out, keys, values, row_B, token_B, count_B, num_kv_heads, group, query_stride, num_slots, first_N, seen_N, extra_N,
    extra_slots, key_width, value_width, scaling, softcap,
):  # fmt: skip
    """`attend` by numba's threads, each of which takes some rows and KV heads."""
    for pair in prange(len(row_B) * num_kv_heads):
        _attend_pair(
            pair // num_kv_heads, pair % num_kv_heads, query, out, keys, values, row_B, token_B, count_B, num_kv_heads, group,
            query_stride, num_slots, first_N, seen_N, extra_N, extra_slots, key_width, value_width, scaling, softcap,
        )  # fmt: skip


# ---------------------------------------------------------------- small operations


@njit(nogil=True, cache=True)
def rotate(heads, cos, sin, num_tokens, num_heads, width, rotary_width, stride):
    """Rotary embedding in place, as transformers has it: x cos + (-x2, x1) sin, with x1 and x2 the halves of x.

    heads: address of float32 [num_tokens, num_heads, width], tokens `stride` numbers apart, of which the first rotary_width
        numbers of a head are turned.
    cos, sin: addresses of float32 [num_tokens, rotary_width].
    """
    half = rotary_width // 2
    for n in range(num_tokens):
        cos_W = carray(_pointer(cos + 4 * n * rotary_width), rotary_width)
        sin_W = carray(_pointer(sin + 4 * n * rotary_width), rotary_width)
        for h in range(num_heads):
            x_W = carray(_pointer(heads + 4 * (n * stride + h * width)), rotary_width)
            for i in range(half):
                low = x_W[i]
                high = x_W[half + i]
                x_W[i] = low * cos_W[i] - high * sin_W[i]
                x_W[half + i] = high * cos_W[half + i] + low * sin_W[half + i]


@njit(nogil=True, cache=True)
def rms_norm(x, weight, y, num_rows, width, eps):
    """y = weight x / sqrt(mean(x^2) + eps) of every row.

    x, y: addresses of float32 [num_rows, width]; weight: of float32 [width].
    """
    weight_D = carray(_pointer(weight), width)
    for m in range(num_rows):
        x_D = carray(_pointer(x + 4 * m * width), width)
        y_D = carray(_pointer(y + 4 * m * width), width)
        square = np.float32(0.0)
        for i in range(width):
            square += x_D[i] * x_D[i]
        scale = np.float32(1.0) / np.sqrt(square / np.float32(width) + eps)
        for i in range(width):
            y_D[i] = weight_D[i] * (x_D[i] * scale)


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    """A pointer to float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate
