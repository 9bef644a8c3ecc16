// Groups of 32 bits on Arm, see formats.h. Instructions multiply by one lane of a register, so activations are loaded
// four groups at a time and need not be broadcast.
#pragma once

#include "simd.h"

namespace triptych {

// One of four groups of activations.
template <int kLane>
struct LaneOf {
  NativeInts groups;
};

INLINED NativeInts four_groups(const uint32_t* from) { return (NativeInts)vld1q_u32(from); }

// With groups that are loaded one by one.
template <class Groups>
struct OfLanes : Groups {
  template <int kPass>
  INLINED static LaneOf<0> activation(uint32_t group) {
    return {Groups::template activations<kPass>(broadcast_part(group))};
  }
};

// Not with the intrinsic: GCC broadcasts the lane for it, keeps what it broadcast for several products, and spills
// sums.
template <int kLane>
INLINED Floats with_lane(Floats sums, LaneOf<kLane> a, Floats columns) {
  return each<Floats>([&](int i) {
    NativeFloats sum = sums.part[i];
    asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(columns.part[i]), "w"(a.groups), "i"(kLane));
    return sum;
  });
}

// Groups that instructions multiply as they are stored.
struct NeonWholeGroups {
  static constexpr int kPasses = 1;
  using Columns = Ints;
  template <int>
  INLINED static NativeInts activations(NativeInts groups) { return groups; }
  template <int>
  INLINED static Columns columns(Ints weights) { return weights; }
};

struct NeonFloat32Groups : NeonWholeGroups {
  template <int kLane>
  INLINED static Floats dot(Floats sums, LaneOf<kLane> a, Columns columns) {
    return with_lane(sums, a, as_floats(columns));
  }
};

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct NeonBFloat16Groups : NeonWholeGroups {
  template <int kLane>
  INLINED static Floats dot(Floats sums, LaneOf<kLane> a, Columns columns) {
    return each<Floats>([&](int i) {
      return (NativeFloats)vbfdotq_laneq_f32((float32x4_t)sums.part[i], (bfloat16x8_t)columns.part[i],
                                             (bfloat16x8_t)a.groups, kLane);
    });
  }
};
#else
// The first of each pair, then the second.
struct NeonBFloat16Groups {
  static constexpr int kPasses = 2;
  using Columns = Floats;
  template <int kPass>
  INLINED static NativeInts activations(NativeInts groups) { return (NativeInts)widened<kPass>(groups); }
  template <int kPass>
  INLINED static Columns columns(Ints pairs) { return widened<kPass>(pairs); }
  template <int kLane>
  INLINED static Floats dot(Floats sums, LaneOf<kLane> a, Columns columns) { return with_lane(sums, a, columns); }
};
#endif

struct NeonInt8Groups : NeonWholeGroups {
  template <int kLane>
  INLINED static Ints dot(Ints sums, LaneOf<kLane> a, Columns columns) {
    return each<Ints>([&](int i) {
      const int8x16_t weights = (int8x16_t)columns.part[i];
#if defined(__ARM_FEATURE_DOTPROD)
      return (NativeInts)vdotq_laneq_s32((int32x4_t)sums.part[i], weights, (int8x16_t)a.groups, kLane);
#else
      // A sum of two products has 16 bits: weights are at least -127.
      const int8x16_t group = (int8x16_t)vdupq_laneq_s32((int32x4_t)a.groups, kLane);
      const int16x8_t low = vmull_s8(vget_low_s8(weights), vget_low_s8(group)), high = vmull_high_s8(weights, group);
      return (NativeInts)vpadalq_s16((int32x4_t)sums.part[i], vpaddq_s16(low, high));
#endif
    });
  }
};

}  // namespace triptych
