// Products in tile registers.
//
// 16 steps of 16 columns of a block are what a register holds, as they are: matrices are packed as for vectors. Up to
// 16 rows are multiplied by a whole block at a time, so that it is read as one contiguous run; up to 32 rows by a half
// block, for which each register that is loaded is used twice.
#pragma once

#include "matmul.h"

namespace triptych {

template <class Format, class Write>
class RegisterProduct {
 public:
  RegisterProduct(const Matrix& matrix, const Rows& rows, const Write& write)
      : matrix_(matrix), rows_(rows), write_(write), steps_(num_steps<Format>(matrix)) {}

  // The half blocks in `range`, numbered 2 * block + half.
  void run(Range range) {
    constexpr int kMostRows = 2 * kRegisterRows;
    const int num_groups = (rows_.count + kMostRows - 1) / kMostRows;
    for (int unit = range.begin, end; unit < range.end; unit = end) {
      end = std::min(range.end, (unit / 2 + 1) * 2);  // of the block
      for (int group = 0; group < num_groups; ++group) {
        const Ahead ahead = end - unit == 2 ? what_to_prefetch(unit / 2, group, num_groups) : Ahead{};
        const int first = group * kMostRows, behind = std::min(rows_.count, first + kMostRows);
        multiply_rows({rows_.first + first, rows_.first + behind}, {unit, end}, ahead);
      }
    }
  }

 private:
  static constexpr int kRows = 4, kColumns = 6;  // the first registers for activations and for weights
  using Copy = uint32_t[kRegisterRows][kLanes];

  // Cache lines to prefetch with each 16 steps.
  struct Ahead {
    const char* next;
    int lines;
    void ask() {
      for (int line = 0; line < lines; ++line) __builtin_prefetch(next + 64 * line, 0, 2);
      next += 64 * lines;
    }
  };

  Ahead what_to_prefetch(int block, int group, int num_groups) const {
    constexpr int kFastRows = 0;  // registers load lines 256 bytes apart: no stream that the hardware reads ahead
    const Prefetch prefetch = prefetch_of(matrix_, block, steps_, rows_, group, num_groups, kFastRows);
    return {prefetch.start, kRegisterSteps * prefetch.lines};
  }

  // One or both halves of a block; what is to be prefetched, is with the first of them.
  void multiply_rows(Range range, Range halves, Ahead ahead) {
    const int block = halves.begin / 2;
    const bool is_low = range.end - range.begin <= kRegisterRows;
    if (is_low && halves.end - halves.begin == 2) return multiply<1, 4>(block, 0, range, ahead);
    for (int unit : Indices{halves}) {
      is_low ? multiply<1, 2>(block, unit % 2, range, ahead) : multiply<2, 2>(block, unit % 2, range, ahead);
      ahead = {};
    }
  }

  // As many as 16 * kHigh rows times kWide vectors of a block, from `half` on; a half block is every second vector.
  template <int kHigh, int kWide>
  void multiply(int block, int half, Range range, Ahead ahead) {
    const int count = range.end - range.begin, height = std::min(count, kRegisterRows);
    registers_.shape(height, kHigh > 1 ? count - height : height);
    for (int row = range.begin; row < range.end; ++row) write_.expect(row, block);
    unrolled<kHigh * kWide>([](auto sums) { clear_tile<sums>(); });
    const uint32_t* weights = matrix_.blocks + size_t(block) * steps_ * 64 + 16 * half;
    alignas(64) Copy copies[kHigh];
    for (int k = 0; k < steps_; k += kRegisterSteps) {
      ahead.ask();
      const int num_steps = std::min(kRegisterSteps, steps_ - k);
      const auto inputs = [&](auto i) {
        const int first = range.begin + i * kRegisterRows, end = std::min(range.end, first + kRegisterRows);
        return this->inputs({first, end}, k, num_steps, copies[i]);
      };
      if (num_steps == kRegisterSteps)
        add<kHigh, kWide>(inputs, [&](auto j) { return RegisterRows{weights + k * 64 + j * (64 / kWide), 64}; });
      else
        add_last<kHigh, kWide>(inputs, weights + k * 64, num_steps);
    }
    typename Format::Accumulators sums[kHigh * kRegisterRows * kWide];
    unrolled<kHigh * kWide>([&](auto tile) {
      store_tile<tile>(sums + tile / kWide * kRegisterRows * kWide + tile % kWide, sizeof *sums * kWide);
    });
    write_sums<Format, kHigh * kRegisterRows, kWide>(sums, matrix_, rows_, block, half, range, write_);
  }

  // Adds the products of 16 steps.
  template <int kHigh, int kWide, class Inputs, class Weights>
  INLINED static void add(const Inputs& inputs, const Weights& weights) {
    unrolled<kHigh>([&](auto i) { load_tile<kRows + i>(inputs(i)); });
    unrolled<kWide>([&](auto j) {
      load_tile<kColumns + j % 2>(weights(j));
      unrolled<kHigh>([&](auto i) { multiply_tile_registers<Format, i * kWide + j, kRows + i, kColumns + j % 2>(); });
    });
  }

  // Adds those of fewer steps: what follows them in memory belongs to the next block, so they are copied before zeros.
  template <int kHigh, int kWide, class Inputs>
  __attribute__((noinline)) static void add_last(const Inputs& inputs, const uint32_t* weights, int num_steps) {
    alignas(64) Copy copies[kWide] = {};
    for (int j = 0; j < kWide; ++j)
      for (int step = 0; step < num_steps; ++step)
        std::copy_n(weights + step * 64 + j * (64 / kWide), kLanes, copies[j][step]);
    add<kHigh, kWide>(inputs, [&](auto j) { return RegisterRows{copies[j][0], kLanes}; });
  }

  // Steps k.. of some rows; copied if rows are not equally far apart, or end before.
  INLINED RegisterRows inputs(Range range, int k, int num_steps, Copy& copy) const {
    if (!rows_.places && num_steps == kRegisterSteps) return {rows_.row(range.begin) + k, rows_.stride};
    const __mmask16 is_there = __mmask16((1u << num_steps) - 1);
    for (int row = range.begin; row < range.end; ++row)
      _mm512_store_si512(copy[row - range.begin], _mm512_maskz_loadu_epi32(is_there, rows_.row(row) + k));
    return {copy[0], kLanes};
  }

  const Matrix& matrix_;
  const Rows& rows_;
  const Write& write_;
  const int steps_;
  TileRegisters registers_;
};

template <class Format, class Write>
void multiply_in_registers(const Matrix& matrix, const Rows& rows, Range range, const Write& write) {
  RegisterProduct<Format, Write>(matrix, rows, write).run(range);
}

}  // namespace triptych
