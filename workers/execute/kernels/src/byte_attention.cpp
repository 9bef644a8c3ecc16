// Tiles that decoders of all formats share.
#include "byte_attention.h"

namespace triptych {

namespace {

template <class Format, int kVectors, class Weights, class Adding>
void multiply_bytes(int count, Floats* sums, int width, ByteTiles::Rows rows, int steps, const Weights& weights,
                    Ahead& ahead, const Adding& adding) {
  if (ahead.is_over())
    add_rows<Format, kVectors>(count, sums, width, rows, weights, steps, PrefetchLines<0>{}, adding);
  else
    add_rows<Format, kVectors>(count, sums, width, rows, weights, steps, AskAhead{ahead}, adding);
}

}  // namespace

void ByteTiles::score(int count, Floats* scores, Rows rows, int steps, const Separate& keys, Ahead& ahead,
                      const ToScores<true>& adding) {
  multiply_bytes<KeyBytes, kTileVectors>(count, scores, kKeyTiles, rows, steps, keys, ahead, adding);
}

void ByteTiles::add_scores(int count, Floats* scores, Rows rows, int steps, const Separate& keys, Ahead& ahead,
                           const ToScores<false>& adding) {
  multiply_bytes<KeyBytes, kTileVectors>(count, scores, kKeyTiles, rows, steps, keys, ahead, adding);
}

void ByteTiles::add_values(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                           Ahead& ahead, const TimesUnits& adding) {
  multiply_bytes<Int8, kTileVectors>(count, outputs, width, rows, steps, values, ahead, adding);
}

void ByteTiles::add_vector(int count, Floats* outputs, int width, Rows rows, int steps, const Adjacent<>& values,
                           Ahead& ahead, const TimesUnits& adding) {
  multiply_bytes<Int8, 1>(count, outputs, width, rows, steps, values, ahead, adding);
}

}  // namespace triptych
