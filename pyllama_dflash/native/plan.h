// What opening a pair would take, found without reading weights or allocating: llama.cpp's dry runs, and ours for the draft.
#pragma once

#include "api.h"

#include <string>
#include <vector>

namespace pld {

struct Plan {
    int32_t                        n_ctx = 0;  // with the default filled in
    std::vector<pld_device_memory> rows;
};

struct PlanFile {
    std::string              path;
    const pld_model_params & params;
};

// draft may be null. params null: the weights alone. Throws Error as opening would.
Plan plan(const PlanFile & target, const PlanFile * draft, const pld_engine_params * params);
// Of a draft alone: its weights and, where params give an n_ctx, the K/V cache of our own graph.
Plan plan_draft(const PlanFile & draft, const pld_engine_params * params);

}  // namespace pld
