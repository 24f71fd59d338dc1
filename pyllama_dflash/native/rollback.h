// How a target's memory takes back tokens that were rejected. Attention's caches are cut where one likes. A recurrent state holds
// all tokens at once: llama.cpp keeps a snapshot after each of the last rows where a model's graph can write them; elsewhere the
// state before the rows is kept, and those that stay are run again.
#pragma once

#include "context.h"

#include <vector>

class llama_memory_recurrent;

namespace pld {

// What a model of that kind needs.
pld_rollback rollback_mode(const llama_model & model);

class Rollback {
public:
    // ctx: made with target_context() for that mode. n_max: most rows that are taken back. Throws Error(PLD_E_INTERNAL) if the
    // memory is not made for it.
    Rollback(Context & ctx, pld_rollback mode, int32_t n_seq_max, int32_t n_max);

    pld_rollback mode() const { return mode_; }
    // Positions [0, n_run) of a sequence are in the memory.
    int32_t n_run(int32_t seq) const { return at(seq).end; }

    // Rows [pos, pos + n) of a sequence run next, after what the memory holds: all but the first of them can be taken back until
    // something else runs, and that one, too, where the cache is cut.
    void keep(int32_t seq, int32_t pos, int32_t n);
    // Positions up to `end` were run, and none of them is to be taken back.
    void ran(int32_t seq, int32_t end) { at(seq) = {end, end}; }
    // Whether a sequence of n_run or more tokens can be shortened to `pos`, now or in settle().
    bool rewind(int32_t seq, int32_t pos);
    // Drop what lies after the first `pos` positions, before anything else runs. Fewer may be left: run those again.
    void settle(int32_t seq, int32_t pos);

    void forget(int32_t seq);
    void forget_all();

private:
    // The memory holds [0, end); rows from base on can be taken back.
    struct Rows {
        int32_t base = 0;
        int32_t end  = 0;
    };

    Rows &       at(int32_t seq) { return rows_[static_cast<size_t>(seq)]; }
    const Rows & at(int32_t seq) const { return rows_[static_cast<size_t>(seq)]; }
    int32_t      shadow(int32_t seq) const { return static_cast<int32_t>(rows_.size()) + seq; }
    void         drop_kept(int32_t seq);

    Context &                ctx_;
    pld_rollback             mode_;
    llama_memory_recurrent * states_;  // with checkpoints: those of the recurrent layers
    std::vector<Rows>        rows_;
};

}  // namespace pld
