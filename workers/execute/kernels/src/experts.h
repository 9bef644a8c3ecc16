// Mixture of experts in place of an MLP: a router chooses the experts with the highest scores for each row, and their
// outputs are weighted by these.
//
// Rows are sorted by expert, so that an expert's weights are read once for all rows that chose it, and not at all if
// none did. A row's choices, the outputs of its experts and the order in which they are added do not depend on the
// other rows.
#pragma once

#include <vector>

#include "buffers.h"

namespace triptych {

// The routing of one layer. The choices of all rows, sorted by expert, occupy consecutive slots.
class Routing {
 public:
  struct Run {  // a chosen expert, and the slots of the rows that chose it
    int expert;
    Range slots;
    int count() const { return slots.end - slots.begin; }
  };

  explicit Routing(const Model& model) : model_(model), next_slots_(model.num_experts) {
    runs_.reserve(model.num_experts);
  }

  void reserve(int num_rows) {
    const size_t num_choices = size_t(num_rows) * model_.experts_per_token;
    experts_.reserve(num_choices);
    weights_.reserve(num_choices);
    slots_.reserve(num_choices);
    rows_.reserve(num_choices);
  }

  // A row's experts are listed by score, the highest first, and by index on ties. If any logit is NaN, so are all
  // weights. Where the scores themselves are needed, they overwrite the logits.
  void choose(int row, float* logits, const float* biases) const {
    const int num_wanted = model_.experts_per_token;
    int32_t* experts = experts_.get() + size_t(row) * num_wanted;
    float* weights = weights_.get() + size_t(row) * num_wanted;
    const bool has_scores = biases || model_.has_sigmoid_routers || model_.num_expert_groups > 1;
    if (has_scores) model_.has_sigmoid_routers ? to_sigmoids(logits) : to_softmax(logits);
    choose_highest(logits, biases, experts);
    float chosen = 1e-20f;  // as in GLM: experts chosen by their biases may all have a sigmoid of 0
    const float total = has_scores ? 1.0f : sum_of_powers(logits, logits[experts[0]]);
    for (int k = 0; k < num_wanted; ++k) {
      const float own = logits[experts[k]];
      weights[k] = has_scores ? own : std::exp(own - logits[experts[0]]) / total;
      chosen += weights[k];
    }
    for (int k = 0; model_.norms_expert_weights && k < num_wanted; ++k) weights[k] /= chosen;
    for (int k = 0; k < num_wanted; ++k) weights[k] *= model_.expert_multiplier;
  }

  // Assigns slots to the choices of the first `num_rows` rows.
  void sort(int num_rows) {
    const int num_wanted = model_.experts_per_token, num_choices = num_rows * num_wanted;
    std::fill(next_slots_.begin(), next_slots_.end(), 0);
    for (int choice = 0; choice < num_choices; ++choice) ++next_slots_[experts_.get()[choice]];
    runs_.clear();
    int begin = 0;
    for (int expert = 0; expert < model_.num_experts; ++expert) {
      const int end = begin + next_slots_[expert];
      if (end > begin) runs_.push_back({expert, {begin, end}});
      next_slots_[expert] = begin;
      begin = end;
    }
    for (int row = 0, choice = 0; row < num_rows; ++row)
      for (int k = 0; k < num_wanted; ++k, ++choice) {
        const int slot = next_slots_[experts_.get()[choice]]++;
        slots_.get()[choice] = slot;
        rows_.get()[slot] = row;
      }
  }

  const int32_t* choices_of(int row) const { return experts_.get() + size_t(row) * model_.experts_per_token; }
  const std::vector<Run>& runs() const { return runs_; }
  const int32_t* rows_of(const Run& run) const { return rows_.get() + run.slots.begin; }

  // to += multiplier * the weighted outputs of the row's experts. `outputs` is [slots][width].
  void add(int row, const float* outputs, size_t width, float multiplier, float* to) const {
    const size_t first = size_t(row) * model_.experts_per_token;
    for (int k = 0; k < model_.experts_per_token; ++k) {
      const Floats weight = broadcast(weights_.get()[first + k] * multiplier);
      const float* from = outputs + slots_.get()[first + k] * width;
      for (size_t i = 0; i < width; i += kLanes)
        store(to + i, fma(load<Floats>(from + i), weight, load<Floats>(to + i)));
    }
  }

 private:
  void choose_highest(const float* scores, const float* biases, int32_t* experts) const {
    const auto rank = [&](int expert) { return biases ? scores[expert] + biases[expert] : scores[expert]; };
    const int num_wanted = model_.experts_per_token, group_size = model_.num_experts / model_.num_expert_groups;
    const uint64_t groups = model_.num_expert_groups > 1 ? highest_groups(rank) : 1;
    for (int expert = 0, count = 0; expert < model_.num_experts; ++expert) {
      if (!(groups >> expert / group_size & 1)) continue;
      const float own = rank(expert);
      if (count == num_wanted && !(own > rank(experts[count - 1]))) continue;
      int place = count < num_wanted ? count++ : count - 1;
      for (; place > 0 && own > rank(experts[place - 1]); --place) experts[place] = experts[place - 1];
      experts[place] = expert;
    }
  }
  // The groups from which experts are chosen, a bit for each.
  template <class Rank>
  uint64_t highest_groups(const Rank& rank) const {
    const int num_groups = model_.num_expert_groups, size = model_.num_experts / num_groups;
    float tops[64];
    for (int group = 0; group < num_groups; ++group) {
      float first = -INFINITY, second = -INFINITY;
      for (int expert = group * size; expert < (group + 1) * size; ++expert) {
        const float own = rank(expert);
        second = std::max(second, std::min(first, own));
        first = std::max(first, own);
      }
      tops[group] = model_.num_group_tops == 1 ? first : first + second;
    }
    uint64_t chosen = 0;
    for (int count = 0; count < model_.num_chosen_groups; ++count) {
      int best = -1;
      for (int group = 0; group < num_groups; ++group)
        if (!(chosen >> group & 1) && (best < 0 || tops[group] > tops[best])) best = group;
      chosen |= uint64_t{1} << best;
    }
    return chosen;
  }
  float sum_of_powers(const float* logits, float top) const {
    float total = 0.0f;
    for (int expert = 0; expert < model_.num_experts; ++expert) total += std::exp(logits[expert] - top);
    return total;
  }
  void to_softmax(float* logits) const {
    const float top = *std::max_element(logits, logits + model_.num_experts);
    const float total = sum_of_powers(logits, top);
    for (int expert = 0; expert < model_.num_experts; ++expert) logits[expert] = std::exp(logits[expert] - top) / total;
  }
  void to_sigmoids(float* logits) const {
    for (int expert = 0; expert < model_.num_experts; ++expert)
      logits[expert] = 1.0f / (1.0f + std::exp(-logits[expert]));
  }

  const Model& model_;
  Buffer<int32_t> experts_;  // [rows][experts_per_token]
  Buffer<float> weights_;    // likewise
  Buffer<int32_t> slots_;    // likewise
  Buffer<int32_t> rows_;     // [slots]
  std::vector<int32_t> next_slots_;
  std::vector<Run> runs_;  // ordered by expert
};

}  // namespace triptych
