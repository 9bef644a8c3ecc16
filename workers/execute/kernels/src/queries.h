// The queries of a step, divided into work items for attention.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace triptych {

constexpr int kBlockRows = 48;  // query rows in a work item, unless a single token has more

// The query rows of one work item: `count` tokens of a sequence, each with `group_size` query heads of some kv heads.
struct QueryBlock {
  int32_t sequence;
  int32_t first_token;  // index into the tokens of the step
  int32_t count;
  int32_t first_head;
  int32_t group_size;
  int32_t first_kv_head;
  int32_t num_kv_heads;
};

inline int tokens_per_item(int group_size) { return std::max(1, kBlockRows / group_size); }
// Enough for the rows of any item: a block of tokens with one kv head, or one token with all kv heads.
inline int rows_per_item(int num_heads, int num_kv_heads) {
  const int group_size = num_heads / num_kv_heads;
  return std::max(num_heads, tokens_per_item(group_size) * group_size);
}

// Splits the attention of a step into work items, those with the most keys first; returns their number. `sequences`
// receives the sequence of each token.
inline int plan_queries(const Model& model, const Step& step, int max_members, int32_t* sequences,
                        QueryBlock* const blocks) {
  constexpr int kItemsPerThread = 4;  // so that all threads finish at about the same time
  const int num_kv_heads = model.num_kv_heads, num_sharing = model.num_heads / num_kv_heads;
  const int room = rows_per_item(model.num_heads, num_kv_heads);
  const int wanted = step.num_sequences * num_kv_heads / (kItemsPerThread * max_members);
  // All heads share the latents. With fewer sequences than threads, the heads of a token are divided among these.
  const int num_parts = model.latent.rank ? std::min(num_sharing, (max_members - 1) / step.num_sequences + 1) : 1;
  const int group_size = (num_sharing + num_parts - 1) / num_parts;
  const int most = std::min(tokens_per_item(group_size), room / group_size);
  QueryBlock* block = blocks;
  for (int s = step.num_sequences - 1; s >= 0; --s) {
    const int begin = step.query_starts[s], end = step.query_starts[s + 1];
    std::fill(sequences + begin, sequences + end, s);
    for (int last = end; last > begin; last = std::max(begin, last - most)) {
      const int first = std::max(begin, last - most), count = last - first;
      const int kv_heads = std::max(1, std::min(wanted, room / (count * group_size)));
      for (int kv_head = 0; kv_head < num_kv_heads; kv_head += kv_heads)
        for (int head = 0; head < num_sharing; head += group_size)
          *block++ = {s, first, count, kv_head * num_sharing + head, std::min(group_size, num_sharing - head), kv_head,
                      std::min(kv_heads, num_kv_heads - kv_head)};
    }
  }
  return int(block - blocks);
}

// The blocks with wanted rows, without the tokens before the first and after the last of these; returns their number.
// In the last layer, other tokens only need keys and values.
inline int keep_wanted_blocks(const Step& step, const QueryBlock* blocks, int count, QueryBlock* kept) {
  const int32_t *const rows = step.wanted_rows, *const end = rows + step.num_rows;
  QueryBlock* to = kept;
  for (const QueryBlock* block = blocks; block < blocks + count; ++block) {
    const int32_t* const first = std::lower_bound(rows, end, block->first_token);
    const int32_t* const behind = std::lower_bound(first, end, block->first_token + block->count);
    if (first == behind) continue;
    *to = *block;
    to->first_token = *first;
    to->count = behind[-1] + 1 - *first;
    ++to;
  }
  return int(to - kept);
}

// The query heads of some groups, for consecutive tokens. Rows are ordered by group, then by token.
template <class Element>
struct Queries {
  const Element* start;
  size_t stride;  // from token to token
  int num_tokens, group_size;
  int head_dim;
  const float* sinks;   // of these heads, see Layer; or null
  const float* slopes;  // likewise, see Model
  int rows_per_group() const { return num_tokens * group_size; }
  const uint32_t* row(int token, int head) const {
    return reinterpret_cast<const uint32_t*>(start + token * stride + size_t(head) * head_dim);
  }
};

// One of these rows.
struct QueryRow {
  const uint32_t* channels;
  int32_t token, head;  // counted from the first ones of the queries
};

}  // namespace triptych
