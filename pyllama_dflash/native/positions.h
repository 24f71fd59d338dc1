// Which positions of a sequence the caches of a memory hold: what llama.cpp reads back from bytes it takes as it is.
#pragma once

#include "llama.h"

#include <cstdint>

namespace pld {

// Throws Error(PLD_E_ARGUMENT) unless each of the target's K/V caches holds positions without a gap up to n_past - 1; from 0 on
// where none has a sliding window.
void require_positions(llama_memory_t memory, int32_t seq, int32_t n_past);

}  // namespace pld
