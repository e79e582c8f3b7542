// One call of paged_attention, and how it is cut into tiles that threads take.
//
// A request with few rows (query tokens x heads of a group) is bound by memory: its tiles are short ranges of keys, of
// all KV heads where other tiles keep the threads busy, so that whole pages are read in order. One with many rows is
// bound by arithmetic: its tiles are blocks of query tokens of one KV head.
// Ranges of keys have a fixed size, so that the result of a request never depends on its neighbours in the batch; a
// request with several ranges gets its partial results merged afterwards. Neither the number of query tokens nor of
// heads of a tile changes a bit of the result.
#pragma once

#include <algorithm>
#include <vector>

#include "common/processor.h"
#include "common/vector.h"

constexpr int FEW_ROWS = 16;
constexpr int FEW_ROWS_RANGE = 256;    // keys per tile
constexpr int MANY_ROWS_RANGE = 4096;  // likewise
constexpr int LEAST_ROWS = 64;         // of a block of query tokens, unless there are no more
constexpr int MOST_ROWS = 512;
constexpr int MOST_ELEMENTS = 64 * 1024;  // of the queries of a block: with their results they stay in L2
constexpr int TILES_PER_THREAD = 4;       // wanted, so that threads finish together
constexpr int MOST_DIM = 640;             // of a key or a value

struct Problem {
    const char* query;
    const char* kv_cache;
    char* output;
    const int32_t* block_table;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const float* kv_scales;                   // [2, num_kv_heads] of a cache of e4m3, or null
    const bf16* token_scales;                 // [2, num_kv_heads, block_size] of a page of int8, or null
    const float* sinks;                       // [num_heads] or null
    int64_t query_stride, query_head_stride;  // elements
    int64_t block_stride;                     // elements
    int64_t table_stride;
    int64_t kv_head_stride;  // from a KV head's keys in a page to the next one's; 0: KV heads see the same ones
    int64_t value_offset;    // from a key to its value; 0: a value is the beginning of its key
    int num_requests, num_heads, num_kv_heads, head_dim, value_dim, block_size;
    float scale, soft_cap;
    int window;
    int query_dtype;  // the output's, or fp32
    int output_dtype;

    int group() const { return num_heads / num_kv_heads; }
    int query_len(int request) const { return query_start[request + 1] - query_start[request]; }
    float key_scale(int kv_head) const { return kv_scales ? kv_scales[kv_head] : 1.0f; }
    float value_scale(int kv_head) const { return kv_scales ? kv_scales[num_kv_heads + kv_head] : 1.0f; }
    // They lie in the pages, behind what they belong to.
    const bf16* scales_of(int64_t page, int kv_head, bool of_values, int offset) const {
        const int64_t head = kv_head + (of_values ? num_kv_heads : 0);
        return token_scales + page * (block_stride / (int64_t)sizeof(bf16)) + head * block_size + offset;
    }
    int padded_dim() const { return padded(head_dim); }
    int padded_value_dim() const { return padded(value_dim); }
    static int padded(int dim) { return (dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }
    // Never in fp32, nor where results are to be batch invariant: tiles of the two kinds round differently, and there a
    // token's numbers are to be the same whether it is decoded or, after a service has died, computed again as part of
    // a prompt.
    bool has_few_rows(int request) const {
        return output_dtype != FLOAT32 && !batch_invariant && (int64_t)query_len(request) * group() <= FEW_ROWS;
    }
};

struct Tile {
    int request;
    int head_begin, head_end;    // KV heads
    int query_begin, query_end;  // tokens of the request's query
    int key_begin, key_end;
    int64_t partial;             // first row of its partial result, -1 if it writes the output itself

    int tokens() const { return query_end - query_begin; }
};

struct Merge {
    Tile tile;  // of the first range
    int parts;
};

struct Plan {
    std::vector<Tile> tiles;
    std::vector<Merge> merges;
    int64_t partial_rows = 0;
    int64_t work = 0;       // multiply-adds, roughly
    int64_t most_rows = 0;  // of a tile with many rows
};

class Planner {
   public:
    Planner(const Problem& p, int threads) : p_(p) {
        int64_t few_tiles = 0, many_rows = 0;
        for (int b = 0; b < p.num_requests; b++) {
            if (p.seq_lens[b] <= 0) continue;
            if (p.has_few_rows(b)) {
                few_tiles += (p.seq_lens[b] + FEW_ROWS_RANGE - 1) / FEW_ROWS_RANGE;
            } else {
                many_rows += (int64_t)p.query_len(b) * p.group() * p.num_kv_heads;
            }
        }
        const int64_t wanted = threads > 1 ? (int64_t)TILES_PER_THREAD * threads : 1;
        few_heads_ = few_tiles >= wanted ? p.num_kv_heads : 1;
        const int most = std::max(LEAST_ROWS, std::min(MOST_ROWS, MOST_ELEMENTS / p.padded_dim()));
        const int rows = (int)std::clamp<int64_t>(many_rows / wanted, LEAST_ROWS, most);
        tokens_per_tile_ = std::max(1, rows / p.group());
    }

    Plan plan() {
        bool uneven = false;
        for (int b = 0; b < p_.num_requests; b++) {
            const int query_len = p_.query_len(b);
            if (p_.seq_lens[b] <= 0 || query_len == 0) continue;
            if (p_.has_few_rows(b)) {
                for (int head = 0; head < p_.num_kv_heads; head += few_heads_)
                    add({b, head, head + few_heads_, 0, query_len, 0, 0, -1}, FEW_ROWS_RANGE);
                continue;
            }
            uneven = true;
            for (int begin = 0; begin < query_len; begin += tokens_per_tile_) {
                const int end = std::min(query_len, begin + tokens_per_tile_);
                plan_.most_rows = std::max<int64_t>(plan_.most_rows, (end - begin) * p_.group());
                for (int head = 0; head < p_.num_kv_heads; head++)
                    add({b, head, head + 1, begin, end, 0, 0, -1}, MANY_ROWS_RANGE);
            }
        }
        // Threads take the last tiles first: they are to be the longest.
        if (uneven)
            std::stable_sort(plan_.tiles.begin(), plan_.tiles.end(),
                             [&](const Tile& a, const Tile& b) { return work(a) < work(b); });
        return std::move(plan_);
    }

   private:
    int64_t work(const Tile& tile) const {
        const int64_t heads = tile.head_end - tile.head_begin, keys = tile.key_end - tile.key_begin;
        return heads * keys * p_.head_dim * (tile.tokens() * p_.group() + 8);
    }

    // The ranges of keys that the tokens of `tile` see. Each begins at a multiple of its size, or with the window.
    void add(Tile tile, int range) {
        const int context = p_.seq_lens[tile.request] - p_.query_len(tile.request);
        const int key_begin = p_.window > 0 ? std::max(0, context + tile.query_begin + 1 - p_.window) : 0;
        const int key_end = context + tile.query_end, first = key_begin / range * range;
        const int parts = (key_end - first + range - 1) / range;
        const int64_t rows = (int64_t)tile.tokens() * p_.group() * (tile.head_end - tile.head_begin);
        if (parts > 1) {
            tile.partial = plan_.partial_rows;
            plan_.merges.push_back({tile, parts});
            plan_.partial_rows += parts * rows;
        }
        for (int from = first; from < key_end; from += range) {
            tile.key_begin = std::max(from, key_begin);
            tile.key_end = std::min(from + range, key_end);
            plan_.work += work(tile);
            plan_.tiles.push_back(tile);
            if (parts > 1) tile.partial += rows;
        }
    }

    const Problem& p_;
    Plan plan_;
    int few_heads_;  // KV heads of a tile with few rows
    int tokens_per_tile_;
};

// The whole plan over a cache of float8_e4m3fn, or of int8 with a scale per token.
void run_plan_fp8(const Problem& p, const Plan& plan, int threads);
void run_plan_int8(const Problem& p, const Plan& plan, int threads);
