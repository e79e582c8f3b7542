// Calls that are written down as numbers, to be made again without Python: `recording.py`.
//
// A call is a function of one argument: an array with a slot of 8 bytes per argument of the kernel, which has the
// argument's bytes at its beginning.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace replay {

using Function = void (*)(const uint64_t* slots);

template <auto KERNEL>
struct Call;

template <class... Arguments, void (*KERNEL)(Arguments...)>
struct Call<KERNEL> {
    static void make(const uint64_t* slots) { spread(slots, std::index_sequence_for<Arguments...>{}); }

   private:
    template <class T>
    static T argument(const uint64_t& slot) {
        T value;
        std::memcpy(&value, &slot, sizeof value);
        return value;
    }
    template <size_t... INDICES>
    static void spread(const uint64_t* slots, std::index_sequence<INDICES...>) {
        KERNEL(argument<Arguments>(slots[INDICES])...);
    }
};

}  // namespace replay

// Stands behind a kernel's definition: it may be called in a recorded step.
#define PAGEWIRE_REPLAYABLE(name) \
    extern "C" void pagewire_##name##_again(const uint64_t* slots) { replay::Call<&pagewire_##name>::make(slots); }
