// One tile of attention, and the run of a whole plan. The query heads that share a KV head are rows of one tile, so each
// page is read once per tile. A tile walks its keys in batches with the online softmax of flash attention.
//
// Included by one source file per form of the cache: with more instances side by side, GCC optimises each of them less.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

#include "attention_plan.h"
#include "pack.h"
#include "parallel.h"

namespace {

constexpr int KEY_BATCH = 64;      // keys per softmax step
constexpr float LOWEST = -1e30f;  // a finite "no key seen yet": LOWEST - LOWEST is 0, not NaN

struct FreeDeleter {
    void operator()(void* p) const { std::free(p); }
};

// 64-byte aligned scratch memory that only grows.
class Scratch {
   public:
    char* take(size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (bytes > size_) {
            memory_.reset(static_cast<char*>(std::aligned_alloc(64, bytes)));
            size_ = bytes;
        }
        return memory_.get();
    }

   private:
    std::unique_ptr<char, FreeDeleter> memory_;
    size_t size_ = 0;
};

f32x16 load_any(const void* p, int dtype, int64_t index, int count) {
    f32x16 x = {};
    with_dtype(dtype, [&](auto t) { x = load((const decltype(t)*)p + index, count); });
    return x;
}

void store_any(void* p, int dtype, int64_t index, f32x16 x, int count) {
    with_dtype(dtype, [&](auto t) { store((decltype(t)*)p + index, x, count); });
}

// ---- rows: row r of a tile is query token query_begin + r / group, head kv_head * group + r % group ----

struct Row {
    int64_t query, output;  // element offsets
    int position, head;
};

Row row_of(const Problem& p, const Tile& tile, int r) {
    const int group = p.group();
    const int token = tile.query_begin + r / group;
    const int head = tile.kv_head * group + r % group;
    const int start = p.query_start[tile.request];
    const int query_len = p.query_start[tile.request + 1] - start;
    return {(start + token) * p.query_stride + head * p.query_head_stride,
            ((int64_t)(start + token) * p.num_heads + head) * p.head_dim,
            p.seq_lens[tile.request] - query_len + token, head};
}

void write_row(const Problem& p, const Row& row, const float* acc, float denominator) {
    const float scale = denominator > 0 ? p.value_scale(row.head / p.group()) / denominator : 0.0f;
    for (int d = 0; d < p.head_dim; d += LANES)
        store_any(p.output, p.query_dtype, row.output + d, load(acc + d) * scale, p.head_dim - d);
}

// ---- one tile ----

// Scaled scores of one row, in units of log2: masked lanes are -inf. Returns the row's maximum.
// The row sees the keys begin .. end of the batch; it stands at position `last`, counted from the batch's first key.
template <bool ALIBI>
float mask_and_scale(float* scores, int vectors, int begin, int end, int last, float scale, float soft_cap,
                     float slope) {
    const f32x16 minus_infinity = splat(-INFINITY);
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float factor = soft_cap > 0 ? scale / soft_cap : scale * LOG2E;
    f32x16 highest = minus_infinity;
    for (int v = 0; v < vectors; v++) {
        const int first = v * LANES;
        f32x16 s = load(scores + first) * factor;
        if (soft_cap > 0) s = tanh(s) * (soft_cap * LOG2E);
        if (ALIBI) s += __builtin_convertvector(lane + (first - last), f32x16) * (slope * LOG2E);
        if (begin > first || end < first + LANES) {
            const i32x16 key = lane + first;
            s = ((key >= begin) & (key < end)) ? s : minus_infinity;
        }
        store(scores + first, s);
        highest = max(highest, s);
    }
    return max(highest);
}

// Turns scores into weights 2^(s - maximum), in the form the second product reads. Returns their sum.
template <class M>
float exponentiate(const float* scores, int vectors, float maximum, typename M::element* weights) {
    f32x16 total = {};
    for (int v = 0; v < vectors; v++) {
        const f32x16 weight = exp2(load(scores + v * LANES) - maximum);
        total += weight;
        if constexpr (M::PER_ELEMENT == 1) {
            store(weights + v * LANES, weight);
        } else {
            store((bf16*)weights + v * LANES, weight);
        }
    }
    return sum(total);
}

template <class M, class T>
class TileWorker {
   public:
    TileWorker(const Problem& p, Scratch& scratch, int max_rows) : p_(p), dim_(p.padded_dim()) {
        const size_t rows = max_rows, dim = dim_;
        const size_t sizes[] = {rows * dim, dim * KEY_BATCH, KEY_BATCH * dim, rows * KEY_BATCH,
                                rows * KEY_BATCH, rows * dim, rows, rows, rows};
        size_t total = 0;
        for (size_t s : sizes) total += (s + 15) / 16 * 16;
        float* next = (float*)scratch.take(total * sizeof(float));
        float** const targets[] = {(float**)&query_, (float**)&keys_, (float**)&values_, &scores_, (float**)&weights_,
                                   &acc_, &maximum_, &denominator_, &correction_};
        for (size_t i = 0; i < std::size(sizes); i++) {
            *targets[i] = next;
            next += (sizes[i] + 15) / 16 * 16;
        }
    }

    void run(const Tile& tile, const Tile* next_tile, float* partials) {
        const int rows = (tile.query_end - tile.query_begin) * p_.group();
        load_query(tile, rows);
        std::fill(acc_, acc_ + rows * dim_, 0.0f);
        std::fill(maximum_, maximum_ + rows, LOWEST);
        std::fill(denominator_, denominator_ + rows, 0.0f);
        find_rows(tile, tile.key_begin);
        for (int key = tile.key_begin; key < tile.key_end; key += KEY_BATCH) {
            const int count = std::min(KEY_BATCH, tile.key_end - key);
            const T* key_rows[KEY_BATCH];
            const T* value_rows[KEY_BATCH];
            std::copy(next_keys_, next_keys_ + count, key_rows);
            for (int i = 0; i < count; i++) value_rows[i] = key_rows[i] + value_offset();
            next_count_ = 0;
            if (key + KEY_BATCH < tile.key_end) {
                find_rows(tile, key + KEY_BATCH);
            } else if (next_tile) {
                find_rows(*next_tile, next_tile->key_begin);
            }
            step(tile, rows, key, count, key_rows, value_rows);
        }
        finish(tile, rows, partials);
    }

   private:
    int depth() const { return dim_ / M::PER_ELEMENT; }
    int64_t value_offset() const { return (int64_t)p_.num_kv_heads * p_.block_size * p_.head_dim; }

    void load_query(const Tile& tile, int rows) {
        for (int r = 0; r < rows; r++) {
            const int64_t source = row_of(p_, tile, r).query;
            for (int d = 0; d < dim_; d += LANES) {
                const f32x16 q = load_any(p_.query, p_.query_dtype, source + d, p_.head_dim - d);
                if constexpr (M::PER_ELEMENT == 1) {
                    store(query_ + r * depth() + d, q);
                } else {
                    store((bf16*)(query_ + r * depth()) + d, q);
                }
            }
        }
    }

    // Where the next batch of keys lies: it is fetched into the cache while the current one is computed.
    void find_rows(const Tile& tile, int key) {
        const int count = next_count_ = std::min(KEY_BATCH, tile.key_end - key);
        const int32_t* table = p_.block_table + tile.request * p_.table_stride;
        const int64_t head = (int64_t)tile.kv_head * p_.block_size * p_.head_dim;
        int page = key / p_.block_size, offset = key % p_.block_size;
        for (int i = 0; i < count; page++, offset = 0) {
            const T* row = (const T*)p_.kv_cache + table[page] * p_.block_stride + head + offset * p_.head_dim;
            const int end = std::min(count, i + p_.block_size - offset);
            for (; i < end; i++, row += p_.head_dim) next_keys_[i] = row;
        }
    }

    void step(const Tile& tile, int rows, int key, int count, const T* const* key_rows, const T* const* value_rows) {
        const int vectors = (count + LANES - 1) / LANES;
        pack_keys<M>(key_rows, count, p_.head_dim, keys_, KEY_BATCH, next_keys_, next_count_);
        gemm<M>(query_, depth(), keys_, KEY_BATCH, (p_.head_dim + M::PER_ELEMENT - 1) / M::PER_ELEMENT, scores_,
                KEY_BATCH, nullptr, rows, vectors);
        const int weight_stride = KEY_BATCH / M::PER_ELEMENT;
        const int group = p_.group();
        const int first_position = row_of(p_, tile, 0).position;
        const float scale = p_.scale * p_.key_scale(tile.kv_head);
        const float* slopes = p_.alibi_slopes ? p_.alibi_slopes + tile.kv_head * group : nullptr;
        for (int r = 0; r < rows; r++) {
            float* scores = scores_ + r * KEY_BATCH;
            const int last = first_position + r / group - key;
            const int end = std::min(count, last + 1);
            const int begin = p_.window > 0 ? last + 1 - p_.window : 0;
            const float highest =
                slopes ? mask_and_scale<true>(scores, vectors, begin, end, last, scale, p_.soft_cap, slopes[r % group])
                       : mask_and_scale<false>(scores, vectors, begin, end, last, scale, p_.soft_cap, 0.0f);
            const float maximum = std::max(maximum_[r], highest);
            correction_[r] = exp2(splat(maximum_[r] - maximum))[0];
            maximum_[r] = maximum;
            denominator_[r] = denominator_[r] * correction_[r] +
                              exponentiate<M>(scores, vectors, maximum, weights_ + r * weight_stride);
        }
        pack_values<M>(value_rows, count, p_.head_dim, values_, dim_, next_keys_, value_offset(), next_count_);
        gemm<M>(weights_, weight_stride, values_, dim_, (count + M::PER_ELEMENT - 1) / M::PER_ELEMENT, acc_, dim_,
                correction_, rows, dim_ / LANES);
    }

    // A partial row is [acc (dim), maximum, denominator], padded to dim + 16.
    void finish(const Tile& tile, int rows, float* partials) {
        for (int r = 0; r < rows; r++) {
            const float* acc = acc_ + r * dim_;
            if (tile.partial < 0) {
                write_row(p_, row_of(p_, tile, r), acc, denominator_[r]);
                continue;
            }
            float* target = partials + (tile.partial + r) * (dim_ + LANES);
            std::copy(acc, acc + dim_, target);
            target[dim_] = maximum_[r];
            target[dim_ + 1] = denominator_[r];
        }
    }

    const Problem& p_;
    const int dim_;
    typename M::element *query_, *keys_, *values_, *weights_;
    float *scores_, *acc_, *maximum_, *denominator_, *correction_;
    const T* next_keys_[KEY_BATCH];
    int next_count_ = 0;
};

void merge_partials(const Problem& p, const Merge& merge, const float* partials) {
    const int dim = p.padded_dim(), stride = dim + LANES;
    const int rows = (merge.tile.query_end - merge.tile.query_begin) * p.group();
    for (int r = 0; r < rows; r++) {
        const float* first = partials + (merge.tile.partial + r) * stride;
        const int64_t part_stride = (int64_t)rows * stride;
        float maximum = LOWEST, denominator = 0.0f;
        for (int i = 0; i < merge.parts; i++) maximum = std::max(maximum, first[i * part_stride + dim]);
        float acc[256] = {};
        for (int i = 0; i < merge.parts; i++) {
            const float* part = first + i * part_stride;
            const float weight = exp2(splat(part[dim] - maximum))[0];
            denominator += weight * part[dim + 1];
            for (int d = 0; d < dim; d += LANES) store(acc + d, load(acc + d) + load(part + d) * weight);
        }
        write_row(p, row_of(p, merge.tile, r), acc, denominator);
    }
}

template <class M, class T>
void run_plan(const Problem& p, const Plan& plan, int threads) {
    static thread_local Scratch partial_memory;
    float* partials = (float*)partial_memory.take(plan.partial_rows * (p.padded_dim() + LANES) * sizeof(float) + 64);
    const int num_tiles = (int)plan.tiles.size(), num_merges = (int)plan.merges.size();
    std::atomic<int> remaining{num_tiles};
    // One chunk per thread, not per tile: a worker's scratch memory serves all the tiles it takes.
    parallel::for_each(threads, std::min(threads, num_tiles), [&](int64_t) {
        static thread_local Scratch scratch;
        TileWorker<M, T> worker(p, scratch, plan.max_rows);
        // The last tiles of a causal prompt are the longest: they go first.
        // A thread takes its next tile early, so that the pages are on their way when it gets there.
        for (int i = --remaining; i >= 0;) {
            const int next = --remaining;
            worker.run(plan.tiles[i], next >= 0 ? &plan.tiles[next] : nullptr, partials);
            i = next;
        }
    });
    parallel::for_each(threads, num_merges, [&](int64_t i) { merge_partials(p, plan.merges[i], partials); });
}

}  // namespace
