// How a model is loaded, and onto which devices.
#pragma once

#include "api.h"
#include "llama.h"

#include <vector>

namespace pld {

class LoadParams {
public:
    // Throws Error(PLD_E_ARGUMENT) for what these devices can't do.
    explicit LoadParams(const pld_model_params & params);
    LoadParams(const LoadParams &) = delete;
    LoadParams & operator=(const LoadParams &) = delete;

    // Points into this object, which must live as long as the model.
    const llama_model_params & llama() const { return llama_; }

    // To measure what a load would take: nothing is allocated.
    llama_model_params dry_run() const;

private:
    void choose_devices(const pld_model_params & params);
    void check_split(const pld_model_params & params) const;

    std::vector<ggml_backend_dev_t> devices_;  // those that layers go to
    std::vector<ggml_backend_dev_t> list_;     // the same for llama.cpp, ended by null
    std::vector<float>              split_;    // one for each device that llama.cpp can have
    llama_model_params              llama_;
};

}  // namespace pld
