// Attention of many query rows of one KV head: keys and values are rearranged into tiles for matrix products, once for
// all rows, and the rows walk them with the online softmax of flash attention.
//
// The result of a row depends only on its own position: tiles of keys begin at multiples of their size, and what a row
// does not see counts exactly nothing.
#pragma once

#include "attention/attention_rows.h"
#include "common/pack.h"

namespace {

// The rows of keys and values begin .. end of a tile, those before its first key as zeros, up to a multiple of STEP,
// which is returned. Scales of tokens, where the cache has them, go the same way.
template <int STEP, class T>
int find_keys(const Problem& p, const Tile& tile, int begin, int end, const T** keys, const T** values,
              float* key_scales, float* value_scales) {
    alignas(64) static constexpr T ZEROS[MOST_DIM] = {};
    const int32_t* table = p.block_table + tile.request * p.table_stride;
    int i = 0;
    const auto add_zeros = [&] {
        keys[i] = values[i] = ZEROS;
        if constexpr (HAS_TOKEN_SCALES<T>) key_scales[i] = value_scales[i] = 0.0f;
        i++;
    };
    while (begin + i < tile.key_begin) add_zeros();
    int page = (begin + i) / p.block_size, offset = (begin + i) % p.block_size;
    for (; begin + i < end; page++, offset = 0) {
        const T* row = (const T*)p.kv_cache + table[page] * p.block_stride + tile.head_begin * p.kv_head_stride +
                       offset * p.head_dim;
        const int page_end = std::min(end - begin, i + p.block_size - offset);
        if constexpr (HAS_TOKEN_SCALES<T>)
            load_scales(p, table[page], tile.head_begin, offset, page_end - i, key_scales + i, value_scales + i);
        for (; i < page_end; i++, row += p.head_dim) {
            keys[i] = row;
            values[i] = row + p.value_offset;
        }
    }
    while (i % STEP) add_zeros();
    return i;
}

// pack(begin, end) of each tile of keys, and then step(begin, first, count, from, to) of rows first .. first + count
// with what they see of it: keys from .. to, counted from `begin`. Bounds are multiples of STEP, but for `end`.
template <int KEY_TILE, int STEP, int ROW_TILE, class Pack, class RowStep>
void walk_keys(const Problem& p, const Tile& tile, Pack pack, RowStep step) {
    const int group = p.group(), rows = tile.tokens() * group, position = first_position(p, tile);
    for (int begin = tile.key_begin / STEP * STEP; begin < tile.key_end;) {
        const int end = std::min(tile.key_end, (begin / KEY_TILE + 1) * KEY_TILE);
        pack(begin, end);
        for (int r = 0; r < rows; r += ROW_TILE) {
            const int count = std::min(ROW_TILE, rows - r);
            const int seen_begin = p.window > 0 ? position + r / group + 1 - p.window : 0;
            const int seen_end = position + (r + count - 1) / group + 1;
            const int from = std::max(0, seen_begin - begin) / STEP * STEP;
            const int to = std::min(end, seen_end) - begin;
            if (from < to) step(begin, r, count, from, (to + STEP - 1) / STEP * STEP);
        }
        begin = end;
    }
}

template <class M, class T>
class PrefillWorker {
   public:
    PrefillWorker(const Problem& p, int64_t most_rows) : p_(p), dim_(p.padded_dim()), value_dim_(p.padded_value_dim()) {
        static thread_local Scratch scratch;
        const size_t rows = (most_rows + LANES - 1) / LANES * LANES, dim = dim_, value_dim = value_dim_;
        const size_t sizes[] = {rows * dim, dim * KEY_TILE, KEY_TILE * value_dim, ROW_TILE * KEY_TILE,
                                ROW_TILE * KEY_TILE, rows * value_dim, rows, rows, ROW_TILE};
        size_t total = 0;
        for (size_t s : sizes) total += s;
        scratch.reserve(total * sizeof(float));
        float* next = (float*)scratch.data();
        float** const targets[] = {(float**)&query_, (float**)&keys_, (float**)&values_, &scores_, (float**)&weights_,
                                   &acc_, &maximum_, &denominator_, &correction_};
        for (size_t i = 0; i < std::size(sizes); i++) {
            *targets[i] = next;
            next += sizes[i];
        }
        // What pack_keys leaves alone meets zeros of queries.
        if (most_rows > 0) {
            const int written = p.head_dim / M::PER_ELEMENT;
            std::fill(keys_ + written * KEY_TILE, keys_ + depth() * KEY_TILE, typename M::element{});
        }
    }

    void run(const Tile& tile, float* partials) {
        const int rows = tile.tokens() * p_.group(), head = tile.head_begin;
        load_query<M>(p_, tile, head, rows, query_);
        std::fill(acc_, acc_ + rows * value_dim_, 0.0f);
        std::fill(maximum_, maximum_ + rows, LOWEST);
        std::fill(denominator_, denominator_ + rows, 0.0f);
        const int position = first_position(p_, tile);
        walk_keys<KEY_TILE, KEY_STEP, ROW_TILE>(
            p_, tile, [&](int begin, int end) { pack(tile, begin, end); },
            [&](int begin, int first, int count, int from, int to) {
                step(tile, position - begin, first, count, from, to);
            });
        for (int r = 0; r < rows; r++)
            finish_row(p_, tile, head, rows, r, acc_ + r * value_dim_, maximum_[r], denominator_[r], partials);
    }

   private:
    static constexpr int KEY_TILE = 256;  // keys per softmax step
    static constexpr int KEY_STEP = 32;   // what the matrix unit sums at a time: bounds in a tile are multiples of it
    static constexpr int ROW_TILE = 32;   // rows that go through a tile of keys together: their scores stay in L1

    int depth() const { return dim_ / M::PER_ELEMENT; }

    void pack(const Tile& tile, int begin, int end) {
        const T* keys[KEY_TILE];
        const T* values[KEY_TILE];
        const int count = find_keys<KEY_STEP>(p_, tile, begin, end, keys, values, key_scales_, value_scales_);
        pack_keys<M>(keys, count, p_.head_dim, keys_, KEY_TILE);
        pack_values<M>(values, count, p_.value_dim, values_, value_dim_);
    }

    // Rows first .. first + count with the keys from .. to of the packed ones. The tile's first query token stands at
    // `position`, counted from the first packed key.
    void step(const Tile& tile, int position, int first, int count, int from, int to) {
        constexpr int WEIGHT_STRIDE = KEY_TILE / M::PER_ELEMENT;
        const int columns = (to - from) / LANES;
        multiply<M>(query_ + first * depth(), depth(), keys_ + from, KEY_TILE, depth(), scores_, KEY_TILE, nullptr,
                    count, columns);
        const int group = p_.group(), head = tile.head_begin;
        const Scoring scoring = {p_.scale * p_.key_scale(head), p_.soft_cap};
        const float factor = scoring.factor();
        alignas(64) float maximum[ROW_TILE] = {};
        for (int r = 0; r < count; r++) {
            const int row = first + r, last = position + row / group - from;
            const int begin = p_.window > 0 ? last + 1 - p_.window : 0;
            if constexpr (HAS_TOKEN_SCALES<T>) scale_scores(scores_ + r * KEY_TILE, key_scales_ + from, columns);
            maximum[r] = finish_scores(scores_ + r * KEY_TILE, columns, begin, last + 1, scoring);
        }
        for (int r = 0; r < count; r += LANES) {
            const f32x16 before = load(maximum_ + first + r), after = max(before, load(maximum + r));
            const f32x16 correction = weight_of<M>(before - after);
            store(maximum_ + first + r, after);
            store(correction_ + r, correction);
            store(denominator_ + first + r, load(denominator_ + first + r) * correction);
        }
        for (int r = 0; r < count; r++)
            denominator_[first + r] += exponentiate<M, T>(scores_ + r * KEY_TILE, columns, factor, maximum_[first + r],
                                                          weights_ + r * WEIGHT_STRIDE, value_scales_ + from);
        multiply<M>(weights_, WEIGHT_STRIDE, values_ + from / M::PER_ELEMENT * value_dim_, value_dim_,
                    (to - from) / M::PER_ELEMENT, acc_ + first * value_dim_, value_dim_, correction_, count,
                    (p_.value_dim + LANES - 1) / LANES);
    }

    const Problem& p_;
    const int dim_, value_dim_;
    typename M::element *query_, *keys_, *values_, *weights_;
    float *scores_, *acc_, *maximum_, *denominator_, *correction_;
    float key_scales_[KEY_TILE], value_scales_[KEY_TILE];  // where the cache has one per token
};

}  // namespace
