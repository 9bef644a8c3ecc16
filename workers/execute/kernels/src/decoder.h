// A step of a dense Llama-shaped decoder: all layers in one parallel region, a barrier between stages.
//
// The residual stays in float. What a stage writes for one row never depends on the other rows of the step.
#pragma once

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
  using Written = typename Buffers<Format>::Written;

  FormatDecoder(const Model& model, int num_threads) : model_(model), team_(num_threads), buffers_(num_threads) {
    for (int i = 0; i < model.num_layers; ++i) {
      const Layer& layer = model.layers[i];
      for (const Matrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
        num_weights_ += int64_t{m->num_inputs} * m->num_blocks * 64;
    }
  }

  void run(const Step& step) override {
    step_ = &step;
    num_rows_ = step.num_tokens;
    tickets_.store(0, std::memory_order_relaxed);
    for (auto& own : buffers_.threads) own.first_ticket = 0;
    buffers_.reserve(model_, std::max(step.num_tokens, step.num_rows));
    plan_queries();
    // Below this many multiplications waking and waiting for each other costs more than the second thread brings.
    constexpr int64_t kWorthATeam = 8 << 20;
    num_threads_ = num_weights_ * step.num_tokens < kWorthATeam ? 1 : team_.size();
    team_.run(num_threads_, [this](int thread) { run_thread(thread); });
  }

 private:
  // Stages end with a barrier, so that the next one finds them complete, unless every thread made its own rows.
  void run_thread(int thread) {
    for (int t : part(step_->num_tokens, thread)) embed(model_, step_->token_ids[t], residual(t));
    team_.barrier.wait();
    for (int i = 0; i < model_.num_layers; ++i) {
      attention_half(model_.layers[i], thread);
      mlp_half(model_.layers[i], thread);
    }
    finish(thread);
  }

  void attention_half(const Layer& layer, int thread) {
    const Rows normed = norm(layer.attention_norm, thread);
    product(layer.qkv, normed, thread, Store{buffers_.qkv.get(), qkv_width()});
    turn(layer, thread);
    attend(layer, thread);
    if (&layer == model_.layers + model_.num_layers - 1) keep_sampled(thread);
    const Rows attended = inputs_of(buffers_.attended, heads_width(), thread);
    product(layer.output, attended, thread, Add{residual(0), hidden_width()});
  }

  // Once the last layer's keys and values are written, only the sampled rows go on, which are in rising order.
  void keep_sampled(int thread) {
    if (step_->num_rows == step_->num_tokens) return;
    if (thread == 0) {
      num_rows_ = step_->num_rows;
      for (int row = 0; row < num_rows_; ++row) {
        const int from = step_->sample_rows[row];
        std::copy_n(residual(from), hidden_width(), residual(row));
        std::copy_n(buffers_.attended.get() + from * heads_width(), heads_width(),
                    buffers_.attended.get() + row * heads_width());
      }
    }
    team_.barrier.wait();
  }

  void mlp_half(const Layer& layer, int thread) {
    const Rows normed = norm(layer.mlp_norm, thread);
    product(layer.gate_up, normed, thread, Gate<Written>{buffers_.gated.get(), inner_width()});
    const Rows gated = inputs_of(buffers_.gated, inner_width(), thread);
    product(layer.down, gated, thread, Add{residual(0), hidden_width()});
  }

  template <class Write>
  void product(const Matrix& matrix, const Rows& rows, int thread, const Write& write) {
    const int num_blocks = matrix.num_blocks, num_halves = 2 * num_blocks;
    if (rows.count <= kFewRows) {  // as fast as memory, and that is fastest in one run for each thread
      multiply<Format>(matrix, rows, share(num_halves, thread, num_threads_), write);
    } else {  // block by block, the last ones by halves so that all threads end at the same time
      const int num_whole = std::max(0, num_blocks - num_threads_);
      for_items(num_halves - num_whole, thread, [&](int item) {
        const int half = item < num_whole ? 2 * item : item + num_whole;
        multiply<Format>(matrix, rows, {half, half + (item < num_whole ? 2 : 1)}, write);
      });
    }
    team_.barrier.wait();
  }

  // make(row, operand) for all rows: few by every thread for itself, many by all threads together.
  template <class Make>
  Rows make_rows(int count, size_t width, int thread, const Make& make) {
    if (count <= ThreadBuffers<Format>::kOwnRows) {
      Operand<Format>& own = buffers_.threads[thread].operand;
      for (int row = 0; row < count; ++row) make(row, own);
      return own.rows(count, int(width));
    }
    for (int row : part(count, thread)) make(row, buffers_.operand);
    team_.barrier.wait();
    return buffers_.operand.rows(count, int(width));
  }

  Rows norm(const float* weight, int thread) {
    const int width = int(hidden_width());
    return make_rows(num_rows_, width, thread, [&](int row, Operand<Format>& to) {
      norm_row(residual(row), weight, model_.hidden_size, model_.norm_eps, buffers_.threads[thread].row.get(),
               to.row(row, width), to.scale(row));
    });
  }

  Rows inputs_of(const Buffer<Written>& written, size_t width, int thread) {
    if constexpr (Buffers<Format>::kIsQuantised) {
      return make_rows(num_rows_, width, thread, [&](int row, Operand<Format>& to) {
        write_row(written.get() + row * width, int(width), to.row(row, int(width)), to.scale(row));
      });
    } else {
      return {reinterpret_cast<const uint32_t*>(written.get()), width / Format::kGroup, nullptr, num_rows_};
    }
  }

  // Queries, keys and values of the step's tokens take their positions; keys and values go to the pages.
  void turn(const Layer& layer, int thread) {
    const int size = model_.head_dim, num_heads = model_.num_heads, num_kv_heads = model_.num_kv_heads;
    const float scale = 1.44269504f / std::sqrt(float(size));  // scores are logarithms to base 2
    const Pages<Cache> pages = pages_of(layer);
    auto* key = buffers_.threads[thread].head.get();
    for (int t : part(step_->num_tokens, thread)) {
      float* head = buffers_.qkv.get() + t * qkv_width();
      const size_t angle = size_t(step_->positions[t]) * (size / 2);
      const float *cosines = model_.cosines + angle, *sines = model_.sines + angle;
      auto* query = buffers_.queries.get() + size_t(t) * num_heads * size;
      for (int h = 0; h < num_heads; ++h, head += size, query += size) {
        turn_head(head, size, layer.query_norm, model_.norm_eps, cosines, sines, scale);
        store_all(query, head, size);
      }
      for (int h = 0; h < num_kv_heads; ++h, head += size) {
        turn_head(head, size, layer.key_norm, model_.norm_eps, cosines, sines, 1.0f);
        store_all(key, head, size);
        store_all(key + size, head + num_kv_heads * size, size);
        pages.write(step_->slot_mapping[t], h, key, key + size, buffers_.is_last.get()[t]);
      }
    }
    team_.barrier.wait();
  }

  template <class Element>
  static void store_all(Element* to, const float* from, int count) {
    for (int i = 0; i < count; i += kLanes) store_as(to + i, load<Floats>(from + i));
  }

  void attend(const Layer& layer, int thread) {
    const int size = model_.head_dim, group_size = model_.num_heads / model_.num_kv_heads;
    const AttentionScratch<Cache> scratch = buffers_.threads[thread].attention();
    Attention<Cache> attention(pages_of(layer), scratch, layer.window);
    for_items(num_query_blocks_, thread, [&](int item) {
      const QueryBlock& block = buffers_.query_blocks.get()[item];
      const int first_head = block.first_kv_head * group_size;
      const size_t first = size_t(block.first_token) * model_.num_heads + first_head;
      const Queries<typename Cache::Element> queries{buffers_.queries.get() + first * size,
                                                     size_t(model_.num_heads) * size, block.count, group_size, size};
      attention.run(queries, step_->positions[block.first_token],
                    step_->block_tables + size_t(block.sequence) * step_->table_width, block.first_kv_head,
                    block.num_kv_heads);
      const float* from = reinterpret_cast<const float*>(scratch.outputs);
      for (int group = 0; group < block.num_kv_heads; ++group)
        for (int r = 0; r < queries.rows_per_group(); ++r, from += size) {
          Written* to = buffers_.attended.get() + (block.first_token + queries.token(r)) * heads_width() +
                        size_t(first_head + queries.head(group, r)) * size;
          store_all(to, from, size);
        }
    });
    team_.barrier.wait();
  }

  void finish(int thread) {
    const Rows rows = norm(model_.final_norm, thread);
    const size_t width = size_t(model_.head.num_blocks) * 64;
    product(model_.head, rows, thread, Store{step_->logits, width});
    for (int r : part(step_->num_rows, thread))
      step_->greatest[r] = choose(step_->logits + r * width, step_->vocab_size, step_->tokens + r);
  }

  // Work items of attention, those with most keys first.
  void plan_queries() {
    constexpr int kItemsPerThread = 4;  // so that all end at about the same time
    const int num_kv_heads = model_.num_kv_heads, group_size = model_.num_heads / num_kv_heads;
    const int most = tokens_per_item(group_size), room = rows_per_item(model_.num_heads, num_kv_heads);
    const int wanted = step_->num_sequences * num_kv_heads / (kItemsPerThread * team_.size());
    QueryBlock* block = buffers_.query_blocks.get();
    for (int s = step_->num_sequences - 1; s >= 0; --s) {
      const int begin = step_->query_starts[s], end = step_->query_starts[s + 1];
      for (int t = begin; t < end; ++t) buffers_.is_last.get()[t] = t + 1 == end;
      for (int last = end; last > begin; last = std::max(begin, last - most)) {
        const int first = std::max(begin, last - most), count = last - first;
        const int heads = std::max(1, std::min(wanted, room / (count * group_size)));
        for (int head = 0; head < num_kv_heads; head += heads)
          *block++ = {s, first, count, head, std::min(heads, num_kv_heads - head)};
      }
    }
    num_query_blocks_ = int(block - buffers_.query_blocks.get());
  }

  // visit(item) for 0..count by whichever thread is free. Tickets only count up: a stage takes one for each item and
  // one more for each thread, so that all know where the next stage begins.
  template <class Visit>
  void for_items(int count, int thread, const Visit& visit) {
    int& first = buffers_.threads[thread].first_ticket;
    for (int item; (item = tickets_.fetch_add(1, std::memory_order_relaxed) - first) < count;) visit(item);
    first += count + num_threads_;
  }

  Indices part(int count, int thread) const { return {share(count, thread, num_threads_)}; }

  Pages<Cache> pages_of(const Layer& layer) const {
    using Element = typename Cache::Element;
    return {static_cast<Element*>(layer.keys), static_cast<Element*>(layer.values), model_.num_kv_heads,
            model_.head_dim, model_.page_size};
  }
  size_t hidden_width() const { return padded(model_.hidden_size); }
  size_t heads_width() const { return padded(model_.num_heads * model_.head_dim); }
  size_t inner_width() const { return padded(model_.intermediate_size); }
  size_t qkv_width() const { return size_t(model_.layers[0].qkv.num_blocks) * 64; }
  float* residual(int token) { return buffers_.residual.get() + token * hidden_width(); }

  static constexpr int kFewRows = 64;

  Model model_;
  Team team_;
  Buffers<Format> buffers_;
  const Step* step_ = nullptr;
  int64_t num_weights_ = 0;
  int num_threads_ = 1;
  int num_rows_ = 0;  // of the residual
  int num_query_blocks_ = 0;
  alignas(64) std::atomic<int> tickets_{0};
};

}  // namespace triptych
