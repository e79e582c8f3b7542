// The products with grouped weights.
#pragma once

#include "grouped/grouped_input.h"

// The numbers of an integer codebook are made unsigned by this zero point.
constexpr int TABLE_ZERO_POINT = 128;

// Whether products of integers, in bytes or in fixed point, take two tiles at once: a gate and what it multiplies.
#if defined(__AVX512VNNI__)
constexpr bool PAIRS_OF_TILES = true;
#else
constexpr bool PAIRS_OF_TILES = false;
#endif

struct Output {
    int dtype;           // of the inputs
    int result_dtype;    // theirs, or fp32
    bool exact;          // the model is in fp32: neither inputs nor weights are rounded
    void* data;          // [tokens, out] of the result's dtype
    const void* bias;    // [out] of it, or null
    int64_t tokens, out;
    bool gated = false;  // data [tokens, out / 2], bias fp32: silu of the first half times the second

    // Whether inputs are of a model in bf16, though they may be in fp32.
    bool is_bf16() const { return dtype == BFLOAT16 || (dtype == FLOAT32 && !exact); }
    char* at(int64_t token, int64_t tile) const {
        const int64_t n = gated ? token * (out / 2) + tile / 2 * TILE : token * out + tile * TILE;
        return (char*)data + n * (result_dtype == FLOAT32 ? sizeof(float) : sizeof(bf16));
    }
    // The tile that is multiplied as the index-th: of gated ones each gate comes before what it multiplies.
    int64_t in_turn(int64_t index) const { return gated ? index / 2 + index % 2 * (out / TILE / 2) : index; }
    void write(int64_t token, int64_t tile, f32x16 sums) const {
        with_dtype(result_dtype, [&](auto t) { write_as<decltype(t)>(token, tile, sums); });
    }
    // The gate that is multiplied as the index-th, and what it multiplies
    void write_gated(int64_t token, int64_t index, f32x16 gate, f32x16 up) const {
        with_dtype(result_dtype, [&](auto t) { write_gated_as<decltype(t)>(token, index, gate, up); });
    }
    // The sums of `count` tokens, each of which has `stride` of them, and tiles [tile, end) in turn
    void write_tokens(int64_t token, int count, int64_t tile, int64_t end, const f32x16* sums, int64_t stride) const {
        with_dtype(result_dtype, [&](auto type) {
            typedef decltype(type) T;
            for (; gated && tile < end; tile += 2, sums += 2)
                for (int t = 0; t < count; t++)
                    write_gated_as<T>(token + t, tile, sums[t * stride], sums[t * stride + 1]);
            for (; tile < end; tile++, sums++)
                for (int t = 0; t < count; t++) write_as<T>(token + t, tile, sums[t * stride]);
        });
    }

   private:
    template <class T>
    void write_as(int64_t token, int64_t tile, f32x16 sums) const {
        const int64_t n = tile * TILE;
        const int lanes = (int)std::min<int64_t>(TILE, out - n);
        if (bias) sums += load((const T*)bias + n, lanes);
        store((T*)data + token * out + n, sums, lanes);
    }
    template <class T>
    void write_gated_as(int64_t token, int64_t index, f32x16 gate, f32x16 up) const {
        const int64_t n = index / 2 * TILE, half = out / 2;
        if (bias) {
            gate += load((const float*)bias + n);
            up += load((const float*)bias + half + n);
        }
        store((T*)data + token * half + n, gate * sigmoid(gate) * up);
    }
};

// f(T{}, R{}) of the dtypes of inputs and result.
template <class F>
void with_input_and_result(const Output& output, F&& f) {
    with_dtype(output.dtype, [&](auto t) {
        if (output.result_dtype == output.dtype) return f(t, t);
        f(t, float{});
    });
}

// x [tokens, in], quantized to 15 bits per block; gated if there are PAIRS_OF_TILES. The weight has no codebook, or one
// of at most 4 bits with integers, and then no offsets and the zero point TABLE_ZERO_POINT.
// rough: to 8 bits; a weight without a codebook.
void grouped_linear_int8(const GroupedWeight& weight, const void* x, const int32_t* permutation, const Output& output,
                         int threads, bool rough = false);

// Weights with a codebook of 4 bits or E4M3, as floats or bf16. False: not such a one, or with groups of half a unit,
// or it would be rounded where it must not be; nothing was done.
bool grouped_linear_table(const GroupedWeight& weight, const void* x, const int32_t* permutation, const Output& output,
                          int threads);

// In fp32 with exact weights.
void grouped_linear_float(const GroupedWeight& weight, const void* x, const int32_t* permutation, const Output& output,
                          int threads);

// In bf16 with the machine's matrix unit. False: it has none, nothing was done.
bool grouped_linear_amx(const GroupedWeight& weight, const void* x, const int32_t* permutation, const Output& output,
                        int threads);

// In fixed point, gated if there are PAIRS_OF_TILES. False, and nothing was done: not is_bf16(); a codebook of other
// than 4 bits or E4M3; E4M3 with groups of half a unit; or a machine without it.
bool grouped_linear_fixed_point(const GroupedWeight& weight, const void* x, const int32_t* permutation,
                                const Output& output, int threads);

// Rows `ids` of the weight, dequantized to dtype. out [count, in]
void grouped_rows(const GroupedWeight& weight, const int64_t* ids, int64_t count, int dtype, void* out, int threads);
