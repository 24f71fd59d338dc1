#include "draft_graphs.h"

#include "error.h"

#include <algorithm>

namespace pld {

namespace {

std::vector<const void *> places_of(const std::vector<const ggml_tensor *> & features) {
    std::vector<const void *> out;
    for (const auto * f : features) {
        out.insert(out.end(), {f->buffer, f->data});
    }
    return out;
}

}  // namespace

DraftGraphs::DraftGraphs(ggml_backend_t backend, bool dry_run, size_t most, Build build)
    : backend_(backend),
      dry_run_(dry_run),
      most_(most),
      build_(std::move(build)),
      allocator_(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend))) {}

void DraftGraphs::reserve(const DraftShape & largest) {
    const auto g = build_(largest);
    for (int32_t i = 0; i < g.n_nodes(); ++i) {
        const auto * node = ggml_graph_node(g.graph, i);
        if (!ggml_backend_supports_op(backend_, node)) {
            throw Unsupported(format("%s does not compute %s of %s", ggml_backend_name(backend_), ggml_op_desc(node),
                                     node->src[0] ? ggml_type_name(node->src[0]->type) : "nothing"));
        }
    }
    if (dry_run_) {
        size_t size = 0;
        ggml_gallocr_reserve_n_size(allocator_.get(), g.graph, nullptr, nullptr, &size);
        n_measured_ = std::max(n_measured_, size);
        return;
    }
    require(ggml_gallocr_reserve(allocator_.get(), g.graph), PLD_E_MEMORY, "no memory for the draft's compute buffer");
}

const DraftGraph & DraftGraphs::get(const DraftShape & shape) {
    const auto places = places_of(shape.features);
    const auto it     = std::find_if(kept_.begin(), kept_.end(),
                                     [&](const Kept & k) { return k.rows == shape.rows && k.places == places; });
    if (it != kept_.end()) {
        ++hits_;
        ++it->n_hits;
        kept_.splice(kept_.begin(), kept_, it);
        return kept_.front().graph;
    }

    ++misses_;
    auto       graph  = build_(shape);
    const auto before = n_bytes();
    const bool allocated = ggml_gallocr_alloc_graph(allocator_.get(), graph.graph);
    if (!allocated || n_bytes() != before) {
        kept_.clear();  // they lie in the buffer that was given up
    }
    require(allocated, PLD_E_MEMORY, "no memory for the draft's compute buffer");
    kept_.push_front({shape.rows, places, std::move(graph), 0});
    if (kept_.size() > most_) {
        kept_.pop_back();
    }
    return kept_.front().graph;
}

void DraftGraphs::list(std::vector<pld_graph> & out) const {
    for (const auto & k : kept_) {
        out.push_back({1, k.rows.blocks(), k.rows.n_rows, k.n_hits, 0});
    }
}

}  // namespace pld
