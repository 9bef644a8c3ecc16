// The queries of a step, divided into work items for attention.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace triptych {

constexpr int kBlockRows = 48;  // query rows in a work item, unless a single token has more

// The query rows of one work item: `count` tokens of a sequence, each with the query heads of some kv heads.
struct QueryBlock {
  int32_t sequence;
  int32_t first_token;  // index into the tokens of the step
  int32_t count;
  int32_t first_kv_head;
  int32_t num_kv_heads;
};

inline int tokens_per_item(int group_size) { return std::max(1, kBlockRows / group_size); }
// Enough for the rows of any item: a block of tokens with one kv head, or one token with all kv heads.
inline int rows_per_item(int num_heads, int num_kv_heads) {
  const int group_size = num_heads / num_kv_heads;
  return std::max(num_heads, tokens_per_item(group_size) * group_size);
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
  int token(int row) const { return row / group_size; }  // for a row of a group
  int head(int group, int row) const { return group * group_size + row % group_size; }
  const uint32_t* row(int token, int head) const {
    return reinterpret_cast<const uint32_t*>(start + token * stride + size_t(head) * head_dim);
  }
};

}  // namespace triptych
