// Low-rank adapters: y += B (A x) for each row of a product, with the A and B of the row's adapter, if it has one.
//
// Adjacent rows with the same adapter are multiplied by its A together. B is added to a row's values before they are
// used, so a row without an adapter is computed as if there were none. Every sum has a fixed order, whatever other rows
// are in the step.
//
// Source: LoRA, Hu et al. 2021; batches of several adapters: Punica, Chen et al. 2023.
#pragma once

#include <vector>

#include "buffers.h"
#include "epilogues.h"

namespace triptych {

// The tensors merged into a packed matrix: side by side, or, for gate and up, 32 columns of each in turn.
struct Parts {
  int first;    // Tensor
  int count;
  int ends[2];  // ends of the first two parts, in vectors of 16 columns; 0: the parts alternate

  struct Place {
    int part;
    int vector;  // in the part
  };
  Place place(int block, int vector) const {
    const int place = 4 * block + vector;
    if (count == 1) return {0, place};
    if (ends[0] == 0) return {vector / 2, 2 * block + vector % 2};
    if (place < ends[0]) return {0, place};
    return place < ends[1] ? Place{1, place - ends[0]} : Place{2, place - ends[1]};
  }
};

inline Parts parts_of(const Model& model, const Layer& layer, Product product) {
  switch (product) {
    case kQkvProduct: {
      if (layer.delta.convolution) {
        const DeltaShape& delta = model.delta;
        const int values = delta.num_value_heads * delta.value_dim / kLanes;
        const int channels = 2 * delta.num_key_heads * delta.key_dim / kLanes + values;
        return {kQuery, 2, {channels, channels + values}};
      }
      if (layer.convolution.taps) {
        const int channels = padded(model.hidden_size) / kLanes;
        return {kQuery, 3, {channels, 2 * channels}};
      }
      const int queries = (model.gates_outputs ? 2 : 1) * model.num_heads * model.head_dim / kLanes;
      return {kQuery, 3, {queries, queries + model.num_kv_heads * model.head_dim / kLanes}};
    }
    case kGatesProduct: {
      const int heads = padded(model.delta.num_value_heads, kLanes) / kLanes;
      return {kBeta, 2, {heads, 2 * heads}};
    }
    case kSpaceProduct: return {kSpace, 1, {}};
    case kDtProduct: return {kDt, 1, {}};
    case kSpaceOutputProduct: return {kSpaceOutput, 1, {}};
    case kOutputProduct: return {kOutput, 1, {}};
    case kGateUpProduct: return model.has_gates ? Parts{kGate, 2, {}} : Parts{kUp, 1, {}};
    default: return {kDown, 1, {}};
  }
}

// The adapters of the rows of a step.
struct AdapterRows {
  struct Run {  // adjacent rows with the same adapter, at most as many as a tile takes
    int adapter;
    Range rows;
  };
  std::vector<int32_t> adapters;  // of each row, -1: none
  std::vector<Run> runs;

  template <class AdapterOf>
  void assign(int count, const AdapterOf& adapter_of) {
    adapters.clear();
    runs.clear();
    for (int row = 0; row < count; ++row) {
      const int adapter = adapter_of(row);
      adapters.push_back(adapter);
      if (adapter < 0) continue;
      const bool goes_on = !runs.empty() && runs.back().adapter == adapter && runs.back().rows.end == row &&
                           row - runs.back().rows.begin < kTileRows;
      if (goes_on) {
        ++runs.back().rows.end;
      } else {
        runs.push_back({adapter, {row, row + 1}});
      }
    }
  }
};

// What adapters add to one product of a step, or nothing.
template <class Format>
struct Addition {
  using Inner = typename Format::Cache;
  using Element = typename Inner::Element;

  const Update* updates = nullptr;  // of the first adapter, for this layer's first tensor
  size_t adapter_stride = 0;        // number of updates between adapters
  Parts parts{};
  const AdapterRows* rows = nullptr;  // null: nothing is added
  Element* inner = nullptr;           // A x, [rows][parts][max_rank]
  size_t inner_stride = 0;            // number of elements between parts

  explicit operator bool() const { return rows != nullptr; }
  int num_items() const { return int(rows->runs.size()) * parts.count; }
  const Update& update(int adapter, int part) const {
    return updates[adapter * adapter_stride + parts.first + part];
  }
  Element* inner_of(int row, int part) const {
    return inner + (size_t(row) * parts.count + part) * inner_stride;
  }

  // Computes A x of one part, for one run of rows.
  void compress(const Rows& inputs, int item) const {
    const AdapterRows::Run& run = rows->runs[item / parts.count];
    const int part = item % parts.count, first = run.rows.begin, count = run.rows.end - first;
    const Update& update = this->update(run.adapter, part);
    if (!update.up) return;
    const int steps = num_steps<Format>(update.down);
    const uint32_t* pointers[kTileRows];
    for (int r = 0; r < count; ++r) pointers[r] = inputs.row(first + r);
    Adjacent<> weights;
    weights.segment_steps = steps;
    weights.stride = kLanes;
    for (int column = 0; column < update.rank; column += kLanes) {
      weights.start[0] = update.down.blocks + size_t(column) * steps;
      typename Format::Accumulators sums[kTileRows] = {};
      add_rows<Format, 1>(count, sums, 1, pointers, weights, steps, PrefetchLines<0>{});
      const RowScales<Format, kTileRows> scales(inputs, run.rows);
      const Finish<Format> found(sums, 1, scales.of, update.down, column);
      for (int r = 0; r < count; ++r) store_as(inner_of(first + r, part) + column, found(r));
    }
  }

  // The values of 16 columns plus the update of the row's adapter.
  Floats added(Floats values, int row, int block, int vector) const {
    const Parts::Place place = parts.place(block, vector);
    const Update& update = this->update(rows->adapters[row], place.part);
    if (!update.up || place.vector >= update.num_vectors) return values;
    const int steps = update.rank / Inner::kGroup;
    const uint32_t* weights = update.up + size_t(place.vector) * steps * kLanes;
    const auto* groups = reinterpret_cast<const uint32_t*>(inner_of(row, place.part));
    for (int k = 0; k < steps; ++k)
      values = with_group<Inner>(values, groups[k], load<Ints>(weights + k * kLanes));
    return values;
  }
};

// An epilogue that adds the adapters' updates before the actual one. Products without any have tiles of their own: to
// ask in every tile would slow down a prompt by some percent.
template <class Format, class Write>
struct AddFirst {
  const Addition<Format>& addition;
  const Write& write;
  void expect(int row, int block) const { write.expect(row, block); }
  template <class Results>
  void operator()(const Results& pair) const {
    const auto updated = [&](Floats found, int r, int vector) {
      const int row = pair.first + r;
      return addition.rows->adapters[row] < 0 ? found : addition.added(found, row, pair.block, vector);
    };
    write(make_pair(pair.first, pair.count, pair.block, pair.vector,
                    [&](int r) { return updated(pair.low(r), r, pair.vector); },
                    [&](int r) { return updated(pair.high(r), r, pair.vector + 2); }));
  }
};

// The adapters of a model, and which rows of the current step use which: all of its rows, and those that are wanted.
template <class Format>
class Adapters {
 public:
  explicit Adapters(const Model& model) : model_(model) {}

  void reserve(int num_tokens) {
    constexpr int kMostParts = 3;
    inner_.reserve(size_t(num_tokens) * kMostParts * model_.max_rank);
    for (AdapterRows* rows : {&all_, &wanted_}) {
      rows->adapters.reserve(num_tokens);
      rows->runs.reserve(num_tokens);
    }
  }

  void begin(const Step& step) {
    const int32_t* const adapters = step.adapters;
    is_used_ = adapters != nullptr;
    if (!is_used_) return;
    all_.assign(step.num_tokens, [&](int row) { return adapters[row]; });
    wanted_.assign(step.num_rows, [&](int row) { return adapters[step.wanted_rows[row]]; });
  }

  Addition<Format> to(Product product, int layer, bool is_of_wanted) const {
    if (!is_used_ || !(model_.adapted_products >> product & 1)) return {};
    return {model_.updates + size_t(layer) * kNumTensors, size_t(model_.num_layers) * kNumTensors,
            parts_of(model_, model_.layers[layer], product), is_of_wanted ? &wanted_ : &all_, inner_.get(),
            size_t(model_.max_rank)};
  }

 private:
  const Model& model_;
  bool is_used_ = false;
  AdapterRows all_, wanted_;
  Buffer<typename Format::Cache::Element> inner_;
};

}  // namespace triptych
