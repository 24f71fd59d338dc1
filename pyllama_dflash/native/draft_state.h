// What a drafter keeps of a sequence, as bytes: a header that says what they fit, then the rows of its cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pld {

// A part of the file's format: a change here must raise its version. The checksum is that of the state it is a part of.
struct DraftState {
    uint32_t magic;
    uint32_t version;
    int32_t  fused;   // 1: written by our own graph's drafter, 0: by llama.cpp's
    int32_t  kind;    // of the draft
    int32_t  n_layer;
    int32_t  type_k;
    int32_t  type_v;
    int32_t  n_embd_k;  // values of a position and layer
    int32_t  n_embd_v;
    int32_t  low;     // the rows are those of positions [low, n_past)
    int32_t  n_past;
    int32_t  unused;
    uint64_t n_bytes;  // that follow
};

// Put the header before n_bytes that are in their place, right after it. like: what belongs to the drafter, low and n_past.
void write_draft_state(uint8_t * out, DraftState like, size_t n_bytes);
// The header of what a drafter like that wrote. Throws Error(PLD_E_ARGUMENT) for what it did not, or holds less
// than half of the window positions before n_past that it would see, or more than n_ctx.
DraftState read_draft_state(const uint8_t * data, size_t size, const DraftState & like, int32_t n_ctx, int32_t window);

// Positions that stay of [0, pos) where the cache holds those from low on: all, or none if of the window positions before pos
// that a draft sees fewer than half are left.
int32_t positions_kept(int32_t pos, int32_t low, int32_t window);

}  // namespace pld
