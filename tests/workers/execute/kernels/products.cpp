// Tiles of every format and height: compared with sums in double, and rows in one batch with the same rows in another,
// bit by bit. For levels of processors that are only emulated; test_multiply.py is thorough, and compiles for longer.
// Prints a checksum of the products in int8, whose sums are exact: all levels have the same. WITHOUT_FLOAT32,
// WITHOUT_BFLOAT16 and WITHOUT_BYTES leave formats out.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "buffers.h"
#include "epilogues.h"
#include "pack.h"
#include "rows.h"

using namespace triptych;

namespace {

constexpr const char* kNames[] = {"float32", "bfloat16", "int8", "int4", "mxfp4", "fine int4"};
constexpr double kTolerances[] = {2e-6, 1e-2, 3e-2, 3e-2, 3e-2, 3e-2};  // as in test_multiply.py
constexpr int kMaxRows = 13;

void check(bool is_right, const char* what, int format, int rows) {
  if (is_right) return;
  std::fprintf(stderr, "%s: %s with %d rows\n", what, kNames[format], rows);
  std::exit(1);
}

// One tile of up to most_rows rows and four vectors, for each block: y = x times the matrix.
template <class Format>
void multiply_rows(const Matrix& matrix, const Rows& rows, Range range, float* y) {
  const int steps = num_steps<Format>(matrix), count = range.end - range.begin;
  const uint32_t* pointers[kTileRows];
  const GroupWorth* worths[kTileRows];
  for (int r = 0; r < count; ++r) pointers[r] = rows.row(range.begin + r), worths[r] = rows.worths(range.begin + r);
  for (int block = 0; block < matrix.num_blocks; ++block) {
    typename Format::Accumulators sums[kTileRows * 4] = {};
    Adjacent<> weights;
    weights.segment_steps = steps;
    weights.stride = 64;
    weights.start[0] = matrix.blocks + size_t(block) * steps * 64;
    if constexpr (kHasGroups<Format>) {
      with_rows(count, [&](auto known) {
        constexpr int kRows = decltype(known)::value, kAtATime = vectors_at_a_time(kRows, 4);
        for (int first = 0; first < 4; first += kAtATime)
          add_groups<Format, kRows, kAtATime>(sums, 4, pointers, worths, weights, first, steps / kGroupSteps<Format>,
                                              PrefetchLines<0>{});
      });
    } else {
      add_rows<Format, 4>(count, sums, 4, pointers, weights, steps, PrefetchLines<0>{}, FromZero{});
    }
    write_sums<Format, kTileRows, 4>(sums, matrix, rows, block, 0, range, Store{y, size_t(64) * matrix.num_blocks});
  }
}

template <class Format>
void multiply_all(const Matrix& matrix, const float* x, int num_rows, float* y) {
  using Activations = std::conditional_t<kHasGroups<Format>, Int8, Format>;
  const int width = padded(matrix.num_inputs);
  Operand<Activations> operand;
  operand.reserve(num_rows, width);
  std::vector<float> row(width), scratch(width);
  for (int r = 0; r < num_rows; ++r) {
    std::copy_n(x + size_t(r) * matrix.num_inputs, matrix.num_inputs, row.data());
    operand.write(r, width, row.data(), {rounding_of(matrix), matrix.num_inputs, scratch.data()});
  }
  for (int r = 0; r < num_rows; r += most_rows<Format>())
    multiply_rows<Format>(matrix, operand.rows(num_rows), {r, std::min(num_rows, r + most_rows<Format>())}, y);
}

struct Packed {
  std::vector<uint32_t> blocks;
  std::vector<float> scales, weights;  // weights [outputs][inputs], as dequantised
  std::vector<int32_t> offsets;
  Matrix matrix{};

  Packed(int format, int num_inputs, int num_outputs, std::mt19937& random) {
    const int columns = padded(num_outputs), groups = num_groups_of(num_inputs);
    const int per_group = format == kFloat32 ? 1 : format == kBFloat16 ? 2 : 4;
    const int steps = format >= kInt4 ? groups * group_steps_of(format) : (num_inputs + per_group - 1) / per_group;
    blocks.resize(size_t(columns) * steps);
    scales.resize(columns);
    offsets.resize(columns);
    weights.resize(size_t(num_outputs) * num_inputs);
    matrix.blocks = blocks.data();
    matrix.scales = scales.data();
    matrix.offsets = offsets.data();
    matrix.num_inputs = num_inputs;
    matrix.num_blocks = columns / 64;
    matrix.format = format;
    if (format == kMxfp4) {
      std::vector<uint8_t> numbers(weights.size() / 2), exponents(weights.size() / 32);
      for (auto& number : numbers) number = uint8_t(random());
      for (auto& exponent : exponents) exponent = uint8_t(124 + random() % 4);
      pack_stored(matrix, MxWeights{numbers.data(), exponents.data()}, {0, 64}, 0, num_outputs);
    } else {
      for (float& weight : weights) weight = float(random() % 2001) / 1000 - 1;
      pack(matrix, weights.data(), nullptr, {0, 64}, 0, num_outputs);
    }
    if (format >= kInt4) unpack(matrix, {0, 64}, 0, num_outputs, weights.data());
  }

  std::vector<float> multiply(const float* x, int rows) const {
    std::vector<float> y(size_t(rows) * 64 * matrix.num_blocks);
    switch (matrix.format) {
#ifndef WITHOUT_FLOAT32
      case kFloat32: multiply_all<Float32>(matrix, x, rows, y.data()); break;
#endif
#ifndef WITHOUT_BFLOAT16
      case kBFloat16: multiply_all<BFloat16>(matrix, x, rows, y.data()); break;
#endif
#ifndef WITHOUT_BYTES
      case kInt8: multiply_all<Int8>(matrix, x, rows, y.data()); break;
      case kInt4: multiply_all<Int4>(matrix, x, rows, y.data()); break;
      case kFineInt4: multiply_all<FineInt4>(matrix, x, rows, y.data()); break;
      case kMxfp4: multiply_all<Mxfp4>(matrix, x, rows, y.data()); break;
#endif
    }
    return y;
  }
};

void compare(int format, int num_inputs, int num_outputs, uint32_t& checksum) {
  std::mt19937 random(num_inputs * num_outputs);
  const Packed packed(format, num_inputs, num_outputs, random);
  std::vector<float> x(size_t(kMaxRows) * num_inputs);
  for (float& value : x) value = float(random() % 2001) / 500 - 2;
  const std::vector<float> together = packed.multiply(x.data(), kMaxRows);
  const size_t width = 64 * packed.matrix.num_blocks;
  for (int r = 0; r < kMaxRows; ++r)
    for (int n = 0; n < num_outputs; ++n) {
      double exact = 0;
      for (int k = 0; k < num_inputs; ++k) exact += double(x[r * num_inputs + k]) * packed.weights[n * num_inputs + k];
      const double limit = kTolerances[format] * 4 * std::sqrt(num_inputs) * 2;
      check(std::abs(together[r * width + n] - exact) < limit, "a wrong product", format, kMaxRows);
    }
  for (int rows = 1; rows < 8; ++rows)
    for (int first = 0; first + rows <= kMaxRows; first += 3) {
      const std::vector<float> alone = packed.multiply(x.data() + first * num_inputs, rows);
      check(!std::memcmp(alone.data(), together.data() + first * width, alone.size() * sizeof(float)),
            "other bits in another batch", format, rows);
    }
  if (format == kInt8)
    for (float value : together) checksum = checksum * 31 + uint32_t(std::lround(value * 1024));
}

// Attention reads weights in segments, and adds products with zeros for masked keys: neither changes a bit.
template <class Format>
void compare_segments(int format) {
  constexpr int kSteps = 24, kSegment = 8;
  std::mt19937 random(format);
  const auto group = [&] {
    float numbers[2] = {float(random() % 2001) / 1000 - 1, float(random() % 2001) / 1000 - 1};
    uint32_t bits;
    if (format == kFloat32) std::memcpy(&bits, numbers, sizeof bits);
    else bits = to_bf16(numbers[0]) | uint32_t{to_bf16(numbers[1])} << 16;
    return bits;
  };
  std::vector<uint32_t> weights(kSteps * 64), apart(kSteps * 64), rows(kTileRows * kSteps);
  for (uint32_t& weight : weights) weight = group();
  for (uint32_t& activation : rows) activation = group();
  Adjacent<> whole{{weights.data()}, kSteps, 64}, segments{{}, kSegment, 64};
  for (int i = 0; i < kSteps / kSegment; ++i) {
    uint32_t* const place = apart.data() + (kSteps / kSegment - 1 - i) * kSegment * 64;
    std::copy_n(weights.data() + i * kSegment * 64, kSegment * 64, place);
    segments.start[i] = place;
  }
  const auto sums_of = [&](int count, const Adjacent<>& of, int steps, const std::vector<uint32_t>& activations) {
    std::vector<float> sums(count * 64);
    const uint32_t* pointers[kTileRows];
    for (int r = 0; r < count; ++r) pointers[r] = activations.data() + r * kSteps;
    Floats lanes[kTileRows * 4];
    add_rows<Format, 4>(count, lanes, 4, pointers, of, steps, PrefetchLines<0>{}, FromZero{});
    for (int i = 0; i < count * 4; ++i) store(sums.data() + i * kLanes, lanes[i]);
    return sums;
  };
  for (int count = 1; count <= kTileRows; ++count)
    for (int steps = kSegment; steps <= kSteps; ++steps) {
      const std::vector<float> sums = sums_of(count, segments, steps, rows);
      check(sums == sums_of(count, whole, steps, rows), "segments change bits", format, count);
      std::vector<uint32_t> masked = rows;
      for (int r = 0; r < kTileRows; ++r) std::fill_n(masked.begin() + r * kSteps + steps, kSteps - steps, 0);
      check(sums == sums_of(count, whole, kSteps, masked), "zeros change bits", format, count);
      const std::vector<float> alone = sums_of(1, whole, steps, rows);
      check(std::equal(alone.begin(), alone.end(), sums.begin()), "other rows change bits", format, count);
    }
}

void compare_formats(std::initializer_list<int> formats) {
  uint32_t checksum = 0;
  for (int format : formats) {
    compare(format, 224, 150, checksum);
    compare(format, format == kMxfp4 ? 96 : 77, 70, checksum);
  }
  if (checksum) std::printf("%08x\n", checksum);
}

}  // namespace

int main() {
#ifndef WITHOUT_FLOAT32
  compare_segments<Float32>(kFloat32);
  compare_formats({kFloat32});
#endif
#ifndef WITHOUT_BFLOAT16
  compare_segments<BFloat16>(kBFloat16);
  compare_formats({kBFloat16});
#endif
#ifndef WITHOUT_BYTES
  compare_formats({kInt8, kInt4, kMxfp4, kFineInt4});
#endif
}
