// The greatest logit without computing most of them.
//
// A copy of the head in eight bits gives each logit with an error of which the greatest possible size is known. Only
// those that may be the greatest, whatever the errors are, are then computed as usual: a few of 50,000. So a token
// reads half as many bytes of a head in bfloat16, and is the same token.
//
// Rows of activations are rounded twice, as a byte has too few digits: into bytes, and what these leave into bytes of a
// row behind them. That doubles the arithmetic, which waits for memory anyway if there are few rows.
//
// Compare "Learning to Screen for Fast Softmax Inference on Large Vocabulary Neural Networks", Chen et al. 2019, arXiv
// 1810.12406, where the choice is learned and may be wrong.
#pragma once

#include <atomic>
#include <cmath>
#include <vector>

#include "products.h"

namespace triptych {

// Adds up the two parts of each logit, stores the most that it may be, and keeps the most that any is at least. Each
// row of `most` has two rows of parts, which come in order.
struct Bounds {
  float* most;
  size_t stride;
  const float* limits;  // see Screen
  const float* sizes;   // [rows]
  Floats* least;        // [rows]
  void expect(int number, int block) const { prefetch_columns(most + number / 2 * stride + 64 * block); }
  template <class Results>
  INLINED void operator()(const Results& pair) const {
    const int column = 64 * pair.block + 16 * pair.vector;
    for (int r = 0; r < pair.count; ++r) {
      add(pair.first + r, column, pair.low(r));
      add(pair.first + r, column + 32, pair.high(r));
    }
  }

 private:
  INLINED void add(int number, int column, Floats part) const {
    const int row = number / 2;
    float* const place = most + row * stride + column;
    if (number % 2 == 0) return store(place, part);
    const Floats logit = load<Floats>(place) + part, error = load<Floats>(limits + column) * broadcast(sizes[row]);
    store(place, logit + error);
    least[row] = max(least[row], logit - error);
  }
};

template <class Format>
class Screening {
 public:
  static constexpr int kMostRows = ThreadBuffers<Format>::kOwnRows;

  Screening(const Model& model, Stages& stages, int num_threads)
      : model_(model), stages_(stages), threads_(num_threads) {
    if (!matrix().num_blocks) return;
    for (Thread& own : threads_) {
      own.rows.reserve(2 * kMostRows, width());
      own.floats.reserve(width());
      own.rest.reserve(width());
    }
  }

  // Whether the greatest logits of so many rows are found here.
  bool is_used(const Step& step, int num_rows) const {
    return matrix().num_blocks && step.only_greatest && num_rows <= kMostRows;
  }

  // Before a step, by one thread.
  void begin() {
    for (std::atomic<float>& least : least_) least.store(-INFINITY, std::memory_order_relaxed);
  }

  // Stores logits, or for those that are not the greatest anything below it. `rows` are those of the head.
  void find(const Rows& rows, float* logits, Member& me) {
    const size_t stride = size_t(matrix().num_blocks) * 64;
    const auto halves = [&] { return share(2 * matrix().num_blocks, me.rank, stages_.num_members()); };
    stages_.run(me, [&] {
      Thread& own = threads_[me.place];
      for (int row = 0; row < rows.count; ++row) round(rows, row, own);
      const Bounds bounds{logits, stride, model_.screen.limits, own.sizes, own.least};
      multiply_halves<Int8>(matrix(), own.rows.rows(2 * rows.count), halves(), bounds);
      for (int row = 0; row < rows.count; ++row) raise(least_[row], greatest(own.least[row]));
    });
    stages_.run(me, [&] {
      for (int row = 0; row < rows.count; ++row) {
        const float least = least_[row].load(std::memory_order_relaxed);
        for (int half : Indices{halves()}) {
          const float* most = logits + row * stride + half / 2 * 64 + half % 2 * kLanes;
          if (greatest(max(load<Floats>(most), load<Floats>(most + 32))) < least) continue;  // not if any is NaN
          multiply_halves<Format>(model_.head, rows.within({row, row + 1}), {half, half + 1}, Store{logits, stride});
        }
      }
    });
  }

 private:
  struct Thread {
    Operand<Int8> rows;
    Buffer<float> floats, rest;
    float sizes[kMostRows];  // Euclidean norms of rows
    Floats least[kMostRows];
  };

  const Matrix& matrix() const { return model_.screen.matrix; }
  int width() const { return padded(model_.hidden_size); }

  void round(const Rows& rows, int row, Thread& own) const {
    float* const floats = own.floats.get();
    float* const rest = own.rest.get();
    convert(reinterpret_cast<const typename Format::Element*>(rows.row(row)), width(), floats);
    own.rows.write(2 * row, width(), floats, {Rounding::kWhole, matrix().num_inputs, rest});
    const Rows rounded = own.rows.rows(2 * row + 1);  // whose transform is in `rest`
    const auto* bytes = reinterpret_cast<const Int8::Element*>(rounded.row(2 * row));
    for (int i = 0; i < width(); ++i) rest[i] -= *rounded.scale(2 * row) * float(bytes[i] - Int8::kExcess);
    own.rows.write(2 * row + 1, width(), rest, {Rounding::kWhole, 1, rest});  // it is transformed already
    Floats squares = broadcast(0.0f);
    for (int i = 0; i < width(); i += kLanes) {
      const Floats x = load<Floats>(floats + i);
      squares = fma(x, x, squares);
    }
    own.sizes[row] = std::sqrt(sum(squares));
    own.least[row] = broadcast(-INFINITY);
  }

  static void raise(std::atomic<float>& least, float value) {
    float known = least.load(std::memory_order_relaxed);
    while (!(known >= value) && !least.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
    }
  }

  const Model& model_;
  Stages& stages_;
  std::vector<Thread> threads_;
  std::atomic<float> least_[kMostRows];
};

}  // namespace triptych
