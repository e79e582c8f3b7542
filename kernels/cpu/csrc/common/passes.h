// Tokens in passes, and what products with quantized inputs have in common.
#pragma once

#include <algorithm>
#include <cstdint>

constexpr int64_t SERIAL_INPUTS = 32 * 1024;  // below which other threads are not woken
constexpr float SMALLEST_PEAK = 1e-30f;       // smaller numbers count as zeros: what is divided by a peak stays finite

// Tokens that are multiplied together, `per_pass` at a time, the last ones perhaps fewer.
struct Passes {
    int64_t tokens, per_pass;

    Passes(int64_t tokens, int64_t most) : tokens(tokens) {
        const int64_t passes = (tokens + most - 1) / most;
        per_pass = (tokens + passes - 1) / passes;  // 9 tokens are 5 + 4, not 8 + 1
    }
    int64_t number() const { return (tokens + per_pass - 1) / per_pass; }
    int64_t first(int64_t token) const { return token / per_pass * per_pass; }  // of the token's pass
    int count(int64_t first) const { return (int)std::min(per_pass, tokens - first); }
};
