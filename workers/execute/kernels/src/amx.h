// The tile registers of Intel's AMX (Sapphire Rapids and later): eight, of 16 rows of 64 bytes.
//
// One instruction multiplies 16 rows of activations, 16 groups each, by 16 groups of 16 columns, and adds the products
// to 16 x 16 sums. Compilers do not allocate these registers: they are named by their numbers.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
#pragma once

#include "formats.h"

namespace triptych {

// Whether the products of a format are computed in tile registers. If so, all of them are, those of a single row too:
// the instruction for bfloat16 adds the products of 32 inputs in an order of its own, and with vectors a row would get
// other bits.
#if defined(__AMX_TILE__)
template <class Format>
constexpr bool kInTileRegisters = std::is_same<Format, BFloat16>::value || std::is_same<Format, Int8>::value;
#else
template <class Format>
constexpr bool kInTileRegisters = false;
#endif

#if defined(__AMX_TILE__)
constexpr int kRegisterRows = 16, kRegisterSteps = 16;  // of a tile register

// Where the rows of a tile register are in memory.
struct RegisterRows {
  const uint32_t* start;
  size_t stride;  // groups from row to row
};

// Written in assembly as the intrinsics of GCC do not tell it that they read and write memory.
template <int kTile>
INLINED void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
INLINED void load_tile(RegisterRows from) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from.start), "r"(4 * from.stride) : "memory");
}
template <int kTile>
INLINED void store_tile(void* to, size_t stride_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(stride_bytes) : "memory");
}
// Adds the rows of `kRows` times the columns of `kColumns` to the sums.
template <class Format, int kSums, int kRows, int kColumns>
INLINED void multiply_tile_registers() {
  if constexpr (std::is_same<Format, BFloat16>::value)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
  else  // unsigned by signed bytes
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
}

// The shapes of this thread's tile registers, from their first use until the end of a product. Once released, they no
// longer burden context switches.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (heights_[0]) asm volatile("tilerelease");
  }

  // Registers 0, 1 and 4 have `first` rows, registers 2, 3 and 5 `second` rows; 6 and 7 are for weights.
  void shape(int first, int second) {
    if (first == heights_[0] && second == heights_[1]) return;
    heights_[0] = first;
    heights_[1] = second;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t num_rows[16] = {};
    } shapes;
    static_assert(sizeof shapes == 64, "as the processor reads it");
    const int num_rows[] = {first, first, second, second, first, second, kRegisterSteps, kRegisterSteps};
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = 64;
      shapes.num_rows[tile] = uint8_t(num_rows[tile]);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }

 private:
  int heights_[2] = {};
};
#endif

}  // namespace triptych
