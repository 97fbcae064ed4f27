"""What a CPU engine computes for few rows, from vector instructions that are written down here and compiled by numba.

*Products.* A matrix W [O, I] is kept as panels [O / PANEL, I, PANEL]: some of its rows side by side. A product with x [M, I]
reads one panel after the other from front to back, the order in which memory gives most, and multiplies each column of a panel
with one number of every row of x. So every number of the result is one chain, bias + x_0 w_0 + x_1 w_1 + ..., each link a fused
multiply-add. That order does not depend on the number of rows, on how many of them share the registers, on threads, or on the
machine: a row has the same bits alone and in any batch. numba's own loops would leave the order and the registers to a
vectoriser; an `intrinsic` does not.

*Attention* is computed for each token and head by itself, over the slots that it sees in ascending order. *A layer* is all of a
decoder layer in one call: products stream their weights through the caches, after which every operation more begins with what
it needs far away.

Arguments are addresses and numbers: numba takes them in a fraction of the time that arrays need. All is in one file, since
numba's cache of compiled code knows when the file of a function has changed, and not when that of a function inside has.
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
from numba import carray, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec.compiled import compiled

KEY_BLOCK = 64  # slots whose keys are held near while all queries read them
MAX_WIDTH = 256  # of keys and values that `attend` takes
HAS_AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
LANES = 16  # numbers of a vector: one register of AVX-512, two of AVX2
VECTORS = 2 if HAS_AVX512 else 1  # of a column of a panel
PANEL = LANES * VECTORS  # rows of W in a panel
MAX_TILE = 12 if HAS_AVX512 else 6  # rows of x whose sums fit into the registers
AHEAD = 16 << 10  # bytes by which memory is asked for before it is read
BLOCK = 192  # columns of a panel, at most, that stay near while several tiles read them
KEYS = 8  # whose products with a query are summed across lanes together

# error_model: a division that may be by zero would be a branch, and no loop with one becomes vector instructions
kernel = compiled(nogil=True, error_model="numpy")
kernel_for_threads = compiled(nogil=True, error_model="numpy", parallel=True)

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
                line_ahead = builder.add(ahead, builder.mul(i, ahead_step))
                _prefetch(builder, line_ahead)
                for start_of_line in range(64, PANEL * size, 64):
                    start_of_line = ir.Constant(_INT, start_of_line)
                    with builder.if_then(builder.icmp_signed("<", start_of_line, ahead_step)):
                        _prefetch(builder, builder.add(line_ahead, start_of_line))
                first = builder.mul(i, ir.Constant(_INT, count))
                line = builder.mul(i, ir.Constant(_INT, VECTORS))
                parts = [builder.add(line, ir.Constant(_INT, part)) for part in range(VECTORS)]
                weights = [_load(builder, panel, part, size, align=32) for part in parts]
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


def _load(builder: Any, address: Any, place: Any, size: int = 4, align: int = 2) -> Any:
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


@kernel
def _floats(address, count):
    """The float32 numbers at an address, as an array."""
    return carray(_pointer_to(address, np.float32(0)), count)


@kernel
def _keep(array):
    """Keeps an array up to this line: numba frees it after the last one that names it, and an address does not count."""


@kernel
def _rows_of_tile(num_rows):
    """8 rows are 4 and 4, not 6 and 2."""
    num_tiles = (num_rows + MAX_TILE - 1) // MAX_TILE
    return (num_rows + num_tiles - 1) // num_tiles


@kernel
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


@kernel
def _panel_product(x, panel, bias, y, num_rows, length, y_stride, weight_size):
    """x: address of the tiles. If there are several, columns are taken in blocks that stay near while all tiles are multiplied
    by them, as float32; a chain goes on where the block before has left it. Each tile asks for its share of the next block
    meanwhile, so that memory is not idle while sums are computed."""
    rows_of_tile = _rows_of_tile(num_rows)
    size = PANEL * weight_size  # of a column
    if num_rows == rows_of_tile:
        _tile(x, panel, bias, y, num_rows, length, 0, y_stride, weight_size, panel + AHEAD, size)
        return
    num_tiles = (num_rows + rows_of_tile - 1) // rows_of_tile
    step = size // num_tiles
    buffer = np.empty(BLOCK * PANEL + LANES if weight_size == 2 else LANES, np.float32)
    wide = (buffer.ctypes.data + 63) // 64 * 64
    num_blocks = (length + BLOCK - 1) // BLOCK
    block = (length + num_blocks - 1) // num_blocks  # a short last one would give too little time to ask for the next
    for i in range(0, length, block):
        columns = min(block, length - i)
        weights = panel + i * size
        ahead = weights + columns * size
        if weight_size == 2:
            _widen(weights, wide, columns * PANEL)
            weights = wide
        for m in range(0, num_rows, rows_of_tile):
            count = min(rows_of_tile, num_rows - m)
            share = m // rows_of_tile * columns * step
            at = y + m * y_stride
            _tile(
                x + 4 * (m * length + i * count), weights, at if i else bias, at, count, columns, y_stride if i else 0,
                y_stride, 4, ahead + share, step,
            )  # fmt: skip
    _keep(buffer)


@kernel
def _widen(numbers, wide, count):
    """bfloat16 as float32, of which it is the upper half."""
    bits = carray(_pointer_to(numbers, np.uint16(0)), count)
    wide_bits = carray(_pointer_to(wide, np.uint32(0)), count)
    for i in range(count):
        wide_bits[i] = np.uint32(bits[i]) << np.uint32(16)


@kernel
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


@kernel_for_threads
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


def _across_lanes(builder: Any, vectors: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    """The lanes of each vector combined, halves with halves: a vector of as many numbers, a power of 2. Two vectors of halves
    make a full one, so that several take fewer operations than one after the other, and give the same numbers."""
    segment = LANES  # lanes of a vector, or of what is left of one
    while segment > 1:
        segment //= 2
        pairs = [(vectors[j], vectors[min(j + 1, len(vectors) - 1)]) for j in range(0, len(vectors), 2)]
        num_lanes = min(2, len(vectors)) * vectors[0].type.count
        low = [lane for lane in range(num_lanes) if lane % (2 * segment) < segment]
        high = [lane + segment for lane in low]
        kind = ir.VectorType(_LANE, len(low))
        halves = [[builder.shuffle_vector(*pair, ir.Constant(kind, lanes)) for lanes in (low, high)] for pair in pairs]
        vectors = [combine(builder, *half) for half in halves]
    return vectors[0]


def _reduction(start: float, combine: Callable[[Any, Any, Any], Any], combine_lanes: Callable[[Any, Any, Any], Any]) -> Any:
    """A function that combines 16 num_chunks float32 numbers at an address: a chain for each of 16 lanes, then the lanes.

    combine, combine_lanes: of a chain and the next numbers; of two halves of the lanes.
    """

    @intrinsic
    def reduce(typing: Any, numbers: Any, num_chunks: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            numbers, num_chunks = args

            def link(i: Any, totals: list[Any]) -> list[Any]:
                return [combine(builder, totals[0], _load(builder, numbers, i))]

            totals = _repeat(builder, num_chunks, [ir.Constant(_VECTOR, [start] * LANES)], link)
            return builder.extract_element(_across_lanes(builder, totals, combine_lanes), ir.Constant(_LANE, 0))

        return types.float32(types.int64, types.int64), generate

    return reduce


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _plus(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


_max_of = _reduction(-np.inf, _larger, _larger)
_sum_of = _reduction(0.0, _plus, _plus)
_squares_of = _reduction(0.0, lambda builder, total, x: builder.call(_fma(builder), [x, x, total]), _plus)


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

            def products(first: Any, num_keys: int) -> None:
                totals = []
                for k in range(num_keys):
                    place = builder.add(first, ir.Constant(_INT, k))
                    key = builder.add(keys, builder.mul(place, ir.Constant(_INT, number * LANES * key_size)))
                    total = ir.Constant(_VECTOR, [0.0] * LANES)
                    for c, part in enumerate(parts):
                        numbers = _load(builder, key, ir.Constant(_INT, c), key_size)
                        total = builder.call(_fma(builder), [part, numbers, total])
                    totals.append(total)
                sums = _across_lanes(builder, totals, _plus)
                address = builder.gep(builder.inttoptr(scores, _FLOAT.as_pointer()), [first])
                builder.store(sums, builder.bitcast(address, sums.type.as_pointer()), align=4)

            def several(i: Any, totals: list[Any]) -> list[Any]:
                products(builder.mul(i, ir.Constant(_INT, KEYS)), KEYS)
                return []

            def one(i: Any, totals: list[Any]) -> list[Any]:
                products(builder.add(i, builder.sub(count, rest)), 1)
                return []

            rest = builder.srem(count, ir.Constant(_INT, KEYS))
            _repeat(builder, builder.sdiv(count, ir.Constant(_INT, KEYS)), [], several)
            _repeat(builder, rest, [], one)

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
                loaded = [_load(builder, value, place, value_size) for place in places]
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


@kernel
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


@kernel
def _softmax(score_S, count, scaling, softcap):
    """Of the first `count`, in place; there is room for a multiple of 16. A softcap of 0 is none."""
    num_chunks = (count + LANES - 1) // LANES
    for j in range(count):
        score_S[j] *= scaling
    if softcap > 0:
        for j in range(count):
            score_S[j] = np.tanh(score_S[j] / softcap) * softcap
    score_S[count : num_chunks * LANES] = -np.inf
    highest = _max_of(score_S.ctypes.data, num_chunks)
    for j in range(num_chunks * LANES):
        score_S[j] = _exp(score_S[j] - highest)
    total = _sum_of(score_S.ctypes.data, num_chunks)
    for j in range(count):
        score_S[j] /= total


@kernel
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
    width = (width + LANES - 1) // LANES * LANES
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
        _softmax(score_QS[q], seen_N[n] + extra_N[n + 1] - extra_N[n], scaling, softcap)
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


@kernel
def _add_values(out, weights, values, count, width, size):
    """`_add_weighted` for values of any multiple of 16 numbers."""
    for chunk in range(0, width // LANES, 4):
        place = LANES * chunk
        _add_weighted(
            out + 4 * place, weights, values + size * place, count, size * width, min(4, width // LANES - chunk), size
        )


@kernel
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


@kernel_for_threads
def attend_by_threads(query, query_stride, out, keys, values, sizes, rows, seen, scaling, softcap):
    """`attend` by numba's threads, each of which takes some rows and KV heads."""
    for pair in prange(len(rows[0]) * sizes[0]):
        _attend_pair(pair, query, query_stride, out, keys, values, sizes, rows, seen, scaling, softcap)


# ---------------------------------------------------------------- small operations


@kernel
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


@kernel
def rms_norm(x, weight, y, num_rows, width, eps):
    """y = weight x / sqrt(mean(x^2) + eps) of every row.

    x, y: addresses of float32 [num_rows, width]; weight: of float32 [width].
    """
    weight_D = _floats(weight, width)
    for m in range(num_rows):
        x_D = _floats(x + 4 * m * width, width)
        y_D = _floats(y + 4 * m * width, width)
        num_chunks = width // LANES
        square = _squares_of(x + 4 * m * width, num_chunks)
        for i in range(num_chunks * LANES, width):
            square += x_D[i] * x_D[i]
        scale = np.float32(1.0) / np.sqrt(square / np.float32(width) + eps)
        for i in range(width):
            y_D[i] = weight_D[i] * (x_D[i] * scale)


@kernel
def gate(gate_up, out, num_rows, width, stride, activation):
    """act(gate) * up of every row.

    gate_up: address of float32 [num_rows, 2 width], rows `stride` numbers apart: gate, then up.
    out: address of float32 [num_rows, width].
    activation: place in ACTIVATIONS.
    """
    for m in range(num_rows):
        gate_F = _floats(gate_up + 4 * m * stride, width)
        up_F = _floats(gate_up + 4 * (m * stride + width), width)
        out_F = _floats(out + 4 * m * width, width)
        if activation == 0:
            for i in range(width):
                out_F[i] = gate_F[i] * _sigmoid(gate_F[i]) * up_F[i]
        else:
            for i in range(width):
                x = gate_F[i]
                # (1 + tanh(u)) / 2 is the sigmoid of 2u
                double = np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)
                out_F[i] = x * _sigmoid(double) * up_F[i]


@kernel
def _sigmoid(x):
    e = _exp(-abs(x))
    return (np.float32(1.0) if x >= 0 else e) / (np.float32(1.0) + e)


ACTIVATIONS = ("silu", "gelu_tanh")


# ---------------------------------------------------------------- a layer

# What `layer` reads of a decoder layer: addresses of float32 and of panels (0: the layer has no such norm), and sizes.
LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "hidden", "intermediate", "num_heads", "num_kv_heads", "width", "rotary_width", "weight_size", "activation",
            "norm_before_attention", "norm_after_attention", "norm_before_mlp", "norm_after_mlp", "q_norm", "k_norm",
            "qkv", "qkv_bias", "output", "output_bias", "gate_up", "gate_up_bias", "down", "down_bias",
        )
    ]
    + [(name, np.float32) for name in ("eps", "scaling", "softcap")]
)  # fmt: skip


@kernel
def layer(x, num_tokens, about, cos, sin, keys, values, num_slots, cache_size, row_N, slot_N, rows, seen):
    """A decoder layer in place: attention and a gated MLP, each with norms before or after it, added to what they read.

    x: address of float32 [num_tokens, hidden].
    about: one of LAYER.
    cos, sin: addresses of float32 [num_tokens, rotary_width].
    keys, values, num_slots: of the layer's cache, as for `attend`; cache_size: bytes of a number.
    row_N, slot_N: where each token's key and value belong.
    rows, seen: as for `attend`.
    """
    this = about[0]
    normed = np.empty(num_tokens * this.hidden, np.float32)
    first_value = this.num_heads + this.num_kv_heads
    qkv_panels = _num_panels((first_value + this.num_kv_heads) * this.width)
    stride = qkv_panels * PANEL
    heads = np.empty(num_tokens * stride, np.float32)
    attended = np.zeros(num_tokens * this.num_heads * this.width, np.float32)
    out_panels = _num_panels(this.hidden)
    added = np.empty(num_tokens * out_panels * PANEL, np.float32)
    x_ = normed.ctypes.data
    heads_ = heads.ctypes.data
    attended_ = attended.ctypes.data
    added_ = added.ctypes.data

    _norm_or_copy(x, this.norm_before_attention, x_, num_tokens, this.hidden, this.eps)
    product(x_, this.qkv, this.qkv_bias, heads_, num_tokens, this.hidden, qkv_panels, this.weight_size)
    for n in range(num_tokens):
        query = heads_ + 4 * n * stride
        key = query + 4 * this.num_heads * this.width
        if this.q_norm:
            rms_norm(query, this.q_norm, query, this.num_heads, this.width, this.eps)
        if this.k_norm:
            rms_norm(key, this.k_norm, key, this.num_kv_heads, this.width, this.eps)
    rotate(heads_, cos, sin, num_tokens, first_value, this.width, this.rotary_width, stride)
    for n in range(num_tokens):
        key = heads_ + 4 * (n * stride + this.num_heads * this.width)
        value = heads_ + 4 * (n * stride + first_value * this.width)
        for g in range(this.num_kv_heads):
            place = cache_size * ((row_N[n] * this.num_kv_heads + g) * num_slots + slot_N[n]) * this.width
            _store(key + 4 * g * this.width, keys + place, this.width, cache_size)
            _store(value + 4 * g * this.width, values + place, this.width, cache_size)
    group = this.num_heads // this.num_kv_heads
    sizes = (this.num_kv_heads, group, num_slots, this.width, this.width, cache_size)
    attend(heads_, 4 * stride, attended_, keys, values, sizes, rows, seen, this.scaling, this.softcap)
    length = this.num_heads * this.width
    product(attended_, this.output, this.output_bias, added_, num_tokens, length, out_panels, this.weight_size)
    _add_normed(x, added_, this.norm_after_attention, num_tokens, this.hidden, out_panels * PANEL, this.eps)

    _norm_or_copy(x, this.norm_before_mlp, x_, num_tokens, this.hidden, this.eps)
    gate_panels = _num_panels(2 * this.intermediate)
    wide = np.empty(num_tokens * gate_panels * PANEL, np.float32)
    gated = np.empty(num_tokens * this.intermediate, np.float32)
    wide_ = wide.ctypes.data
    gated_ = gated.ctypes.data
    product(x_, this.gate_up, this.gate_up_bias, wide_, num_tokens, this.hidden, gate_panels, this.weight_size)
    gate(wide_, gated_, num_tokens, this.intermediate, gate_panels * PANEL, this.activation)
    product(gated_, this.down, this.down_bias, added_, num_tokens, this.intermediate, out_panels, this.weight_size)
    _add_normed(x, added_, this.norm_after_mlp, num_tokens, this.hidden, out_panels * PANEL, this.eps)
    for array in (normed, heads, attended, added, wide, gated):
        _keep(array)


@kernel
def _num_panels(num_rows):
    return (num_rows + PANEL - 1) // PANEL


@kernel
def _norm_or_copy(x, weight, y, num_rows, width, eps):
    if weight:
        rms_norm(x, weight, y, num_rows, width, eps)
    else:
        _floats(y, num_rows * width)[:] = _floats(x, num_rows * width)


@kernel
def _add_normed(x, added, weight, num_rows, width, stride, eps):
    """x += added, whose rows are `stride` numbers apart, normed in place if there is a weight."""
    for m in range(num_rows):
        row = added + 4 * m * stride
        if weight:
            rms_norm(row, weight, row, 1, width, eps)
        x_D = _floats(x + 4 * m * width, width)
        added_D = _floats(row, width)
        for i in range(width):
            x_D[i] += added_D[i]


@kernel
def _store(numbers, place, count, size):
    """Copy float32 into a cache, rounded to the nearest if it is of bfloat16."""
    number_W = _floats(numbers, count)
    if size == 4:
        _floats(place, count)[:] = number_W
    else:
        bits_W = carray(_pointer_to(numbers, np.uint32(0)), count)
        half_W = carray(_pointer_to(place, np.uint16(0)), count)
        for i in range(count):
            bits = bits_W[i]
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            half_W[i] = np.uint16(rounded) if number_W[i] == number_W[i] else np.uint16(0x7FC0)  # else nan
