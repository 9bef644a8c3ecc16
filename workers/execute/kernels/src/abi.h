// The structures that Python and C++ share, mirrored field by field in ../structures.py.
//
// Every row of activations is zero-padded to a multiple of 64 values and every matrix to a multiple of 64 columns, so
// no kernel needs a tail loop, whatever the sizes of the model.
#pragma once

#include <cstdint>

namespace triptych {

enum FormatCode : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3, kMxfp4 = 4, kFineInt4 = 5 };
enum Activation : int32_t {
  kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2, kSquaredRelu = 3, kRelu = 4, kGelu = 5, kXielu = 6
};

// y = x W^T + b, with W packed in blocks of 64 columns (outputs); see pack.h.
struct Matrix {
  uint32_t* blocks;     // [num_blocks][steps][64] groups of 32 bits
  float* bias;          // [64 * num_blocks], or null
  float* scales;        // int8 only: [64 * num_blocks], the scale of each column's weights
  int32_t* offsets;     // int8 only: [64 * num_blocks], 128 times the sum of a column's weights
  float* squares;       // four bits only: [num_inputs], to which those of its inputs are added in steps; or null
  int32_t num_inputs;   // K
  int32_t num_blocks;
  int32_t format;       // FormatCode; the format of activations is in Model
  int32_t unused;
};

// Tells which logits may be the greatest, see screen.h.
struct Screen {
  Matrix matrix;        // the head again, in eight bits; no blocks: there is none
  const float* limits;  // [64 * num_blocks], the greatest error of each logit, as a multiple of the size of its input
};

struct Expert {
  Matrix gate_up;  // same layout as a layer's
  Matrix down;
};

// A gated delta rule that replaces attention (see delta_rule.h), or none. The layer's qkv then holds its queries, keys
// and values, each [heads][dim], and the gates of its outputs.
struct DeltaLayer {
  Matrix gates;              // kFloat32: betas and decay rates of the value heads, each padded to a multiple of 16
  const float* convolution;  // [conv_size][channels]; null: the layer uses attention
  const float* rates;        // [value heads], factors of the decay rates
  const float* rate_biases;  // [value heads], added to the decay rates first
  const float* norm;         // [value_dim], weights of the output norm
  float* states;             // [rows][value heads] tiles, see delta_rule.h
  float* inputs;             // [rows][conv_size - 1][channels], past inputs of the convolution, latest last
};

// A short convolution that replaces attention (see short_convolution.h), or none. The layer's qkv then holds the gates
// of its inputs, those of its outputs, and the inputs, each padded to a multiple of 64 channels.
struct ShortConvolution {
  const float* taps;  // [num_taps][channels], padded; null: the layer uses attention
  float* inputs;      // [rows][num_taps - 1][channels], padded: past inputs, gated, latest last
};

// The factors of kXielu, see activations.h.
struct Xielu {
  float squared;
  float exponential;
  float linear;
};

// A state space that replaces attention or runs beside it (see state_space.h), or none. Its projection holds x of the
// heads, B and C of the groups, and the gates of the outputs.
struct StateSpaceLayer {
  Matrix projection;  // no blocks: the layer has no state space
  Matrix dts;         // kFloat32: the dt of the heads
  Matrix output;
  const float* convolution;         // [conv_size][channels]
  const float* convolution_biases;  // [channels]
  const float* rates;      // [heads], of decay
  const float* dt_biases;  // [heads]
  const float* skips;      // [heads], D
  const float* norm;       // [heads][head_dim], weights of the output norm; or null
  float* states;           // [rows][heads] tiles, see state_space.h
  float* inputs;           // [rows][conv_size - 1][channels], past inputs of the convolution, latest last
};

// Attention to latent vectors (see latents.h), or none. The layer's qkv then holds its queries, or their latents, and
// behind them the latents of the keys and the key channels that are rotated, which all heads share.
struct LatentLayer {
  Matrix query_up;            // makes queries of their latents; without blocks, qkv holds queries
  const Matrix* key_ups;      // [heads], from the plain channels of a query to those of a latent; null: none of this
  const Matrix* value_ups;    // [heads], from a latent to the values of the head
  const float* query_norm;    // [query_rank], of the latents of queries
  const float* norm;          // [rank], of those of keys
};

struct Layer {
  Matrix qkv;      // queries, keys and values side by side; if outputs are gated, each query is followed by its gate
  Matrix output;
  Matrix gate_up;  // each block holds 32 gate columns and the 32 up columns that go with them; without gates, only ups
  Matrix down;
  Matrix router;          // kFloat32; outputs the logits of the experts, then that of the shared expert, if gated
  const float* router_biases;  // [num_experts], added to scores for the choice of experts alone; or null
  const Expert* experts;  // [num_experts], or null; if set, gate_up and down are the shared expert's, if any
  const float* attention_norm;  // weights, in layer norms biases behind them; null: attention reads x without a norm
  const float* mlp_norm;        // likewise
  const float* query_norm;      // [head_dim], or [heads][head_dim] if whole queries are normed; or null
  const float* key_norm;
  const float* attended_norm;  // norm of what attention adds to the residual, or null
  const float* gated_norm;     // norm of what the rest of the layer adds, or null
  DeltaLayer delta;
  ShortConvolution convolution;
  StateSpaceLayer space;
  LatentLayer latent;
  const float* cosines;        // [positions][rotary_dim / 2]; null: no rotary embedding
  const float* sines;
  const float* sinks;          // [heads], scores of attention sinks, which have no value; or null
  void* keys;    // [pages][kv heads][page_size / 16] tiles, see pages.h and eight_bits.h
  void* values;
  int32_t window;  // number of keys each token attends to, itself included; 0: all
  Xielu xielu;
};

// For a delta rule, kQuery is queries, keys and values together, kKey is the output gates, and kValue is unused.
// kSpace is the whole projection of a state space.
enum Tensor : int32_t {
  kQuery, kKey, kValue, kOutput, kGate, kUp, kDown, kBeta, kRate, kSpace, kDt, kSpaceOutput, kNumTensors
};
enum Product : int32_t {
  kQkvProduct, kOutputProduct, kGateUpProduct, kDownProduct, kGatesProduct, kSpaceProduct, kDtProduct,
  kSpaceOutputProduct
};

// What an adapter adds to the outputs of one tensor: B (A x). In both A and B, each 16 outputs are contiguous:
// [outputs / 16][steps][16] groups.
struct Update {
  Matrix down;          // A, in the model's format
  const uint32_t* up;   // B times the adapter's scale, in the format of keys and values; null: no update
  int32_t rank;         // padded to a multiple of 16
  int32_t num_vectors;  // of 16 outputs each
};

// Sizes shared by all gated delta rules of a model.
struct DeltaShape {
  int32_t num_key_heads;
  int32_t num_value_heads;  // a multiple of num_key_heads
  int32_t key_dim;
  int32_t value_dim;
  int32_t conv_size;
  int32_t unused;
};

// Sizes shared by all state spaces of a model.
struct StateSpaceShape {
  int32_t num_heads;
  int32_t head_dim;
  int32_t num_groups;  // of heads, with the same B and C
  int32_t state_size;  // an even number
  int32_t conv_size;
  int32_t norm_size;      // outputs are normed in groups of so many channels; 0: they are only gated
  int32_t norms_first;    // before they are gated
  float gate_multiplier;  // of the gates of outputs
  float dt_multiplier;    // of dt, before the biases
  int32_t unused;
};

// Sizes shared by all latent attention layers of a model, all multiples of 16; the first and the last of 64.
struct LatentShape {
  int32_t rank;       // channels of a latent; the model's head_dim has the rotated key channels too; 0: no latents
  int32_t query_rank;
  int32_t plain_dim;  // channels of a query that are not rotated, followed by rotary_dim that are
  int32_t head_value_dim;  // channels of a head's value
  float norm_eps;
  int32_t unused;
};

struct Model {
  const Layer* layers;
  Matrix head;
  Screen screen;
  const void* embedding;    // [vocab][hidden_size], as stored in the checkpoint
  const float* positions;   // [num_positions][hidden_size], padded: added to the embeddings; or null
  const float* embedding_norm;  // of the embeddings, or null
  const float* slopes;          // [num_heads], subtracted from a score for each position back to the key; or null
  const float* final_norm;
  const Update* updates;  // [adapters][layers][kNumTensors], or null
  int32_t format;
  int32_t embedding_is_bf16;  // otherwise float
  int32_t num_positions;      // that are learned
  int32_t num_layers;
  int32_t hidden_size;
  int32_t intermediate_size;  // the largest of any layer, routed experts excluded
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;   // channels of a cached key
  int32_t value_dim;  // and of a cached value, at most head_dim
  int32_t page_size;
  float norm_eps;
  int32_t has_layer_norms;  // of inputs: means are subtracted, and norms have biases; null weights aside, in all layers
  float score_divisor;  // the square root of head_dim in most models
  float embedding_multiplier;
  // Applied to what is added to the residual: by attention or what replaces it, by state spaces, and by MLPs or
  // experts.
  float attended_multiplier;
  float space_multiplier;
  float gated_multiplier;
  float score_cap;            // scores y become cap * tanh(y / cap); 0: no cap
  float logit_cap;            // the same for logits
  float qkv_limit;            // queries, keys and values are clipped to +-qkv_limit; 0: they are not
  float query_growth;         // a query at position p is scaled by 1 + query_growth * log(1 + p / query_growth_span)
  int32_t query_growth_span;  // p / query_growth_span is an integer division
  int32_t activation;         // Activation of the gate, or of the ups if there are no gates
  int32_t has_gates;          // in MLPs
  int32_t is_parallel;        // attention and MLP of a layer read the same x
  float gate_slope;           // factor on gates, for kSilu and kClampedSwiglu
  float gate_limit;           // for kClampedSwiglu
  int32_t max_rank;           // largest rank of any update, padded
  int32_t adapted_products;   // bit p: some adapter updates Product p
  int32_t eight_bit_pages;    // keys and values are stored in eight bits, see eight_bits.h
  int32_t num_experts;        // in each layer that has experts
  int32_t experts_per_token;
  int32_t expert_size;           // intermediate size of one expert
  int32_t num_expert_groups;     // of equal size; a token's experts are in some of them; 1: in all
  int32_t num_chosen_groups;     // those whose experts have the highest scores,
  int32_t num_group_tops;        // 1 or 2 of them added up
  int32_t norms_expert_weights;  // the weights of a token's experts are normalised to sum to 1
  int32_t has_sigmoid_routers;   // scores of experts are sigmoids of logits, not their softmax
  float expert_multiplier;       // of the weights of experts
  int32_t gates_shared_expert;   // by a sigmoid; otherwise its weight is 1
  int32_t norms_whole_queries;   // query and key norms cover all heads together
  int32_t rotary_dim;            // the first channels of each head, to which the rotary embedding applies
  int32_t turns_neighbours;      // it rotates channel 2i with 2i + 1, not i with i + rotary_dim / 2
  int32_t norms_turned_heads;    // query and key norms come after it
  int32_t gates_outputs;         // attention outputs are gated by a sigmoid
  int32_t num_taps;              // of short convolutions
  DeltaShape delta;
  StateSpaceShape space;
  LatentShape latent;
};

// How a step is shared among threads.
struct Sharing {
  int64_t worth_a_thread;  // a step with fewer multiplications runs on the calling thread: waking another takes longer
  int64_t worth_a_team;    // below this, a single thread computes the step: synchronising would cost more than it gains
  int64_t too_long;        // from this on, nothing should be queued behind the step: new arrivals would wait for it too
  int32_t num_threads;     // the most that compute a step
  int32_t num_own;         // threads that keep running while the caller is busy elsewhere
};

// Names are those of StepInputs, where it has the same.
struct Step {
  const int32_t* token_ids;
  const int32_t* positions;
  const int64_t* slot_mapping;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  const int32_t* wanted_rows;  // [num_rows], the tokens whose logits or hidden states are wanted, increasing
  const int32_t* carried;      // [num_tokens], or null
  const int32_t* last_tokens;  // tokens of the previous step, for the carried rows
  const int32_t* adapters;     // [num_tokens], -1: none; or null
  const int32_t* segment_starts;  // [num_sequences + 1], first segment of each sequence; null: no layer has states
  const int32_t* segment_ends;    // of each segment, as a number of the sequence's tokens in this step
  const int32_t* state_reads;     // [num_sequences], state row from which each sequence starts
  const int32_t* state_writes;    // of each segment, the row that receives the state at its end
  int32_t* choices;    // [num_tokens][num_layers][experts_per_token], likeliest first; or null
  float* logits;       // [num_rows - num_hidden][64 * head.num_blocks]; see only_greatest
  int32_t* tokens;     // likewise one for each row of logits: their argmax, the first one on ties
  float* greatest;     // the logit of that token; NaN if any logit is NaN
  float* hidden;       // [num_hidden][hidden_size, padded]: x after the final norm
  int32_t num_tokens;
  int32_t num_sequences;
  int32_t num_rows;
  int32_t table_width;  // of block_tables
  int32_t vocab_size;
  int32_t num_hidden;  // the last rows, whose hidden states are wanted in place of logits
  int32_t only_greatest;  // logits that are not the greatest of their row may be anything below it
};

}  // namespace triptych
