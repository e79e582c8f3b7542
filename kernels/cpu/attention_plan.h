// One call of paged_attention, and how it is cut into tiles: (request, KV head, some query tokens, a range of keys).
//
// Key ranges have a fixed size, so that the result of a request never depends on its neighbours in the batch; a request
// with several ranges gets its partial results merged afterwards.
#pragma once

#include <algorithm>
#include <vector>

#include "vector.h"

constexpr int TILE_ROWS = 64;         // query tokens x heads of a group per tile, more only for larger groups
constexpr int FEW_ROWS = 16;          // a tile with at most so many rows is bound by memory: short key ranges
constexpr int KEYS_PER_TILE_FEW = 256;
constexpr int KEYS_PER_TILE_MANY = 4096;

struct Problem {
    const char* query;
    const char* kv_cache;
    char* output;
    const int32_t* block_table;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const float* alibi_slopes;                // [num_heads] or null
    const float* kv_scales;                   // [2, num_kv_heads] or null
    int64_t query_stride, query_head_stride;  // elements
    int64_t block_stride;                     // elements
    int64_t table_stride;
    int num_requests, num_heads, num_kv_heads, head_dim, block_size;
    float scale, soft_cap;
    int window;
    int query_dtype;

    int group() const { return num_heads / num_kv_heads; }
    float key_scale(int kv_head) const { return kv_scales ? kv_scales[kv_head] : 1.0f; }
    float value_scale(int kv_head) const { return kv_scales ? kv_scales[num_kv_heads + kv_head] : 1.0f; }
    int padded_dim() const { return (head_dim + LANES - 1) / LANES * LANES; }
};

struct Tile {
    int request, kv_head;
    int query_begin, query_end;  // tokens of the request's query
    int key_begin, key_end;
    int64_t partial;             // first row of its partial result, -1 if it writes the output itself
};

struct Merge {
    Tile tile;  // of the first range
    int parts;
};

struct Plan {
    std::vector<Tile> tiles;
    std::vector<Merge> merges;
    int64_t partial_rows = 0;
    int64_t work = 0;  // multiply-adds, roughly
    int max_rows = 0;
};

static inline Plan make_plan(const Problem& p) {
    Plan plan;
    const int group = p.group();
    const int tokens_per_tile = std::max(1, TILE_ROWS / group);
    for (int b = 0; b < p.num_requests; b++) {
        const int query_len = p.query_start[b + 1] - p.query_start[b], seq_len = p.seq_lens[b];
        if (seq_len <= 0) continue;
        for (int begin = 0; begin < query_len; begin += tokens_per_tile) {
            const int end = std::min(query_len, begin + tokens_per_tile);
            const int rows = (end - begin) * group;
            const int first_position = seq_len - query_len + begin;
            const int key_end = seq_len - query_len + end;
            const int key_begin = p.window > 0 ? std::max(0, first_position + 1 - p.window) : 0;
            const int range = rows <= FEW_ROWS ? KEYS_PER_TILE_FEW : KEYS_PER_TILE_MANY;
            // Ranges begin at multiples of their size, wherever the window begins.
            const int first_range = key_begin / range * range;
            const int parts = (key_end - first_range + range - 1) / range;
            plan.max_rows = std::max(plan.max_rows, rows);
            plan.work += (int64_t)(key_end - key_begin) * p.num_kv_heads * p.head_dim * (rows + 8);
            for (int head = 0; head < p.num_kv_heads; head++) {
                const int64_t partial = parts > 1 ? plan.partial_rows : -1;
                if (parts > 1) {
                    plan.merges.push_back({{b, head, begin, end, 0, 0, partial}, parts});
                    plan.partial_rows += (int64_t)parts * rows;
                }
                for (int i = 0; i < parts; i++) {
                    const int from = first_range + i * range;
                    plan.tiles.push_back({b, head, begin, end, std::max(from, key_begin), std::min(from + range, key_end),
                                          partial < 0 ? -1 : partial + (int64_t)i * rows});
                }
            }
        }
    }
    return plan;
}

// The whole plan over a cache of float8_e4m3fn.
void run_plan_fp8(const Problem& p, const Plan& plan, int threads);
