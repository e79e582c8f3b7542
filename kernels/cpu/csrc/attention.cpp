// Attention over a paged KV cache: cut into tiles (attention_plan.h), which threads work off (attention_run.h).

#include "attention_run.h"
#include "replay.h"

constexpr int64_t SERIAL_WORK = 100'000;  // multiply-adds below which another thread gains nothing

extern "C" void pagewire_paged_attention(int query_dtype, int kv_dtype, const void* query, const void* kv_cache,
                                         void* output, const int32_t* block_table, const int32_t* query_start,
                                         const int32_t* seq_lens, const float* kv_scales, int64_t query_stride, int64_t query_head_stride, int64_t block_stride,
                                         int64_t table_stride, int num_requests, int num_heads, int num_kv_heads,
                                         int head_dim, int block_size, float scale, int window, float soft_cap,
                                         int threads) {
    const Problem p = {(const char*)query, (const char*)kv_cache, (char*)output, block_table, query_start, seq_lens,
                       kv_scales, query_stride, query_head_stride, block_stride, table_stride,
                       num_requests, num_heads, num_kv_heads, head_dim, block_size, scale, soft_cap, window,
                       query_dtype};
    const Plan plan = Planner(p, threads).plan();
    if (plan.tiles.empty()) return;
    if (plan.work < SERIAL_WORK) threads = 1;
    if (kv_dtype == FLOAT8_E4M3) return run_plan_fp8(p, plan, threads);
#if defined(__AVX512BF16__)
    if (query_dtype == BFLOAT16 && kv_dtype == BFLOAT16) return run_plan<Bf16Pair, bf16>(p, plan, threads);
#endif
    with_dtype(kv_dtype, [&](auto t) { run_plan<Fp32, decltype(t)>(p, plan, threads); });
}

PAGEWIRE_REPLAYABLE(paged_attention)
