// Attention of every token to the tokens of its own request, without a cache: what encoders do.
//
// Threads take blocks of query tokens of one head. Keys and values are rearranged into tiles for matrix products, and
// the rows walk them with the online softmax of flash attention. Blocks and tiles begin at fixed places, so that the
// result of a request never depends on its neighbours in the batch.
#include "attention/attention_rows.h"
#include "common/pack.h"
#include "common/parallel.h"
#include "common/replay.h"

namespace {

constexpr int KEY_TILE = 256;     // keys per softmax step
constexpr int ROW_TILE = 32;      // rows that go through a tile of keys together: their scores stay in L1
constexpr int QUERY_BLOCK = 128;  // most tokens of a block
constexpr int64_t SERIAL_WORK = 100'000;  // multiply-adds below which another thread gains nothing

struct Heads {
    const char* data;
    int64_t token_stride, head_stride;  // elements

    template <class T>
    const T* row(int token, int head) const {
        return (const T*)data + token * token_stride + head * head_stride;
    }
};

struct Encoder {
    Heads query, key, value;
    char* output;
    int num_heads, num_kv_heads, head_dim;
    float scale;
    int window;

    int padded_dim() const { return (head_dim + LANES - 1) / LANES * LANES; }
};

// Tokens begin .. end of a request of `length` tokens, the first of which is `start` in the batch.
struct QueryBlock {
    int start, length, begin, end;
};

template <class T>
class Worker {
   public:
    explicit Worker(const Encoder& e) : e_(e), dim_(e.padded_dim()) {
        static thread_local Scratch scratch;
        const int sizes[] = {QUERY_BLOCK * dim_,  dim_ * KEY_TILE, KEY_TILE * dim_, ROW_TILE * KEY_TILE,
                             ROW_TILE * KEY_TILE, QUERY_BLOCK * dim_, QUERY_BLOCK, QUERY_BLOCK, ROW_TILE};
        size_t total = 0;
        for (int size : sizes) total += size;
        scratch.reserve(total * sizeof(float));
        float* next = (float*)scratch.data();
        float** const targets[] = {&query_, &keys_, &values_, &scores_, &weights_,
                                   &acc_, &maximum_, &denominator_, &correction_};
        for (size_t i = 0; i < std::size(sizes); next += sizes[i++]) *targets[i] = next;
    }

    void run(const QueryBlock& block, int head) {
        const int rows = block.end - block.begin;
        for (int r = 0; r < rows; r++) {
            const T* source = e_.query.row<T>(block.start + block.begin + r, head);
            for (int d = 0; d < dim_; d += LANES)
                store(query_ + r * dim_ + d, load(source + d, std::min(LANES, e_.head_dim - d)));
        }
        std::fill(acc_, acc_ + rows * dim_, 0.0f);
        std::fill(maximum_, maximum_ + QUERY_BLOCK, LOWEST);
        std::fill(denominator_, denominator_ + QUERY_BLOCK, 0.0f);
        const int first = e_.window > 0 ? std::max(0, block.begin - e_.window) : 0;
        const int last = e_.window > 0 ? std::min(block.length, block.end + e_.window) : block.length;
        for (int from = first; from < last; from += KEY_TILE) {
            const int count = std::min(KEY_TILE, last - from);
            pack(block.start + from, count, head / (e_.num_heads / e_.num_kv_heads));
            for (int r = 0; r < rows; r += ROW_TILE)
                step(r, std::min(ROW_TILE, rows - r), block.begin - from, count);
        }
        for (int r = 0; r < rows; r++) {
            const int64_t token = block.start + block.begin + r;
            T* target = (T*)e_.output + (token * e_.num_heads + head) * e_.head_dim;
            for (int d = 0; d < e_.head_dim; d += LANES)
                store(target + d, load(acc_ + r * dim_ + d) * (1 / denominator_[r]), e_.head_dim - d);
        }
    }

   private:
    // `count` keys from the batch's token `first` on, and zeros up to a whole vector.
    void pack(int first, int count, int kv_head) {
        alignas(64) static constexpr T ZEROS[256] = {};
        const T* keys[KEY_TILE];
        const T* values[KEY_TILE];
        int i = 0;
        for (; i < count; i++) {
            keys[i] = e_.key.row<T>(first + i, kv_head);
            values[i] = e_.value.row<T>(first + i, kv_head);
        }
        for (; i % LANES; i++) keys[i] = values[i] = ZEROS;
        pack_keys<Fp32>(keys, i, e_.head_dim, keys_, KEY_TILE);
        pack_values<Fp32>(values, i, e_.head_dim, values_, dim_);
    }

    // Rows first .. first + count of the block with the packed keys; the block's first token stands at `position`,
    // counted from the first of them.
    void step(int first, int count, int position, int num_keys) {
        const int columns = (num_keys + LANES - 1) / LANES;
        multiply<Fp32>(query_ + first * dim_, dim_, keys_, KEY_TILE, e_.head_dim, scores_, KEY_TILE, nullptr, count,
                       columns);
        const Scoring scoring = {e_.scale, 0.0f};
        alignas(64) float maximum[ROW_TILE] = {};
        for (int r = 0; r < count; r++) {
            const int at = position + first + r;
            const int begin = e_.window > 0 ? at - e_.window : 0;
            const int end = e_.window > 0 ? std::min(num_keys, at + e_.window + 1) : num_keys;
            maximum[r] = finish_scores(scores_ + r * KEY_TILE, columns, begin, end, scoring);
        }
        for (int r = 0; r < count; r += LANES) {
            const f32x16 before = load(maximum_ + first + r), after = max(before, load(maximum + r));
            const f32x16 correction = exp2(before - after);
            store(maximum_ + first + r, after);
            store(correction_ + r, correction);
            store(denominator_ + first + r, load(denominator_ + first + r) * correction);
        }
        for (int r = 0; r < count; r++)
            denominator_[first + r] += exponentiate<Fp32>(scores_ + r * KEY_TILE, columns, scoring.factor(),
                                                          maximum_[first + r], weights_ + r * KEY_TILE);
        multiply<Fp32>(weights_, KEY_TILE, values_, dim_, columns * LANES, acc_ + first * dim_, dim_, correction_,
                       count, dim_ / LANES);
    }

    const Encoder& e_;
    const int dim_;
    float *query_, *keys_, *values_, *scores_, *weights_, *acc_, *maximum_, *denominator_, *correction_;
};

}  // namespace

// query and output [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim]; window 0 = none
extern "C" void pagewire_encoder_attention(int dtype, const void* query, const void* key, const void* value,
                                           void* output, const int32_t* query_start, int64_t query_stride,
                                           int64_t query_head_stride, int64_t key_stride, int64_t key_head_stride,
                                           int64_t value_stride, int64_t value_head_stride, int num_requests,
                                           int num_heads, int num_kv_heads, int head_dim, float scale, int window,
                                           int threads) {
    const Encoder e = {{(const char*)query, query_stride, query_head_stride},
                       {(const char*)key, key_stride, key_head_stride},
                       {(const char*)value, value_stride, value_head_stride},
                       (char*)output, num_heads, num_kv_heads, head_dim, scale, window};
    std::vector<QueryBlock> blocks;
    int64_t work = 0;
    for (int b = 0; b < num_requests; b++) {
        const int start = query_start[b], length = query_start[b + 1] - start;
        work += (int64_t)length * length * num_heads * head_dim;
        for (int begin = 0; begin < length; begin += QUERY_BLOCK)
            blocks.push_back({start, length, begin, std::min(length, begin + QUERY_BLOCK)});
    }
    if (work < SERIAL_WORK) threads = 1;
    with_dtype(dtype, [&](auto t) {
        parallel::for_each(threads, (int64_t)blocks.size() * num_heads, [&](int64_t i) {
            Worker<decltype(t)>(e).run(blocks[i / num_heads], (int)(i % num_heads));
        });
    });
}

PAGEWIRE_REPLAYABLE(encoder_attention)
