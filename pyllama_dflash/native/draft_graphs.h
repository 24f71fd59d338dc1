// The draft graphs in use, each made once, and the memory that they compute in.
#pragma once

#include "draft_graph.h"
#include "api.h"

#include <functional>
#include <list>
#include <vector>

namespace pld {

// What makes one graph differ from another.
struct DraftShape {
    DraftRows                        rows;
    std::vector<const ggml_tensor *> features;  // of the target: read while a graph is built, compared by where they lie
};

class DraftGraphs {
public:
    using Build = std::function<DraftGraph(const DraftShape &)>;

    // most: graphs that are kept.
    DraftGraphs(ggml_backend_t backend, bool dry_run, size_t most, Build build);

    // Make room for graphs as large as this one: what is built later then never moves what was built before.
    // Throws Unsupported for a node that the backend does not compute, Error(PLD_E_MEMORY).
    void reserve(const DraftShape & largest);

    // The graph of a shape, ready to run. The reference is good until the next call. Throws Error(PLD_E_MEMORY).
    const DraftGraph & get(const DraftShape & shape);

    // Append those that are kept, the last used first.
    void list(std::vector<pld_graph> & out) const;

    int32_t size() const { return static_cast<int32_t>(kept_.size()); }
    int32_t n_nodes() const { return kept_.empty() ? 0 : kept_.front().graph.n_nodes(); }  // of the one used last
    int64_t hits() const { return hits_; }
    int64_t misses() const { return misses_; }
    size_t  n_bytes() const { return dry_run_ ? n_measured_ : ggml_gallocr_get_buffer_size(allocator_.get(), 0); }

private:
    struct Kept {
        DraftRows                 rows;
        std::vector<const void *> places;
        DraftGraph                graph;
        int64_t                   n_hits;
    };

    ggml_backend_t   backend_;
    bool             dry_run_;
    size_t           most_;
    Build            build_;
    ggml_gallocr_ptr allocator_;  // one for all: they never run at once
    std::list<Kept>  kept_;       // the last used first
    size_t           n_measured_ = 0;  // what a dry run would have reserved
    int64_t          hits_   = 0;
    int64_t          misses_ = 0;
};

}  // namespace pld
