// The product of gemm.h on the matrix unit of x86.
#pragma once

#include "common/amx.h"
#include "common/gemm.h"

#if defined(PAGEWIRE_AMX)

// As Bf16Pair. The thread has TileRegisters; depths are multiples of 16 pairs; A and C have memory for a multiple of 16
// rows, of which those past the last count for nothing.
struct AmxPair : Bf16Pair {};

// ROWS x COLUMNS tiles of 16 x 16 results. Strides in bytes.
template <int ROWS, int COLUMNS>
static inline void amx_block(const char* a, int64_t a_stride, const char* b, int64_t b_stride, int steps, char* c,
                             int64_t c_stride, bool accumulate) {
    const int64_t a_tile = 16 * a_stride, c_tile = 16 * c_stride;
    amx::memory_is_written();
    if (accumulate) {
        _tile_loadd(0, c, c_stride);
        if (COLUMNS > 1) _tile_loadd(1, c + 64, c_stride);
        if (ROWS > 1) _tile_loadd(2, c + c_tile, c_stride);
        if (ROWS > 1 && COLUMNS > 1) _tile_loadd(3, c + c_tile + 64, c_stride);
    } else {
        _tile_zero(0);
        if (COLUMNS > 1) _tile_zero(1);
        if (ROWS > 1) _tile_zero(2);
        if (ROWS > 1 && COLUMNS > 1) _tile_zero(3);
    }
    for (int s = 0; s < steps; s++, a += 64, b += 16 * b_stride) {
        _tile_loadd(4, a, a_stride);
        _tile_loadd(6, b, b_stride);
        _tile_dpbf16ps(0, 4, 6);
        if (COLUMNS > 1) {
            _tile_loadd(7, b + 64, b_stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (ROWS > 1) {
            _tile_loadd(5, a + a_tile, a_stride);
            _tile_dpbf16ps(2, 5, 6);
            if (COLUMNS > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_stride);
    if (COLUMNS > 1) _tile_stored(1, c + 64, c_stride);
    if (ROWS > 1) _tile_stored(2, c + c_tile, c_stride);
    if (ROWS > 1 && COLUMNS > 1) _tile_stored(3, c + c_tile + 64, c_stride);
}

template <>
inline void multiply<AmxPair>(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int depth, float* c,
                              int c_stride, const float* beta, int rows, int vectors) {
    for (int r = 0; beta && r < rows; r++) {
        if (beta[r] == 1.0f) continue;
        float* const row = c + r * c_stride;
        for (int v = 0; v < vectors; v++) store(row + v * LANES, load(row + v * LANES) * beta[r]);
    }
    const auto block = [&](auto tile_rows, auto columns, int r, int v) {
        amx_block<tile_rows(), columns()>((const char*)(a + r * a_stride), 4 * a_stride, (const char*)(b + v * LANES),
                                          4 * b_stride, depth / 16, (char*)(c + r * c_stride + v * LANES), 4 * c_stride,
                                          beta != nullptr);
    };
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, 2> two;
    for (int v = 0; v < vectors; v += 2) {
        const bool pair = v + 1 < vectors;
        for (int r = 0; r < rows; r += 32) {
            if (r + 16 < rows) {
                pair ? block(two, two, r, v) : block(two, one, r, v);
            } else {
                pair ? block(one, two, r, v) : block(one, one, r, v);
            }
        }
    }
}

#endif
