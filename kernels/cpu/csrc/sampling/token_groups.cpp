// Passes over the logits by groups of 128 token ids, for the sampling ops. A line is logits + lines[l] * stride; its
// values are scaled by scales[l] in fp32, rounded once. The last group is filled up with -inf. G is the number of
// groups.

#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/replay.h"
#include "common/vector.h"

namespace {

constexpr int GROUP_SIZE = 128;
constexpr int GROUP_VECTORS = GROUP_SIZE / LANES;
constexpr int64_t GROUPS_PER_CHUNK = 64;

struct Lines {
    const void* logits;
    int64_t stride;  // in elements
    const int64_t* lines;
    const float* scales;
    int64_t num_lines;
    int64_t vocab_size;

    int64_t num_groups() const { return (vocab_size + GROUP_SIZE - 1) / GROUP_SIZE; }

    template <class T>
    void load_group(int64_t line, int64_t group, f32x16* values) const {
        const T* p = (const T*)logits + lines[line] * stride + group * GROUP_SIZE;
        const int count = (int)std::min<int64_t>(GROUP_SIZE, vocab_size - group * GROUP_SIZE);
        for (int i = 0; i < GROUP_VECTORS; i++) {
            const int left = count - i * LANES;
            values[i] = left > 0 ? load(p + i * LANES, left) * scales[line] : splat(-INFINITY);
            for (int lane = left; lane > 0 && lane < LANES; lane++) values[i][lane] = -INFINITY;
        }
    }

    // f(line, group) for all of them; threads share the groups of a line, too.
    template <class F>
    void for_groups(int threads, F&& f) const {
        const int64_t groups = num_groups(), chunks = (groups + GROUPS_PER_CHUNK - 1) / GROUPS_PER_CHUNK;
        parallel::for_each(threads, num_lines * chunks, [&](int64_t chunk) {
            const int64_t line = chunk / chunks, first = chunk % chunks * GROUPS_PER_CHUNK;
            for (int64_t group = first; group < std::min(groups, first + GROUPS_PER_CHUNK); group++) f(line, group);
        });
    }
};

// NaN where one of them is.
float max_or_nan(const f32x16* values) {
    f32x16 m = values[0];
    for (int i = 1; i < GROUP_VECTORS; i++) m = ((values[i] > m) | (values[i] != values[i])) ? values[i] : m;
    const i32x16 is_nan = m != m;
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= is_nan[lane];
    return any ? NAN : max(m);
}

template <class T>
void group_maxima(const Lines& l, float* maxima, int threads) {
    l.for_groups(threads, [&](int64_t line, int64_t group) {
        f32x16 values[GROUP_VECTORS];
        l.load_group<T>(line, group, values);
        maxima[line * l.num_groups() + group] = max_or_nan(values);
    });
}

// The first of the largest; the first NaN where there is one.
int64_t argmax(const float* values, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 0; i < count; i++) {
        if (values[i] != values[i]) return i;
        if (values[i] > values[best]) best = i;
    }
    return best;
}

}  // namespace

extern "C" {

// maxima [num_lines, G]; NaN of a group with NaN
void pagewire_group_maxima(int dtype, const void* logits, int64_t stride, const int64_t* lines, const float* scales,
                           int64_t num_lines, int64_t vocab_size, float* maxima, int threads) {
    const Lines l{logits, stride, lines, scales, num_lines, vocab_size};
    with_dtype(dtype, [&](auto t) { group_maxima<decltype(t)>(l, maxima, threads); });
}

// masses [num_lines, G]: the sums of exp(value - origin) over values >= lowest; lowest, origin [num_lines]. A
// group is not read if its maximum is below lowest, or NaN.
void pagewire_group_masses(int dtype, const void* logits, int64_t stride, const int64_t* lines, const float* scales,
                           int64_t num_lines, int64_t vocab_size, const float* maxima, const float* lowest,
                           const float* origin, float* masses, int threads) {
    const Lines l{logits, stride, lines, scales, num_lines, vocab_size};
    with_dtype(dtype, [&](auto t) {
        l.for_groups(threads, [&](int64_t line, int64_t group) {
            const int64_t index = line * l.num_groups() + group;
            f32x16 total = {};
            if (maxima[index] >= lowest[line]) {
                f32x16 values[GROUP_VECTORS];
                l.load_group<decltype(t)>(line, group, values);
                for (const f32x16 v : values)
                    total += v >= splat(lowest[line]) ? exp2((v - origin[line]) * LOG2E) : f32x16{};
            }
            masses[index] = sum(total);
        });
    });
}

// counts [num_lines, G]: of values > bound [num_lines]. A group is not read if its maximum is not, or NaN.
void pagewire_group_counts(int dtype, const void* logits, int64_t stride, const int64_t* lines, const float* scales,
                           int64_t num_lines, int64_t vocab_size, const float* maxima, const float* bound,
                           int32_t* counts, int threads) {
    const Lines l{logits, stride, lines, scales, num_lines, vocab_size};
    with_dtype(dtype, [&](auto t) {
        l.for_groups(threads, [&](int64_t line, int64_t group) {
            const int64_t index = line * l.num_groups() + group;
            i32x16 total = {};
            if (maxima[index] > bound[line]) {
                f32x16 values[GROUP_VECTORS];
                l.load_group<decltype(t)>(line, group, values);
                for (const f32x16 v : values) total -= v > splat(bound[line]);  // -1 where it is
            }
            counts[index] = 0;
            for (int lane = 0; lane < LANES; lane++) counts[index] += total[lane];
        });
    });
}

// out [num_members, 128]: the values of group groups[i] of the line members[i]
void pagewire_group_members(int dtype, const void* logits, int64_t stride, const int64_t* lines, const float* scales,
                            int64_t num_lines, int64_t vocab_size, const int64_t* members, const int64_t* groups,
                            int64_t num_members, float* out) {
    const Lines l{logits, stride, lines, scales, num_lines, vocab_size};
    with_dtype(dtype, [&](auto t) {
        for (int64_t i = 0; i < num_members; i++) {
            f32x16 values[GROUP_VECTORS];
            l.load_group<decltype(t)>(members[i], groups[i], values);
            std::memcpy(out + i * GROUP_SIZE, values, sizeof values);
        }
    });
}

// The most probable token of each position with temperature 0: to sampled [num_positions] and, if it is to be
// appended, to the row's token_ids at num_tokens, which grows by one. Where there is NaN, sampled is -1 and the row
// gets token 0. Positions without a row (-1) get 0, others -1: they are to be drawn. maxima [num_positions, G] is
// overwritten.
void pagewire_sample_greedy(int dtype, const void* logits, int64_t stride, int64_t num_positions, int64_t vocab_size,
                            const int32_t* rows, const float* temperature, int32_t* token_ids, int64_t token_ids_stride,
                            int64_t* num_tokens, int append, float* maxima, int64_t* sampled, int threads) {
    std::vector<int64_t> greedy;
    for (int64_t i = 0; i < num_positions; i++) {
        const bool is_random = rows[i] >= 0 && temperature[rows[i]] > 0;
        sampled[i] = is_random ? -1 : 0;
        if (rows[i] >= 0 && !is_random) greedy.push_back(i);
    }
    const std::vector<float> scales(greedy.size(), 1.0f);
    const Lines l{logits, stride, greedy.data(), scales.data(), (int64_t)greedy.size(), vocab_size};
    with_dtype(dtype, [&](auto t) {
        group_maxima<decltype(t)>(l, maxima, threads);
        for (int64_t line = 0; line < l.num_lines; line++) {
            const int64_t group = argmax(maxima + line * l.num_groups(), l.num_groups());
            alignas(64) f32x16 values[GROUP_VECTORS];
            l.load_group<decltype(t)>(line, group, values);
            const int64_t token = group * GROUP_SIZE + argmax((const float*)values, GROUP_SIZE);
            const float maximum = maxima[line * l.num_groups() + group];
            const bool is_broken = maximum != maximum;
            const int32_t row = rows[greedy[line]];
            sampled[greedy[line]] = is_broken ? -1 : token;
            if (append) token_ids[row * token_ids_stride + num_tokens[row]++] = is_broken ? 0 : (int32_t)token;
        }
    });
}
PAGEWIRE_REPLAYABLE(sample_greedy)
}
