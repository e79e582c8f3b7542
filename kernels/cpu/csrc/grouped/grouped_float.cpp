// Grouped weights as floats: products in fp32, and rows of the weight.

#include "grouped/grouped_dequantize.h"
#include "grouped/grouped_linear.h"

namespace {

constexpr int MAX_TOKENS = REGISTERS == 1 ? 8 : 6;  // with sums in registers: AVX2 has 16, of half a tile
constexpr int CHUNK_TILES = 4;

// sums[t] += the products of a unit's weights with the inputs x[t * stride ..] of TOKENS tokens
template <int TOKENS>
void multiply(const f32x16 weights[UNIT], const float* x, int64_t stride, f32x16* sums) {
    f32_register acc[TOKENS][REGISTERS];
    __builtin_memcpy(acc, sums, sizeof acc);
    for (int k = 0; k < UNIT; k++) {
        f32_register weight[REGISTERS];
        __builtin_memcpy(weight, weights + k, sizeof weight);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
            for (int n = 0; n < REGISTERS; n++) acc[t][n] += weight[n] * x[t * stride + k];
    }
    __builtin_memcpy(sums, acc, sizeof acc);
}

// x [tokens, padded_in]
void linear(const GroupedWeight& w, const float* x, const Output& output, int threads) {
    typedef void (*Multiply)(const f32x16*, const float*, int64_t, f32x16*);
    static constexpr Multiply multiplies[] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>,
                                              multiply<5>, multiply<6>, multiply<7>, multiply<8>};
    const int64_t tiles = w.tiles(), stride = w.padded_in();
    parallel::for_each(threads, (tiles + CHUNK_TILES - 1) / CHUNK_TILES, [&](int64_t chunk) {
        TileDequantizer weights(w);
        std::vector<f32x16> sums(output.tokens);
        const int64_t end = std::min(tiles, (chunk + 1) * CHUNK_TILES);
        for (int64_t tile = chunk * CHUNK_TILES; tile < end; tile++) {
            weights.start(tile);
            std::fill(sums.begin(), sums.end(), f32x16{});
            for (int64_t u = 0; u < w.units(); u++) {
                f32x16 unit[UNIT];
                weights.unit(u, unit);
                for (int64_t t = 0; t < output.tokens; t += MAX_TOKENS) {
                    const int count = (int)std::min<int64_t>(MAX_TOKENS, output.tokens - t);
                    multiplies[count - 1](unit, x + t * stride + u * UNIT, stride, sums.data() + t);
                }
            }
            for (int64_t t = 0; t < output.tokens; t++) output.write(t, tile, sums[t]);
        }
    });
}

// The row of `lane` in a tile, in the inputs' order.
template <class T>
void write_row(const GroupedWeight& w, const TileDequantizer& tile, int lane, T* out) {
    f32x16 unit[UNIT];
    float row[UNIT];
    for (int64_t u = 0; u < w.units(); u++) {
        tile.unit(u, unit);
        for (int k = 0; k < UNIT; k++) row[k] = unit[k][lane];
        for (int half = 0; half < UNIT; half += LANES) {
            const int64_t position = u * UNIT + half, group = position / w.padded_group();
            const int64_t offset = position - group * w.padded_group(), column = group * w.group_size + offset;
            const int count = (int)std::min(w.group_size - offset, w.in - column);
            if (count > 0) store(out + column, load(row + half), count);
        }
    }
}

}  // namespace

void grouped_linear_float(const GroupedWeight& weight, const void* x, const int32_t* permutation, const Output& output,
                          int threads) {
    const auto as_they_are = [](f32x16 inputs) { return inputs; };
    const float* const inputs =
        ordered_inputs<float>(weight, output.dtype, x, permutation, output.tokens, threads, as_they_are);
    linear(weight, inputs, output, threads);
}

void grouped_rows(const GroupedWeight& weight, const int64_t* ids, int64_t count, int dtype, void* out, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        for_tokens(threads, count, weight.in * TILE, [&](int64_t i) {
            TileDequantizer tile(weight);
            tile.start(ids[i] / TILE);
            write_row(weight, tile, (int)(ids[i] % TILE), (T*)out + i * weight.in);
        });
    });
}
