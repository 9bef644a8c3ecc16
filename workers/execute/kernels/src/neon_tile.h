// The tiles of tile.h and int4.h on Arm, whose instructions multiply by one group of activations out of four: steps are
// taken four at a time. Of the 32 registers of 128 bits, 20 hold the sums of 5 x 1 vectors, five activations and four
// weights.
#pragma once

#include <algorithm>

#include "formats.h"

namespace triptych {

#define ALWAYS __attribute__((always_inline))

// See tile.h. Each pass takes four steps, or as many as are left, so that the order of the sums does not depend on how
// many are left: products with zeros change nothing.
template <class Format, int kRows, int kVectors, class Sum, class Weights, class Asking, class Adding>
__attribute__((noinline)) void add_tile(Sum* sums, int width, const uint32_t* const* rows, const Weights& weights,
                                        int first, int steps, Asking asking, Adding adding) {
  typename Format::Accumulators registers[kRows][kVectors];
  const uint32_t* a[kRows];
  unrolled<kRows>([&](auto r) ALWAYS {
    a[r] = rows[r];
    unrolled<kVectors>([&](auto v) ALWAYS { registers[r][v] = adding.begin(sums[r * width + first + v]); });
  });
  for (int segment = 0, k = 0; k < steps; ++segment) {
    auto walk = weights.walk(segment, first);
    asking.begin_segment(segment);
    const int end = std::min(steps, k + weights.segment_steps);
    // Adds the products of one step, whose activations are lane(row).
    const auto add = [&](auto pass, const auto& lane) ALWAYS {
      unrolled<kVectors>([&](auto v) ALWAYS {
        const auto columns = Format::template columns<pass>(held(load<Ints>(walk.vector(v))));
        unrolled<kRows>([&](auto r) ALWAYS { registers[r][v] = Format::dot(registers[r][v], lane(r), columns); });
      });
      walk.next();
    };
    for (; k + 4 <= end; k += 4) {
      auto start = walk;
      unrolled<4>([&](auto) ALWAYS { asking.step(); });
      unrolled<Format::kPasses>([&](auto pass) ALWAYS {
        NativeInts groups[kRows];
        unrolled<kRows>([&](auto r) ALWAYS { groups[r] = Format::template activations<pass>(four_groups(a[r] + k)); });
        walk = start;
        unrolled<4>([&](auto i) ALWAYS { add(pass, [&](auto r) ALWAYS { return LaneOf<i>{groups[r]}; }); });
        if (pass + 1 < Format::kPasses) {
          start.again();
          unrolled<kRows>([&](auto r) ALWAYS { a[r] = renewed(a[r]); });
        }
      });
    }
    const auto start = walk;
    unrolled<Format::kPasses>([&](auto pass) ALWAYS {
      walk = start;
      for (int left = k; left < end; ++left)
        add(pass, [&](auto r) ALWAYS { return Format::template activation<pass>(a[r][left]); });
    });
    k = end;
  }
  unrolled<kRows>([&](auto r) ALWAYS {
    unrolled<kVectors>([&](auto v) ALWAYS {
      auto& sum = sums[r * width + first + v];
      sum = adding.end(sum, registers[r][v], r, first + v);
    });
  });
}

// See int4.h.
template <class Format, int kRows, int kVectors, class Weights, class Asking>
__attribute__((noinline)) void add_groups(Floats* sums, int width, const uint32_t* const* rows,
                                          const GroupWorth* const* worths, const Weights& weights, int first,
                                          int num_groups, Asking asking) {
  constexpr int kSteps = Format::kWeightSteps / Format::kPieces;
  const uint32_t* a[kRows];
  unrolled<kRows>([&](auto r) ALWAYS { a[r] = rows[r]; });
  auto walk = weights.walk(0, first);
  for (int group = 0; group < num_groups; ++group) {
    for (int piece = 0; piece < Format::kPieces; ++piece) {
      Ints products[kRows][kVectors] = {};
      for (int step = 0; step < kSteps; step += 2) {
        NativeInts groups[kRows];
        unrolled<kRows>([&](auto r) ALWAYS { groups[r] = four_groups(a[r] + 2 * step); });
        unrolled<2>([&](auto i) ALWAYS {
          asking.step();
          unrolled<kVectors>([&](auto v) ALWAYS {
            const Ints numbers = held(load<Ints>(walk.vector(v)));
            const auto add = [&](auto lane, Ints columns) ALWAYS {
              unrolled<kRows>([&](auto r) ALWAYS {
                products[r][v] = Format::dot(products[r][v], LaneOf<lane>{groups[r]}, columns);
              });
            };
            add(std::integral_constant<int, 2 * i>{}, Format::low(numbers));
            add(std::integral_constant<int, 2 * i + 1>{}, Format::high(numbers));
          });
          walk.next();
        });
      }
      unrolled<kVectors>([&](auto v) ALWAYS {
        const size_t rest = Format::kWeightSteps - (piece + 1) * kSteps + piece % Format::kWorthSteps;
        const typename Format::Worth worth(load<Ints>(walk.vector(v) + rest * weights.stride), piece);
        unrolled<kRows>([&](auto r) ALWAYS {
          Floats& sum = sums[r * width + first + v];
          sum = worth.add(sum, products[r][v], worths[r][group], piece);
        });
      });
      unrolled<kRows>([&](auto r) ALWAYS { a[r] += 2 * kSteps; });
    }
    for (int step = 0; step < Format::kWorthSteps; ++step) {
      asking.step();
      walk.next();
    }
  }
}

#undef ALWAYS

}  // namespace triptych
