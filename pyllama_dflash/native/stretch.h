// A row of neighbouring sequences.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pld {

struct Stretch {
    int32_t first;
    int32_t last;

    int32_t size() const { return last - first + 1; }
};

// Sequences in between that nobody asked for, and that are run in vain because another launch would cost as much.
constexpr int32_t MOST_IN_VAIN = 4;

// The smallest power of two of sequences that has these, starting at a multiple of itself: as sequences come and go, there are few
// such stretches, and so few graphs.
inline Stretch aligned(Stretch s, int32_t n_seqs) {
    int32_t size = 1;
    while (s.first / size != s.last / size) {
        size *= 2;
    }
    const auto first = s.first / size * size;
    return {first, std::min(first + size, n_seqs) - 1};
}

}  // namespace pld
