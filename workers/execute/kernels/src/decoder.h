// One step of a decoder, stage by stage.
//
// The residual stays in float. What a stage computes for one row never depends on the other rows of the step or on the
// number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "attention.h"
#include "latents.h"
#include "recurrent_layers.h"
#include "screen.h"
#include "team.h"

namespace triptych {

class Decoder : public Computation {
 public:
  // Allocates for steps of up to `num_tokens` tokens; no step may be running. Larger steps allocate when they start.
  // May throw bad_alloc.
  virtual void reserve(int num_tokens) = 0;
  // Steps are computed in order of submission. Returns whether it pays to submit another step behind this one.
  virtual bool submit(const Step& step) = 0;
  // Waits for the oldest step not yet waited for. Returns false if it ran out of memory.
  virtual bool wait() = 0;
  // From now on, steps store CLOCK_MONOTONIC in `word` as they advance, see Progress. No step may be running.
  virtual void show_progress(int64_t* word) = 0;
};

template <class Format>
class FormatDecoder : public Decoder, private RecurrentLayers<Format> {
 public:
  using Cache = typename Format::Cache;
  using Written = typename Buffers<Format>::Written;
  using Added = Addition<Format>;
  using Found = typename Products<Format>::Found;

  FormatDecoder(const Model& model, const Sharing& sharing)
      : RecurrentLayers<Format>(model, sharing.num_own + 1),
        sharing_(sharing),
        screening_(model_, stages_, sharing.num_own + 1),
        team_(*this, stages_, sharing.num_own) {
    for (int i = 0; i < model.num_layers; ++i) {
      const Layer& layer = model.layers[i];
      const StateSpaceLayer& space = layer.space;
      const Matrix* of_all[] = {&layer.qkv,         &layer.output,     &layer.gate_up, &layer.down,  &layer.router,
                                &layer.delta.gates, &space.projection, &space.dts,     &space.output};
      for (const Matrix* matrix : of_all) num_weights_ += noted(*matrix);
      num_weights_ += noted(layer.latent.query_up);
      for (int h = 0; layer.latent.key_ups && h < model.num_heads; ++h)
        num_weights_ += num_weights(layer.latent.key_ups[h]) + num_weights(layer.latent.value_ups[h]);
      const bool has_state = layer.delta.convolution || layer.convolution.taps;
      num_attending_ += layer.output.num_blocks && !has_state;
      num_recurrent_ += has_state || space.output.num_blocks;
      for (int e = 0; layer.experts && e < model.num_experts; ++e) {
        const int64_t count = noted(layer.experts[e].gate_up) + noted(layer.experts[e].down);
        if (e == 0) num_expert_weights_ += count;
      }
    }
  }

  void reserve(int num_tokens) override {
    buffers_.reserve(model_, num_tokens);
    if (model_.updates) adapters_.reserve(num_tokens);
    routing_.reserve(num_tokens);
  }

  bool submit(const Step& step) override {
    const int64_t work = num_multiplications(step);
    const bool is_shared = work >= sharing_.worth_a_thread && sharing_.num_own > 0;
    team_.submit(step, work < sharing_.worth_a_team ? 1 : sharing_.num_threads, is_shared);
    return is_shared && work < sharing_.too_long;
  }

  bool wait() override { return team_.wait(); }

  void show_progress(int64_t* word) override { stages_.progress.show_in(word); }

  void begin(const Step& step, int max_members) override {
    step_ = &step;
    reserve(std::max(step.num_tokens, step.num_rows));
    adapters_.begin(step);
    screening_.begin();
    num_query_blocks_ =
        plan_queries(model_, step, max_members, buffers_.sequences.get(), buffers_.query_blocks.get());
    num_last_blocks_ =
        keep_wanted_blocks(step, buffers_.query_blocks.get(), num_query_blocks_, buffers_.last_blocks.get());
  }

  void compute(Member& me) override {
    int num_rows = step_->num_tokens;
    stages_.run(me, [&] {
      for (int t : part(num_rows, me)) embed(model_, token_id(t), step_->positions[t], residual(t));
    });
    for (int i = 0; i < model_.num_layers; ++i) {
      const Layer& layer = model_.layers[i];
      const bool is_last = i + 1 == model_.num_layers;
      const auto added = [&](Product product) { return adapters_.to(product, i, is_last); };
      const Added to_gate_up = added(kGateUpProduct), to_down = added(kDownProduct);
      const Found of_space = layer.space.output.num_blocks ? apply_state_space(layer, i, me) : Found{};
      const Found found = mix(layer, i, me);
      if (is_last) num_rows = keep_wanted_rows({found, of_space}, me);
      const auto add_found = [&] {
        if (layer.space.output.num_blocks)
          add(layer.space.output, of_space, num_rows, added(kSpaceOutputProduct), nullptr, model_.space_multiplier, me);
        if (layer.output.num_blocks)
          add(layer.output, found, num_rows, added(kOutputProduct), layer.attended_norm, model_.attended_multiplier,
              me);
      };
      if (!model_.is_parallel) add_found();
      if (layer.experts) {
        const size_t count = model_.experts_per_token, first = i * count, stride = model_.num_layers * count;
        const Choices choices{step_->choices ? step_->choices + first : nullptr, stride};
        add_experts(layer, num_rows, to_gate_up, to_down, choices, me);
        continue;
      }
      if (!layer.gate_up.num_blocks) continue;
      const Rows again = norm(layer.gate_up, num_rows, layer.mlp_norm, to_gate_up, me);
      product(layer.gate_up, again, to_gate_up, me, gate(layer, buffers_.gated.get(), inner_width(layer)));
      if (model_.is_parallel) add_found();  // only now, as the MLP reads x without it
      const Found gated{&buffers_.gated, inner_width(layer)};
      add(layer.down, gated, num_rows, to_down, layer.gated_norm, model_.gated_multiplier, me);
    }
    num_rows -= step_->num_hidden;
    if (step_->num_hidden) norm_hidden(num_rows, me);
    const size_t width = width_of(model_.head);
    const bool is_screened = screening_.is_used(*step_, num_rows);
    const Rows last = norm(model_.head, false, num_rows, model_.final_norm, is_screened ? 2 : 1, me,
                           [&](int) { return buffers_.threads[me.place].rows.get(); });
    if (!is_screened)
      product(model_.head, last, Added{}, me, Store{step_->logits, width});
    else if constexpr (!Buffers<Format>::kIsQuantised)
      screening_.find(last, step_->logits, me);
    stages_.run(me, [&] {
      for (int r : part(num_rows, me)) {
        float* logits = step_->logits + r * width;
        if (model_.logit_cap != 0.0f) cap_row(logits, step_->vocab_size, model_.logit_cap);
        step_->greatest[r] = choose(logits, step_->vocab_size, step_->tokens + r);
      }
    });
  }

 private:
  static int64_t num_weights(const Matrix& matrix) { return int64_t{matrix.num_inputs} * matrix.num_blocks * 64; }
  // Their number, after noting whether they are in four bits.
  int64_t noted(const Matrix& matrix) {
    buffers_.has_groups |= rounding_of(matrix) == Rounding::kInGroups;
    return num_weights(matrix);
  }

  // The approximate cost of a step.
  int64_t num_multiplications(const Step& step) const {
    int64_t num_pairs = 0;  // pairs of a query and a key, an upper bound
    for (int s = 0; s < step.num_sequences; ++s)
      num_pairs += int64_t{step.query_starts[s + 1] - step.query_starts[s]} * step.context_lens[s];
    constexpr int64_t kRead = 8;    // cost of reading a weight
    constexpr int64_t kPasses = 4;  // multiplications of a token with each number of a state
    const int64_t num_choices = int64_t{step.num_tokens} * model_.experts_per_token;
    const int64_t num_chosen = std::min<int64_t>(num_choices, model_.num_experts);  // distinct ones, at most
    return num_weights_ * std::max<int64_t>(step.num_tokens, kRead) +
           num_expert_weights_ * std::max(num_choices, num_chosen * kRead) +
           num_pairs * 2 * num_attending_ * model_.num_heads * model_.head_dim +
           kPasses * step.num_tokens * num_recurrent_ * num_state_numbers();
  }

  // The previous step's token if it was sampled there and is not yet known to the caller.
  int token_id(int t) const {
    const int row = step_->carried ? step_->carried[t] : -1;
    return row < 0 ? step_->token_ids[t] : step_->last_tokens[row];
  }

  // Once the last layer's keys and values, or its states, are written, only the wanted rows continue, moved to the
  // front.
  int keep_wanted_rows(std::initializer_list<Found> found, Member& me) {
    if (step_->num_rows == step_->num_tokens) return step_->num_tokens;
    stages_.run(me, [&] {
      for (int row = 0; me.rank == 0 && row < step_->num_rows; ++row) {
        const int from = step_->wanted_rows[row];
        std::copy_n(residual(from), hidden_width(), residual(row));
        for (const Found& each : found)
          if (each.rows) std::copy_n(each.row(from), each.width, each.row(row));
      }
    });
    return step_->num_rows;
  }

  // The hidden states of the rows from `first` on, as floats.
  void norm_hidden(int first, Member& me) {
    stages_.run(me, [&] {
      for (int r : part(step_->num_hidden, me)) {
        float* to = step_->hidden + r * hidden_width();
        norm_row(model_, residual(first + r), model_.final_norm, to);
      }
    });
  }

  // Adds the product of what was found to the residual.
  void add(const Matrix& matrix, const Found& found, int num_rows, const Added& more, const float* norm,
           float multiplier, Member& me) {
    add_product(matrix, inputs_of(matrix, *found.rows, num_rows, found.width, more, me), more, norm, multiplier, me);
  }

  // What the layer's attention, or what replaces it, puts out for all tokens; nothing if it has none.
  Found mix(const Layer& layer, int number, Member& me) {
    if (!layer.output.num_blocks) return {};
    if (layer.delta.convolution) return apply_delta_rule(layer, number, me);
    if (layer.convolution.taps) return convolve(layer, number, me);
    layer.latent.key_ups ? attend_to_latents(layer, number, me) : attend(layer, number, me);
    return {&buffers_.attended, heads_width()};
  }

  // The outputs of the layer's attention, for all tokens; in the last layer, for those that are wanted.
  void attend(const Layer& layer, int number, Member& me) {
    const bool is_last = number + 1 == model_.num_layers, are_few = step_->num_rows < step_->num_tokens;
    const bool saves_queries = is_last && are_few && !adapters_.to(kQkvProduct, number, false);
    saves_queries ? project_last(layer, me) : project(layer, number, me);
    stages_.run(me, [&] { turn(layer, me); });
    stages_.run(me, [&] { attend_blocks(layer, number, me); });
  }

  // Projects the normed rows of the last layer: without queries of the tokens before the first that is wanted and after
  // the last one, which are left as they were.
  void project_last(const Layer& layer, Member& me) {
    const Matrix& qkv = layer.qkv;
    const int32_t* const wanted = step_->wanted_rows;
    const Range asked = step_->num_rows ? Range{wanted[0], wanted[step_->num_rows - 1] + 1} : Range{0, 0};
    const Rows normed = norm(qkv, false, step_->num_tokens, layer.attention_norm, 2, me,
                             [&](int) { return buffers_.threads[me.place].rows.get(); });
    const auto multiply = [&](Range blocks, Range rows) {
      const Store store{buffers_.qkv.get(), width_of(qkv)};
      this->template multiply_blocks<Format>(qkv, blocks, normed.of(qkv).within(rows), me, store);
    };
    const int num_blocks = model_.num_heads * query_stride() / 64;  // with nothing but queries
    multiply({0, num_blocks}, asked);
    multiply({num_blocks, qkv.num_blocks}, {0, step_->num_tokens});
  }

  // The same if all heads attend to latents.
  void attend_to_latents(const Layer& layer, int number, Member& me) {
    const LatentHeads<Format> heads(model_, layer, buffers_);
    const int num_rows = step_->num_tokens;
    project(layer, number, me);
    if (model_.latent.query_rank) {
      const Matrix& up = layer.latent.query_up;
      float* const normed = buffers_.threads[me.place].rows.get();
      const int rank = model_.latent.query_rank;
      const Rows latents = make_rows(up, false, num_rows, rank, 1, me, buffers_.inputs, [&](int row) {
        heads.norm_query(row, normed);
        return normed;
      });
      product(up, latents, Added{}, me, heads.latent_queries());
    }
    stages_.run(me, [&] {
      const Pages<Cache> pages = pages_of(layer);
      for (int t : part(num_rows, me)) {
        const int position = step_->positions[t];
        const float factor = kLog2E / model_.score_divisor * query_factor(position);
        const float* latent = heads.turn(t, position, factor, scratch(me));
        pages.write(step_->slot_mapping[t], 0, latent, latent, is_last(t), buffers_.threads[me.place].head.get());
      }
    });
    head_product(layer.latent.key_ups, heads.plain_queries(num_rows), me, [&](int h) { return heads.query_of(h); });
    stages_.run(me, [&] { attend_blocks(layer, number, me); });
    head_product(layer.latent.value_ups, heads.attended(num_rows), me,
                 [&](int h) { return heads.value_of(h, heads_width()); });
  }

  // Applies norms and rotary embeddings to the queries and keys of the step, and writes keys and values to the pages.
  void turn(const Layer& layer, const Member& me) {
    const int size = model_.head_dim, num_heads = model_.num_heads, num_kv_heads = model_.num_kv_heads;
    const int query_stride = this->query_stride();
    const size_t width = width_of(layer.qkv);
    const float scale = kLog2E / model_.score_divisor;  // scores are base-2 logarithms
    const float* query_norm = model_.norms_whole_queries ? nullptr : layer.query_norm;  // of each head
    const float* key_norm = model_.norms_whole_queries ? nullptr : layer.key_norm;
    const Pages<Cache> pages = pages_of(layer);
    auto* room = buffers_.threads[me.place].head.get();
    for (int t : part(step_->num_tokens, me)) {
      float* head = buffers_.qkv.get() + t * width;
      const size_t angle = size_t(step_->positions[t]) * (model_.rotary_dim / 2);
      const float* cosines = layer.cosines ? layer.cosines + angle : nullptr;
      const float* sines = layer.cosines ? layer.sines + angle : nullptr;
      auto* query = buffers_.queries.get() + size_t(t) * num_heads * size;
      const float factor = scale * query_factor(step_->positions[t]);
      if (model_.norms_whole_queries) {
        norm_heads(head, num_heads * size, layer.query_norm, model_.norm_eps);
        norm_heads(head + num_heads * size, num_kv_heads * size, layer.key_norm, model_.norm_eps);
      }
      if (model_.qkv_limit != 0.0f) clip_row(head, int(width), model_.qkv_limit);
      // The next token's heads are prefetched: each page of memory would stop the hardware's prefetcher.
      for (int h = 0; h < num_heads; ++h, head += query_stride, query += size) {
        prefetch_row(head + width, query_stride);
        turn_head(head, model_, query_norm, cosines, sines, factor);
        store_all(query, head, size);
      }
      for (int h = 0; h < num_kv_heads; ++h, head += size) {
        prefetch_row(head + width, size);
        prefetch_row(head + num_kv_heads * size + width, size);
        turn_head(head, model_, key_norm, cosines, sines, 1.0f);
        pages.write(step_->slot_mapping[t], h, head, head + num_kv_heads * size, is_last(t), room);
      }
    }
  }

  float query_factor(int position) const {
    if (model_.query_growth == 0.0f) return 1.0f;
    return 1.0f + model_.query_growth * std::log(1.0f + float(position / model_.query_growth_span));
  }

  void attend_blocks(const Layer& layer, int number, const Member& me) {
    const bool is_last = number + 1 == model_.num_layers;
    const QueryBlock* const blocks = is_last ? buffers_.last_blocks.get() : buffers_.query_blocks.get();
    const int size = model_.head_dim, value_size = model_.value_dim;
    const AttentionScratch<Cache> scratch = buffers_.threads[me.place].attention();
    Attention<Cache> attention(pages_of(layer), scratch, layer.window, kLog2E * model_.score_cap);
    stages_.for_items(is_last ? num_last_blocks_ : num_query_blocks_, [&](int item) {
      const QueryBlock& block = blocks[item];
      const size_t first = size_t(block.first_token) * model_.num_heads + block.first_head;
      const Queries<typename Cache::Element> queries{buffers_.queries.get() + first * size,
                                                     size_t(model_.num_heads) * size, block.count, block.group_size,
                                                     size, layer.sinks ? layer.sinks + block.first_head : nullptr,
                                                     model_.slopes ? model_.slopes + block.first_head : nullptr};
      const auto attended_of = [&](const QueryRow& row) {
        const size_t token = block.first_token + row.token, head = block.first_head + row.head;
        return buffers_.attended.get() + token * heads_width() + head * size;
      };
      attention.run(queries, step_->positions[block.first_token],
                    step_->block_tables + size_t(block.sequence) * step_->table_width, block.first_kv_head,
                    block.num_kv_heads, [&](const QueryRow& row) {
                      if (!layer.latent.key_ups) prefetch_row(attended_of(row), size);
                    });
      float* from = reinterpret_cast<float*>(scratch.outputs);
      const QueryRow* const end = scratch.rows + block.num_kv_heads * queries.rows_per_group();
      for (const QueryRow* row = scratch.rows; row < end; ++row, from += value_size) {
        const int token = block.first_token + row->token, head = block.first_head + row->head;
        if (layer.latent.key_ups) {
          LatentHeads<Format>(model_, layer, buffers_).keep(token, head, from, this->scratch(me));
          continue;
        }
        if (model_.gates_outputs)
          gate_head(from, size, buffers_.qkv.get() + token * width_of(layer.qkv) + head * query_stride() + size);
        store_all(attended_of(*row), from, size);
      }
    });
  }

  Pages<Cache> pages_of(const Layer& layer) const {
    return {static_cast<char*>(layer.keys), static_cast<char*>(layer.values), model_.num_kv_heads, model_.head_dim,
            model_.value_dim, model_.page_size, model_.eight_bit_pages != 0};
  }
  bool is_last(int token) const { return token + 1 == step_->query_starts[buffers_.sequences.get()[token] + 1]; }
  size_t heads_width() const {
    return padded(model_.num_heads * (model_.latent.rank ? model_.latent.head_value_dim : model_.head_dim));
  }
  int query_stride() const { return model_.head_dim * (model_.gates_outputs ? 2 : 1); }
  // In the states of one sequence, in one layer.
  int64_t num_state_numbers() const {
    const StateSpaceShape& space = model_.space;
    return int64_t{model_.delta.num_value_heads} * model_.delta.key_dim * model_.delta.value_dim +
           int64_t{space.num_heads} * space.head_dim * space.state_size;
  }

  using Products<Format>::model_;
  using Products<Format>::buffers_;
  using Products<Format>::stages_;
  using Products<Format>::add_product;
  using Products<Format>::product;
  using Products<Format>::head_product;
  using Products<Format>::scratch;
  using Products<Format>::make_rows;
  using Products<Format>::norm;
  using Products<Format>::inputs_of;
  using Products<Format>::part;
  using Products<Format>::hidden_width;
  using Products<Format>::width_of;
  using Products<Format>::residual;
  using Products<Format>::inner_width;
  using Products<Format>::gate;
  using ExpertLayers<Format>::routing_;
  using ExpertLayers<Format>::add_experts;
  using RecurrentLayers<Format>::adapters_;
  using RecurrentLayers<Format>::step_;
  using RecurrentLayers<Format>::project;
  using RecurrentLayers<Format>::convolve;
  using RecurrentLayers<Format>::apply_delta_rule;
  using RecurrentLayers<Format>::apply_state_space;

  const Sharing sharing_;
  int64_t num_weights_ = 0, num_expert_weights_ = 0;  // the latter of one expert in each layer
  int num_query_blocks_ = 0, num_last_blocks_ = 0, num_attending_ = 0, num_recurrent_ = 0;  // the last two count layers
  Screening<Format> screening_;
  Team team_;  // last, because its threads use the other members
};

}  // namespace triptych
