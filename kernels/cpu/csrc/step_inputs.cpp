// What a forward pass needs to know of its requests, gathered from their rows; microseconds of copying, on one thread.
// All arrays as in reference.step_inputs; strides are in elements.

#include <algorithm>
#include <numeric>

#include "common/replay.h"

extern "C" void pagewire_step_inputs(const int32_t* rows, const int32_t* query_start, const int32_t* num_blocks,
                                     const int32_t* new_block_start, const int32_t* new_block_ids,
                                     const int32_t* token_ids, int64_t token_stride, int64_t* num_computed_tokens,
                                     int32_t* row_block_table, int64_t row_group_stride, int64_t row_table_stride,
                                     int64_t* input_ids, int64_t* positions, int64_t* slot_mapping,
                                     int64_t slot_group_stride, int32_t* seq_lens, int32_t* block_table,
                                     int64_t group_stride, int64_t table_stride, int64_t block_size, int num_requests,
                                     int num_groups) {
    for (int b = 0; b < num_requests; b++) {
        const int64_t row = rows[b], begin = query_start[b], end = query_start[b + 1];
        if (row < 0) {
            std::fill(input_ids + begin, input_ids + end, 0);
            std::fill(positions + begin, positions + end, 0);
            for (int g = 0; g < num_groups; g++) {
                int64_t* slots = slot_mapping + g * slot_group_stride;
                std::fill(slots + begin, slots + end, -1);
            }
            seq_lens[b] = 0;
            continue;
        }
        const int32_t* tokens = token_ids + row * token_stride;
        const int64_t context_len = num_computed_tokens[row], seq_len = context_len + end - begin;
        std::copy(tokens + context_len, tokens + seq_len, input_ids + begin);
        std::iota(positions + begin, positions + end, context_len);
        for (int g = 0; g < num_groups; g++) {
            const int64_t i = (int64_t)b * num_groups + g;
            int32_t* table = row_block_table + g * row_group_stride + row * row_table_stride;
            std::copy(new_block_ids + new_block_start[i], new_block_ids + new_block_start[i + 1],
                      table + num_blocks[i]);
            int64_t* slots = slot_mapping + g * slot_group_stride;
            int64_t page = context_len / block_size, offset = context_len % block_size;
            for (int64_t t = begin; t < end; t++) {
                slots[t] = table[page] * block_size + offset;
                if (++offset == block_size) page++, offset = 0;
            }
            std::copy(table, table + (seq_len + block_size - 1) / block_size,
                      block_table + g * group_stride + b * table_stride);
        }
        seq_lens[b] = (int32_t)seq_len;
        num_computed_tokens[row] = seq_len;
    }
}

PAGEWIRE_REPLAYABLE(step_inputs)
