// Rows times a packed matrix.
//
// A block of 64 columns is four vectors. Its two halves, vectors {0, 2} and {1, 3}, are the unit in which a matrix is
// divided among threads: nine blocks split evenly over two threads, and gate and up columns, 32 apart, stay together.
// All rows are multiplied by a block before the next one is touched: it comes from memory once, then from the L2 cache.
#pragma once

#include <algorithm>

#include "abi.h"
#include "amx.h"
#include "mxfp4.h"

namespace triptych {

struct Range {
  int begin, end;
};

// The part of 0..count that belongs to `thread`.
inline Range share(int count, int thread, int num_threads) {
  return {int(int64_t{count} * thread / num_threads), int(int64_t{count} * (thread + 1) / num_threads)};
}

// The indices in a range, for a range-based for loop.
struct Indices {
  struct Iterator {
    int value;
    int operator*() const { return value; }
    void operator++() { ++value; }
    bool operator!=(Iterator other) const { return value != other.value; }
  };
  Range range;
  Iterator begin() const { return {range.begin}; }
  Iterator end() const { return {range.end}; }
};

// Rows of activations, in groups of 32 bits: one float, two bfloat16 or four bytes.
struct Rows {
  const uint32_t* groups;
  size_t stride;        // groups from row to row
  const float* scales;  // int8 only: of each row, or for weights in four bits a GroupWorth of each group of a row
  size_t scale_stride;
  int count;
  int first = 0;                    // number of the first of the `count` rows
  const int32_t* places = nullptr;  // of each row in `groups`; null: the rows are consecutive
  // The same rows as for weights in eight bits, if these are for weights in four and both are needed.
  const uint32_t* whole_groups = nullptr;
  const float* whole_scales = nullptr;

  // For weights in eight bits.
  Rows whole() const {
    return whole_groups ? Rows{whole_groups, stride, whole_scales, scale_stride, count, first} : *this;
  }
  // Only some of them, with their numbers.
  Rows within(Range range) const {
    Rows rows = *this;
    rows.first = range.begin;
    rows.count = range.end - range.begin;
    return rows;
  }
  // The numbers of a part of them.
  Range share(int part, int num_parts) const {
    const Range range = triptych::share(count, part, num_parts);
    return {first + range.begin, first + range.end};
  }
  // The numbers of one of their pieces of `size`, or of what is left for the last one.
  Range piece(int number, int size) const {
    return {first + number * size, first + std::min(count, (number + 1) * size)};
  }
  Rows of(const Matrix& matrix) const { return matrix.format >= kInt4 ? *this : whole(); }
  int place(int row) const { return places ? places[row] : row; }
  const uint32_t* row(int row) const { return groups + place(row) * stride; }
  const float* scale(int row) const { return scales + place(row) * scale_stride; }
  const GroupWorth* worths(int row) const { return reinterpret_cast<const GroupWorth*>(scale(row)); }
};

// Whether weights are in four bits, in groups.
template <class Format>
constexpr bool kHasGroups = std::is_base_of<Int4, Format>::value;

// The most rows of a tile.
template <class Format>
constexpr int most_rows() {
  if constexpr (kHasGroups<Format>) return Format::kMostRows;
  return kTileRows;
}

template <class Format>
inline int num_steps(const Matrix& matrix) {
  if constexpr (kHasGroups<Format>) return num_groups_of(matrix.num_inputs) * kGroupSteps<Format>;
  return (matrix.num_inputs + Format::kGroup - 1) / Format::kGroup;
}

// The factors of some rows' sums.
template <class Format, int kRows>
struct RowScales {
  float of[kRows];
  INLINED RowScales(const Rows& rows, Range range) {
    if constexpr (std::is_same<Format, Int8>::value)
      for (int row = range.begin; row < range.end; ++row) of[row - range.begin] = *rows.scale(row);
  }
};

// Dequantises the sums of 16 columns, row by row, and adds the bias. What belongs to the columns is read once.
template <class Format>
class Finish {
 public:
  using Accumulators = typename Format::Accumulators;

  // `sums` of rows are `width` apart.
  INLINED Finish(const Accumulators* sums, int width, const float* row_scales, const Matrix& matrix, int column)
      : sums_(sums), width_(width), row_scales_(row_scales), bias_(matrix.bias ? matrix.bias + column : nullptr) {
    if constexpr (std::is_same<Format, Int8>::value) {
      scales_ = load<Floats>(matrix.scales + column);
      if (Int8::kExcess) offsets_ = load<Ints>(matrix.offsets + column);
    }
  }

  INLINED Floats operator()(int row) const {
    Floats result;
    if constexpr (std::is_same<Format, Int8>::value) {
      const Floats exact = to_floats(Int8::kExcess ? sums_[row * width_] - offsets_ : sums_[row * width_]);
      result = exact * (scales_ * broadcast(row_scales_[row]));
    } else {
      result = sums_[row * width_];
    }
    return bias_ ? result + load<Floats>(bias_) : result;
  }

 private:
  const Accumulators* sums_;
  int width_;
  const float *row_scales_, *bias_;
  Floats scales_;
  Ints offsets_;
};

// The results of a tile in 16 columns, `vector` of a block, and in the 16 that are 32 further: low(r) and high(r) of
// row `first` + r. These are references, as copies would go through memory.
template <class Low, class High>
struct Pair {
  int first, count, block, vector;
  const Low& low;
  const High& high;
};
template <class Low, class High>
INLINED Pair<Low, High> make_pair(int first, int count, int block, int vector, const Low& low, const High& high) {
  return {first, count, block, vector, low, high};
}

// Calls write(pair) for the sums of `kVectors` vectors of a block, from `half` on, and a range of at most kRows rows.
template <class Format, int kRows, int kVectors, class Write>
INLINED void write_sums(const typename Format::Accumulators* sums, const Matrix& matrix, const Rows& rows, int block,
                        int half, Range range, const Write& write) {
  const RowScales<Format, kRows> scales(rows, range);
  for (int v = 0; v < kVectors / 2; ++v) {
    const int column = 64 * block + 16 * (half + v);
    const Finish<Format> low(sums + v, kVectors, scales.of, matrix, column);
    const Finish<Format> high(sums + v + kVectors / 2, kVectors, scales.of, matrix, column + 32);
    write(make_pair(range.begin, range.end - range.begin, block, half + v, low, high));
  }
}

// Cache lines to prefetch while a tile is computed: `lines` at each step, from `start` on.
struct Prefetch {
  const char* start;
  int lines;
};

constexpr int kFastRows = kReadsAhead ? 0 : 4;

// What the tile of a group of rows prefetches. If several groups share a block, each prefetches its part of the next
// block, so that memory traffic is spread evenly over the computation. With up to `fast_rows`, the hardware prefetcher
// keeps up and software prefetches only get in its way, except on Zen 5. With somewhat more rows, the time between reads
// is too long for it, so the tile prefetches its own block a little ahead.
inline Prefetch prefetch_of(const Matrix& matrix, int block, int steps, const Rows& rows, int group, int num_groups,
                            int fast_rows = kFastRows) {
  constexpr int kStepBytes = 256, kStepsAhead = 32;
  const char* start = reinterpret_cast<const char*>(matrix.blocks) + size_t(block) * steps * kStepBytes;
  if (num_groups == 1) return {start + kStepsAhead * kStepBytes, rows.count > fast_rows ? 4 : 0};
  const int begin = 4 * group / num_groups, end = 4 * (group + 1) / num_groups;
  return {start + size_t(steps) * (kStepBytes + begin * (kStepBytes / 4)), end - begin};
}

// The fewest rows of a tile that prefetches so many lines at each step, see prefetch_of: with several groups of rows,
// that is how many the smallest of two or three groups has. For fewer rows no such tile is compiled.
constexpr int fewest_rows(int lines, int most_rows) {
  return lines == 4 ? kFastRows + 1 : lines == 2 ? (most_rows + 1) / 2 : lines == 1 ? (2 * most_rows + 1) / 3 : 1;
}

// What is computed before an epilogue: `num_vectors` vectors of a block from `half` on, for a range of rows.
struct Tile {
  const Matrix& matrix;
  const Rows& rows;
  int block, half, num_vectors;  // a whole block, or half of it
  Range range;
  Prefetch prefetch;  // half a block prefetches nothing
};

// The sums of tiles, which all epilogues share.
template <class Format>
struct TileSums {
  using Accumulators = typename Format::Accumulators;
  // sums [rows][num_vectors]
  static void find(Accumulators* sums, const Tile& tile);
  template <int kVectors>
  INLINED static void find_vectors(Accumulators* sums, const Tile& tile);
};

template <class Format>
__attribute__((noinline)) void TileSums<Format>::find(Accumulators* sums, const Tile& tile) {
  if (kTileVectors > 2 && tile.num_vectors == kTileVectors)
    find_vectors<kTileVectors>(sums, tile);
  else
    find_vectors<2>(sums, tile);
}

template <class Format>
template <int kVectors>
void TileSums<Format>::find_vectors(Accumulators* sums, const Tile& tile) {
  const int steps = num_steps<Format>(tile.matrix), count = tile.range.end - tile.range.begin;
  Adjacent<64 / kVectors> weights;  // a half block is every second vector
  weights.segment_steps = steps;
  weights.stride = 64;
  weights.start[0] = tile.matrix.blocks + size_t(tile.block) * steps * 64 + 16 * tile.half;
  const uint32_t* rows[kTileRows];
  const GroupWorth* worths[kTileRows];
  for (int r = 0; r < count; ++r) {
    rows[r] = tile.rows.row(tile.range.begin + r);
    if constexpr (kHasGroups<Format>) worths[r] = tile.rows.worths(tile.range.begin + r);
  }
  if constexpr (kHasGroups<Format>) std::fill_n(sums, count * kVectors, Accumulators{});
  with_rows(count, [&](auto known) {
    constexpr int kRows = decltype(known)::value, kAtATime = vectors_at_a_time(kRows, kVectors);
    if constexpr (kRows <= most_rows<Format>()) {
      const auto run = [&](auto lines) {
        constexpr bool kIsUsed = kVectors == 4 && kRows >= fewest_rows(lines, most_rows<Format>());
        const PrefetchLines<kIsUsed ? lines : 0> asking{tile.prefetch.start};
        if constexpr (kHasGroups<Format>) {
          const int num_groups = steps / kGroupSteps<Format>;
          const auto add = [&](int first, auto asking) {
            add_groups<Format, kRows, kAtATime>(sums, kVectors, rows, worths, weights, first, num_groups, asking);
          };
          add(0, asking);
          for (int first = kAtATime; first < kVectors; first += kAtATime) add(first, PrefetchLines<0>{});
        } else {
          add_known_rows<Format, kRows, kVectors>(sums, kVectors, rows, weights, steps, asking, FromZero{});
        }
      };
      switch (tile.prefetch.lines) {
        case 0: return run(std::integral_constant<int, 0>{});
        case 1: return run(std::integral_constant<int, 1>{});
        case 2: return run(std::integral_constant<int, 2>{});
        default: return run(std::integral_constant<int, 4>{});
      }
    }
  });
}

// Calls write.expect(row, block) for the rows before they are computed, then write_sums. Not inlined: within the loops
// over tiles, the epilogue with gates takes three times as long.
template <class Format, int kVectors, class Write>
__attribute__((noinline)) void multiply_tile(const Tile& tile, const Write& write) {
  typename Format::Accumulators sums[kTileRows * kVectors];
  for (int row = tile.range.begin; row < tile.range.end; ++row) write.expect(row, tile.block);
  TileSums<Format>::find(sums, tile);
  write_sums<Format, kTileRows, kVectors>(sums, tile.matrix, tile.rows, tile.block, tile.half, tile.range, write);
}

template <class Format, class Write>
void multiply_in_vectors(const Matrix& matrix, const Rows& rows, Range range, const Write& write) {
  constexpr int kMost = most_rows<Format>();
  const int num_groups = (rows.count + kMost - 1) / kMost;
  // A few rows more than one tile has: the full one multiplies no more slowly than memory delivers, and prefetches like
  // a single one; that of the rest, over weights that are in the cache, prefetches what the next full one begins with.
  const bool has_rest = num_groups == 2 && rows.count <= kMost * 5 / 3;
  for (int unit = range.begin; unit < range.end;) {
    const bool is_whole = kTileVectors == 4 && unit % 2 == 0 && unit + 1 < range.end;
    for (int group = 0; group < num_groups; ++group) {
      // Otherwise, 32 rows are 6 + 5 + 5 + 6 + 5 + 5, not 6 * 5 + 2.
      const Range part = has_rest ? rows.piece(group, kMost) : rows.share(group, num_groups);
      const int place = has_rest ? 0 : group, num_places = has_rest && group == 0 ? 1 : num_groups;
      const Prefetch prefetch = prefetch_of(matrix, unit / 2, num_steps<Format>(matrix), rows, place, num_places);
      if (is_whole) {
        multiply_tile<Format, kTileVectors>({matrix, rows, unit / 2, 0, kTileVectors, part, prefetch}, write);
      } else {
        multiply_tile<Format, 2>({matrix, rows, unit / 2, unit % 2, 2, part, {nullptr, 0}}, write);
      }
    }
    unit += is_whole ? 2 : 1;
  }
}

// Defined in amx_products.h.
template <class Format, class Write>
void multiply_in_registers(const Matrix& matrix, const Rows& rows, Range range, const Write& write);

// Computes the half blocks in `range` of the product, numbered 2 * block + half. The matrix is in this format.
template <class Format, class Write>
void multiply_halves(const Matrix& matrix, const Rows& rows, Range range, const Write& write) {
  if constexpr (kInTileRegisters<Format>)
    multiply_in_registers<Format>(matrix, rows, range, write);
  else
    multiply_in_vectors<Format>(matrix, rows, range, write);
}

// The same, with a matrix in four bits too.
template <class Format, class Write>
void multiply(const Matrix& matrix, const Rows& rows, Range range, const Write& write) {
  if constexpr (std::is_same<Format, Int8>::value) {
    if (matrix.format == kInt4) return multiply_halves<Int4>(matrix, rows, range, write);
    if (matrix.format == kMxfp4) return multiply_halves<Mxfp4>(matrix, rows, range, write);
    if (matrix.format == kFineInt4) return multiply_halves<FineInt4>(matrix, rows, range, write);
  }
  multiply_halves<Format>(matrix, rows, range, write);
}

}  // namespace triptych

#if defined(__AMX_TILE__)
#include "amx_products.h"
#endif
