"""Drawing tokens by temperature, top-k, top-p and min-p without sorting the vocabulary.

The definition (``sampling.draw``) orders tokens by falling score, keeps a beginning of that order, and draws from what
it keeps in the same order. So three tokens have to be found: the k-th, the one at which top-p stops, and the drawn one.
Each is known by what precedes it: a count, or a mass, which is the sum of weights. Nothing has to be in order for that.
One program sums what lies above each of some thresholds, for a part of a row; from these sums follow narrower brackets
around the three scores, in which the next thresholds lie. After a few such passes few tokens are left, which are
listed, and one program finishes the row. A row with neither top-k nor top-p is drawn in the order of its ids.

All sums are of integers, so they do not depend on the order of summation: a row's token is the same however it is
split, in any batch, and in whatever order tokens are listed. A weight is a multiple of 2**-42; less is never drawn.

A key is the bits of a float32, how far a score is below the greatest: ascending keys are falling scores. Of each of
the three, ``lo <= key < hi`` is known, and the masses of the tokens below either end.

Axes: R rows, V vocabulary, S splits of a row, N thresholds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import cdiv
from .support import num_processors
from .triton_keys import (
    END,
    MUCH,
    kept_mass,
    key_of,
    likelihood_of,
    load_bracket,
    load_filters,
    load_four,
    mass_of,
    share_of,
    store_bracket,
    target_in,
    threshold_in,
)

MAX_SPLITS = 64
_NUM_PASSES = 3
_NUM_THRESHOLDS = 16  # of a pass
_BLOCK = 256  # logits of a step of a loop over a row
_LIST_BLOCK = 512
_PROGRAMS_PER_PROCESSOR = 2
_STATE = 32  # numbers that are kept of a row between two kernels, see ``load_bracket``

_SIZES = ["V", "R", "num_splits", "index", "capacity", "logit_row", "table_row"]


@triton.jit
def _grid(N: tl.constexpr):
    """The thresholds of the first pass, int32 [N]: closer together near the greatest, up to where weights are 0."""
    i = tl.arange(0, N)
    distance = (i + 1).to(tl.float32)
    return tl.where(i < N - 1, distance * distance * (16.0 / (N * N)), 30.0).to(tl.int32, bitcast=True)


@triton.jit
def _thresholds(of_k, of_p, of_d, has_k, has_p, N: tl.constexpr):
    """Those of a later pass: half of them in the bracket of the drawn token, the others in those of what else is to be
    found.
    """
    i = tl.arange(0, N)
    half: tl.constexpr = N // 2
    num_k = tl.where(has_k, tl.where(has_p, half // 2, half), 0)
    in_k = threshold_in(of_k[0], of_k[1], i, num_k)
    in_p = threshold_in(of_p[0], of_p[1], i - num_k, half - num_k)
    in_d = threshold_in(of_d[0], of_d[1], i - half, half)
    return tl.where(i >= half, in_d, tl.where(i < num_k, in_k, in_p))


@triton.jit
def _narrowed(bracket, thresholds, masses, counts, is_below, is_above):
    """The bracket between the last threshold that is surely not above the key and the first that surely is.

    ``masses`` and ``counts`` [N] rise with the thresholds.
    """
    lo, hi, mass_lo, mass_hi, count_lo = bracket
    lo = tl.maximum(lo, tl.max(tl.where(is_below, thresholds, 0), 0))
    hi = tl.minimum(hi, tl.min(tl.where(is_above, thresholds, END), 0))
    mass_lo = tl.maximum(mass_lo, tl.max(tl.where(is_below, masses, 0), 0))
    mass_hi = tl.minimum(mass_hi, tl.min(tl.where(is_above, masses, MUCH), 0))
    count_lo = tl.maximum(count_lo, tl.max(tl.where(is_below, counts, 0), 0))
    return lo, hi, mass_lo, mass_hi, count_lo


@triton.jit(do_not_specialize=_SIZES)
def _narrow(table, counts, masses, wholes, thresholds, states, V, num_splits, index, table_row,
            N: tl.constexpr, MAX_SPLITS: tl.constexpr):  # fmt: skip
    """One program narrows the three brackets of a row by pass ``index``, and chooses the thresholds of the next one."""
    r = tl.program_id(0).to(tl.int64)
    filters = load_filters(table, table_row, r)
    top_k, top_p, number = filters[1], filters[2], filters[4]
    has_k, has_p = top_k < V, top_p < 1
    if (filters[0] <= 0) | (not (has_k | has_p)):
        return
    s, i = tl.arange(0, MAX_SPLITS), tl.arange(0, N)
    place = (r * num_splits + s[:, None]) * N + i[None, :]
    count = tl.sum(tl.load(counts + place, mask=s[:, None] < num_splits, other=0), 0)
    mass = tl.sum(tl.load(masses + place, mask=s[:, None] < num_splits, other=0), 0)
    state = states + r * 32
    if index == 0:
        kept = tl.sum(tl.load(wholes + r * num_splits + s, mask=s < num_splits, other=0), 0)
        whole, grid = tl.max(mass, 0), _grid(N)  # the last threshold is above all that have a weight
        kept = tl.where(filters[3] > 0, kept, whole)
        zero = r * 0  # int64
        of_k = (zero.to(tl.int32), zero.to(tl.int32) + END, zero, whole, zero.to(tl.int32))
        of_p, of_d = of_k, of_k
        tl.store(state + 15, kept)
        tl.store(state + 16, whole)
    else:
        kept, whole, grid = tl.load(state + 15), tl.load(state + 16), tl.load(thresholds + r * N + i)
        of_k, of_p, of_d = load_bracket(state), load_bracket(state + 5), load_bracket(state + 10)
    of_k = _narrowed(of_k, grid, mass, count, count < top_k, count >= top_k)
    # The less is known of the mass that one filter keeps, the less of what the next one takes its share of.
    most = tl.where(has_k, of_k[3], whole)
    least = tl.where(has_k & (of_k[1] - of_k[0] > 1), of_k[2], most)
    of_p = _narrowed(of_p, grid, mass, count, mass < share_of(top_p, least), mass >= share_of(top_p, most))
    least = tl.minimum(tl.where(has_p, tl.maximum(share_of(top_p, least), of_p[2]), least), kept)
    most = tl.minimum(tl.where(has_p, tl.minimum(of_p[3], most), most), kept)
    of_d = _narrowed(of_d, grid, mass, count, mass <= target_in(number, least), mass > target_in(number, most))
    store_bracket(state, of_k)
    store_bracket(state + 5, of_p)
    store_bracket(state + 10, of_d)
    j = tl.arange(0, 4)
    tl.store(state + 17 + j, j.to(tl.int64) * 0, mask=j < 3)  # nothing is listed yet
    tl.store(thresholds + r * N + i, _thresholds(of_k, of_p, of_d, has_k, has_p, N))


@triton.jit
def _add_below(x, best, temperature, thresholds, count, mass):
    """Add the logits below each threshold to their counts and masses."""
    key = key_of(x, best, temperature)
    is_below = key[None, :] < thresholds[:, None]
    count += is_below.to(tl.int32)
    mass += tl.where(is_below, mass_of(likelihood_of(key))[None, :], 0)
    return count, mass


@triton.jit(do_not_specialize=_SIZES)
def _measure(logits, greatest, table, counts, masses, wholes, thresholds, V, num_splits, index, logit_row, table_row,
             N: tl.constexpr, BLOCK: tl.constexpr, HAS_CUTS: tl.constexpr):  # fmt: skip
    """Pass ``index`` over one split of a row: what lies below each threshold. The first also sums what min-p keeps."""
    r, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    filters = load_filters(table, table_row, r)
    temperature, min_p = filters[0], filters[3]
    if temperature <= 0:
        return
    length = (V + num_splits - 1) // num_splits
    begin, end = split * length, tl.minimum(split * length + length, V)
    best, row = tl.load(greatest + r), logits + r * logit_row
    j = tl.arange(0, BLOCK)
    is_cut = (filters[1] < V) | (filters[2] < 1)
    if (index == 0) & ((min_p > 0) | (not is_cut)):
        kept = tl.zeros([BLOCK], tl.int64)
        for start in range(begin, end, 4 * BLOCK):
            x0, x1, x2, x3 = load_four(row, start + j, end, BLOCK)
            kept += kept_mass(x0, best, temperature, min_p) + kept_mass(x1, best, temperature, min_p)
            kept += kept_mass(x2, best, temperature, min_p) + kept_mass(x3, best, temperature, min_p)
        tl.store(wholes + r * num_splits + split, tl.sum(kept, 0))
    if HAS_CUTS:  # noqa: SIM102
        if is_cut:
            each = _grid(N)
            if index > 0:
                each = tl.load(thresholds + r * N + tl.arange(0, N))
            count, mass = tl.zeros([N, BLOCK], tl.int32), tl.zeros([N, BLOCK], tl.int64)
            for start in range(begin, end, 4 * BLOCK):
                x0, x1, x2, x3 = load_four(row, start + j, end, BLOCK)
                count, mass = _add_below(x0, best, temperature, each, count, mass)
                count, mass = _add_below(x1, best, temperature, each, count, mass)
                count, mass = _add_below(x2, best, temperature, each, count, mass)
                count, mass = _add_below(x3, best, temperature, each, count, mass)
            place = (r * num_splits + split) * N + tl.arange(0, N)
            tl.store(counts + place, tl.sum(count, 1))
            tl.store(masses + place, tl.sum(mass, 1))


@triton.jit
def _list_in(lo, hi, key, token, end, length, ids, capacity):
    """List the tokens in a bracket, in any order; ``length`` counts also those that are beyond the capacity."""
    is_in = (key >= lo) & (key < hi) & (token < end)
    place = tl.atomic_add(length + token * 0, 1, mask=is_in, sem="relaxed")
    tl.store(ids + place, token, mask=is_in & (place < capacity))


@triton.jit
def _list_row(row, best, temperature, state, ids, begin, end, has_k, has_p, capacity, BLOCK: tl.constexpr):
    of_k, of_p, of_d = load_bracket(state), load_bracket(state + 5), load_bracket(state + 10)
    end_k = tl.where(has_k & (of_k[2] < of_k[3]), of_k[1], 0)
    end_p = tl.where(has_p & (of_p[1] - of_p[0] > 1), of_p[1], 0)
    for start in range(begin, end, 4 * BLOCK):
        token = start + tl.arange(0, 4 * BLOCK)
        key = key_of(tl.load(row + token, mask=token < end, other=float("-inf")), best, temperature)
        _list_in(of_k[0], end_k, key, token, end, state + 17, ids, capacity)
        _list_in(of_p[0], end_p, key, token, end, state + 18, ids + capacity, capacity)
        _list_in(of_d[0], of_d[1], key, token, end, state + 19, ids + 2 * capacity, capacity)


@triton.jit(do_not_specialize=_SIZES)
def _list(logits, greatest, table, wholes, states, ids, tokens, V, num_splits, capacity, logit_row, table_row,
          BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr, HAS_CUTS: tl.constexpr):  # fmt: skip
    """List one split's tokens in each of the three brackets; draw from rows with neither top-k nor top-p."""
    r, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    filters = load_filters(table, table_row, r)
    temperature, min_p, number = filters[0], filters[3], filters[4]
    if temperature <= 0:
        return
    length = (V + num_splits - 1) // num_splits
    begin, end = split * length, tl.minimum(split * length + length, V)
    best, row = tl.load(greatest + r), logits + r * logit_row
    if HAS_CUTS:
        has_k, has_p = filters[1] < V, filters[2] < 1
        if has_k | has_p:
            state, own = states + r * 32, ids + r * 3 * capacity
            _list_row(row, best, temperature, state, own, begin, end, has_k, has_p, capacity, BLOCK)
            return
    s, j = tl.arange(0, MAX_SPLITS), tl.arange(0, 4 * BLOCK)
    each = tl.load(wholes + r * num_splits + s, mask=s < num_splits, other=0)
    target = target_in(number, tl.sum(each, 0))
    total = tl.sum(tl.where(s < split, each, 0), 0)
    if (target < total) | (target >= total + tl.sum(tl.where(s == split, each, 0), 0)):
        return
    start = begin
    while (start < end) & (total <= target):
        token = start + j
        mass = kept_mass(tl.load(row + token, mask=token < end, other=float("-inf")), best, temperature, min_p)
        num_before = tl.sum((total + tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
        total += tl.sum(mass, 0)
        if total > target:
            tl.store(tokens + r, (start + num_before).to(tl.int64))
        start += 4 * BLOCK


@triton.jit
def _listed(ids, start, length, is_listed, BLOCK: tl.constexpr):
    """Some tokens of a list, or of a row that has none, and which of them exist."""
    token = start + tl.arange(0, BLOCK)
    exists = token < length
    if is_listed:
        token = tl.load(ids + token, mask=exists, other=0)
    return token, exists


@triton.jit
def _settle(row, best, temperature, ids, length, bracket, capacity, V, target,
            BY_COUNT: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The key in a bracket at which the count or the mass passes ``target``, and the masses below it and up to it."""
    i = tl.arange(0, N)
    lo, hi, mass_lo, mass_hi, count_lo = bracket
    is_listed = length <= capacity
    length = tl.where(is_listed, length, V)
    base_count, base_mass = tl.where(is_listed, count_lo, 0), tl.where(is_listed, mass_lo, 0)
    least, most = hi, lo
    if hi - lo > 1:
        for start in range(0, length, BLOCK):
            token, exists = _listed(ids, start, length, is_listed, BLOCK)
            key = key_of(tl.load(row + token, mask=exists, other=float("-inf")), best, temperature)
            is_in = (key >= lo) & (key < hi) & exists
            least = tl.minimum(least, tl.min(tl.where(is_in, key, END), 0))
            most = tl.maximum(most, tl.max(tl.where(is_in, key, 0), 0))
        lo, hi = tl.minimum(least, most), most + 1
    while hi - lo > 1:
        thresholds = threshold_in(lo, hi, i, N)
        count, mass = tl.zeros([N], tl.int32) + base_count, tl.zeros([N], tl.int64) + base_mass
        for start in range(0, length, BLOCK):
            token, exists = _listed(ids, start, length, is_listed, BLOCK)
            key = key_of(tl.load(row + token, mask=exists, other=float("-inf")), best, temperature)
            is_below = key[None, :] < thresholds[:, None]
            count += tl.sum(is_below.to(tl.int32), 1)
            mass += tl.sum(tl.where(is_below, mass_of(likelihood_of(key))[None, :], 0), 1)
        is_before = mass <= target
        if BY_COUNT:
            is_before = count <= target
        hi = tl.minimum(hi, tl.min(tl.where(is_before, END, thresholds), 0))
        lo = tl.maximum(lo, tl.max(tl.where(is_before, thresholds, 0), 0))
        mass_hi = tl.minimum(mass_hi, tl.min(tl.where(is_before, MUCH, mass), 0))
        mass_lo = tl.maximum(mass_lo, tl.max(tl.where(is_before, mass, 0), 0))
    return lo, mass_lo, mass_hi


@triton.jit
def _tie(row, best, temperature, ids, length, capacity, V, key, rank, N: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens with a key the one that ``rank`` others with lower ids precede."""
    i = tl.arange(0, N)
    is_listed = length <= capacity
    length = tl.where(is_listed, length, V)
    lo, hi = length * 0 + V, length * 0
    for start in range(0, length, BLOCK):
        token, exists = _listed(ids, start, length, is_listed, BLOCK)
        is_tie = exists & (key_of(tl.load(row + token, mask=exists, other=0.0), best, temperature) == key)
        lo = tl.minimum(lo, tl.min(tl.where(is_tie, token, V), 0))
        hi = tl.maximum(hi, tl.max(tl.where(is_tie, token + 1, 0), 0))
    while (hi - lo > 1) & (rank > 0):
        thresholds = threshold_in(lo, hi, i, N)
        count = tl.zeros([N], tl.int32)
        for start in range(0, length, BLOCK):
            token, exists = _listed(ids, start, length, is_listed, BLOCK)
            is_tie = exists & (key_of(tl.load(row + token, mask=exists, other=0.0), best, temperature) == key)
            count += tl.sum((is_tie[None, :] & (token[None, :] < thresholds[:, None])).to(tl.int32), 1)
        hi = tl.minimum(hi, tl.min(tl.where(count <= rank, V, thresholds), 0))
        lo = tl.maximum(lo, tl.max(tl.where(count <= rank, thresholds, 0), 0))
    return lo


@triton.jit(do_not_specialize=_SIZES)
def _finish(logits, greatest, table, states, ids, tokens, V, capacity, logit_row, table_row,
            N: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program draws the token of one row with top-k or top-p, from the listed tokens."""
    r = tl.program_id(0).to(tl.int64)
    filters = load_filters(table, table_row, r)
    temperature, top_k, top_p, number = filters[0], filters[1], filters[2], filters[4]
    has_k, has_p = top_k < V, top_p < 1
    best, row = tl.load(greatest + r), logits + r * logit_row
    # With an infinity or NaN among the logits the row fails, whatever its token.
    if (temperature <= 0) | (not (has_k | has_p)) | (not (tl.abs(best) < float("inf"))):
        return
    state, own = states + r * 32, ids + r * 3 * capacity
    total = tl.load(state + 16)
    if has_k:
        of_k, length = load_bracket(state), tl.load(state + 17).to(tl.int32)
        if of_k[2] < of_k[3]:
            total = _settle(row, best, temperature, own, length, of_k, capacity, V, top_k - 1, True, N, BLOCK)[2]
        else:
            total = of_k[3]
    if has_p:
        least, length = share_of(top_p, total), tl.load(state + 18).to(tl.int32)
        end = _settle(row, best, temperature, own + capacity, length, load_bracket(state + 5), capacity, V,
                      least - 1, False, N, BLOCK)  # fmt: skip
        each = tl.maximum(mass_of(likelihood_of(end[0])), 1)
        total = end[1] + (least - end[1] + each - 1) // each * each
    target, length = target_in(number, tl.minimum(total, tl.load(state + 15))), tl.load(state + 19).to(tl.int32)
    drawn = _settle(row, best, temperature, own + 2 * capacity, length, load_bracket(state + 10), capacity, V,
                    target, False, N, BLOCK)  # fmt: skip
    rank = (target - drawn[1]) // tl.maximum(mass_of(likelihood_of(drawn[0])), 1)
    token = _tie(row, best, temperature, own + 2 * capacity, length, capacity, V, drawn[0], rank, N, BLOCK)
    tl.store(tokens + r, token.to(tl.int64), mask=token < V)


def draw_rows(
    logits: torch.Tensor, greatest: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor, *, has_cuts: bool
) -> None:
    """Replace in ``tokens`` int64 [R], those of the ``greatest`` logits [R], the tokens of rows with a temperature.

    ``logits`` are float32 [R, V]; ``table`` is that of ``sampling.device.columns``. Without ``has_cuts`` no row has
    top-k or top-p. A row whose greatest logit is not finite gets any token.
    """
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    num_splits = split_count(num_rows, vocab_size, num_processors(logits.device))
    capacity, num_cut = cdiv(vocab_size, 4), num_rows if has_cuts else 0
    masses = logits.new_empty(num_cut, num_splits, _NUM_THRESHOLDS, dtype=torch.int64)
    counts = torch.empty_like(masses, dtype=torch.int32)
    wholes = logits.new_empty(num_rows, num_splits, dtype=torch.int64)
    thresholds = logits.new_empty(num_cut, _NUM_THRESHOLDS, dtype=torch.int32)
    states = logits.new_empty(num_cut, _STATE, dtype=torch.int64)
    ids = logits.new_empty(num_cut, 3, capacity, dtype=torch.int32)
    rows, strides = (logits, greatest, table), (logits.stride(0), table.stride(0))
    sums = (counts, masses, wholes, thresholds)
    for index in range(_NUM_PASSES if has_cuts else 1):
        _measure[num_rows, num_splits](
            *rows, *sums, vocab_size, num_splits, index, *strides, N=_NUM_THRESHOLDS, BLOCK=_BLOCK, HAS_CUTS=has_cuts,
            num_warps=8,
        )  # fmt: skip
        if has_cuts:
            _narrow[(num_rows,)](
                table, *sums, states, vocab_size, num_splits, index, table.stride(0), N=_NUM_THRESHOLDS,
                MAX_SPLITS=MAX_SPLITS, num_warps=1,
            )  # fmt: skip
    _list[num_rows, num_splits](
        *rows, wholes, states, ids, tokens, vocab_size, num_splits, capacity, *strides, BLOCK=_BLOCK,
        MAX_SPLITS=MAX_SPLITS, HAS_CUTS=has_cuts, num_warps=8,
    )  # fmt: skip
    if has_cuts:
        _finish[(num_rows,)](
            *rows, states, ids, tokens, vocab_size, capacity, *strides, N=_NUM_THRESHOLDS, BLOCK=_LIST_BLOCK,
            num_warps=4,
        )  # fmt: skip


def split_count(num_rows: int, vocab_size: int, processors: int) -> int:
    """How many programs share a row, so that all processors have work."""
    wanted = _PROGRAMS_PER_PROCESSOR * processors // num_rows
    return max(1, min(wanted, MAX_SPLITS, cdiv(vocab_size, 4 * _BLOCK)))
