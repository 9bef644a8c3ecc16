// A step of a dense Llama-shaped decoder: all layers in one parallel region, a barrier between stages.
//
// The residual stays in float. What a stage writes for one row never depends on the other rows of the step.
#pragma once

#include <vector>

#include "buffers.h"
#include "rows.h"
#include "team.h"

namespace triptych {

class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void run(const Step& step) = 0;
};

template <class Format>
class FormatDecoder : public Decoder {
 public:
  using Cache = typename Format::Cache;

  FormatDecoder(const Model& model, int num_threads) : model_(model), team_(num_threads) {
    for (int i = 0; i < model.num_layers; ++i) {
      const Layer& layer = model.layers[i];
      for (const Matrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
        num_weights_ += int64_t{m->num_inputs} * m->num_blocks * 64;
    }
  }

  void run(const Step& step) override {
    step_ = &step;
    buffers_.reserve(model_, std::max(step.num_tokens, step.num_rows), team_.size());
    plan_queries();
    // Below this many multiplications waking and waiting for each other costs more than the second thread brings.
    constexpr int64_t kWorthATeam = 4 << 20;
    num_threads_ = num_weights_ * step.num_tokens < kWorthATeam ? 1 : team_.size();
    team_.run(num_threads_, [this](int thread) { run_thread(thread); });
  }

 private:
  void run_thread(int thread) {
    for (int t : part(step_->num_tokens, thread)) embed(model_, step_->token_ids[t], residual(t));
    for (int i = 0; i < model_.num_layers; ++i) {
      attention_half(model_.layers[i], thread);
      mlp_half(model_.layers[i], thread);
    }
    finish(thread);
  }

  void attention_half(const Layer& layer, int thread) {
    if (thread == 0) next_item_.store(0, std::memory_order_relaxed);
    norm(layer.attention_norm, thread);
    product(layer.qkv, buffers_.normed, step_->num_tokens, thread, Store{buffers_.qkv.get(), qkv_width()});
    turn(layer, thread);
    attend(layer, thread);
    quantise(buffers_.attended, thread);
    product(layer.output, buffers_.attended, step_->num_tokens, thread, Add{residual(0), hidden_width()});
  }

  void mlp_half(const Layer& layer, int thread) {
    norm(layer.mlp_norm, thread);
    Inputs<Format>& gated = buffers_.gated;
    using Written = typename Inputs<Format>::Written;
    product(layer.gate_up, buffers_.normed, step_->num_tokens, thread,
            Gate<Written>{gated.written(0), size_t(gated.width)});
    quantise(gated, thread);
    product(layer.down, gated, step_->num_tokens, thread, Add{residual(0), hidden_width()});
  }

  // Every stage ends with a barrier, so that the next one finds it complete.
  template <class Write>
  void product(const Matrix& matrix, const Inputs<Format>& inputs, int num_rows, int thread, const Write& write) {
    multiply<Format>(matrix, inputs.rows(num_rows), share(2 * matrix.num_blocks, thread, num_threads_), write);
    team_.barrier.wait();
  }

  void norm(const float* weight, int thread) {
    for (int t : part(step_->num_tokens, thread)) norm_one(residual(t), weight, t, thread);
    team_.barrier.wait();
  }

  void norm_one(const float* x, const float* weight, int row, int thread) {
    float* scratch = buffers_.scratch.get() + thread * hidden_width();
    norm_row(x, weight, model_.hidden_size, model_.norm_eps, scratch, buffers_.normed.row(row),
             buffers_.normed.scales.get() + row);
  }

  void quantise(Inputs<Format>& inputs, int thread) {
    if constexpr (Inputs<Format>::kIsQuantised) {
      for (int t : part(step_->num_tokens, thread))
        write_row(inputs.written(t), inputs.width, inputs.row(t), inputs.scales.get() + t);
      team_.barrier.wait();
    }
  }

  // Queries, keys and values of the step's tokens take their positions; keys and values go to the pages.
  void turn(const Layer& layer, int thread) {
    const int size = model_.head_dim, num_heads = model_.num_heads, num_kv_heads = model_.num_kv_heads;
    const float scale = 1.0f / std::sqrt(float(size));
    const Pages<Cache> pages = pages_of(layer);
    for (int t : part(step_->num_tokens, thread)) {
      float* head = buffers_.qkv.get() + t * qkv_width();
      const size_t angle = size_t(step_->positions[t]) * (size / 2);
      const float *cosines = model_.cosines + angle, *sines = model_.sines + angle;
      auto* query = buffers_.queries.get() + size_t(t) * num_heads * size;
      for (int h = 0; h < num_heads; ++h, head += size, query += size) {
        turn_head(head, size, layer.query_norm, model_.norm_eps, cosines, sines, scale);
        for (int d = 0; d < size; d += kLanes) store_as(query + d, load<Floats>(head + d));
      }
      for (int h = 0; h < num_kv_heads; ++h, head += size) {
        turn_head(head, size, layer.key_norm, model_.norm_eps, cosines, sines, 1.0f);
        pages.write(step_->slot_mapping[t], h, head, head + num_kv_heads * size, buffers_.is_last.get()[t]);
      }
    }
    team_.barrier.wait();
  }

  void attend(const Layer& layer, int thread) {
    const int size = model_.head_dim, group_size = model_.num_heads / model_.num_kv_heads;
    Attention<Cache> attention(pages_of(layer), buffers_.attention_scratch(model_, thread), layer.window);
    const float* outputs = buffers_.attention_scratch(model_, thread).outputs;
    const typename Cache::Element* queries[kMaxItemRows];
    const int num_items = num_query_blocks_ * model_.num_kv_heads;
    for (;;) {
      const int item = next_item_.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items) break;
      const int kv_head = item % model_.num_kv_heads;
      const QueryBlock& block = buffers_.query_blocks.get()[item / model_.num_kv_heads];
      const int num_rows = block.count * group_size;
      for (int r = 0; r < num_rows; ++r)
        queries[r] = buffers_.queries.get() + size_t(channel(block, kv_head, group_size, r)) * size;
      attention.run(queries, num_rows, group_size, step_->positions[block.first_token],
                    step_->block_tables + size_t(block.sequence) * step_->table_width, kv_head);
      for (int r = 0; r < num_rows; ++r) {
        const int head = channel(block, kv_head, group_size, r);
        auto* to = buffers_.attended.written(head / model_.num_heads) + size_t(head % model_.num_heads) * size;
        for (int d = 0; d < size; d += kLanes) store_as(to + d, load<Floats>(outputs + size_t(r) * size + d));
      }
    }
    team_.barrier.wait();
  }

  // Index of a query head among all heads of all tokens of the step.
  int channel(const QueryBlock& block, int kv_head, int group_size, int row) const {
    const int token = block.first_token + row / group_size;
    return token * model_.num_heads + kv_head * group_size + row % group_size;
  }

  void finish(int thread) {
    for (int r : part(step_->num_rows, thread)) norm_one(residual(step_->sample_rows[r]), model_.final_norm, r, thread);
    team_.barrier.wait();
    const size_t width = size_t(model_.head.num_blocks) * 64;
    product(model_.head, buffers_.normed, step_->num_rows, thread, Store{step_->logits, width});
    for (int r : part(step_->num_rows, thread)) choose(step_->logits + r * width, r);
  }

  // The greatest logit of a row and its first place. A not-a-number makes the sum one.
  void choose(const float* logits, int row) {
    const int count = step_->vocab_size, whole = count / kLanes * kLanes;
    Floats top = broadcast(-INFINITY), zero = broadcast(0.0f);
    for (int i = 0; i < whole; i += kLanes) {
      const Floats x = load<Floats>(logits + i);
      top = max(top, x);
      zero = zero + (x - x);
    }
    float best = whole ? greatest(top) : -INFINITY, check = sum(zero);
    for (int i = whole; i < count; ++i) {
      best = std::max(best, logits[i]);
      check += logits[i] - logits[i];
    }
    int place = 0;
    while (place < count && !(logits[place] == best)) ++place;
    step_->tokens[row] = place < count ? place : 0;
    step_->greatest[row] = best + check;
  }

  // Work items of attention, those with most keys first.
  void plan_queries() {
    const int most = tokens_per_item(model_.num_heads / model_.num_kv_heads);
    QueryBlock* block = buffers_.query_blocks.get();
    for (int s = step_->num_sequences - 1; s >= 0; --s) {
      const int begin = step_->query_starts[s], end = step_->query_starts[s + 1];
      for (int t = begin; t < end; ++t) buffers_.is_last.get()[t] = t + 1 == end;
      for (int last = end; last > begin; last = std::max(begin, last - most)) {
        const int first = std::max(begin, last - most);
        *block++ = {s, first, last - first};
      }
    }
    num_query_blocks_ = int(block - buffers_.query_blocks.get());
  }

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
  Indices part(int count, int thread) const { return {share(count, thread, num_threads_)}; }

  Pages<Cache> pages_of(const Layer& layer) const {
    using Element = typename Cache::Element;
    return {static_cast<Element*>(layer.keys), static_cast<Element*>(layer.values), model_.num_kv_heads,
            model_.head_dim, model_.page_size};
  }
  size_t hidden_width() const { return padded(model_.hidden_size); }
  size_t qkv_width() const { return size_t(model_.layers[0].qkv.num_blocks) * 64; }
  float* residual(int token) { return buffers_.residual.get() + token * hidden_width(); }

  static constexpr int kMaxItemRows = 1024;

  Model model_;
  Team team_;
  Buffers<Format> buffers_;
  const Step* step_ = nullptr;
  int64_t num_weights_ = 0;
  int num_threads_ = 1;
  int num_query_blocks_ = 0;
  alignas(64) std::atomic<int> next_item_{0};
};

}  // namespace triptych
