// The functions that Python calls. No exception crosses this boundary: failure is a null pointer or a nonzero status.
#include "abi.h"
#include "entries.h"
#include "pack.h"

using namespace triptych;

template struct triptych::TileSums<Float32>;

namespace {

// 0, or 1 if the system has no memory for what `run` allocates.
template <class Run>
int32_t status_of(const Run& run) {
  try {
    run();
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Sizes of the structures, against which Python checks its mirror of them.
void triptych_sizes(int64_t* sizes) {
  sizes[0] = sizeof(Matrix);
  sizes[1] = sizeof(Layer);
  sizes[2] = sizeof(Model);
  sizes[3] = sizeof(Sharing);
  sizes[4] = sizeof(Step);
  sizes[5] = sizeof(Update);
  sizes[6] = sizeof(Expert);
}

// Packs outputs begin..end of a checkpoint's matrix into the columns given by `first` and `run` (see Placement).
// `importance` is that of the errors of each input's weights in four bits, or null. 0, or 1 if out of memory.
int32_t triptych_pack(Matrix* matrix, const void* source, int32_t source_is_bf16, const float* importance,
                      int32_t first, int32_t run, int32_t begin, int32_t end) {
  return status_of([&] {
    if (source_is_bf16)
      pack(*matrix, static_cast<const uint16_t*>(source), importance, {first, run}, begin, end);
    else
      pack(*matrix, static_cast<const float*>(source), importance, {first, run}, begin, end);
  });
}

// The same for a matrix that is already in four bits, see FourBits.
void triptych_pack_int4(const Matrix* matrix, const uint8_t* numbers, const float* scales, const float* least,
                        int32_t first, int32_t run, int32_t begin, int32_t end) {
  if (matrix->format == kFineInt4)
    pack_stored(*matrix, FourBits<kGroupInputs / 2>{numbers, scales, least}, {first, run}, begin, end);
  else
    pack_stored(*matrix, FourBits<kGroupInputs>{numbers, scales, least}, {first, run}, begin, end);
}

// The same for a matrix in MXFP4, see MxWeights.
void triptych_pack_mxfp4(const Matrix* matrix, const uint8_t* numbers, const uint8_t* scales, int32_t first,
                         int32_t run, int32_t begin, int32_t end) {
  pack_stored(*matrix, MxWeights{numbers, scales}, {first, run}, begin, end);
}

// The inverse, for floats, eight and four bits: dequantises the weights.
void triptych_unpack(const Matrix* matrix, float* to, int32_t first, int32_t run, int32_t begin, int32_t end) {
  unpack(*matrix, {first, run}, begin, end, to);
}

// Packs outputs begin..end of a Screen, and finds their limits. 0, or 1 if out of memory.
int32_t triptych_pack_screen(const Matrix* matrix, const void* source, int32_t source_is_bf16, int32_t begin,
                             int32_t end, float* limits) {
  return status_of([&] {
    if (source_is_bf16)
      pack_screen(*matrix, static_cast<const uint16_t*>(source), begin, end, limits);
    else
      pack_screen(*matrix, static_cast<const float*>(source), begin, end, limits);
  });
}

// Floats y [num_rows][64 * num_blocks] = x [num_rows][num_inputs] times the matrix; 0, or 1 if out of memory. For
// tests, like the two after it.
int32_t triptych_multiply(const Matrix* matrix, const float* x, int32_t num_rows, float* y) {
  return status_of([&] {
    switch (matrix->format) {
      case kFloat32: return Entries<Float32>::multiply_floats(*matrix, x, num_rows, y);
      case kBFloat16: return Entries<BFloat16>::multiply_floats(*matrix, x, num_rows, y);
      default: return Entries<Int8>::multiply_floats(*matrix, x, num_rows, y);
    }
  });
}

// Runs a sequence's next `count` tokens, in segments, through one delta rule; rows have no padding.
int32_t triptych_delta_rule(const DeltaShape* shape, const DeltaLayer* layer, float eps, const float* projected,
                            const float* gates, int32_t count, int32_t read, int32_t num_segments, const int32_t* ends,
                            const int32_t* writes, float* outputs) {
  return status_of([&] {
    const size_t num_outputs = size_t(shape->num_value_heads) * shape->value_dim;
    Buffer<float> mixed;
    mixed.reserve(size_t(count) * DeltaRule::width(*shape));
    const RecurrentChunk chunk{projected, DeltaRule::num_channels(*shape) + num_outputs,
                           gates, size_t(2) * padded(shape->num_value_heads, kLanes),
                           mixed.get(), count, read, num_segments, ends, writes};
    const DeltaRule rule(*shape, *layer, eps);
    for (int t = 0; t < count; ++t)
      for (int head = 0; head < shape->num_key_heads; ++head) rule.mix(chunk, t, head);
    for (int head = 0; head < shape->num_value_heads; ++head) rule.run(chunk, head, outputs, num_outputs);
  });
}

// The same for one state space.
int32_t triptych_state_space(const StateSpaceShape* shape, const StateSpaceLayer* layer, float eps,
                             const float* projected, const float* dts, int32_t count, int32_t read,
                             int32_t num_segments, const int32_t* ends, const int32_t* writes, float* outputs) {
  return status_of([&] {
    const size_t num_outputs = StateSpace::num_outputs(*shape);
    Buffer<float> mixed;
    mixed.reserve(size_t(count) * StateSpace::width(*shape));
    const RecurrentChunk chunk{projected, StateSpace::num_channels(*shape) + num_outputs, dts, size_t(shape->num_heads),
                               mixed.get(), count, read, num_segments, ends, writes};
    const StateSpace space(*shape, *layer, eps);
    for (int t = 0; t < count; ++t)
      for (int head = 0; head < shape->num_heads; ++head) space.mix(chunk, t, head);
    for (int head = 0; head < shape->num_heads; ++head) space.run(chunk, head);
    for (int t = 0; t < count; ++t) space.finish(chunk, t, outputs + t * num_outputs);
  });
}

// Returns a decoder of the model, whose arrays must outlive it; or null.
void* triptych_decoder_new(const Model* model, const Sharing* sharing) {
  try {
    switch (model->format) {
      case kFloat32: return Entries<Float32>::new_decoder(*model, *sharing);
      case kBFloat16: return Entries<BFloat16>::new_decoder(*model, *sharing);
      default: return Entries<Int8>::new_decoder(*model, *sharing);
    }
  } catch (...) {
    return nullptr;
  }
}

void triptych_decoder_delete(void* decoder) { delete static_cast<Decoder*>(decoder); }

// Allocates for steps of up to `num_tokens` tokens; no step may be running. 0, or 1 if out of memory.
int32_t triptych_decoder_reserve(void* decoder, int32_t num_tokens) {
  return status_of([&] { static_cast<Decoder*>(decoder)->reserve(num_tokens); });
}

// Queues a step behind those submitted before. Its arrays must live until the step has been waited for, and `tokens`
// until the next one has. Returns 1 if it pays to submit another step behind it before waiting for it.
int32_t triptych_decoder_submit(void* decoder, const Step* step) {
  return static_cast<Decoder*>(decoder)->submit(*step) ? 1 : 0;
}

// Waits for the oldest step not yet waited for. 0, or 1 if it ran out of memory.
int32_t triptych_decoder_wait(void* decoder) { return static_cast<Decoder*>(decoder)->wait() ? 0 : 1; }

// From now on, steps store CLOCK_MONOTONIC, in ns, in `word` as they advance. It must outlive the decoder; no step may
// be in flight.
void triptych_decoder_show_progress(void* decoder, int64_t* word) {
  static_cast<Decoder*>(decoder)->show_progress(word);
}

}  // extern "C"
#pragma GCC visibility pop
