// What decides between ways to compute besides the instructions that a processor has.
#pragma once

// How bf16 is multiplied: FASTEST is what fits the machine, with its matrix unit if it has one; tests ask for the others.
enum Bf16Form : int { FASTEST = 0, PAIRS = 1, FLOATS = 2 };
inline Bf16Form bf16_form = FASTEST;

// Whether products of bf16 are faster as products of floats than as AVX512-BF16's dot products of pairs. Measured: an
// Intel core (Emerald Rapids; with the matrix unit, which beats both, it does not matter) begins a dot product every other
// cycle, but two vectors of float products in each. AMD's cores begin as many of one as of the other.
inline bool floats_beat_bf16_pairs() {
#if defined(__AVX512BF16__)
    static const bool is_intel = __builtin_cpu_is("intel");
    return bf16_form == FASTEST ? is_intel : bf16_form == FLOATS;
#else
    return true;
#endif
}
