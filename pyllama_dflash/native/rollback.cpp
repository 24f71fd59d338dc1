#include "rollback.h"

#include "error.h"
#include "llama-arch.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

namespace pld {

namespace {

// The part of a memory that is recurrent; null if there is none.
llama_memory_recurrent * recurrent_part(llama_memory_t memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return dynamic_cast<llama_memory_recurrent *>(memory);
}

}  // namespace

pld_rollback rollback_mode(const llama_model & model) {
    if (!llama_model_is_recurrent(&model) && !llama_model_is_hybrid(&model)) {
        return PLD_ROLLBACK_CUT;
    }
    return llm_arch_supports_rs_rollback(model.arch) ? PLD_ROLLBACK_SNAPSHOTS : PLD_ROLLBACK_CHECKPOINT;
}

Rollback::Rollback(Context & ctx, pld_rollback mode, int32_t n_seq_max, int32_t n_max)
    : ctx_(ctx),
      mode_(mode),
      states_(mode == PLD_ROLLBACK_CHECKPOINT ? recurrent_part(ctx.memory()) : nullptr),
      rows_(static_cast<size_t>(n_seq_max)) {
    require(mode != PLD_ROLLBACK_SNAPSHOTS || llama_n_rs_seq(ctx.get()) >= static_cast<uint32_t>(n_max), PLD_E_INTERNAL,
            format("the target's memory keeps %u snapshots, not %d", llama_n_rs_seq(ctx.get()), n_max));
    require(mode != PLD_ROLLBACK_CHECKPOINT || n_max == 0 || (states_ && states_->size >= 2 * rows_.size()), PLD_E_INTERNAL,
            "the target's memory has no room for a state beside each sequence's own");
}

void Rollback::keep(int32_t seq, int32_t pos, int32_t n) {
    if (n == 1 && mode_ != PLD_ROLLBACK_CUT) {
        ran(seq, pos + 1);
        return;
    }
    at(seq) = {pos, pos + n};
    if (mode_ == PLD_ROLLBACK_CHECKPOINT && pos > 0) {
        // Both refer to one state until the rows run: they read it, and write the new one to another place. Nothing is copied.
        states_->seq_cp(seq, shadow(seq), -1, -1);
    }
}

bool Rollback::rewind(int32_t seq, int32_t pos) {
    const auto & r     = at(seq);
    const bool   waits = r.base < r.end;
    // A snapshot is taken after each row, none before the first.
    if (pos >= r.base + (waits && mode_ == PLD_ROLLBACK_SNAPSHOTS ? 1 : 0)) {
        return true;
    }
    if (!ctx_.rewind(seq, pos)) {
        return false;
    }
    ran(seq, pos);
    return true;
}

void Rollback::settle(int32_t seq, int32_t pos) {
    const auto r = at(seq);
    if (r.base == r.end) {
        return;  // at most pos are held
    }
    if (r.end <= pos) {
        drop_kept(seq);
        ran(seq, r.end);
        return;
    }
    if (mode_ != PLD_ROLLBACK_CHECKPOINT) {
        require(ctx_.truncate(seq, pos), PLD_E_INTERNAL, "the target's memory could not roll back");
        ran(seq, pos);
        return;
    }
    states_->seq_rm(seq, -1, -1);
    if (r.base > 0) {
        states_->seq_cp(shadow(seq), seq, -1, -1);
    }
    drop_kept(seq);
    require(ctx_.truncate(seq, r.base), PLD_E_INTERNAL, "the target's memory could not drop the rows after its state");
    ran(seq, r.base);
}

void Rollback::drop_kept(int32_t seq) {
    if (mode_ == PLD_ROLLBACK_CHECKPOINT) {
        states_->seq_rm(shadow(seq), -1, -1);
    }
}

void Rollback::forget(int32_t seq) {
    if (at(seq).base < at(seq).end) {
        drop_kept(seq);
    }
    ctx_.forget(seq);
    ran(seq, 0);
}

void Rollback::forget_all() {
    ctx_.forget_all();
    rows_.assign(rows_.size(), {});
}

}  // namespace pld
