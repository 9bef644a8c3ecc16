// Multi-head latent attention: the keys and values of all heads are made of one latent per token, by matrices of each
// head, and of a few key channels that are rotated and that all heads share.
//
// Pages hold the latents and the rotated channels, not what is made of them. The score of a key U z is q U z, so each
// query is multiplied by U instead, once, and then all heads attend to the same latents as if these were both keys and
// values. What a head attends to is the sum of weighted latents, of which its values are made only then.
//
// Source: "DeepSeek-V2", DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.
#pragma once

#include "buffers.h"
#include "epilogues.h"
#include "rows.h"

namespace triptych {

// The queries of one layer, and what they find. A query has plain_dim channels and then rotary_dim that are rotated.
template <class Format>
class LatentHeads {
 public:
  using Element = typename Format::Cache::Element;
  using Written = typename Buffers<Format>::Written;

  LatentHeads(const Model& model, const Layer& layer, const Buffers<Format>& buffers)
      : model_(model), layer_(layer), buffers_(buffers) {}

  // Norms the latent of a token's queries.
  void norm_query(int t, float* to) const {
    const int rank = shape().query_rank;
    std::copy_n(inputs(t), rank, to);
    norm_heads(to, rank, layer_.latent.query_norm, shape().norm_eps);
  }
  Store latent_queries() const { return {buffers_.latent_queries.get(), latent_queries_width()}; }

  // Norms a token's latent, rotates its channels and those of its queries, and multiplies the queries by `factor`.
  // Returns the latent, followed by the rotated channels.
  const float* turn(int t, int position, float factor, float* scratch) const {
    const int num_rotated = model_.rotary_dim, num_plain = shape().plain_dim, width = num_plain + num_rotated;
    const size_t angle = size_t(position) * (num_rotated / 2);
    const auto turn_channels = [&](float* channels) {
      triptych::turn(channels, num_rotated, model_.turns_neighbours, layer_.cosines + angle, layer_.sines + angle);
    };
    float* query = inputs(t);
    float* latent = query + (shape().query_rank ? shape().query_rank : model_.num_heads * width);
    if (shape().query_rank) query = buffers_.latent_queries.get() + t * latent_queries_width();
    norm_heads(latent, shape().rank, layer_.latent.norm, shape().norm_eps);
    turn_channels(latent + shape().rank);
    for (int row = t * model_.num_heads, end = row + model_.num_heads; row < end; ++row, query += width) {
      turn_channels(query + num_plain);
      for (int i = 0; i < width; i += kLanes) store(query + i, load<Floats>(query + i) * broadcast(factor));
      store_all(buffers_.queries.get() + size_t(row) * model_.head_dim + shape().rank, query + num_plain, num_rotated);
      buffers_.plain_queries.write(row, num_plain, query, {Rounding::kWhole, num_plain, scratch});
    }
    return latent;
  }
  Rows plain_queries(int num_tokens) const {
    return buffers_.plain_queries.rows(num_tokens * model_.num_heads);
  }
  StoreAs<Element> query_of(int head) const {
    return {buffers_.queries.get() + head * model_.head_dim, size_t(model_.num_heads) * model_.head_dim};
  }

  // Keeps the sum of weighted latents that a head found.
  void keep(int t, int head, const float* latents, float* scratch) const {
    const int rank = shape().rank;
    buffers_.attended_latents.write(t * model_.num_heads + head, rank, latents, {Rounding::kWhole, rank, scratch});
  }
  Rows attended(int num_tokens) const {
    return buffers_.attended_latents.rows(num_tokens * model_.num_heads);
  }
  StoreAs<Written> value_of(int head, size_t stride) const {
    return {buffers_.attended.get() + head * shape().head_value_dim, stride};
  }

 private:
  const LatentShape& shape() const { return model_.latent; }
  float* inputs(int t) const { return buffers_.qkv.get() + t * size_t(layer_.qkv.num_blocks) * 64; }
  size_t latent_queries_width() const { return size_t(layer_.latent.query_up.num_blocks) * 64; }

  const Model& model_;
  const Layer& layer_;
  const Buffers<Format>& buffers_;
};

}  // namespace triptych
