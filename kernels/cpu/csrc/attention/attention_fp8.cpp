// Attention over pages in fp8.

#include "attention/attention_run.h"

void run_plan_fp8(const Problem& p, const Plan& plan, int threads) {
#if defined(__AVX512BF16__)
    if (p.output_dtype == BFLOAT16) return run_plan<Bf16Pair, e4m3>(p, plan, threads);
#endif
    run_plan<Fp32, e4m3>(p, plan, threads);
}
