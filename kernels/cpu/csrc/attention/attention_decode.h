// Attention of a few query rows, bound by memory: each key and value is read from memory once.
//
// A tile is a range of at most FEW_ROWS_RANGE keys. All its scores are known before the first value is weighted.
#pragma once

#include "attention/attention_rows.h"
#include "common/pack.h"
#include "common/registers.h"

namespace {

// ---- vectors of keys and values ----

// Pairs of bf16 as they lie in memory, or of what becomes bf16; of the `left` elements those past the end read as zero.
inline u32_register load_pairs(const bf16* row, int left) {
    constexpr int COUNT = 2 * REGISTER_LANES;
    if (__builtin_expect(left >= COUNT, 1)) return load_raw<u32_register>(row);
#if defined(__AVX512F__)
    return (u32_register)_mm512_maskz_loadu_epi16((1u << left) - 1, row);
#else
    bf16 padded[COUNT] = {};
    __builtin_memcpy(padded, row, left * sizeof(bf16));
    return load_raw<u32_register>(padded);
#endif
}

#if defined(__AVX512BF16__)
inline u32_register load_pairs(const e4m3* row, int left) {
    const __m256i bytes = left >= 2 * LANES ? load_raw<__m256i>(row) : _mm256_maskz_loadu_epi8((1u << left) - 1, row);
    return (u32_register)e4m3_as_bf16(Bf16Pair{}, (u16x32)_mm512_cvtepu8_epi16(bytes));
}
inline u32_register load_pairs(const i8* row, int left) {
    const __m256i bytes = left >= 2 * LANES ? load_raw<__m256i>(row) : _mm256_maskz_loadu_epi8((1u << left) - 1, row);
    const f32x16 first = widen((i8x16)_mm256_castsi256_si128(bytes), i8{});
    const f32x16 second = widen((i8x16)_mm256_extracti128_si256(bytes, 1), i8{});
    const auto both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return load_raw<u32_register>(&both);
}
template <class T>
constexpr bool IN_PAIRS = std::is_same_v<T, e4m3> || std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool IN_PAIRS = std::is_same_v<T, bf16>;
#endif

// What is loaded at a time: 2 * REGISTER_LANES elements of a row. As floats, elements of pairs part: first all even
// ones, then all odd ones, since a bf16 is the upper half of its float.
template <class M>
constexpr int PARTS = 2 / M::PER_ELEMENT;

template <class M, class T>
inline void load_parts(const T* row, int left, typename M::part* out) {
    if constexpr (M::PER_ELEMENT == 2) {
        out[0] = load_pairs(row, left);
    } else if constexpr (IN_PAIRS<T>) {
        const u32_register pairs = load_pairs(row, left);
        out[0] = (f32_register)(pairs << 16);
        out[1] = (f32_register)(pairs & 0xffff0000u);
    } else {
        out[0] = load_register(row, left);
        out[1] = left > REGISTER_LANES ? load_register(row + REGISTER_LANES, left - REGISTER_LANES) : f32_register{};
    }
}

// Dimensions of the values of one key (Fp32) or two keys (Bf16Pair), for M::multiply_add with their weights.
template <class M, int COUNT = 2, class T>
inline void load_values(const T* first, const T* second, int left, typename M::part* out) {
#pragma GCC unroll 2
    for (int i = 0; i < COUNT; i += 2) {
        const int d = i * REGISTER_LANES;
        if constexpr (M::PER_ELEMENT == 1) {
            if (d < left) {
                load_parts<M>(first + d, left - d, out + i);
            } else {
                out[i] = out[i + 1] = f32_register{};
            }
        } else {
#if defined(__AVX512BF16__)
            const __m512i a = (__m512i)load_pairs(first + i * LANES, left - i * LANES);
            const __m512i b = (__m512i)load_pairs(second + i * LANES, left - i * LANES);
            out[i] = (u32x16)_mm512_unpacklo_epi16(a, b);
            out[i + 1] = (u32x16)_mm512_unpackhi_epi16(a, b);
#endif
        }
    }
}

// Puts 32 sums of products with load_values' vectors of two keys in order.
inline void order_sums(float* sums) {
    const f32x16 a = load(sums), b = load(sums + LANES);
    store(sums, __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(sums + LANES, __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
}

// Fetches the pages of a tile into the L2 cache, in the order of memory, while another tile is computed.
class Prefetcher {
   public:
    void start(const Problem& p, const Tile& tile, int element_size) {
        p_ = &p;
        tile_ = &tile;
        element_size_ = element_size;
        values_ = false;
        key_ = tile.key_begin;
        head_ = tile.head_begin;
        begin_piece();
    }

    void fetch(int64_t bytes) {
        while (bytes > 0 && left_ > 0) {
            const int64_t size = std::min(bytes, left_);
            for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(next_ + i, 0, 2);
            next_ += size;
            bytes -= size;
            left_ -= size;
            if (left_ == 0) end_piece();
        }
    }

   private:
    int keys_in_page() const { return std::min(tile_->key_end - key_, p_->block_size - key_ % p_->block_size); }

    // A piece: the keys or values of one head in one page.
    void begin_piece() {
        const int64_t page = p_->block_table[tile_->request * p_->table_stride + key_ / p_->block_size];
        next_ = p_->kv_cache + (page * p_->block_stride + head_ * p_->kv_head_stride + values_ * p_->value_offset +
                                key_ % p_->block_size * p_->head_dim) * element_size_;
        if (p_->token_scales) __builtin_prefetch(p_->scales_of(page, head_, values_, key_ % p_->block_size), 0, 2);
        left_ = (int64_t)keys_in_page() * p_->head_dim * element_size_;
    }

    void end_piece() {
        if (++head_ == tile_->head_end || p_->kv_head_stride == 0) {
            head_ = tile_->head_begin;
            values_ = !values_ && p_->value_offset;
            if (!values_) key_ += keys_in_page();
            if (key_ == tile_->key_end) return;
        }
        begin_piece();
    }

    const Problem* p_;
    const Tile* tile_;
    const char* next_;
    int64_t left_ = 0;  // bytes of the piece
    int element_size_, key_, head_;
    bool values_;
};

// Products: what multiplies. It has the types Form (gemm.h) and T (of the cache) and the functions
//   score(query, rows, keys, count, scores, prefetcher)   scores[row][key] of `count` keys; may rearrange the queries
//   weigh(weights, rows, values, count, sums, prefetcher) sums[row][dimension] of `count` values
// Rows are FEW_ROWS_RANGE scores or weights apart, padded_dim() queries or padded_value_dim() sums. Up to a multiple of
// KEY_STEP there are more keys, any of the cache, for which scores may be written, and more values: copies of the last
// with weight zero.
template <class Products>
class DecodeWorker {
   public:
    typedef typename Products::Form M;
    typedef typename Products::T T;

    explicit DecodeWorker(const Problem& p)
        : p_(p), dim_(p.padded_dim()), value_dim_(p.padded_value_dim()), products_(p) {
        static thread_local Scratch scratch;
        const size_t query = FEW_ROWS * dim_, sums = FEW_ROWS * value_dim_, scores = FEW_ROWS * RANGE;
        scratch.reserve((query + sums + 2 * scores) * sizeof(float));
        scores_ = (float*)scratch.data();
        sums_ = scores_ + scores;
        query_ = (typename M::element*)(sums_ + sums);
        weights_ = query_ + query;
    }

    // `next`: what this thread computes afterwards, or null
    void run(const Tile& tile, const Tile* next, float* partials) {
        if (next) prefetcher_.start(p_, *next, sizeof(T));
        for (int head = tile.head_begin; head < tile.head_end; head++) run_head(tile, head, partials);
        prefetcher_.fetch(INT64_MAX);
    }

   private:
    static constexpr int RANGE = FEW_ROWS_RANGE;

    void run_head(const Tile& tile, int kv_head, float* partials) {
        const int rows = tile.tokens() * p_.group(), count = tile.key_end - tile.key_begin;
        find_rows(tile, kv_head, count);
        load_query<M>(p_, tile, kv_head, rows, query_);
        products_.score(query_, rows, keys_, count, scores_, prefetcher_);
        float maximum[FEW_ROWS], denominator[FEW_ROWS];
        for (int r = 0; r < rows; r++) weigh_row(tile, kv_head, count, r, maximum[r], denominator[r]);
        products_.weigh(weights_, rows, values_, count, sums_, prefetcher_);
        for (int r = 0; r < rows; r++)
            finish_row(p_, tile, kv_head, rows, r, sums_ + r * value_dim_, maximum[r], denominator[r], partials);
    }

    void find_rows(const Tile& tile, int kv_head, int count) {
        const int32_t* table = p_.block_table + tile.request * p_.table_stride;
        const int padded = (count + Products::KEY_STEP - 1) / Products::KEY_STEP * Products::KEY_STEP;
        int page = tile.key_begin / p_.block_size, offset = tile.key_begin % p_.block_size;
        int i = 0;
        for (; i < count; page++, offset = 0) {
            const T* row = (const T*)p_.kv_cache + table[page] * p_.block_stride + kv_head * p_.kv_head_stride +
                           offset * p_.head_dim;
            const int end = std::min(padded, i + p_.block_size - offset);
            if constexpr (HAS_TOKEN_SCALES<T>)
                load_scales(p_, table[page], kv_head, offset, end - i, key_scales_ + i, value_scales_ + i);
            for (; i < end; i++, row += p_.head_dim) {
                keys_[i] = row;
                values_[i] = row + p_.value_offset;
            }
        }
        for (; i < padded; i++) keys_[i] = keys_[count - 1];
        for (i = count; i < padded; i++) values_[i] = values_[count - 1];
        if constexpr (HAS_TOKEN_SCALES<T>)  // a slot that is free may hold a NaN
            for (i = count; i < padded; i++) key_scales_[i] = value_scales_[i] = 0.0f;
    }

    // Scores of row r -> weights
    void weigh_row(const Tile& tile, int kv_head, int count, int r, float& maximum, float& denominator) {
        constexpr int STEP = Products::KEY_STEP;
        const int group = p_.group(), vectors = (count + STEP - 1) / STEP * (STEP / LANES);
        const int last = first_position(p_, tile) + r / group - tile.key_begin;
        const Scoring scoring = {p_.scale * p_.key_scale(kv_head), p_.soft_cap};
        float* scores = scores_ + r * RANGE;
        const int begin = p_.window > 0 ? last + 1 - p_.window : 0;
        if constexpr (HAS_TOKEN_SCALES<T>) scale_scores(scores, key_scales_, vectors);
        maximum = std::max(LOWEST, finish_scores(scores, vectors, begin, std::min(count, last + 1), scoring));
        denominator = exponentiate<M, T>(scores, vectors, scoring.factor(), maximum,
                                         weights_ + r * RANGE / M::PER_ELEMENT, value_scales_);
    }

    const Problem& p_;
    const int dim_, value_dim_;
    Products products_;
    Prefetcher prefetcher_;
    float *scores_, *sums_;
    typename M::element *query_, *weights_;
    const T* keys_[RANGE];
    const T* values_[RANGE];
    alignas(64) float key_scales_[RANGE];  // where the cache has one per token
    alignas(64) float value_scales_[RANGE];
};

}  // namespace
