// The ops on grouped weights: which product fits the weight, the dtype and the number of tokens.

#include <cmath>

#include "common/amx.h"
#include "common/processor.h"
#include "common/replay.h"
#include "grouped/grouped_linear.h"
#include "products/gates.h"

namespace {

constexpr int64_t SERIAL_WORK = 64 * 1024;  // multiply-adds below which other threads are not woken

// The number of tokens from which decoding the weights for the matrix unit pays. With integers: 24 tokens took less
// time that way than 16 the other, and 16 take no more than 24. With tables of other numbers estimated, from both ways'
// times per token.
constexpr int64_t AMX_MIN_TOKENS = 16;
constexpr int64_t AMX_MIN_TABLE_TOKENS = 12;

constexpr int64_t GATED_TOKENS = 512;  // with sums that become gates afterwards

// The number of tokens from which fixed point pays: they share what decoding the weights takes. Without AVX-512 that is
// more of them, except with tables, of which there are no other products of integers.
int64_t fixed_point_tokens(const GroupedWeight& w, bool has_table) {
    if (REGISTERS == 1 || has_table) return 16;
    return w.bits == 8 ? 32 : 20;
}

bool fits_bytes(const GroupedWeight& w) {
    if (w.bits != 4) return false;
    for (int i = 0; i < SMALL_CODEBOOK; i++)
        if (!(std::abs(w.codebook[i]) <= 127) || w.codebook[i] != std::floor(w.codebook[i])) return false;
    return true;
}

void linear(GroupedWeight w, const void* x, const int32_t* permutation, const Output& output, int threads) {
    if (output.tokens * w.in * w.out < SERIAL_WORK) threads = 1;
    const bool has_table = w.codebook && !fits_bytes(w);
    const int64_t amx_tokens = has_table ? AMX_MIN_TABLE_TOKENS : AMX_MIN_TOKENS;
    if (!output.exact && !batch_invariant && output.tokens >= amx_tokens &&
        grouped_linear_amx(w, x, permutation, output, threads)) return;
    if (in_fixed_point(output.tokens, fixed_point_tokens(w, has_table)) &&
        grouped_linear_fixed_point(w, x, permutation, output, threads)) return;
    if (has_table && grouped_linear_table(w, x, permutation, output, threads)) return;
    if (output.exact || has_table) return grouped_linear_float(w, x, permutation, output, threads);
    if (w.codebook) w.zero_point = TABLE_ZERO_POINT;
    grouped_linear_int8(w, x, permutation, output, threads);
}

// Whether gates can be summed side by side with what they multiply.
bool gates_in_products(const GroupedWeight& w, const Output& output) {
#if defined(PAGEWIRE_AMX)
    if (!batch_invariant && output.tokens >= AMX_MIN_TOKENS && amx::permitted()) return false;
#endif
    const bool has_table = w.codebook && !fits_bytes(w);
    return PAIRS_OF_TILES && !output.exact && !has_table && w.out % (2 * TILE) == 0;
}

// The sums of some tokens at a time.
void gate_afterwards(const GroupedWeight& w, const void* x, const int32_t* permutation, const Output& output,
                     int threads) {
    static thread_local std::vector<float> memory;
    const Passes passes(output.tokens, GATED_TOKENS);
    const int64_t half = w.out / 2, size = output.dtype == FLOAT32 ? sizeof(float) : sizeof(bf16);
    memory.resize(passes.per_pass * w.out);
    for (int64_t first = 0; first < passes.tokens; first += passes.per_pass) {
        const int64_t count = passes.count(first);
        const Output sums = {output.dtype, FLOAT32, output.exact, memory.data(), output.bias, count, w.out};
        linear(w, (const char*)x + first * w.in * size, permutation, sums, threads);
        with_dtype(output.result_dtype, [&](auto t) {
            gate((decltype(t)*)output.data + first * half, memory.data(), count, half,
                 count * half < SERIAL_WORK ? 1 : threads);
        });
    }
}

}  // namespace

extern "C" {

// x [tokens, in] of `dtype`, bias [out] or null and result [tokens, out] of it or of fp32; contiguous. `exact`: x, in
// fp32, is not rounded.
void pagewire_grouped_linear(int dtype, int result_dtype, int exact, const void* x, const uint8_t* codes,
                             int scale_kind, const char* scales, int offset_kind, const char* offsets,
                             const float* codebook, const int32_t* permutation,
                             const void* bias, void* result, int64_t tokens, int64_t in, int64_t out, int bits,
                             int64_t group_size, int zero_point, int threads) {
    if (tokens == 0 || out == 0) return;
    const GroupedWeight w = {codes, scales, offsets, codebook, in, out, bits, (int)std::min(group_size, in),
                             zero_point, (GroupKind)scale_kind, (GroupKind)offset_kind};
    linear(w, x, permutation, {dtype, result_dtype, (bool)exact, result, bias, tokens, out}, threads);
}

// The same with silu(gates) * ups of the sums, gates first: bias fp32 [out] or null, result [tokens, out / 2]
void pagewire_grouped_gated_linear(int dtype, int result_dtype, int exact, const void* x, const uint8_t* codes,
                                   int scale_kind, const char* scales, int offset_kind, const char* offsets,
                                   const float* codebook, const int32_t* permutation, const void* bias, void* result,
                                   int64_t tokens, int64_t in, int64_t out, int bits, int64_t group_size,
                                   int zero_point, int threads) {
    if (tokens == 0 || out == 0) return;
    const GroupedWeight w = {codes, scales, offsets, codebook, in, out, bits, (int)std::min(group_size, in),
                             zero_point, (GroupKind)scale_kind, (GroupKind)offset_kind};
    Output output = {dtype, result_dtype, (bool)exact, result, bias, tokens, out};
    output.gated = gates_in_products(w, output);
    if (output.gated) return linear(w, x, permutation, output, threads);
    gate_afterwards(w, x, permutation, output, threads);
}

// As pagewire_grouped_linear, of a weight without a codebook; inputs are rounded to 8 bits.
void pagewire_rough_grouped_linear(int dtype, const void* x, const uint8_t* codes, int scale_kind, const char* scales,
                                   int offset_kind, const char* offsets, const int32_t* permutation, const void* bias,
                                   void* result, int64_t tokens, int64_t in, int64_t out, int bits, int64_t group_size,
                                   int zero_point, int threads) {
    if (tokens == 0 || out == 0) return;
    const GroupedWeight w = {codes, scales, offsets, nullptr, in, out, bits, (int)std::min(group_size, in),
                             zero_point, (GroupKind)scale_kind, (GroupKind)offset_kind};
    if (tokens * in * out < SERIAL_WORK) threads = 1;
    grouped_linear_int8(w, x, permutation, {dtype, dtype, false, result, bias, tokens, out}, threads, true);
}

// Rows `ids` [count] of a weight -> result [count, in], contiguous
void pagewire_grouped_embedding(int dtype, const int64_t* ids, int64_t count, const uint8_t* codes, int scale_kind,
                                const char* scales, int offset_kind, const char* offsets, const float* codebook,
                                void* result, int64_t in, int64_t out, int bits, int64_t group_size, int zero_point,
                                int threads) {
    const GroupedWeight w = {codes, scales, offsets, codebook, in, out, bits, (int)std::min(group_size, in),
                             zero_point, (GroupKind)scale_kind, (GroupKind)offset_kind};
    grouped_rows(w, ids, count, dtype, result, threads);
}

}

PAGEWIRE_REPLAYABLE(grouped_linear)
PAGEWIRE_REPLAYABLE(grouped_gated_linear)
PAGEWIRE_REPLAYABLE(rough_grouped_linear)
PAGEWIRE_REPLAYABLE(grouped_embedding)
