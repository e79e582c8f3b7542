// The two products of attention with few query rows on the matrix unit of x86. Where 16 keys lie side by side in a
// page, a tile register takes them from there.
#pragma once

#include "attention/attention_decode.h"
#include "common/amx.h"

#if defined(PAGEWIRE_AMX)

namespace {

// Products of decode workers (attention_decode.h), for at most 16 rows. The thread has TileRegisters.
template <class Stored>
class AmxProducts {
   public:
    typedef Bf16Pair Form;
    typedef Stored T;
    static constexpr int KEY_STEP = 32;

    explicit AmxProducts(const Problem& p)
        : head_dim_(p.head_dim),
          dim_(p.padded_dim()),
          value_dim_(p.value_dim),
          padded_value_dim_(p.padded_value_dim()) {}

    void score(const uint32_t* query, int rows, const T* const* keys, int count, float* scores,
               Prefetcher& prefetcher) {
        pack_query(query, rows);
        const int steps = dim_ / 32;
        for (int k = 0; k < count; k += TILE) {
            prefetcher.fetch(TILE * head_dim_ * (int)sizeof(T));
            int64_t stride;
            const char* const tile = key_tile(keys + k, stride);
            amx::memory_is_written();
            _tile_zero(0);
            for (int step = 0; step < steps; step++) {
                _tile_loadd(4, packed_query_ + step * amx::TILE_PAIRS, 64);
                _tile_loadd(5, tile + step * 64, stride);
                _tile_dpbf16ps(0, 5, 4);
            }
            _tile_stored(0, by_key_ + k * TILE, 64);
        }
        // Not sooner: what a tile register has stored is long in coming.
        for (int k = 0; k < count; k += TILE)
            for (int r = 0; r < rows; r += 4) spread(by_key_ + k * TILE + r, scores + r * FEW_ROWS_RANGE + k);
    }

    void weigh(const uint32_t* weights, int rows, const T* const* values, int count, float* sums,
               Prefetcher& prefetcher) {
        for (int d = 0; d < padded_value_dim_; d += 64) {
            if (padded_value_dim_ - d > 32) {
                weigh_block<true>(weights, values, count, d, sums + d, prefetcher);
            } else {
                weigh_block<false>(weights, values, count, d, sums + d, prefetcher);
            }
        }
        for (int i = 0; i < rows * padded_value_dim_; i += 2 * LANES) order_sums(sums + i);
    }

   private:
    static constexpr int TILE = 16;

    // The rows of queries as columns.
    void pack_query(const uint32_t* query, int rows) {
        const int columns = rows > 8 ? 16 : 8;
        const bf16* queries[TILE];
        for (int r = 0; r < columns; r++) queries[r] = (const bf16*)(query + std::min(r, rows - 1) * dim_ / 2);
        pack_keys<Bf16Pair>(queries, columns, dim_, packed_query_, TILE);
    }

    // 16 keys as rows `stride` bytes apart: where they are, else copied.
    const char* key_tile(const T* const* keys, int64_t& stride) {
        if (sizeof(T) == 2 && dim_ == head_dim_ && keys[TILE - 1] == keys[0] + (TILE - 1) * head_dim_) {
            stride = head_dim_ * sizeof(T);
            return (const char*)keys[0];
        }
        stride = dim_ * 2;
        for (int i = 0; i < TILE; i++)
            for (int d = 0; d < head_dim_; d += 2 * LANES) {
                const u32x16 row = load_pairs(keys[i] + d, head_dim_ - d);
                _mm512_store_si512(copy_ + (i * dim_ + d) / 2, (__m512i)row);
            }
        return (const char*)copy_;
    }

    // by_key: scores of 16 keys, of 16 rows each -> of 4 rows, of 16 keys each
    static void spread(const float* by_key, float* scores) {
        f32x16 keys[4];  // 4 x 4 rows
        for (int i = 0; i < 4; i++) {
            const float* first = by_key + 4 * i * TILE;
            __m512 four = _mm512_castps128_ps512(_mm_load_ps(first));
            four = _mm512_insertf32x4(four, _mm_load_ps(first + TILE), 1);
            four = _mm512_insertf32x4(four, _mm_load_ps(first + 2 * TILE), 2);
            keys[i] = (f32x16)_mm512_insertf32x4(four, _mm_load_ps(first + 3 * TILE), 3);
        }
#define ROWS(x, y, a, b) \
    __builtin_shufflevector(x, y, a, a + 4, a + 8, a + 12, a + 16, a + 20, a + 24, a + 28, b, b + 4, b + 8, b + 12, \
                            b + 16, b + 20, b + 24, b + 28)
#define LOW_HALVES(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH_HALVES(x, y) __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
        const f32x16 a = ROWS(keys[0], keys[1], 0, 1), b = ROWS(keys[2], keys[3], 0, 1);
        const f32x16 c = ROWS(keys[0], keys[1], 2, 3), d = ROWS(keys[2], keys[3], 2, 3);
        store(scores, LOW_HALVES(a, b));
        store(scores + FEW_ROWS_RANGE, HIGH_HALVES(a, b));
        store(scores + 2 * FEW_ROWS_RANGE, LOW_HALVES(c, d));
        store(scores + 3 * FEW_ROWS_RANGE, HIGH_HALVES(c, d));
#undef ROWS
#undef LOW_HALVES
#undef HIGH_HALVES
    }

    // 64 dimensions, or 32, from d on
    template <bool WIDE>
    void weigh_block(const uint32_t* weights, const T* const* values, int count, int d, float* sums,
                     Prefetcher& prefetcher) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        pack_values<WIDE>(values, d, packed_values_[0]);
        for (int k = 0; k < count; k += KEY_STEP) {
            prefetcher.fetch(KEY_STEP * (WIDE ? 64 : 32) * (int)sizeof(T));
            // One step ahead: a tile register waits for stores that are still under way.
            if (k + KEY_STEP < count)
                pack_values<WIDE>(values + k + KEY_STEP, d, packed_values_[(k / KEY_STEP + 1) % 2]);
            const uint32_t* const packed = packed_values_[k / KEY_STEP % 2];
            amx::memory_is_written();
            _tile_loadd(4, weights + k / 2, FEW_ROWS_RANGE * 2);
            _tile_loadd(5, packed, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, packed + amx::TILE_PAIRS, 64);
            _tile_dpbf16ps(1, 4, 6);
            if (!WIDE) continue;
            _tile_loadd(5, packed + 2 * amx::TILE_PAIRS, 64);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, packed + 3 * amx::TILE_PAIRS, 64);
            _tile_dpbf16ps(3, 4, 6);
        }
        const int64_t stride = padded_value_dim_ * sizeof(float);
        _tile_stored(0, sums, stride);
        _tile_stored(1, sums + TILE, stride);
        if (!WIDE) return;
        _tile_stored(2, sums + 2 * TILE, stride);
        _tile_stored(3, sums + 3 * TILE, stride);
    }

    // 32 values as pairs of keys; order_sums puts the results in order.
    template <bool WIDE>
    void pack_values(const T* const* values, int d, uint32_t* packed) const {
        for (int i = 0; i < TILE; i++, packed += TILE) {
            const T* first = values[2 * i] + d;
            const T* second = values[2 * i + 1] + d;
            pack_pair(first, second, value_dim_ - d, packed);
            if (WIDE) pack_pair(first + 32, second + 32, value_dim_ - d - 32, packed + 2 * amx::TILE_PAIRS);
        }
    }

    // A row of two tiles. Each is stored at once: a tile register cannot take it from two stores still under way.
    static void pack_pair(const T* first, const T* second, int left, uint32_t* row) {
        u32x16 pairs[2];
        load_values<Bf16Pair>(first, second, left, pairs);
        _mm512_store_si512(row, (__m512i)pairs[0]);
        _mm512_store_si512(row + amx::TILE_PAIRS, (__m512i)pairs[1]);
    }

    const int head_dim_, dim_, value_dim_, padded_value_dim_;
    alignas(64) uint32_t packed_query_[MOST_DIM / 2 * TILE];
    alignas(64) uint32_t packed_values_[2][4 * amx::TILE_PAIRS];
    alignas(64) uint32_t copy_[TILE * MOST_DIM / 2];
    alignas(64) float by_key_[FEW_ROWS_RANGE * TILE];  // scores
};

}  // namespace

#endif
