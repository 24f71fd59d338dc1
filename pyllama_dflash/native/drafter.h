// What an engine asks of a drafter, whichever graph it runs: it reads features of the target's layers, keeps their K/V, and
// drafts a block in one pass.
#pragma once

#include "accept.h"
#include "context.h"
#include "footprint.h"
#include "model.h"

#include <memory>
#include <vector>

namespace pld {

// What became of one sequence's rows in the target's last batch, which come together: the first n_kept of n stay.
struct BatchRows {
    int32_t seq;
    int32_t n;
    int32_t n_kept;
};

// n tokens to draft after the anchor, which stands at position n_past(seq). Requests of one call share the width of the widest,
// and what is more than asked for is left out: a draft that isn't causal sees all of its block, so its width is part of it.
struct DraftRequest {
    int32_t seq;
    int32_t anchor;
    int32_t n;
};

class Drafter {
public:
    virtual ~Drafter() = default;

    // Whether this is our own graph.
    virtual bool    fused() const        = 0;
    virtual int32_t n_candidates() const = 0;
    // Positions before a block that it sees at most.
    virtual int32_t n_ctx() const = 0;
    // Positions whose features are here: in the cache, or waiting to be written there.
    virtual int32_t n_past(int32_t seq) const = 0;
    virtual int64_t n_injected() const        = 0;
    virtual void    counters(pld_engine_memory & out) const = 0;
    virtual void    footprint(Footprint & out) const = 0;
    virtual void    graphs(std::vector<pld_graph> & out) const = 0;

    virtual void attach(const ThreadPool & pool, int32_t n_threads) = 0;
    // Give up what an assertion that failed half way through a graph left in an unknown state.
    virtual void leak() noexcept = 0;

    // The target is about to run: its next batch overwrites the features of its last one.
    virtual void release_features() = 0;
    // Take the features of the target's last batch, whose rows these are, in their order; what is kept of a sequence follows
    // what is here of it.
    virtual void add_features(const std::vector<BatchRows> & rows) = 0;
    // Write what waits into the cache.
    virtual void inject() = 0;
    // A draft for each request, n >= 1 in all of them; by ascending sequence.
    virtual std::vector<Draft> draft(const std::vector<DraftRequest> & requests) = 0;

    // Keep positions [0, pos) of a sequence, or nothing at all where the cache has lost what that needs. Returns the positions
    // kept.
    virtual int32_t truncate(int32_t seq, int32_t pos) = 0;
    virtual void    forget_all()                       = 0;

    // What is here of a sequence, as bytes for a later state_read() by a drafter of the same kind for the same draft; what waits
    // is written into the cache first. out has room for state_size() bytes.
    virtual size_t state_size(int32_t seq)                                      = 0;
    virtual void   state_write(int32_t seq, uint8_t * out)                      = 0;
    // In place of what is here of it. Throws Error(PLD_E_ARGUMENT) for what does not fit; the sequence is forgotten then.
    virtual void   state_read(int32_t seq, const uint8_t * data, size_t size) = 0;

protected:
    // Say once that a draft was cut where a candidate was invalid.
    void warn_invalid();

private:
    bool warned_ = false;
};

// What a target must be able to do for drafts, and its header does not show. Both throw Error(PLD_E_PAIR).
void require_layers(const Model & target, const Model & draft, Context & ctx);
void require_layers(const Model & target, const std::vector<int32_t> & ids, Context & ctx);

// Ids that a graph hands over as floats, -1 for what is none of n_vocab tokens.
std::vector<int32_t> token_ids(const float * ids, int32_t n, int32_t n_vocab);

// Our own graph where it supports the draft and its place, else llama.cpp's; a log line says why. Turns on the target's layer
// taps. params: those of the target's context.
std::unique_ptr<Drafter> make_drafter(std::shared_ptr<Model> model, const Model & target, Context & ctx,
                                      const pld_engine_params & params);

}  // namespace pld
