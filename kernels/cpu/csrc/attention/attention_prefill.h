// Attention of many query rows of one KV head: keys and values are rearranged into tiles for matrix products, once for
// all rows, and the rows walk them with the online softmax of flash attention.
//
// The result of a row depends only on its own position: tiles of keys begin at multiples of their size, and what a row
// does not see counts exactly nothing.
#pragma once

#include "attention/attention_rows.h"
#include "common/pack.h"

namespace {

constexpr int KEY_TILE = 256;  // keys per softmax step
constexpr int KEY_STEP = 32;   // what the matrix unit sums at a time: bounds within a tile are multiples of it
constexpr int ROW_TILE = 32;   // rows that go through a tile of keys together: their scores stay in L1

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
        const int group = p_.group(), rows = tile.tokens() * group, head = tile.head_begin;
        load_query<M>(p_, tile, head, rows, query_);
        std::fill(acc_, acc_ + rows * value_dim_, 0.0f);
        std::fill(maximum_, maximum_ + rows, LOWEST);
        std::fill(denominator_, denominator_ + rows, 0.0f);
        const int position = first_position(p_, tile);
        for (int begin = tile.key_begin / KEY_STEP * KEY_STEP; begin < tile.key_end;) {
            const int end = std::min(tile.key_end, (begin / KEY_TILE + 1) * KEY_TILE);
            pack(tile, begin, end);
            for (int r = 0; r < rows; r += ROW_TILE) {
                const int count = std::min(ROW_TILE, rows - r);
                const int seen_begin = p_.window > 0 ? position + r / group + 1 - p_.window : 0;
                const int seen_end = position + (r + count - 1) / group + 1;
                const int from = std::max(0, seen_begin - begin) / KEY_STEP * KEY_STEP;
                const int to = std::min(end, seen_end) - begin;
                const int padded = (to + KEY_STEP - 1) / KEY_STEP * KEY_STEP;
                if (from < to) step(tile, position - begin, r, count, from, padded);
            }
            begin = end;
        }
        for (int r = 0; r < rows; r++)
            finish_row(p_, tile, head, rows, r, acc_ + r * value_dim_, maximum_[r], denominator_[r], partials);
    }

   private:
    int depth() const { return dim_ / M::PER_ELEMENT; }

    // Keys begin .. end, those before the tile's first as zeros, up to a multiple of KEY_STEP.
    void pack(const Tile& tile, int begin, int end) {
        alignas(64) static constexpr T ZEROS[MOST_DIM] = {};
        const T* keys[KEY_TILE];
        const T* values[KEY_TILE];
        const int32_t* table = p_.block_table + tile.request * p_.table_stride;
        int i = 0;
        for (; begin + i < tile.key_begin; i++) keys[i] = values[i] = ZEROS;
        int page = (begin + i) / p_.block_size, offset = (begin + i) % p_.block_size;
        for (; begin + i < end; page++, offset = 0) {
            const T* row = (const T*)p_.kv_cache + table[page] * p_.block_stride +
                           tile.head_begin * p_.kv_head_stride + offset * p_.head_dim;
            const int page_end = std::min(end - begin, i + p_.block_size - offset);
            for (; i < page_end; i++, row += p_.head_dim) {
                keys[i] = row;
                values[i] = row + p_.value_offset;
            }
        }
        for (; i % KEY_STEP; i++) keys[i] = values[i] = ZEROS;
        pack_keys<M>(keys, i, p_.head_dim, keys_, KEY_TILE);
        pack_values<M>(values, i, p_.value_dim, values_, value_dim_);
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
            denominator_[first + r] += exponentiate<M>(scores_ + r * KEY_TILE, columns, factor, maximum_[first + r],
                                                       weights_ + r * WEIGHT_STRIDE);
        multiply<M>(weights_, WEIGHT_STRIDE, values_ + from / M::PER_ELEMENT * value_dim_, value_dim_,
                    (to - from) / M::PER_ELEMENT, acc_ + first * value_dim_, value_dim_, correction_, count,
                    (p_.value_dim + LANES - 1) / LANES);
    }

    const Problem& p_;
    const int dim_, value_dim_;
    typename M::element *query_, *keys_, *values_, *weights_;
    float *scores_, *acc_, *maximum_, *denominator_, *correction_;
};

}  // namespace
