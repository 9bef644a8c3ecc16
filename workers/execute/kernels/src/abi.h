// What Python and C++ share: plain structures, mirrored field by field in ../structures.py.
//
// Every row of activations is padded to a multiple of 64 values, every matrix to 64 columns, with zeros: no kernel has
// a tail, whatever the model's sizes.
#pragma once

#include <cstdint>

namespace triptych {

enum FormatCode : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3, kMxfp4 = 4 };
enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

// y = x W^T + b with W packed in blocks of 64 columns (outputs), see pack.h.
struct Matrix {
  uint32_t* blocks;     // [num_blocks][steps][64] groups of 32 bits
  float* bias;          // [64 * num_blocks], or null
  float* scales;        // int8 only: [64 * num_blocks], what one unit of a column's weights is worth
  void* offsets;        // int8, four bits: [64 * num_blocks] int32 or float, 128 times the sum of a column's weights
  int32_t num_inputs;   // K
  int32_t num_blocks;
  int32_t format;       // FormatCode; that of activations is the model's
  int32_t unused;
};

struct Expert {
  Matrix gate_up;  // as a layer's
  Matrix down;
};

// A gated delta rule in place of attention, see delta_rule.h; or nothing. The layer's qkv are then its queries, keys and
// values, [heads][dim] each, and what gates its outputs.
struct DeltaLayer {
  Matrix gates;              // kFloat32: betas and rates of decay of the value heads, each padded to 16
  const float* convolution;  // [conv_size][channels], or null: the layer attends
  const float* rates;        // [value heads], by which rates of decay are multiplied
  const float* rate_biases;  // [value heads], what is added to them before
  const float* norm;         // [value_dim], of outputs
  float* states;             // [rows][value heads] tiles, see delta_rule.h
  float* inputs;             // [rows][conv_size - 1][channels], of the convolution, the latest last
};

struct Layer {
  Matrix qkv;      // queries, keys and values side by side; where outputs are gated, a gate behind each query
  Matrix output;
  Matrix gate_up;  // 32 gate columns and the 32 up columns that belong to them in each block
  Matrix down;
  Matrix router;          // kFloat32, whose outputs are the experts' logits, and that of the one that all tokens share
  const Expert* experts;  // [num_experts], or null. Then gate_up and down are the one that all tokens share, if there is one
  const float* attention_norm;  // or null: attention reads x as it is
  const float* mlp_norm;        // likewise
  const float* query_norm;      // [head_dim], or [heads][head_dim] where whole queries are normed, or null
  const float* key_norm;
  const float* attended_norm;  // of what attention adds to the residual, or null
  const float* gated_norm;     // of what the rest of the layer adds, or null
  DeltaLayer delta;
  const float* cosines;        // [positions][rotary_dim / 2], or null: queries and keys are the same at every position
  const float* sines;
  const float* sinks;          // [heads], scores of something that has no value, or null
  void* keys;    // [pages][kv heads][page_size / 16] tiles, see pages.h and eight_bits.h
  void* values;
  int32_t window;  // keys a token attends to, itself included; 0: all
  int32_t unused;
};

// Of a delta rule the first is queries, keys and values, the second what gates its outputs, and the third is none.
enum Tensor : int32_t { kQuery, kKey, kValue, kOutput, kGate, kUp, kDown, kBeta, kRate, kNumTensors };
enum Product : int32_t { kQkvProduct, kOutputProduct, kGateUpProduct, kDownProduct, kGatesProduct };

// What an adapter adds to the outputs of one tensor: B (A x). Of A and of B 16 outputs are one run of memory,
// [outputs / 16][steps][16] groups.
struct Update {
  Matrix down;          // A, in the model's format
  const uint32_t* up;   // B times the adapter's scale, in the format of keys and values; null: nothing is added
  int32_t rank;         // padded to 16
  int32_t num_vectors;  // of outputs
};

// Sizes of all gated delta rules of a model.
struct DeltaShape {
  int32_t num_key_heads;
  int32_t num_value_heads;  // a multiple of these
  int32_t key_dim;
  int32_t value_dim;
  int32_t conv_size;
  int32_t unused;
};

struct Model {
  const Layer* layers;
  Matrix head;
  const void* embedding;    // [vocab][hidden_size], as in the checkpoint
  const float* final_norm;
  const Update* updates;  // [adapters][layers][kNumTensors], or null
  int32_t format;
  int32_t embedding_is_bf16;  // else float
  int32_t num_layers;
  int32_t hidden_size;
  int32_t intermediate_size;  // the greatest of any layer, without experts that are chosen
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t page_size;
  float norm_eps;
  float score_divisor;  // in most models the root of head_dim
  float embedding_multiplier;
  float residual_multiplier;  // of what is added to the residual
  float score_cap;            // scores y become cap * tanh(y / cap); 0: they do not
  float logit_cap;            // and so do logits
  float query_growth;         // a query at position p times 1 + query_growth * log(1 + p / query_growth_span)
  int32_t query_growth_span;  // p / this is a whole number
  int32_t activation;         // Activation, of the gate
  float gate_slope;           // of kClampedSwiglu, as is gate_limit
  float gate_limit;
  int32_t max_rank;           // of the updates, padded
  int32_t adapted_products;   // bit p: some adapter adds to Product p
  int32_t eight_bit_pages;    // keys and values have eight bits, see eight_bits.h
  int32_t num_experts;        // of a layer that has some
  int32_t experts_per_token;
  int32_t expert_size;           // what intermediate_size is of a layer without experts
  int32_t norms_expert_weights;  // those of a token's experts add up to 1
  int32_t norms_whole_queries;   // norms of queries and keys are over all heads together
  int32_t rotary_dim;            // channels of a head that turn, the first ones
  int32_t gates_outputs;         // those of attention, by a sigmoid
  DeltaShape delta;
};

// Who computes a step.
struct Sharing {
  int64_t worth_a_thread;  // multiplications below which it is left to the caller: waking another takes longer
  int64_t worth_a_team;    // below which one thread computes it: waiting for each other costs more than others bring
  int64_t too_long;        // from which on nothing should be submitted behind it: whoever comes next waits for that too
  int32_t num_threads;     // at most, at a time
  int32_t num_own;         // that go on while the caller is busy elsewhere
};

// Names as in StepInputs.
struct Step {
  const int32_t* token_ids;
  const int32_t* positions;
  const int64_t* slot_mapping;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  const int32_t* sample_rows;
  const int32_t* carried;      // [num_tokens], or null
  const int32_t* last_tokens;  // of the step before, for those that are carried
  const int32_t* adapters;     // [num_tokens], -1: none; or null
  const int32_t* segment_starts;  // [num_sequences + 1], which segments are a sequence's; or null: no layer has states
  const int32_t* segment_ends;    // of each segment, counted in the sequence's tokens of this step
  const int32_t* state_reads;     // [num_sequences], rows of states with which they begin
  const int32_t* state_writes;    // of each segment, the row for the state at its end
  int32_t* choices;    // [num_tokens][num_layers][experts_per_token], the likeliest first; or null
  float* logits;       // [num_rows][64 * head.num_blocks]
  int32_t* tokens;     // [num_rows], the first of the greatest logits
  float* greatest;     // [num_rows], its logit; not a number where any logit is none
  int32_t num_tokens;
  int32_t num_sequences;
  int32_t num_rows;
  int32_t table_width;  // of block_tables
  int32_t vocab_size;
  int32_t unused;
};

}  // namespace triptych
