// One launch of a draft as a ggml graph: it writes the K/V of the target's rows, runs the blocks of some sequences after them, and
// picks their candidates. Any of the two parts may be left out.
#pragma once

#include "draft_cache.h"
#include "draft_inputs.h"

#include <vector>

namespace pld {

struct DraftGraph {
    ggml_context_ptr ctx;
    ggml_cgraph *    graph = nullptr;
    // F32 [2k, n_block-1, n_seqs]: candidates as floats, then their scores after the candidate picked before. Null without blocks.
    ggml_tensor * out = nullptr;

    int32_t n_nodes() const { return ggml_graph_n_nodes(graph); }
};

// features: the target's tensors, read where they lie; none without rows of the target. [n_embd, n_rows or more], or any number of
// rows where they are gathered.
DraftGraph build_draft_graph(const DraftModel & model, const DraftCache & cache, const DraftInputs & inputs, const DraftRows & rows,
                             const std::vector<const ggml_tensor *> & features, int32_t n_candidates, bool flash_attn);

}  // namespace pld
