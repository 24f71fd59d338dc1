// What a draft file is, and whether it belongs to a target. Headers suffice: no weights are read.
#pragma once

#include "api.h"
#include "header.h"

#include <string>
#include <vector>

namespace pld {

struct DraftFacts {
    pld_kind             kind = PLD_KIND_TARGET;
    std::string          refusal;  // why a draft of PLD_KIND_OTHER is not run
    int32_t              block_size = 0;
    std::vector<int32_t> target_layers;  // "input of layer id" of the target, in the order the draft reads them
    int32_t              mask_token     = -1;
    int32_t              selector_rank  = 0;
    int32_t              selector_top_k = 0;
    bool                 causal         = false;
    bool                 own_embd       = false;
    bool                 own_head       = false;
    int32_t              n_vocab_draft  = 0;
    std::vector<int32_t> draft_vocab;  // tokens whose rows of the target's head suffice for drafts, in their order; empty: all
};

// Candidates of a drafted position.
int32_t candidates_of(const DraftFacts & facts, int32_t n_vocab);

// Throws Error(PLD_E_LOAD), naming the key or tensor, for a DFlash draft that is damaged or incomplete.
DraftFacts draft_facts(const Header & header);

// A sentence, with the fix, on one aspect in which the two do not agree; empty if they do. Any two files can be compared.
std::string mismatch(const Header & target, const Header & draft, pld_aspect aspect);

// Throws Error(PLD_E_PAIR) with the first reason why the two do not belong together, or why a file is no target.
void check_pair(const Header & target, const Header & draft);
void check_target(const Header & target);

}  // namespace pld
