// The ops on grouped weights: which product fits the weight, the dtype and the number of tokens.

#include <cmath>

#include "common/processor.h"
#include "common/replay.h"
#include "grouped/grouped_linear.h"

namespace {

constexpr int64_t SERIAL_WORK = 64 * 1024;  // multiply-adds below which other threads are not woken

// The number of tokens from which decoding the weights for the matrix unit pays. With integers: 24 tokens took less
// time that way than 16 the other, and 16 take no more than 24. With tables of other numbers estimated, from both ways'
// times per token.
constexpr int64_t AMX_MIN_TOKENS = 16;
constexpr int64_t AMX_MIN_TABLE_TOKENS = 12;

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
    GroupedWeight w = {codes, scales, offsets, codebook, in, out, bits, (int)std::min(group_size, in),
                       zero_point, (GroupKind)scale_kind, (GroupKind)offset_kind};
    const Output output = {dtype, result_dtype, (bool)exact, result, bias, tokens, out};
    if (tokens * in * out < SERIAL_WORK) threads = 1;
    const bool has_table = codebook && !fits_bytes(w);
    const int64_t amx_tokens = has_table ? AMX_MIN_TABLE_TOKENS : AMX_MIN_TOKENS;
    if (!exact && !batch_invariant && tokens >= amx_tokens &&
        grouped_linear_amx(w, x, permutation, output, threads)) return;
    if (in_fixed_point(tokens, fixed_point_tokens(w, has_table)) &&
        grouped_linear_fixed_point(w, x, permutation, output, threads)) return;
    if (has_table && grouped_linear_table(w, x, permutation, output, threads)) return;
    if (exact || has_table) return grouped_linear_float(w, x, permutation, output, threads);
    if (codebook) w.zero_point = TABLE_ZERO_POINT;
    grouped_linear_int8(w, x, permutation, output, threads);
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
PAGEWIRE_REPLAYABLE(rough_grouped_linear)
PAGEWIRE_REPLAYABLE(grouped_embedding)
