// Computes the instructions of Intel's AMX on processors that lack them, where they raise SIGILL.
//
// So what is tested is the library as it is built for processors that have them. Everything is checked that such a
// processor checks; what it would not execute is left to the handler that was there before.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, "LDTILECFG" to "TILEZERO".
#pragma GCC optimize("O3")  // tests are built without most optimisations

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>

#include <immintrin.h>
#include <ucontext.h>

namespace {

constexpr int kNumTiles = 8, kRows = 16, kGroups = 16;

struct Tile {
  int rows = 0, row_bytes = 0;
  uint32_t groups[kRows][kGroups] = {};
  bool is_valid() const { return rows > 0 && row_bytes % 4 == 0; }
};
thread_local Tile tiles[kNumTiles];
thread_local bool is_configured = false;

std::atomic<int64_t> num_products{0}, num_in_use{0};  // threads that have not released their tiles
struct sigaction previous;

struct Instruction {
  const uint8_t* bytes;
  greg_t* registers;
  int length = 5;

  int prefix() const { return bytes[2] & 3; }  // none, 66, F3, F2
  int opcode() const { return bytes[3]; }
  bool names_register() const { return bytes[4] >> 6 == 3; }
  int modrm_register() const { return bytes[4] >> 3 & 7; }
  int modrm_operand() const { return bytes[4] & 7; }
  int vex_operand() const { return ~bytes[2] >> 3 & 15; }
  // C4, the map 0F38, W0 and 128 bits.
  bool is_vex() const { return bytes[0] == 0xc4 && (bytes[1] & 31) == 2 && (bytes[2] & 0x84) == 0; }

  uint64_t general(int number) const {
    constexpr int kPlaces[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return uint64_t(registers[kPlaces[number]]);
  }
  template <class Number>
  int64_t displacement() {
    Number number;
    std::memcpy(&number, bytes + length, sizeof number);
    length += sizeof number;
    return number;
  }
  // The memory operand; `stride` is the index of its SIB byte, or untouched if it has none.
  uint64_t address(int64_t* stride) {
    const int mode = bytes[4] >> 6, high_base = bytes[1] & 0x20 ? 0 : 8, high_index = bytes[1] & 0x40 ? 0 : 8;
    if (mode == 0 && modrm_operand() == 5) {
      const int64_t offset = displacement<int32_t>();
      return uint64_t(registers[REG_RIP]) + length + offset;
    }
    uint64_t base = 0;
    if (modrm_operand() != 4) {
      base = general(high_base + modrm_operand());
    } else {
      const int sib = bytes[length++], index = high_index + (sib >> 3 & 7);
      if (index != 4) *stride = int64_t(general(index)) << (sib >> 6);
      if ((sib & 7) == 5 && mode == 0)
        base = displacement<int32_t>();
      else
        base = general(high_base + (sib & 7));
    }
    if (mode == 1) base += displacement<int8_t>();
    if (mode == 2) base += displacement<int32_t>();
    return base;
  }
};

void release() {
  if (is_configured) --num_in_use;
  is_configured = false;
  for (Tile& tile : tiles) tile = Tile{};
}

bool configure(const uint8_t* from) {
  if (from[0] != 1 || from[1] != 0) return false;
  for (int i = 2; i < 64; ++i)
    if ((i < 16 || (i >= 32 && i < 48) || i >= 56) && from[i]) return false;
  release();
  for (int i = 0; i < kNumTiles; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, from + 16 + 2 * i, sizeof row_bytes);
    tiles[i].row_bytes = row_bytes;
    tiles[i].rows = from[48 + i];
    if (row_bytes > 64 || tiles[i].rows > kRows || (row_bytes == 0) != (tiles[i].rows == 0)) return false;
  }
  ++num_in_use;
  return is_configured = true;
}

bool load(Tile& tile, uint64_t start, int64_t stride) {
  if (!tile.is_valid()) return false;
  std::memset(tile.groups, 0, sizeof tile.groups);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.groups[row], reinterpret_cast<const void*>(start + row * stride), tile.row_bytes);
  return true;
}
bool store(const Tile& tile, uint64_t start, int64_t stride) {
  if (!tile.is_valid()) return false;
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(reinterpret_cast<void*>(start + row * stride), tile.groups[row], tile.row_bytes);
  return true;
}

float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The first numbers of all pairs are added up, and the second ones, before their sums are added to what was there.
void multiply_bfloat16(Tile& sums, const Tile& a, const Tile& b) {
  for (int m = 0; m < sums.rows; ++m) {
    float firsts[kGroups] = {}, seconds[kGroups] = {};
    for (int k = 0; k < a.row_bytes / 4; ++k)
      for (int n = 0; n < kGroups; ++n) {
        const uint32_t left = a.groups[m][k], right = b.groups[k][n];
        firsts[n] = std::fma(as_float(left << 16), as_float(right << 16), firsts[n]);
        seconds[n] = std::fma(as_float(left & 0xffff0000), as_float(right & 0xffff0000), seconds[n]);
      }
    for (int n = 0; n < kGroups; ++n) {
      const float sum = as_float(sums.groups[m][n]) + (firsts[n] + seconds[n]);
      std::memcpy(&sums.groups[m][n], &sum, sizeof sum);
    }
  }
}
// Unsigned by signed bytes.
void multiply_bytes(Tile& sums, const Tile& a, const Tile& b) {
  for (int m = 0; m < sums.rows; ++m)
    for (int k = 0; k < a.row_bytes / 4; ++k)
      for (int n = 0; n < kGroups; ++n)
        for (int shift = 0; shift < 32; shift += 8)
          sums.groups[m][n] += int32_t(a.groups[m][k] >> shift & 0xff) * int8_t(b.groups[k][n] >> shift);
}

bool multiply(const Instruction& of) {
  const int numbers[] = {of.modrm_register(), of.modrm_operand(), of.vex_operand()};
  if (!of.names_register() || numbers[2] >= kNumTiles) return false;
  Tile &sums = tiles[numbers[0]], &a = tiles[numbers[1]], &b = tiles[numbers[2]];
  if (&sums == &a || &sums == &b || &a == &b || !sums.is_valid() || !a.is_valid() || !b.is_valid()) return false;
  if (sums.rows != a.rows || sums.row_bytes != b.row_bytes || a.row_bytes / 4 != b.rows) return false;
  if (of.opcode() == 0x5c && of.prefix() == 2) {
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);  // what is denormal counts as zero
    multiply_bfloat16(sums, a, b);
    _mm_setcsr(control);
  } else if (of.opcode() == 0x5e && of.prefix() == 1) {
    multiply_bytes(sums, a, b);
  } else {
    return false;
  }
  ++num_products;
  return true;
}

// Whether the instruction is one of those that kernels use, with valid operands.
bool execute(Instruction& of) {
  if (!of.is_vex()) return false;
  if (of.opcode() == 0x5c || of.opcode() == 0x5e) return is_configured && multiply(of);
  int64_t stride = INT64_MIN;
  Tile& tile = tiles[of.modrm_register()];
  if (of.opcode() == 0x49 && of.prefix() == 0 && of.names_register() && of.bytes[4] == 0xc0) {
    release();
    return true;
  }
  if (of.opcode() == 0x49 && of.prefix() == 0 && !of.names_register())
    return configure(reinterpret_cast<const uint8_t*>(of.address(&stride)));
  if (!is_configured) return false;
  if (of.opcode() == 0x49 && of.prefix() == 3 && of.names_register() && of.modrm_operand() == 0) {
    std::memset(tile.groups, 0, sizeof tile.groups);
    return tile.is_valid();
  }
  if (of.opcode() != 0x4b || of.names_register()) return false;
  const uint64_t start = of.address(&stride);
  if (stride == INT64_MIN) return false;
  return of.prefix() == 3 ? load(tile, start, stride) : of.prefix() == 2 && store(tile, start, stride);
}

void on_illegal_instruction(int signal, siginfo_t* cause, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  Instruction instruction{reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers};
  if (execute(instruction))
    registers[REG_RIP] += instruction.length;
  else if (previous.sa_flags & SA_SIGINFO)
    previous.sa_sigaction(signal, cause, context);
  else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN)
    sigaction(SIGILL, &previous, nullptr);  // the instruction is tried again
  else
    previous.sa_handler(signal);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int amx_install() {
  struct sigaction action {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  return sigaction(SIGILL, &action, &previous);
}

// Products of tiles so far.
int64_t amx_count_products() { return num_products; }
// Threads that have not released their tiles.
int64_t amx_count_in_use() { return num_in_use; }
}
#pragma GCC visibility pop
