// The rows of a step and their products with packed matrices, computed by all members of the team.
#pragma once

#include "lora.h"
#include "rows.h"
#include "team.h"

namespace triptych {

template <class Format>
class Products {
 protected:
  using Written = typename Buffers<Format>::Written;
  using Added = Addition<Format>;

  Products(const Model& model, int num_threads) : model_(model), buffers_(num_threads), stages_(num_threads) {}

  // What part of a layer puts out for all tokens, before the product whose result is added to the residual.
  struct Found {
    const Buffer<Written>* rows;  // null: the layer has no such part
    size_t width;
    Written* row(int number) const { return rows->get() + number * width; }
  };

  // Adds a product to the residual, times `multiplier`, after a norm if `norm` is not null.
  void add_product(const Matrix& matrix, const Rows& rows, const Added& added, const float* norm, float multiplier,
                   Member& me) {
    if (!norm) return product(matrix, rows, added, me, Add{residual(0), hidden_width(), multiplier});
    product(matrix, rows, added, me, Store{buffers_.added.get(), hidden_width()});
    stages_.run(me, [&] {
      for (int r : part(rows.count, me))
        add_normed_row(buffers_.added.get() + r * hidden_width(), norm, model_.hidden_size, model_.norm_eps,
                       multiplier, residual(r));
    });
  }

  template <class Write>
  void product(const Matrix& matrix, const Rows& rows, const Added& added, Member& me, const Write& write) {
    if (!added) return multiply_all<Format>(matrix, rows.of(matrix), me, write);
    compress(added, rows, me);
    multiply_all<Format>(matrix, rows.of(matrix), me, AddFirst<Format, Write>{added, write});
  }

  // Computes A x for all adapted rows, from the same rows as the product itself.
  void compress(const Added& added, const Rows& rows, Member& me) {
    const Rows inputs = rows.whole();
    stages_.run(me, [&] { stages_.for_items(added.num_items(), [&](int item) { added.compress(inputs, item); }); });
  }

  template <class Arithmetic, class Write>
  void multiply_all(const Matrix& matrix, const Rows& rows, Member& me, const Write& write) {
    multiply_blocks<Arithmetic>(matrix, {0, matrix.num_blocks}, rows, me, write);
  }

  // The columns of some blocks. In calibrations, inputs are counted with the last one.
  template <class Arithmetic, class Write>
  void multiply_blocks(const Matrix& matrix, Range blocks, const Rows& rows, Member& me, const Write& write) {
    stages_.run(me, [&] {
      if (me.rank == 0 && blocks.end == matrix.num_blocks) add_squares(matrix, rows);
      const int num_members = stages_.num_members(), num_blocks = blocks.end - blocks.begin;
      if (rows.count <= kFewRows) {  // limited by memory bandwidth, best with one contiguous run for each thread
        const Range halves = share(2 * num_blocks, me.rank, num_members);
        const int first = 2 * blocks.begin;
        return multiply<Arithmetic>(matrix, rows, {first + halves.begin, first + halves.end}, write);
      }
      // Each thread has rows of its own if there are many, otherwise a run of blocks, and helps others at the end.
      // Blocks one by one would not do: a thread would prefetch what another reads next, and all would write adjacent
      // lines. The last block of a run is in halves, so that all threads finish at about the same time.
      const int num_parts = parts_of(rows.count, num_members), per_part = num_members / num_parts;
      const auto run_of = [&](int owner) { return share(num_blocks, owner % per_part, per_part); };
      const auto length_of = [&](int owner) { return run_of(owner).end - run_of(owner).begin; };
      const auto num_items = [&](int owner) { return length_of(owner) ? length_of(owner) + 1 : 0; };
      stages_.for_shares(me, num_items, [&](int owner, int item) {
        const int last = length_of(owner) - 1;
        const int half = 2 * (blocks.begin + run_of(owner).begin) + std::min(2 * item, item + last);
        const Rows own = rows.within(rows.share(owner / per_part, num_parts));
        multiply<Arithmetic>(matrix, own, {half, half + (item < last ? 2 : 1)}, write);
      });
    });
  }

  // The same with rows and weights in float; A x has been computed.
  void float_product(const Matrix& matrix, const Rows& rows, const Added& added, Member& me, const Store& store) {
    if (!added) return multiply_all<Float32>(matrix, rows, me, store);
    multiply_all<Float32>(matrix, rows, me, AddFirst<Format, Store>{added, store});
  }

  // Multiplies the row of each head by the head's own matrix, which is in this format: rows are [tokens][heads].
  // write_of(head) writes the results of all tokens.
  template <class WriteOf>
  void head_product(const Matrix* matrices, const Rows& rows, Member& me, const WriteOf& write_of) {
    stages_.run(me, [&] {
      const int num_heads = model_.num_heads, num_blocks = matrices->num_blocks;
      stages_.for_items(num_heads * num_blocks, [&](int item) {
        const int head = item / num_blocks, half = 2 * (item % num_blocks);
        const Rows of_head{rows.row(head), rows.stride * num_heads, rows.scale(head), rows.scale_stride * num_heads,
                           rows.count / num_heads};
        multiply_halves<Format>(matrices[head], of_head, {half, half + 2}, write_of(head));
      });
    });
  }

  // Rows in the form that a matrix reads: of all rows floats_of(row). If the weights are in four bits and
  // `needs_whole`, as adapters or a shared expert read them too, they are also made for weights in eight. Many rows are
  // divided among the threads, in a stage of their own, and kept in `inputs`; few rows are computed by every thread for
  // itself, before the next `num_stages` stages, which use them.
  template <class FloatsOf>
  Rows make_rows(const Matrix& matrix, bool needs_whole, int count, size_t width, int num_stages, Member& me,
                 const Inputs<Format>& inputs, const FloatsOf& floats_of) {
    const bool is_own = count <= kOwnRows;
    const Operands operands = operands_for(matrix, needs_whole, is_own ? buffers_.threads[me.place].inputs : inputs);
    const auto make = [&](int row) { operands.write(row, int(width), floats_of(row), matrix, scratch(me)); };
    if (is_own) {
      for (int row = 0; stages_.is_in_time(me, num_stages) && row < count; ++row) make(row);
    } else {
      stages_.run(me, [&] {
        for (int row : part(count, me)) make(row);
      });
    }
    return operands.rows(count);
  }

  // Where rows are made, in one form or in two.
  struct Operands {
    const Operand<Format>& first;
    const Operand<Format>* whole;  // null: one form is enough

    void write(int row, int width, const float* from, const Matrix& matrix, float* scratch) const {
      first.write(row, width, from, {rounding_of(matrix), matrix.num_inputs, scratch});
      if (whole) whole->write(row, width, from, {Rounding::kWhole, matrix.num_inputs, scratch});
    }
    Rows rows(int count) const {
      Rows rows = first.rows(count);
      if (!whole) return rows;
      const Rows others = whole->rows(count);
      rows.whole_groups = others.groups;
      rows.whole_scales = others.scales;
      return rows;
    }
  };
  static Operands operands_for(const Matrix& matrix, bool needs_whole, const Inputs<Format>& inputs) {
    const bool has_both = needs_whole && rounding_of(matrix) == Rounding::kInGroups;
    return {inputs.operand, has_both ? &inputs.whole : nullptr};
  }

  // Normed rows. floats(row) is where a row is normed.
  template <class Floats>
  Rows norm(const Matrix& matrix, bool needs_whole, int count, const float* weight, int num_stages, Member& me,
            const Floats& floats) {
    return make_rows(matrix, needs_whole, count, hidden_width(), num_stages, me, buffers_.inputs, [&](int row) {
      float* const to = floats(row);
      norm_row(model_, residual(row), weight, to);
      return to;
    });
  }
  Rows norm(const Matrix& matrix, int count, const float* weight, const Added& added, Member& me) {
    return norm(matrix, bool(added), count, weight, num_stages(added), me,
                [&](int) { return buffers_.threads[me.place].rows.get(); });
  }

  Rows inputs_of(const Matrix& matrix, const Buffer<Written>& written, int count, size_t width, const Added& added,
                 Member& me) {
    return inputs_of(matrix, written, count, width, added, me, buffers_.inputs);
  }
  Rows inputs_of(const Matrix& matrix, const Buffer<Written>& written, int count, size_t width, const Added& added,
                 Member& me, const Inputs<Format>& inputs) {
    if constexpr (Buffers<Format>::kIsQuantised) {
      return make_rows(matrix, bool(added), count, width, num_stages(added), me, inputs,
                       [&](int row) { return written.get() + row * width; });
    } else {
      return {reinterpret_cast<const uint32_t*>(written.get()), width / Format::kGroup, nullptr, 0, count};
    }
  }

  // Into how many parts the rows of a product are divided; members of the same part divide its blocks.
  static int parts_of(int num_rows, int num_members) {
    int parts = num_members;
    while (parts > 1 && (num_members % parts || num_rows < kManyRows * parts)) --parts;
    return parts;
  }
  float* scratch(const Member& me) const { return buffers_.threads[me.place].hadamard.get(); }
  static int num_stages(const Added& added) { return added ? 2 : 1; }  // taken by a product
  Indices part(int count, const Member& me) const { return {share(count, me.rank, stages_.num_members())}; }
  // Of a row of a product.
  static size_t width_of(const Matrix& matrix) { return size_t(matrix.num_blocks) * 64; }
  static size_t inner_width(const Layer& layer) { return padded(layer.down.num_inputs); }
  Gate<Written> gate(const Layer& layer, Written* to, size_t width) const {
    return {to, width, model_.has_gates != 0, model_.activation, model_.gate_slope, model_.gate_limit, layer.xielu};
  }
  size_t hidden_width() const { return padded(model_.hidden_size); }
  float* residual(int token) { return buffers_.residual.get() + token * hidden_width(); }

  static constexpr int kFewRows = 64, kManyRows = 192, kOwnRows = ThreadBuffers<Format>::kOwnRows;

  const Model model_;
  Buffers<Format> buffers_;
  Stages stages_;
};

}  // namespace triptych
