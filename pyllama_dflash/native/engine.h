// One conversation with a target and, if there is one, its draft: prefill, draft, verify, roll back. The loop over these steps
// is the caller's; their order is checked here.
#pragma once

#include "context.h"
#include "drafter.h"
#include "engine_params.h"
#include "model.h"

#include <memory>
#include <vector>

namespace pld {

struct Verdict {
    std::vector<int32_t> chosen;   // the target's argmax at each row
    std::vector<float>   margins;  // of each row; empty with backend argmax
    int32_t              n_accepted = 0;
};

class Engine {
public:
    // draft may be null.
    Engine(std::shared_ptr<Model> target, std::shared_ptr<Model> draft, const pld_engine_params & params);
    ~Engine();

    pld_engine_info  info() const;
    pld_engine_state state() const;
    pld_engine_memory memory() const;
    std::vector<pld_device_memory> devices() const;
    std::vector<pld_graph> graphs();

    void    reset();
    int32_t begin(const int32_t * tokens, int32_t n);
    int32_t prefill();
    Draft   draft(int32_t n);
    Verdict verify(const int32_t * tokens, int32_t n, bool margins);
    void    logits(int32_t row, float * out) const;

private:
    // What belongs to one sequence.
    struct Sequence {
        std::vector<int32_t> cached;   // tokens in the target's cache, one a position
        std::vector<int32_t> pending;  // prompt tokens that wait for prefill
        int32_t              anchor = -1;
    };

    void    open();
    void    trial();
    void    warm_up();
    void    abandon() noexcept;
    void    run_target();
    void    roll_back(int32_t pos);
    int32_t choose(int32_t row) const;
    int32_t n_past() const { return static_cast<int32_t>(seq_.cached.size()); }
    void    require_ready(const char * what) const;

    template <typename F> auto or_reset(F && step) -> decltype(step());

    std::shared_ptr<Model>   target_;
    std::shared_ptr<Model>   draft_;
    pld_engine_params        params_;
    int32_t                  n_vocab_;
    ThreadPool               threads_;
    std::unique_ptr<Context> ctx_;
    std::unique_ptr<Drafter> drafter_;  // goes before the context that it reads
    Sequence                 seq_;
    int32_t                  n_rows_       = 0;  // of the last verify, whose results can be read
    int64_t                  n_prefilled_  = 0;
    int64_t                  n_trial_rows_ = 0;  // injected while opening
};

}  // namespace pld
