// The products with grouped weights.
#pragma once

#include "grouped/grouped_input.h"

// The numbers of an integer codebook are made unsigned by this zero point.
constexpr int TABLE_ZERO_POINT = 128;

struct Output {
    int dtype;         // of the inputs
    int result_dtype;  // theirs, or fp32
    bool exact;        // the model is in fp32: neither inputs nor weights are rounded
    void* data;        // [tokens, out] of the result's dtype
    const void* bias;  // [out] of it, or null
    int64_t tokens, out;

    // Whether inputs are of a model in bf16, though they may be in fp32.
    bool is_bf16() const { return dtype == BFLOAT16 || (dtype == FLOAT32 && !exact); }
    char* at(int64_t token, int64_t tile) const {
        return (char*)data + (token * out + tile * TILE) * (result_dtype == FLOAT32 ? sizeof(float) : sizeof(bf16));
    }
    void write(int64_t token, int64_t tile, f32x16 sums) const {
        const int64_t n = tile * TILE;
        const int count = (int)std::min<int64_t>(TILE, out - n);
        with_dtype(result_dtype, [&](auto t) {
            typedef decltype(t) T;
            if (bias) sums += load((const T*)bias + n, count);
            store((T*)data + token * out + n, sums, count);
        });
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

// x [tokens, in], quantized to 15 bits per block. The weight has no codebook, or one of at most
// 4 bits with integers, and then no offsets and the zero point TABLE_ZERO_POINT.
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

// In fixed point. False, and nothing was done: not is_bf16(); a codebook of other than 4 bits or E4M3; E4M3 with groups
// of half a unit; or a machine without it.
bool grouped_linear_fixed_point(const GroupedWeight& weight, const void* x, const int32_t* permutation,
                                const Output& output, int threads);

// Rows `ids` of the weight, dequantized to dtype. out [count, in]
void grouped_rows(const GroupedWeight& weight, const int64_t* ids, int64_t count, int dtype, void* out, int threads);
