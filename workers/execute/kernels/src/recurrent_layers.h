// What layers that keep a state per sequence compute in place of attention or beside it, stage by stage.
#pragma once

#include "expert_layers.h"
#include "short_convolution.h"

namespace triptych {

template <class Format>
class RecurrentLayers : protected ExpertLayers<Format> {
 protected:
  using Added = Addition<Format>;
  using Found = typename Products<Format>::Found;

  RecurrentLayers(const Model& model, int num_threads) : ExpertLayers<Format>(model, num_threads), adapters_(model_) {}

  // The outputs of the layer's short convolution, for all tokens.
  Found convolve(const Layer& layer, int number, Member& me) {
    project(layer, number, me);
    const ShortConvolver convolver(layer.convolution, model_.num_taps);
    stages_.run(me, [&] {
      for (int t : part(step_->num_tokens, me)) {
        const int sequence = buffers_.sequences.get()[t], first = step_->query_starts[sequence];
        const int segment = step_->segment_starts[sequence];
        const size_t stride = width_of(layer.qkv);
        const ConvolutionChunk chunk{buffers_.qkv.get() + first * stride, stride,
                                     int(hidden_width()), step_->state_reads[sequence],
                                     step_->segment_starts[sequence + 1] - segment,
                                     step_->segment_ends + segment, step_->state_writes + segment};
        convolver.convolve(chunk, t - first, buffers_.convolved.get() + t * hidden_width());
      }
    });
    return {&buffers_.convolved, hidden_width()};
  }

  // The outputs of the layer's delta rule, for all tokens.
  Found apply_delta_rule(const Layer& layer, int number, Member& me) {
    const Matrix &matrix = layer.qkv, &gates = layer.delta.gates;
    project_exactly(layer, matrix, adapters_.to(kQkvProduct, number, false), gates,
                    adapters_.to(kGatesProduct, number, false), me);
    const DeltaRule rule(model_.delta, layer.delta, model_.norm_eps);
    const auto chunk_of = [&](int sequence) {
      return this->chunk_of(sequence, matrix, gates, DeltaRule::width(model_.delta));
    };
    mix_tokens(model_.delta.num_key_heads, me,
               [&](int sequence, int t, int head) { rule.mix(chunk_of(sequence), t, head); });
    const size_t width = padded(model_.delta.num_value_heads * model_.delta.value_dim);
    apply_heads(model_.delta.num_value_heads, me, [&](int sequence, int head) {
      rule.run(chunk_of(sequence), head, buffers_.delta_outputs.get() + step_->query_starts[sequence] * width, width);
    });
    return {&buffers_.delta_outputs, width};
  }

  // The outputs of the layer's state space, for all tokens.
  Found apply_state_space(const Layer& layer, int number, Member& me) {
    const Matrix &matrix = layer.space.projection, &dts = layer.space.dts;
    project_exactly(layer, matrix, adapters_.to(kSpaceProduct, number, false), dts,
                    adapters_.to(kDtProduct, number, false), me);
    const StateSpace space(model_.space, layer.space, model_.norm_eps);
    const auto chunk_of = [&](int sequence) {
      return this->chunk_of(sequence, matrix, dts, StateSpace::width(model_.space));
    };
    const int num_heads = model_.space.num_heads;
    mix_tokens(num_heads, me, [&](int sequence, int t, int head) { space.mix(chunk_of(sequence), t, head); });
    apply_heads(num_heads, me, [&](int sequence, int head) { space.run(chunk_of(sequence), head); });
    const size_t width = padded(StateSpace::num_outputs(model_.space));
    mix_tokens(1, me, [&](int sequence, int t, int) {
      const int row = step_->query_starts[sequence] + t;
      space.finish(chunk_of(sequence), t, buffers_.space_outputs.get() + row * width);
    });
    return {&buffers_.space_outputs, width};
  }

  // Projects the normed rows by the layer's qkv.
  void project(const Layer& layer, int number, Member& me) {
    const Added to_qkv = adapters_.to(kQkvProduct, number, false);
    const Rows normed = norm(layer.qkv, step_->num_tokens, layer.attention_norm, to_qkv, me);
    product(layer.qkv, normed, to_qkv, me, Store{buffers_.qkv.get(), width_of(layer.qkv)});
  }

  Adapters<Format> adapters_;
  const Step* step_ = nullptr;

  using Products<Format>::kOwnRows;
  using Products<Format>::model_;
  using Products<Format>::buffers_;
  using Products<Format>::stages_;
  using Products<Format>::product;
  using Products<Format>::float_product;
  using Products<Format>::compress;
  using Products<Format>::norm;
  using Products<Format>::num_stages;
  using Products<Format>::part;
  using Products<Format>::hidden_width;
  using Products<Format>::width_of;

 private:
  // Projects the normed rows by the matrix and by that of the gates.
  void project_exactly(const Layer& layer, const Matrix& matrix, const Added& to_matrix, const Matrix& gates,
                       const Added& to_gates, Member& me) {
    const int num_rows = step_->num_tokens;
    // Gates are computed from float rows in every format, as they scale all later tokens.
    float* exact = num_rows <= kOwnRows ? buffers_.threads[me.place].rows.get() : buffers_.exact.get();
    const int of_all = num_stages(to_matrix) + num_stages(to_gates);
    const Rows normed = norm(matrix, to_matrix || to_gates, num_rows, layer.attention_norm, of_all, me,
                             [&](int row) { return exact + row * hidden_width(); });
    product(matrix, normed, to_matrix, me, Store{buffers_.qkv.get(), width_of(matrix)});
    const Rows rows{reinterpret_cast<const uint32_t*>(exact), hidden_width(), nullptr, 0, num_rows};
    const Store store{buffers_.gates.get(), width_of(gates)};
    if (to_gates) compress(to_gates, normed, me);
    float_product(gates, rows, to_gates, me, store);
  }

  // Calls mix(sequence, t, item) for items 0..num_items of token t of a sequence's chunk, for all tokens.
  template <class Mix>
  void mix_tokens(int num_items, Member& me, const Mix& mix) {
    stages_.run(me, [&] {
      for (int item : part(step_->num_tokens * num_items, me)) {
        const int t = item / num_items, sequence = buffers_.sequences.get()[t];
        mix(sequence, t - step_->query_starts[sequence], item % num_items);
      }
    });
  }

  // Calls run(sequence, head) for all heads of all sequences.
  template <class Run>
  void apply_heads(int num_heads, Member& me, const Run& run) {
    stages_.run(me, [&] {
      const int num_sequences = step_->num_sequences;
      // Chunks, which take longest, come last in a step, so they are started first.
      stages_.for_items(num_sequences * num_heads,
                        [&](int item) { run(num_sequences - 1 - item / num_heads, item % num_heads); });
    });
  }

  RecurrentChunk chunk_of(int sequence, const Matrix& matrix, const Matrix& gates, int width) const {
    const size_t first = step_->query_starts[sequence], stride = width_of(matrix), gates_stride = width_of(gates);
    const int segment = step_->segment_starts[sequence];
    return {buffers_.qkv.get() + first * stride, stride,
            buffers_.gates.get() + first * gates_stride, gates_stride,
            buffers_.mixed.get() + first * width,
            step_->query_starts[sequence + 1] - int(first),
            step_->state_reads[sequence],
            step_->segment_starts[sequence + 1] - segment,
            step_->segment_ends + segment, step_->state_writes + segment};
  }
};

}  // namespace triptych
