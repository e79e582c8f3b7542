// y = x w^T + bias with the matrix unit of x86 (AMX), for so many tokens that decoding the weights to bf16 pays.

#include "grouped_linear.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

#include "grouped_dequantize.h"

namespace {

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023;  // arch_prctl: ask the kernel for a register state
constexpr int XFEATURE_XTILEDATA = 18;

constexpr int BLOCK = 32;              // tokens and outputs of a register block: 2 x 2 tiles of 16
constexpr int64_t TOKEN_BLOCK = 512;   // inputs of TOKEN_BLOCK x DEPTH stay in the L2 cache,
constexpr int64_t DEPTH = 1024;        // weights of BLOCK x DEPTH nearly in the L1 cache

bool permitted() {
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

// The tile registers of a thread, all of 16 rows of 64 bytes, while this lives.
class TileRegisters {
   public:
    TileRegisters() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; i++) {
            config.row_bytes[i] = 64;
            config.rows[i] = 16;
        }
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
};

// Inputs as bf16 [tokens, in], both padded with zeros.
struct Inputs {
    bf16* data;
    int64_t tokens, in;
};

// Products of 32 tokens with 32 outputs, added to c [32, c_stride]. weights: per unit of inputs 2 tiles [16][16] of
// pairs of inputs for each of the two tiles of outputs
void multiply_block(const bf16* x, int64_t x_stride, const uint32_t* weights, int64_t units, float* c,
                    int64_t c_stride) {
    const int64_t x_bytes = x_stride * sizeof(bf16), c_bytes = c_stride * sizeof(float);
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + TILE, c_bytes);
    _tile_loadd(2, c + TILE * c_stride, c_bytes);
    _tile_loadd(3, c + TILE * c_stride + TILE, c_bytes);
    for (int64_t u = 0; u < units; u++, weights += 2 * 256) {
        _tile_loadd(4, x + u * UNIT, x_bytes);
        _tile_loadd(6, weights, 64);
        _tile_loadd(7, weights + 256, 64);
        _tile_loadd(5, x + TILE * x_stride + u * UNIT, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + TILE, c_bytes);
    _tile_stored(2, c + TILE * c_stride, c_bytes);
    _tile_stored(3, c + TILE * c_stride + TILE, c_bytes);
}

// [UNIT][16] floats -> [UNIT / 2][16] pairs of bf16, the even input in the low half
void pack_pairs(const f32x16* unit, uint32_t* out) {
    alignas(64) static constexpr uint16_t INTERLEAVE[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = load_raw<__m512i>(INTERLEAVE);
    for (int k = 0; k < UNIT; k += 2) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)unit[k + 1], (__m512)unit[k]);
        _mm512_storeu_si512(out + k / 2 * TILE, _mm512_permutexvar_epi16(order, both));
    }
}

// The weights of units [begin, end) of the two tiles from `tile` on; out as multiply_block reads them
void decode(const GroupedWeight& w, TileDequantizer& dequantizer, int64_t tile, int64_t begin, int64_t end,
            uint32_t* out) {
    for (int half = 0; half < 2; half++) {
        uint32_t* target = out + half * 256;
        if (tile + half >= w.tiles()) {
            for (int64_t u = begin; u < end; u++, target += 2 * 256) std::fill(target, target + 256, 0u);
            continue;
        }
        dequantizer.start(tile + half);
        for (int64_t u = begin; u < end; u++, target += 2 * 256) {
            f32x16 unit[UNIT];
            dequantizer.unit(u, unit);
            pack_pairs(unit, target);
        }
    }
}

template <class T>
T* aligned_memory(std::vector<T>& memory, int64_t size) {
    memory.resize(size + 64 / sizeof(T));
    return (T*)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

// One block of outputs, for the tokens [first, last) and the units [begin, end).
void multiply_outputs(const GroupedWeight& w, const Inputs& inputs, int64_t block, int64_t first, int64_t last,
                      int64_t begin, int64_t end, float* c, int64_t c_stride) {
    static thread_local std::vector<uint32_t> memory;
    uint32_t* const weights = aligned_memory(memory, DEPTH / UNIT * 2 * 256);
    TileDequantizer dequantizer(w);
    decode(w, dequantizer, block * 2, begin, end, weights);
    const TileRegisters registers;
    for (int64_t t = first; t < last; t += BLOCK)
        multiply_block(inputs.data + t * inputs.in + begin * UNIT, inputs.in, weights, end - begin,
                       c + (t - first) * c_stride + block * BLOCK, c_stride);
}

}  // namespace

bool grouped_linear_amx(const GroupedWeight& weight, const void* x, const int32_t* permutation, const Output& output,
                        int threads) {
    if (!permitted()) return false;
    static thread_local std::vector<bf16> inputs_memory;
    static thread_local std::vector<float> sums_memory;
    const int64_t tokens = (output.tokens + BLOCK - 1) / BLOCK * BLOCK, in = weight.padded_in();
    const int64_t blocks = (weight.tiles() + 1) / 2, stride = blocks * BLOCK;
    const Inputs inputs = {aligned_memory(inputs_memory, tokens * in), tokens, in};
    with_dtype(output.dtype, [&](auto t) {
        for_tokens(threads, output.tokens, in, [&](int64_t token) {
            TokenInputs<decltype(t)> row(weight, x, permutation, token);
            for (int64_t i = 0; i < in; i += LANES) store(inputs.data + token * in + i, row.next());
        });
    });
    std::fill(inputs.data + output.tokens * in, inputs.data + tokens * in, bf16{});
    float* const sums = aligned_memory(sums_memory, std::min(tokens, TOKEN_BLOCK) * stride);
    for (int64_t first = 0; first < tokens; first += TOKEN_BLOCK) {
        const int64_t last = std::min(tokens, first + TOKEN_BLOCK);
        std::fill(sums, sums + (last - first) * stride, 0.0f);
        for (int64_t begin = 0; begin < weight.units(); begin += DEPTH / UNIT) {
            const int64_t end = std::min(weight.units(), begin + DEPTH / UNIT);
            parallel::for_each(threads, blocks, [&](int64_t block) {
                multiply_outputs(weight, inputs, block, first, last, begin, end, sums, stride);
            });
        }
        for_tokens(threads, std::min(last, output.tokens) - first, stride, [&](int64_t t) {
            for (int64_t tile = 0; tile < weight.tiles(); tile++)
                output.write(first + t, tile, load(sums + t * stride + tile * TILE));
        });
    }
    return true;
}

#else

bool grouped_linear_amx(const GroupedWeight&, const void*, const int32_t*, const Output&, int) { return false; }

#endif
