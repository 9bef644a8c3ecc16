// Layers with experts, stage by stage: routing, and what the experts add to the residual.
#pragma once

#include "experts.h"
#include "products.h"

namespace triptych {

// Where the choices of one layer are reported, with `stride` between rows; start is null if they are not.
struct Choices {
  int32_t* start;
  size_t stride;
};

template <class Format>
class ExpertLayers : protected Products<Format> {
 protected:
  using Written = typename Buffers<Format>::Written;
  using Added = Addition<Format>;

  ExpertLayers(const Model& model, int num_threads) : Products<Format>(model, num_threads), routing_(model_) {}

  // Adds the outputs of the routed experts and of the shared one to each row. The adapters apply to the shared expert.
  void add_experts(const Layer& layer, int num_rows, const Added& to_gate_up, const Added& to_down,
                   const Choices& choices, Member& me) {
    using Run = Routing::Run;
    const bool shared_is_whole = has_shared(layer) && rounding_of(layer.gate_up) == Rounding::kWhole;
    const Rows normed = choose_experts(layer, num_rows, to_gate_up || shared_is_whole, choices, me);
    const size_t width = inner_width(layer);
    if (has_shared(layer)) product(layer.gate_up, normed, to_gate_up, me, gate(layer, buffers_.gated.get(), width));
    expert_products(layer.experts->gate_up, me, [&](const Run& run, Range halves) {
      Rows rows = normed;
      rows.count = run.count();
      rows.places = routing_.rows_of(run);
      Written* to = buffers_.expert_gated.get() + run.slots.begin * expert_width();
      const Matrix& matrix = layer.experts[run.expert].gate_up;
      if (halves.begin == 0) add_squares(matrix, rows);
      multiply<Format>(matrix, rows, halves, gate(layer, to, expert_width()));
    });
    if (has_shared(layer)) {  // only now, as its inputs may overwrite the normed rows
      const Add add{residual(0), hidden_width(), model_.gated_multiplier, buffers_.shared_weights.get()};
      product(layer.down, inputs_of(layer.down, buffers_.gated, num_rows, width, to_down, me), to_down, me, add);
    }
    const int num_slots = num_rows * model_.experts_per_token;
    const Rows gated = inputs_of(layer.experts->down, buffers_.expert_gated, num_slots, expert_width(), Added{}, me,
                                 buffers_.expert_inputs);
    expert_products(layer.experts->down, me, [&](const Run& run, Range halves) {
      const int first = run.slots.begin;
      const Rows rows{gated.row(first), gated.stride, gated.scale(first), gated.scale_stride, run.count()};
      float* to = buffers_.expert_outputs.get() + first * hidden_width();
      const Matrix& matrix = layer.experts[run.expert].down;
      if (halves.begin == 0) add_squares(matrix, rows);
      multiply<Format>(matrix, rows, halves, Store{to, hidden_width()});
    });
    stages_.run(me, [&] {
      for (int row : part(num_rows, me))
        routing_.add(row, buffers_.expert_outputs.get(), hidden_width(), model_.gated_multiplier, residual(row));
    });
  }

  Routing routing_;

  using Products<Format>::model_;
  using Products<Format>::buffers_;
  using Products<Format>::stages_;
  using Products<Format>::product;
  using Products<Format>::float_product;
  using Products<Format>::inputs_of;
  using Products<Format>::scratch;
  using Products<Format>::part;
  using Products<Format>::hidden_width;
  using Products<Format>::inner_width;
  using Products<Format>::width_of;
  using Products<Format>::residual;
  using Products<Format>::gate;

 private:
  // Norms the rows for the experts, which are returned. The router reads them as floats, since rounded ones might
  // choose other experts.
  Rows choose_experts(const Layer& layer, int num_rows, bool needs_whole, const Choices& choices, Member& me) {
    const int width = int(hidden_width());
    float *exact = buffers_.exact.get(), *logits = buffers_.router_logits.get();
    const auto operands = this->operands_for(layer.experts->gate_up, needs_whole, buffers_.inputs);
    stages_.run(me, [&] {
      for (int row : part(num_rows, me)) {
        float* const own = exact + size_t(row) * width;
        norm_row(model_, residual(row), layer.mlp_norm, own);
        operands.write(row, width, own, layer.experts->gate_up, scratch(me));
      }
    });
    const Rows rows{reinterpret_cast<const uint32_t*>(exact), size_t(width), nullptr, 0, num_rows};
    const size_t num_logits = width_of(layer.router);
    float_product(layer.router, rows, Added{}, me, Store{logits, num_logits});
    stages_.run(me, [&] {
      const int count = model_.experts_per_token;
      for (int row : part(num_rows, me)) {
        float* own = logits + row * num_logits;
        routing_.choose(row, own, layer.router_biases);
        if (has_shared(layer)) buffers_.shared_weights.get()[row] = shared_weight(own[model_.num_experts]);
        if (choices.start) std::copy_n(routing_.choices_of(row), count, choices.start + row * choices.stride);
      }
    });
    stages_.run(me, [&] {
      if (me.rank == 0) routing_.sort(num_rows);
    });
    return operands.rows(num_rows);
  }

  // Calls compute(run, halves) for all halves of the matrices of all chosen experts, which have the shape of `matrix`.
  template <class Compute>
  void expert_products(const Matrix& matrix, Member& me, const Compute& compute) {
    stages_.run(me, [&] {
      const std::vector<Routing::Run>& runs = routing_.runs();
      const int num_blocks = matrix.num_blocks;
      stages_.for_items(int(runs.size()) * num_blocks, [&](int item) {
        const int half = 2 * (item % num_blocks);
        compute(runs[item / num_blocks], Range{half, half + 2});
      });
    });
  }

  float shared_weight(float logit) const {
    return model_.gates_shared_expert ? 1.0f / (1.0f + std::exp(-logit)) : 1.0f;
  }
  static bool has_shared(const Layer& layer) { return layer.down.num_blocks > 0; }
  size_t expert_width() const { return padded(model_.expert_size); }
};

}  // namespace triptych
