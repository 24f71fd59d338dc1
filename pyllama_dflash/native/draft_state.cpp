#include "draft_state.h"

#include "error.h"

#include <cstring>

namespace pld {

namespace {

constexpr uint32_t MAGIC = 0x44444c50, VERSION = 2;  // "PLDD"

}  // namespace

void write_draft_state(uint8_t * out, DraftState like, size_t n_bytes) {
    like.magic   = MAGIC;
    like.version = VERSION;
    like.n_bytes = n_bytes;
    std::memcpy(out, &like, sizeof(like));
}

DraftState read_draft_state(const uint8_t * data, size_t size, const DraftState & like, int32_t n_ctx, int32_t window) {
    DraftState s = {};
    require(size >= sizeof(s), PLD_E_ARGUMENT, format("%zu bytes are no state of a draft; it has %zu and more", size, sizeof(s)));
    std::memcpy(&s, data, sizeof(s));
    require(s.magic == MAGIC, PLD_E_ARGUMENT, "this is no state of a draft");
    require(s.version == VERSION, PLD_E_ARGUMENT,
            format("the draft's state has version %u and this library reads version %u; evaluate the prompt again", s.version, VERSION));
    require(s.n_bytes == size - sizeof(s), PLD_E_ARGUMENT, "the draft's state is damaged: its length is wrong");
    require(s.fused == like.fused, PLD_E_ARGUMENT,
            format("the draft's state was written with fused_draft=%d; open with that", s.fused));
    require(s.type_k == like.type_k && s.type_v == like.type_v, PLD_E_ARGUMENT,
            "the draft's state was written with other types of cache; open with the same type_k_draft and type_v_draft");
    require(s.kind == like.kind && s.n_layer == like.n_layer && s.n_embd_k == like.n_embd_k && s.n_embd_v == like.n_embd_v,
            PLD_E_ARGUMENT, "the state is another draft's: their layers differ");
    require(s.low >= 0 && s.low <= s.n_past, PLD_E_ARGUMENT, "the draft's state is damaged: its positions make no sense");
    require(s.n_past <= n_ctx, PLD_E_ARGUMENT,
            format("the draft's state has %d positions and n_ctx is %d; raise n_ctx", s.n_past, n_ctx));
    require(positions_kept(s.n_past, s.low, window) == s.n_past, PLD_E_ARGUMENT,
            format("the draft's state has the last %d of %d positions; open with n_ctx_draft=%d, or evaluate the prompt again",
                   s.n_past - s.low, s.n_past, s.n_past - s.low));
    return s;
}

int32_t positions_kept(int32_t pos, int32_t low, int32_t window) {
    const auto first = std::max(0, pos - window);
    return pos - std::max(low, first) >= (pos - first + 1) / 2 ? pos : 0;
}

}  // namespace pld
