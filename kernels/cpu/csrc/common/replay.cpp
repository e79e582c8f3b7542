// Makes recorded calls one after the other.

#include "common/replay.h"

extern "C" {

struct RecordedCall {
    replay::Function function;
    const uint64_t* slots;
};

void pagewire_replay(const RecordedCall* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].slots);
}

void pagewire_zero(void* data, int64_t size) { std::memset(data, 0, size); }
PAGEWIRE_REPLAYABLE(zero)
}
