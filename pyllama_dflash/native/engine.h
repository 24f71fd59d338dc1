// Conversations with a target and, if there is one, its draft: prefill, draft, verify, roll back, for one sequence or for several
// in one launch. The loop over these steps is the caller's; their order is checked here.
#pragma once

#include "context.h"
#include "drafter.h"
#include "engine_params.h"
#include "model.h"
#include "rollback.h"
#include "stretch.h"

#include <memory>
#include <vector>

namespace pld {

struct Verdict {
    std::vector<int32_t> chosen;   // the target's argmax at each row
    std::vector<float>   margins;  // of each row; empty with backend argmax
    int32_t              n_accepted = 0;
};  // all empty for a prompt that goes along

// n drafted tokens of a sequence. While its prompt waits there are none, and the next rows of that go along with the others.
struct VerifyRequest {
    int32_t         seq;
    const int32_t * tokens;
    int32_t         n;
};

class Engine {
public:
    // draft may be null.
    Engine(std::shared_ptr<Model> target, std::shared_ptr<Model> draft, const pld_engine_params & params);
    ~Engine();

    pld_engine_info  info() const;
    pld_engine_state state(int32_t seq) const;
    pld_engine_memory memory() const;
    std::vector<pld_device_memory> devices() const;
    std::vector<pld_graph> graphs();

    void reset();
    void reset(int32_t seq);
    int32_t begin(int32_t seq, const int32_t * tokens, int32_t n);
    int32_t prefill(int32_t seq);
    // Requests come by ascending sequence; the anchors are the engine's. n = 0 drafts nothing.
    std::vector<Draft>   draft(std::vector<DraftRequest> requests);
    std::vector<Verdict> verify(const std::vector<VerifyRequest> & requests, bool margins);
    void logits(int32_t row, float * out) const;

    // Tokens in the cache of a sequence.
    const std::vector<int32_t> & tokens(int32_t seq) const;
    // What is kept of a sequence, as bytes: prompt tokens that wait for prefill are not, nor are the last verify's logits.
    size_t state_size(int32_t seq);
    void   state_write(int32_t seq, uint8_t * out, size_t size);
    // In place of what is kept of it. After a failure nothing is.
    void state_read(int32_t seq, const uint8_t * data, size_t size);

private:
    struct Sequence {
        // Evaluated tokens, one a position. The target's memory has more after a verify and may lack the last: see Rollback.
        std::vector<int32_t> cached;
        std::vector<int32_t> pending;  // prompt tokens that wait for prefill
        int32_t              anchor = -1;

        int32_t n_past() const { return static_cast<int32_t>(cached.size()); }
        int32_t n_pending() const { return static_cast<int32_t>(pending.size()); }
    };
    using Requests = std::vector<VerifyRequest>::const_iterator;
    // What the target takes at once: requests, by sequences of a stretch that may have more, and rows of each.
    struct Launch {
        Requests begin, end;
        Stretch  seqs;
        int32_t  width;
        bool     prompts;  // all wait: no row is an output
    };

    void    open();
    void    trial();
    void    warm_up();
    void    abandon() noexcept;
    void    run_target(bool whole);
    void    catch_up(const std::vector<int32_t> & seqs);
    void    roll_back(int32_t seq, int32_t pos);
    void    read_memories(int32_t seq, const uint8_t * data, size_t n_target, size_t n_draft, int32_t n_past);
    int32_t choose(int32_t row) const;
    bool    joins(int32_t seq, int32_t next) const;
    bool    takes_surplus(Stretch seqs, int32_t n) const;
    Launch  next_launch(const std::vector<VerifyRequest> & requests, Requests begin) const;
    int32_t prompt_width(const Launch & launch) const;
    std::vector<int32_t> seqs_of(const Launch & launch) const;
    BatchRows add_rows(int32_t seq, const VerifyRequest * r, const Launch & launch);
    Verdict   take_rows(const VerifyRequest & r, int32_t row, bool margins, BatchRows & of);
    void      run_launch(const Launch & launch, bool margins, std::vector<Verdict> & out);
    void    require_room(const Sequence & s, int32_t n) const;
    void    require_ready(int32_t seq, const char * what) const;

    Sequence &       at(int32_t seq);
    const Sequence & at(int32_t seq) const { return const_cast<Engine *>(this)->at(seq); }

    // After a failure in a batch nothing is known of the caches.
    template <typename F> auto or_reset(F && step) -> decltype(step()) {
        try {
            return step();
        } catch (...) {
            reset();
            throw;
        }
    }

    std::shared_ptr<Model>    target_;
    std::shared_ptr<Model>    draft_;
    pld_engine_params         params_;
    int32_t                   n_vocab_;
    ThreadPool                threads_;
    std::unique_ptr<Context>  ctx_;
    std::unique_ptr<Rollback> rollback_;
    std::unique_ptr<Drafter>  drafter_;  // goes before the context that it reads
    std::vector<Sequence>     seqs_;
    int32_t                   n_rows_       = 0;  // of the last verify, whose results can be read
    int64_t                   n_prefilled_  = 0;
    int64_t                   n_trial_rows_ = 0;  // injected while opening
};

}  // namespace pld
