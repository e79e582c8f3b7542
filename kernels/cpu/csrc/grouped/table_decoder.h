// Codes that stand for numbers of a table (nf4, fp4: 4 bits; fp8 e4m3: 8), decoded to packed bf16 (packed_linear.h),
// in pairs of inputs as they follow each other; pairs of fp8 come in the order of e4m3.h.
#pragma once

#include "common/e4m3.h"
#include "grouped/grouped.h"
#include "products/packed_linear.h"

class TableDecoder {
   public:
    static bool fits(const GroupedWeight& w) { return w.codebook && (w.bits == 4 || w.bits == 8); }

    explicit TableDecoder(const GroupedWeight& w) : bits_(w.bits) {
        for (int i = 0; bits_ == 4 && i < SMALL_CODEBOOK; i++) {
            bf16 number[LANES];
            store(number, splat(w.codebook[i]));
            table_[i] = table_[i + SMALL_CODEBOOK] = number[0].bits;
            low_[i] = (uint8_t)table_[i];
            high_[i] = (uint8_t)(table_[i] >> 8);
        }
    }

    // A unit of a tile: out [packed::ROWS, TILE] pairs
    void unit(const uint8_t* codes, uint32_t* out) const { bits_ == 4 ? nibbles(codes, out) : bytes(codes, out); }

   private:
#if defined(__AVX512BW__)
    void nibbles(const uint8_t* codes, uint32_t* out) const {
        // Of each output's 4 bytes those of neighbouring inputs into neighbouring words.
        const __m512i order =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
        const __m512i table = load_raw<__m512i>(table_);
        for (int plane = 0; plane < QUADS / 2; plane++, codes += 64, out += 4 * TILE) {
            const __m512i words = _mm512_shuffle_epi8(load_raw<__m512i>(codes), order);
            // The index is a word's lowest 5 bits; the table's halves are the same.
            const auto look_up = [&](__m512i index, int row) {
                _mm512_storeu_si512(out + row * TILE, _mm512_permutexvar_epi16(index, table));
            };
            look_up(words, 0);
            look_up(_mm512_srli_epi16(words, 8), 1);
            look_up(_mm512_srli_epi16(words, 4), 2);
            look_up(_mm512_srli_epi16(words, 12), 3);
        }
    }
#else
    void nibbles(const uint8_t* codes, uint32_t* out) const {
        const u8x16 low = load_raw<u8x16>(low_), high = load_raw<u8x16>(high_);
        const u8x16 order = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
        for (int plane = 0; plane < QUADS / 2; plane++, out += 4 * TILE)
            for (int n = 0; n < TILE; n += 4, codes += 16) {  // 4 outputs at a time
                const u8x16 both = __builtin_shuffle(load_raw<u8x16>(codes), order);
                for (int nibble = 0; nibble < 2; nibble++) {
                    const u8x16 code = nibble ? both >> 4 : both & 15;
                    const u8x16 lows = __builtin_shuffle(low, code), highs = __builtin_shuffle(high, code);
                    const u8x16 first = __builtin_shufflevector(lows, highs, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                                                      6, 22, 7, 23);
                    const u8x16 second = __builtin_shufflevector(lows, highs, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                                                       29, 14, 30, 15, 31);
                    __builtin_memcpy(out + 2 * nibble * TILE + n, &first, sizeof first);
                    __builtin_memcpy(out + (2 * nibble + 1) * TILE + n, &second, sizeof second);
                }
            }
    }
#endif

    static void bytes(const uint8_t* codes, uint32_t* out) {
        for (int quad = 0; quad < QUADS; quad++, codes += 64, out += 2 * TILE)
            for (int n = 0; n < TILE; n += REGISTER_LANES) {
                const E4m3Pairs pairs = e4m3_pairs(codes + 4 * n);
                __builtin_memcpy(out + n, &pairs.first, sizeof pairs.first);
                __builtin_memcpy(out + TILE + n, &pairs.second, sizeof pairs.second);
            }
    }

    const int bits_;
    alignas(64) uint16_t table_[2 * SMALL_CODEBOOK] = {};  // bf16
    uint8_t low_[SMALL_CODEBOOK] = {}, high_[SMALL_CODEBOOK] = {};
};
