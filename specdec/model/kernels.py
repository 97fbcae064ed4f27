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
HAS_AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
LANES = 16  # numbers of a vector: one register of AVX-512, two of AVX2
VECTORS = 2 if HAS_AVX512 else 1  # of a column of a panel
PANEL = LANES * VECTORS  # rows of W in a panel
MAX_TILE = 12 if HAS_AVX512 else 6  # rows of x whose sums fit into the registers
AHEAD = 8 << 10  # bytes by which memory is asked for before it is read
BLOCK = (64 << 10) // (4 * PANEL)  # columns of a panel that stay near while many tiles read them

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
    start: Any,
    y: Any,
    num_rows: Any,
    length: Any,
    start_stride: Any,
    y_stride: Any,
    weight_size: Any,
    ahead: Any,
    ahead_step: Any,
) -> Any:
    """Chains of 1 to MAX_TILE rows of x with some columns of one panel, all sums in registers.

    x: address of float32 [length, num_rows].
    panel: address of float32 or bfloat16 [length, PANEL].
    start, y: addresses of float32, of what the chains start with and where they end; rows are so many bytes apart.
    weight_size: 4 or 2, bytes of a weight.
    ahead, ahead_step: meanwhile memory is asked for at this address, and so many bytes further on for every column.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, panel, start, y, num_rows, length, start_stride, y_stride, weight_size, ahead, ahead_step = args

        def vector_at(address: Any, stride: Any, row: int, part: int) -> Any:
            place = builder.add(address, builder.mul(stride, ir.Constant(_INT, row)))
            pointer = builder.inttoptr(place, _VECTOR.as_pointer())
            return builder.gep(pointer, [ir.Constant(_INT, part)])

        def emit(choice: int) -> None:
            count, size = divmod(choice, 8)
            places = [(row, part) for row in range(count) for part in range(VECTORS)]
            numbers = builder.inttoptr(x, _FLOAT.as_pointer())

            def link(i: Any, totals: list[Any]) -> list[Any]:
                for start_of_line in range(0, PANEL * size, 64):
                    offset = builder.add(builder.mul(i, ahead_step), ir.Constant(_INT, start_of_line))
                    _prefetch(builder, builder.add(ahead, offset))
                first = builder.mul(i, ir.Constant(_INT, count))
                line = builder.mul(i, ir.Constant(_INT, VECTORS))
                parts = [builder.add(line, ir.Constant(_INT, part)) for part in range(VECTORS)]
                weights = [_load_numbers(builder, panel, part, size, align=32) for part in parts]
                results = []
                for (row, part), total in zip(places, totals, strict=True):
                    if part == 0:
                        place = builder.gep(numbers, [builder.add(first, ir.Constant(_INT, row))])
                        number = _broadcast(builder, builder.load(place, align=4))
                    results.append(builder.call(_fma(builder), [number, weights[part], total]))
                return results

            starts = [builder.load(vector_at(start, start_stride, *place), align=4) for place in places]
            for place, total in zip(places, _repeat(builder, length, starts, link), strict=True):
                builder.store(total, vector_at(y, y_stride, *place), align=4)

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


def _load_numbers(builder: Any, address: Any, place: Any, size: int, align: int = 2) -> Any:
    """Vector `place` behind an address, of float32 or, if a number's size is 2, of bfloat16, the upper half of a float32."""
    if size == 4:
        return builder.load(builder.gep(builder.inttoptr(address, _VECTOR.as_pointer()), [place]), align=2 * align)
    words = ir.VectorType(_LANE, LANES)
    halves = ir.VectorType(ir.IntType(16), LANES)
    loaded = builder.load(builder.gep(builder.inttoptr(address, halves.as_pointer()), [place]), align=align)
    shifted = builder.shl(builder.zext(loaded, words), ir.Constant(words, [16] * LANES))
    return builder.bitcast(shifted, _VECTOR)


def _broadcast(builder: Any, number: Any) -> Any:
    """A vector with the number in every lane."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_LANE, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_LANE, LANES), [0] * LANES))


@intrinsic
def _pointer_to(typing: Any, address: Any, example: Any) -> Any:
    """A pointer to numbers of the example's type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.args[1]).as_pointer())

    return types.CPointer(example)(types.int64, example), generate


@njit(nogil=True, cache=True)
def _floats(address, count):
    """The float32 numbers at an address, as an array."""
    return carray(_pointer_to(address, np.float32(0)), count)


@njit(nogil=True, cache=True)
def _keep(array):
    """Keeps an array up to this line: numba frees it after the last one that names it, and an address does not count."""


@njit(nogil=True, cache=True)
def _rows_of_tile(num_rows):
    """8 rows are 4 and 4, not 6 and 2."""
    num_tiles = (num_rows + MAX_TILE - 1) // MAX_TILE
    return (num_rows + num_tiles - 1) // num_tiles


@njit(nogil=True, cache=True)
def _tiles_of(x, num_rows, length):
    """The rows of each tile side by side: [tiles, length, rows of the tile], end to end. One address reaches all of them, and
    what is read together lies together."""
    rows_of_tile = _rows_of_tile(num_rows)
    packed = np.empty(num_rows * length, np.float32)
    x_MI = _floats(x, num_rows * length).reshape(num_rows, length)
    for first in range(0, num_rows, rows_of_tile):
        count = min(rows_of_tile, num_rows - first)
        tile = packed[first * length : (first + count) * length]
        for i in range(length):
            for m in range(count):
                tile[i * count + m] = x_MI[first + m, i]
    return packed


@njit(nogil=True, cache=True)
def _panel_product(x, panel, bias, y, num_rows, length, y_stride, weight_size):
    """x: address of the tiles. If there are several, columns are taken in blocks that stay near while all tiles are multiplied
    by them, as float32; a chain goes on where the block before has left it. The first tile asks for the next block meanwhile,
    so that memory is not idle while sums are computed."""
    rows_of_tile = _rows_of_tile(num_rows)
    size = PANEL * weight_size  # of a column
    if num_rows == rows_of_tile:
        _tile(x, panel, bias, y, num_rows, length, 0, y_stride, weight_size, panel + AHEAD, size)
        return
    is_widened = weight_size == 2 and num_rows > 2 * rows_of_tile  # below, the tiles do it faster
    buffer = np.empty(BLOCK * PANEL + LANES if is_widened else LANES, np.float32)
    wide = (buffer.ctypes.data + 63) // 64 * 64
    for i in range(0, length, BLOCK):
        columns = min(BLOCK, length - i)
        weights = panel + i * size
        ahead = weights + columns * size
        if is_widened:
            _widen(weights, wide, columns * PANEL)
            weights = wide
        for m in range(0, num_rows, rows_of_tile):
            count = min(rows_of_tile, num_rows - m)
            at = y + m * y_stride
            _tile(
                x + 4 * (m * length + i * count), weights, at if i else bias, at, count, columns, y_stride if i else 0,
                y_stride, 4 if is_widened else weight_size, ahead if m == 0 else weights, size if m == 0 else 0,
            )  # fmt: skip
    _keep(buffer)


@njit(nogil=True, cache=True)
def _widen(numbers, wide, count):
    """bfloat16 as float32, of which it is the upper half."""
    bits = carray(_pointer_to(numbers, np.uint16(0)), count)
    wide_bits = carray(_pointer_to(wide, np.uint32(0)), count)
    for i in range(count):
        wide_bits[i] = np.uint32(bits[i]) << np.uint32(16)


@njit(nogil=True, cache=True)
def product(x, panels, bias, y, num_rows, length, num_panels, weight_size):
    """y = x W^T + bias, by one thread.

    x: address of float32 [num_rows, length].
    panels: address of float32 or bfloat16 [num_panels, length, PANEL].
    bias: address of float32 [PANEL num_panels].
    y: address of float32 [num_rows, PANEL num_panels].
    weight_size: 4 or 2, bytes of a weight.
    """
    tiles = _tiles_of(x, num_rows, length)
    for p in range(num_panels):
        offset = p * PANEL
        panel = panels + offset * length * weight_size
        _panel_product(
            tiles.ctypes.data, panel, bias + 4 * offset, y + 4 * offset, num_rows, length, 4 * PANEL * num_panels, weight_size
        )
    _keep(tiles)


@njit(nogil=True, cache=True, parallel=True)
def product_by_threads(x, panels, bias, y, num_rows, length, num_panels, weight_size):
    """`product` by numba's threads, each of which takes a stretch of the panels."""
    tiles = _tiles_of(x, num_rows, length)
    for p in prange(num_panels):
        offset = p * PANEL
        panel = panels + offset * length * weight_size
        _panel_product(
            tiles.ctypes.data, panel, bias + 4 * offset, y + 4 * offset, num_rows, length, 4 * PANEL * num_panels, weight_size
        )
    _keep(tiles)


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
def _scores(typing: Any, query: Any, keys: Any, scores: Any, count: Any, num_chunks: Any, size: Any) -> Any:
    """The products of a query with `count` keys of 16 num_chunks numbers: a chain for each of 16 lanes, then the lanes' sum.

    query, scores: addresses of float32.
    keys: address of float32 or bfloat16, whose numbers have this size.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        query, keys, scores, count, num_chunks, size = args

        def emit(choice: int) -> None:
            number, key_size = divmod(choice, 8)
            parts = [_load(builder, query, ir.Constant(_INT, c)) for c in range(number)]

            def link(i: Any, totals: list[Any]) -> list[Any]:
                key = builder.add(keys, builder.mul(i, ir.Constant(_INT, number * LANES * key_size)))
                total = ir.Constant(_VECTOR, [0.0] * LANES)
                for c, part in enumerate(parts):
                    total = builder.call(
                        _fma(builder), [part, _load_numbers(builder, key, ir.Constant(_INT, c), key_size), total]
                    )
                pointer = builder.gep(builder.inttoptr(scores, _FLOAT.as_pointer()), [i])
                builder.store(_sum_lanes(builder, total), pointer, align=4)
                return []

            _repeat(builder, count, [], link)

        choice = builder.add(builder.mul(num_chunks, ir.Constant(_INT, 8)), size)
        _choose(builder, choice, [8 * number + x for x in (4, 2) for number in range(1, MAX_WIDTH // LANES + 1)], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def _add_weighted(
    typing: Any, out: Any, weights: Any, values: Any, count: Any, value_stride: Any, num_chunks: Any, size: Any
) -> Any:
    """Add `count` vectors of 16 num_chunks numbers, 64 at most, to the one at `out`, each times its weight, in order.

    out, weights: addresses of float32.
    values: address of float32 or bfloat16, whose numbers have this size.
    value_stride: bytes from vector to vector.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, weights, values, count, value_stride, num_chunks, size = args

        def emit(choice: int) -> None:
            number, value_size = divmod(choice, 8)
            places = [ir.Constant(_INT, c) for c in range(number)]

            def link(i: Any, totals: list[Any]) -> list[Any]:
                weight = builder.load(builder.gep(builder.inttoptr(weights, _FLOAT.as_pointer()), [i]), align=4)
                factor = _broadcast(builder, weight)
                value = builder.add(values, builder.mul(i, value_stride))
                loaded = [_load_numbers(builder, value, place, value_size) for place in places]
                return [builder.call(_fma(builder), [factor, x, total]) for x, total in zip(loaded, totals, strict=True)]

            totals = _repeat(builder, count, [_load(builder, out, place) for place in places], link)
            for place, total in zip(places, totals, strict=True):
                builder.store(total, builder.gep(builder.inttoptr(out, _VECTOR.as_pointer()), [place]), align=4)

        choice = builder.add(builder.mul(num_chunks, ir.Constant(_INT, 8)), size)
        _choose(builder, choice, [8 * number + x for x in (4, 2) for number in range(1, 5)], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


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
def _attend_pair(pair, query, query_stride, out, keys, values, sizes, rows, seen, scaling, softcap):
    """The tokens of one row, and the query heads that share a KV head. Keys and values are taken in blocks that stay in the
    nearest cache while all of these read them; what is added for one of them, and in which order, does not depend on others.

    pair: place of the row among those that have tokens, times the number of KV heads, plus the KV head.
    """
    num_kv_heads, group, num_slots, key_width, value_width, size = sizes
    row_B, token_B, count_B = rows
    first_N, seen_N, extra_N, extra_slots = seen
    b = pair // num_kv_heads
    g = pair % num_kv_heads
    token = token_B[b]
    num_queries = count_B[b] * group
    line = (row_B[b] * num_kv_heads + g) * num_slots
    keys += size * line * key_width
    values += size * line * value_width
    query += 4 * g * group * key_width
    out += 4 * g * group * value_width
    out_stride = 4 * num_kv_heads * group * value_width
    chunks = key_width // LANES
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
                _scores(at, keys + size * begin * key_width, scores, count, chunks, size)
    for q in range(num_queries):
        n = token + q // group
        at = query + n * query_stride + 4 * (q % group) * key_width
        scores = score_QS.ctypes.data + 4 * (q * width + seen_N[n])
        for i in range(extra_N[n], extra_N[n + 1]):
            _scores(at, keys + size * extra_slots[i] * key_width, scores + 4 * (i - extra_N[n]), 1, chunks, size)
        _softmax(score_QS[q, : seen_N[n] + extra_N[n + 1] - extra_N[n]], scaling, softcap)
    for block in range(0, last, KEY_BLOCK):
        for q in range(num_queries):
            n = token + q // group
            begin = max(block, first_N[n])
            count = min(block + KEY_BLOCK, first_N[n] + seen_N[n]) - begin
            if count > 0:
                at = out + n * out_stride + 4 * (q % group) * value_width
                weights = score_QS.ctypes.data + 4 * (q * width + begin - first_N[n])
                _add_values(at, weights, values + size * begin * value_width, count, value_width, size)
    for q in range(num_queries):
        n = token + q // group
        at = out + n * out_stride + 4 * (q % group) * value_width
        weights = score_QS.ctypes.data + 4 * (q * width + seen_N[n])
        for i in range(extra_N[n], extra_N[n + 1]):
            value = values + size * extra_slots[i] * value_width
            _add_values(at, weights + 4 * (i - extra_N[n]), value, 1, value_width, size)
    _keep(score_QS)


@njit(nogil=True, cache=True)
def _add_values(out, weights, values, count, width, size):
    """`_add_weighted` for values of any multiple of 16 numbers."""
    for chunk in range(0, width // LANES, 4):
        place = LANES * chunk
        _add_weighted(
            out + 4 * place, weights, values + size * place, count, size * width, min(4, width // LANES - chunk), size
        )


@njit(nogil=True, cache=True)
def attend(query, query_stride, out, keys, values, sizes, rows, seen, scaling, softcap):
    """Attention of a forward's tokens over their rows' slots, by one thread.

    query: address of float32 [tokens, heads, key_width], tokens query_stride bytes apart.
    out: address of zeros, float32 [tokens, heads, value_width].
    keys, values: addresses of a layer's cache, float32 or bfloat16 [rows, num_kv_heads, num_slots, width].
    sizes: num_kv_heads; query heads that share one; num_slots; key_width; value_width; bytes of a number of the cache.
    rows: row_B, token_B, count_B: of each row that has tokens: its place in the cache, its first token, and how many.
    seen: first_N, seen_N: each token sees the slots first .. first + seen - 1,
        extra_N, extra_slots: and then extra_slots[extra_N[n] : extra_N[n + 1]].
    softcap: 0 for none.
    """
    for pair in range(len(rows[0]) * sizes[0]):
        _attend_pair(pair, query, query_stride, out, keys, values, sizes, rows, seen, scaling, softcap)


@njit(nogil=True, cache=True, parallel=True)
def attend_by_threads(query, query_stride, out, keys, values, sizes, rows, seen, scaling, softcap):
    """`attend` by numba's threads, each of which takes some rows and KV heads."""
    for pair in prange(len(rows[0]) * sizes[0]):
        _attend_pair(pair, query, query_stride, out, keys, values, sizes, rows, seen, scaling, softcap)


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
        cos_W = _floats(cos + 4 * n * rotary_width, rotary_width)
        sin_W = _floats(sin + 4 * n * rotary_width, rotary_width)
        for h in range(num_heads):
            x_W = _floats(heads + 4 * (n * stride + h * width), rotary_width)
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
    weight_D = _floats(weight, width)
    for m in range(num_rows):
        x_D = _floats(x + 4 * m * width, width)
        y_D = _floats(y + 4 * m * width, width)
        square = np.float32(0.0)
        for i in range(width):
            square += x_D[i] * x_D[i]
        scale = np.float32(1.0) / np.sqrt(square / np.float32(width) + eps)
        for i in range(width):
            y_D[i] = weight_D[i] * (x_D[i] * scale)
