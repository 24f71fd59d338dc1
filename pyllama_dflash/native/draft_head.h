// A head of the target's that a draft shares, made again where the draft computes: all of it, or the rows of a few tokens.
#pragma once

#include "footprint.h"
#include "ggml-backend.h"
#include "header.h"

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

struct llama_model;

namespace pld {

struct DraftHead {
    ggml_context_ptr ctx;
    Allocation       memory;
    ggml_tensor *    tensor = nullptr;
};

// The whole head on another device; its buffer must be one that gives its rows back. Throws Error(PLD_E_MEMORY).
DraftHead copy_head(const ggml_tensor * head, ggml_backend_dev_t device, bool dry_run);

// The rows of these tokens, in this order, in the layout that the device multiplies fastest. They are read from the target's
// file, for a head that was laid out for a CPU does not give its rows back. Rows of zeros may follow, where a layout takes
// whole groups of rows only. repack: layouts for this CPU are allowed. The tensor is null if the file does not hold the head.
// Throws Error(PLD_E_MEMORY), Error(PLD_E_LOAD) if the file can't be read any more.
DraftHead rows_of_head(const ggml_tensor * head, const std::vector<int32_t> & tokens, const Header & target,
                       ggml_backend_dev_t device, bool repack, bool dry_run);

// The copies that a draft's engines use: made once for a target while an engine has it. Safe to use from several threads.
class DraftHeads {
public:
    // rows: of some tokens. What make returns is kept if it has a tensor; null if it has none.
    std::shared_ptr<const DraftHead> get(const llama_model * target, bool rows, const std::function<DraftHead()> & make);

private:
    struct Kept {
        const llama_model *            target;  // not closed before the engines that hold its head
        bool                           rows;
        std::weak_ptr<const DraftHead> head;
    };

    std::mutex        mutex_;
    std::vector<Kept> kept_;
};

}  // namespace pld
