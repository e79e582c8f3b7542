// What both ways to compute a tile of attention share: the rows of a tile, and the softmax of a row of scores.
//
// Row r of a KV head's tile is query token query_begin + r / group, head kv_head * group + r % group.
// Scores are in units of log2.
#pragma once

#include <cstdlib>
#include <memory>
#include <type_traits>

#include "attention/attention_plan.h"
#include "common/gemm.h"

namespace {

constexpr float LOWEST = -1e30f;  // a finite "no key seen yet": LOWEST - LOWEST is 0, not NaN

struct FreeDeleter {
    void operator()(void* p) const { std::free(p); }
};

// 64-byte aligned memory that only grows, handed out in pieces.
class Scratch {
   public:
    void reserve(size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (bytes > size_) {
            memory_.reset(static_cast<char*>(std::aligned_alloc(64, bytes)));
            size_ = bytes;
        }
    }
    char* data() const { return memory_.get(); }

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

struct Row {
    int64_t query, output;  // element offsets
    int head;
};

Row row_of(const Problem& p, const Tile& tile, int kv_head, int r) {
    const int64_t token = p.query_start[tile.request] + tile.query_begin + r / p.group();
    const int head = kv_head * p.group() + r % p.group();
    return {token * p.query_stride + head * p.query_head_stride, (token * p.num_heads + head) * p.value_dim, head};
}

// The position of the tile's first query token in its request.
int first_position(const Problem& p, const Tile& tile) {
    return p.seq_lens[tile.request] - p.query_len(tile.request) + tile.query_begin;
}

// Rows of queries in the form M; dimensions are padded with zeros.
template <class M>
void load_query(const Problem& p, const Tile& tile, int kv_head, int rows, typename M::element* out) {
    const int dim = p.padded_dim();
    for (int r = 0; r < rows; r++, out += dim / M::PER_ELEMENT) {
        const int64_t source = row_of(p, tile, kv_head, r).query;
        typedef std::conditional_t<M::PER_ELEMENT == 2, bf16, float> Element;
        for (int d = 0; d < dim; d += LANES)
            store((Element*)out + d, load_any(p.query, p.query_dtype, source + d, std::max(0, p.head_dim - d)));
    }
}

// acc: padded_value_dim() sums of weighted values. A sink is counted here, once for all ranges of keys.
void write_row(const Problem& p, int kv_head, const Row& row, const float* acc, float maximum, float denominator) {
    if (p.sinks) denominator += exp2(splat(p.sinks[row.head] * LOG2E - maximum))[0];
    const float scale = denominator > 0 ? p.value_scale(kv_head) / denominator : 0.0f;
    for (int d = 0; d < p.value_dim; d += LANES)
        store_any(p.output, p.output_dtype, row.output + d, load(acc + d) * scale, p.value_dim - d);
}

// A partial row is [acc (padded_value_dim), maximum, denominator], padded to padded_value_dim + 16.
int64_t partial_stride(const Problem& p) { return p.padded_value_dim() + LANES; }

// Row r of a head's tile: to the output, or to the partial result of a range of keys.
void finish_row(const Problem& p, const Tile& tile, int kv_head, int rows, int r, const float* acc, float maximum,
                float denominator, float* partials) {
    if (tile.partial < 0) return write_row(p, kv_head, row_of(p, tile, kv_head, r), acc, maximum, denominator);
    const int dim = p.padded_value_dim();
    float* target = partials + (tile.partial + (int64_t)(kv_head - tile.head_begin) * rows + r) * partial_stride(p);
    std::copy(acc, acc + dim, target);
    target[dim] = maximum;
    target[dim + 1] = denominator;
}

void merge_partials(const Problem& p, const Merge& merge, const float* partials) {
    const int dim = p.padded_value_dim(), stride = (int)partial_stride(p);
    const int rows = merge.tile.tokens() * p.group();
    const int all_rows = rows * (merge.tile.head_end - merge.tile.head_begin);
    for (int r = 0; r < all_rows; r++) {
        const float* first = partials + (merge.tile.partial + r) * stride;
        const int64_t part_stride = (int64_t)all_rows * stride;
        float maximum = LOWEST, denominator = 0.0f;
        for (int i = 0; i < merge.parts; i++) maximum = std::max(maximum, first[i * part_stride + dim]);
        alignas(64) float acc[MOST_DIM] = {};
        for (int i = 0; i < merge.parts; i++) {
            const float* part = first + i * part_stride;
            const float weight = exp2(splat(part[dim] - maximum))[0];
            denominator += weight * part[dim + 1];
            for (int d = 0; d < dim; d += LANES) store(acc + d, load(acc + d) + load(part + d) * weight);
        }
        const int kv_head = merge.tile.head_begin + r / rows;
        write_row(p, kv_head, row_of(p, merge.tile, kv_head, r % rows), acc, maximum, denominator);
    }
}

// ---- scales of tokens ----

// Whether each key and value in a cache of T has a scale of its own. Products with keys are multiplied with it, and so
// are weights of values: the numbers themselves are used as they lie in memory.
template <class T>
constexpr bool HAS_TOKEN_SCALES = std::is_same_v<T, i8>;

// Of `count` tokens in a page from `offset` on.
inline void load_scales(const Problem& p, int64_t page, int kv_head, int offset, int count, float* keys,
                        float* values) {
    const bf16* const of_keys = p.scales_of(page, kv_head, false, offset);
    const bf16* const of_values = p.scales_of(page, kv_head, true, offset);
    for (int i = 0; i < count; i += LANES) {
        store(keys + i, load(of_keys + i, count - i), count - i);
        store(values + i, load(of_values + i, count - i), count - i);
    }
}

inline void scale_scores(float* scores, const float* scales, int vectors) {
    for (int i = 0; i < vectors * LANES; i += LANES) store(scores + i, load(scores + i) * load(scales + i));
}

// ---- softmax of a row ----

struct Scoring {
    float scale, soft_cap;

    bool is_plain() const { return soft_cap == 0 && scale > 0; }       // just a factor
    float factor() const { return is_plain() ? scale * LOG2E : 1.0f; }  // what is left for exponentiate()
};

float maximum_of(const float* scores, int vectors) {
    f32_register highest[REGISTERS];
    __builtin_memcpy(highest, scores, sizeof highest);
    for (int v = 1; v < vectors; v++)
        for (int i = 0; i < REGISTERS; i++)
            highest[i] = max(highest[i], load_raw<f32_register>(scores + v * LANES + i * REGISTER_LANES));
    return max(load_raw<f32x16>(highest));
}

// Makes products of a row scores, but for by.factor(); those of keys outside begin .. end are -inf, both
// counted from the first score's key. Returns the maximum.
float finish_scores(float* scores, int vectors, int begin, int end, const Scoring& by) {
    const bool is_plain = by.is_plain();
    if (is_plain && begin <= 0 && end >= vectors * LANES) return maximum_of(scores, vectors) * by.factor();
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 highest = splat(-INFINITY);
    for (int v = 0; v < vectors; v++) {
        const int first = v * LANES;
        f32x16 s = load(scores + first);
        if (!is_plain)
            s = by.soft_cap > 0 ? tanh(s * (by.scale / by.soft_cap)) * (by.soft_cap * LOG2E) : s * (by.scale * LOG2E);
        if (begin > first || end < first + LANES) {
            const i32x16 key = lane + first;
            s = ((key >= begin) & (key < end)) ? s : splat(-INFINITY);
        }
        store(scores + first, s);
        highest = max(highest, s);
    }
    return max(highest) * by.factor();
}

#if defined(__AVX512F__)
// 2^x for weights of 16 bits: with a relative error of 9e-5. 1 is exact.
inline f32x16 rough_exp2(f32x16 x) {
    const f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
    f32x16 power = r * 0.07706719637f + 0.22764481604f;
    power = power * r + 0.69511681795f;
    power = power * r + 1.0f;
    return (f32x16)_mm512_scalef_ps((__m512)power, (__m512)x);
}
#endif

// 2^x as weights of the form M need it.
template <class M, class V>
V weight_of(V x) {
#if defined(__AVX512F__)
    if constexpr (M::PER_ELEMENT == 2) return rough_exp2(x);
#endif
    return exp2(x);
}

// Turns scores into weights 2^(s * factor - maximum), in the form the second product reads; those of a cache with a
// scale per token are multiplied with its values' scales. Returns their sum without these.
// The number of vectors is a multiple of M::PER_ELEMENT.
template <class M, class T = float>
float exponentiate(const float* scores, int vectors, float factor, float maximum, typename M::element* weights,
                   const float* scales = nullptr) {
    const auto weight = [&](int i) {
        return weight_of<M>(load_raw<f32_register>(scores + i) * factor - maximum);
    };
    const auto scaled = [&](f32_register power, int i) {
        if constexpr (HAS_TOKEN_SCALES<T>) power *= load_raw<f32_register>(scales + i);
        return power;
    };
    f32_register total[REGISTERS] = {};
#if defined(__AVX512BF16__)
    if constexpr (M::PER_ELEMENT == 2) {
        for (int i = 0; i < vectors * LANES; i += 2 * LANES) {
            const f32_register first = weight(i), second = weight(i + LANES);
            total[0] += first;
            total[0] += second;
            const auto both = _mm512_cvtne2ps_pbh((__m512)scaled(second, i + LANES), (__m512)scaled(first, i));
            __builtin_memcpy(weights + i / 2, &both, sizeof both);
        }
        return sum(total[0]);
    }
#endif
    for (int i = 0; i < vectors * LANES; i += LANES)
        for (int part = 0; part < REGISTERS; part++) {
            const int first = i + part * REGISTER_LANES;
            const f32_register power = weight(first), stored = scaled(power, first);
            total[part] += power;
            __builtin_memcpy(weights + first, &stored, sizeof stored);
        }
    return sum(load_raw<f32x16>(total));
}

}  // namespace
