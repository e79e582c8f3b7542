// y = x w^T + bias with the matrix unit of x86 (AMX), for so many tokens that decoding the weights to bf16 pays.

#include "grouped/grouped_linear.h"
#include "products/amx_products.h"

#if defined(PAGEWIRE_AMX)

namespace {

using amx::TILE_PAIRS;

constexpr int64_t PIECES = 3;            // of work, per thread: the first stage of each is decoded beforehand
constexpr int64_t PACKED_TOKENS = 2048;  // packed at a time
constexpr int HALF_UNIT = UNIT / 2;

// ---- weights as bf16, rounded once ----

// Even and odd inputs, rounded to nearest, side by side. Of equally near numbers the one farther from zero: the
// instruction that takes the even one, and the shuffle that it needs, take twice as long. Weights are no NaN but that
// of arithmetic.
[[gnu::always_inline]] inline void store_pairs(uint32_t* target, f32x16 even, f32x16 odd) {
    const u32x16 low = ((u32x16)even + 0x8000u) >> 16, high = ((u32x16)odd + 0x8000u) & 0xffff0000u;
    _mm512_store_si512(target, (__m512i)(low | high));
}

struct PlainValue {
    static f32x16 at(u32x16 quad, int byte, const float*) {
        const u32x16 code = byte == 3 ? quad >> 24 : byte == 0 ? quad & 0xff : quad >> 8 * byte & 0xff;
        return __builtin_convertvector((i32x16)code, f32x16);
    }
};

struct CodebookValue {
    static f32x16 at(u32x16 quad, int byte, const float* codebook) {  // of 16: an index's other bits do not count
        return (f32x16)_mm512_permutexvar_ps((__m512i)(quad >> 8 * byte), _mm512_loadu_ps(codebook));
    }
};

struct E4m3Value {
    static f32x16 at(u32x16 quad, int byte, const float*) { return e4m3_to_float(quad >> 8 * byte & 0xff); }
};

// A group's 16 scales and offsets, which are added.
struct Group {
    const float *scales, *offsets;
};

// A unit, with halves that may be of different groups, to bf16: out [ROWS, TILE] pairs
template <int BITS, class Value>
void decode(const uint8_t* codes, const Group* halves, const float* codebook, uint32_t* out) {
    u32x16 quads[QUADS];
    unpack_unit<BITS>(codes, quads);
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; q++) {
        const Group& group = halves[q / (QUADS / 2)];
        const f32x16 scale = load(group.scales), offset = load(group.offsets);
#pragma GCC unroll 2
        for (int byte = 0; byte < 4; byte += 2, out += TILE)
            store_pairs(out, Value::at(quads[q], byte, codebook) * scale + offset,
                        Value::at(quads[q], byte + 1, codebook) * scale + offset);
    }
}

// Nibbles become floats where they are, as upper bits of the mantissa: 1 + code / 2^(23 - AT).
template <int AT>
struct NibbleValue {
    const f32x16 scale, offset;
    explicit NibbleValue(const Group& group)
        : scale(load(group.scales) * (float)(1 << (23 - AT))), offset(load(group.offsets) - scale) {}
    [[gnu::always_inline]] f32x16 at(u32x16 word) const {
        return (f32x16)((word & (0xfu << AT)) | 0x3f800000u) * scale + offset;
    }
};

void decode_nibbles(const uint8_t* codes, const Group* halves, const float*, uint32_t* out) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const NibbleValue<12> low(halves[half]);
        const NibbleValue<16> high(halves[half]);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, codes += 64, out += 4 * TILE) {
            const u32x16 word = load_raw<u32x16>(codes);
            store_pairs(out, high.at(word << 16), high.at(word << 8));  // nibbles 0 and 2
            store_pairs(out + TILE, high.at(word), high.at(word >> 8));
            store_pairs(out + 2 * TILE, low.at(word << 8), low.at(word));  // 1 and 3
            store_pairs(out + 3 * TILE, low.at(word >> 8), high.at(word >> 12));
        }
    }
}

typedef void (*Decode)(const uint8_t* codes, const Group* halves, const float* codebook, uint32_t* out);

Decode decoder(const GroupedWeight& w) {
    if (w.codebook) return w.bits == 4 ? decode<4, CodebookValue> : decode<8, E4m3Value>;
    if (w.bits == 4) return decode_nibbles;
    Decode result = nullptr;
    with_bits(w.bits, [&](auto bits) { result = decode<decltype(bits)::BITS, PlainValue>; });
    return result;
}

// The weights of amx::multiply_tokens, decoded while the matrix unit multiplies with the stage before.
class DecodedStages {
   public:
    explicit DecodedStages(const GroupedWeight& w)
        : w_(w), decode_(decoder(w)), half_units_per_group_((int)w.padded_group() / HALF_UNIT) {
        static thread_local std::vector<uint32_t> memory;
        static thread_local std::vector<float> group_memory;
        buffers_ = aligned_memory(memory, 2 * BUFFER);
        group_memory.resize(4 * w.padded_groups() * TILE);
        groups_ = group_memory.data();
    }

    void prepare(const amx::Stage& stage, int64_t steps) {
        if (stage.unit == 0)
            for (int64_t i = 0; i < stage.tiles; i++) expand(stage.tile + i, scales_of(i), offsets_of(i));
        stage_ = stage;
        steps_ = std::max<int64_t>(1, steps);
        credit_ = 0;
        done_ = 0;
        first_buffer_ = !first_buffer_;
    }

    amx::StageWeights take(const amx::Stage&) {
        while (done_ < units()) decode_next();
        return {buffer(), stage_.units * TILE_PAIRS};
    }

    // The units are spread evenly over the steps.
    void step() {
        for (credit_ += units(); credit_ >= steps_ && done_ < units(); credit_ -= steps_) decode_next();
    }

   private:
    static constexpr int64_t BUFFER = 2 * amx::DEPTH * TILE_PAIRS;

    int64_t units() const { return stage_.tiles * stage_.units; }
    uint32_t* buffer() const { return buffers_ + (first_buffer_ ? 0 : BUFFER); }
    float* scales_of(int64_t i) const { return groups_ + 2 * i * w_.padded_groups() * TILE; }
    float* offsets_of(int64_t i) const { return scales_of(i) + w_.padded_groups() * TILE; }

    void expand(int64_t tile, float* scales, float* offsets) const {
        expand_groups(w_, tile, false, scales);
        expand_groups(w_, tile, true, offsets);
        if (!w_.has_minimums())
            for (int64_t i = 0; i < w_.padded_groups() * TILE; i++) offsets[i] *= -scales[i];
    }

    void decode_next() {
        const int64_t i = done_ / stage_.units, unit = stage_.unit + done_ % stage_.units;
        Group halves[2];
        for (int half = 0; half < 2; half++) {
            const int64_t group = ((int)unit * 2 + half) / half_units_per_group_ * TILE;
            halves[half] = {scales_of(i) + group, offsets_of(i) + group};
        }
        decode_(w_.tile_codes(stage_.tile + i) + unit * w_.unit_bytes(), halves, w_.codebook,
                buffer() + done_ * TILE_PAIRS);
        done_++;
    }

    const GroupedWeight& w_;
    const Decode decode_;
    const int half_units_per_group_;
    uint32_t* buffers_;  // of the stage that is multiplied and of the next one
    float* groups_;      // of the tiles of a stage: scales, then offsets
    amx::Stage stage_ = {};
    int64_t steps_ = 1, credit_ = 0, done_ = 0;
    bool first_buffer_ = false;
};

// Inputs as bf16 in the order of the codes: [tokens, padded_in]
template <class T>
amx::Tokens pack_inputs(const GroupedWeight& w, const void* x, const int32_t* permutation, int64_t first,
                        int64_t tokens, int threads) {
    static thread_local std::vector<bf16> memory;
    const int64_t in = w.padded_in();
    memory.resize(tokens * in);
    bf16* const packed = memory.data();
    for_tokens(threads, tokens, w.in, [&](int64_t token) {
        TokenInputs<T> inputs(w, x, permutation, first + token);
        for (int64_t i = 0; i < in; i += LANES) store(packed + token * in + i, inputs.next());
    });
    return {(const char*)packed, in * (int64_t)sizeof(bf16), tokens};
}

template <class T>
void multiply(const GroupedWeight& w, const amx::Tokens& x, const amx::Results<T>& all, bool streamed, int threads) {
    const int64_t pairs = (w.tiles() + 1) / 2, group = (pairs + PIECES * threads - 1) / (PIECES * threads);
    const int64_t groups = (pairs + group - 1) / group, part = amx::part_of(x.stride);
    parallel::for_each(threads, groups * ((x.count + part - 1) / part), [&](int64_t piece) {
        const int64_t tile = piece % groups * group * 2, first = piece / groups * part;
        const amx::Tokens tokens = {x.data + first * x.stride, x.stride, std::min(part, x.count - first)};
        const amx::Results<T> results = {all.data + first * all.stride, all.bias, all.out, all.stride};
        DecodedStages weights(w);
        amx::multiply_piece(tokens, tile, std::min(w.tiles(), tile + 2 * group), w.units(), weights, results, streamed);
    });
}

}  // namespace

bool grouped_linear_amx(const GroupedWeight& w, const void* x, const int32_t* permutation, const Output& output,
                        int threads) {
    if (!amx::permitted() || (w.codebook && w.bits != 4 && w.bits != 8)) return false;
    const bool as_they_are = output.dtype == BFLOAT16 && !permutation && w.padded_in() == w.in;
    const int64_t step = as_they_are ? output.tokens : PACKED_TOKENS;
    with_input_and_result(output, [&](auto t, auto r) {
        typedef decltype(t) T;
        typedef decltype(r) R;
        for (int64_t first = 0; first < output.tokens; first += step) {
            const int64_t tokens = std::min(step, output.tokens - first);
            const amx::Tokens inputs = as_they_are
                                           ? amx::Tokens{(const char*)x, w.in * (int64_t)sizeof(bf16), tokens}
                                           : pack_inputs<T>(w, x, permutation, first, tokens, threads);
            const amx::Results<R> results = {(R*)output.data + first * output.out, (const R*)output.bias, output.out,
                                             output.out};
            multiply(w, inputs, results, results.streamed(output.tokens), threads);
        }
    });
    return true;
}

#else

bool grouped_linear_amx(const GroupedWeight&, const void*, const int32_t*, const Output&, int) { return false; }

#endif
