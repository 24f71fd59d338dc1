// The options of an engine: checked against its models, and as llama.cpp takes them.
#pragma once

#include "header.h"
#include "llama.h"
#include "pairing.h"

#include <string>

namespace pld {

// A K/V cache type by name, or -1.
int32_t kv_type(const std::string & name);

// The parameters with defaults filled in. Throws Error if the models don't belong together or a value is out of range. draft
// may be null.
pld_engine_params resolve(const Header & target, const Header * draft, pld_engine_params params);

// Check what a draft's K/V cache takes: sizes and its types. Throws Error(PLD_E_ARGUMENT).
void check_draft_cache(const Header & draft, const pld_engine_params & params);
// Positions of a sequence that a draft's cache has room for before a block: n_ctx_draft, or all.
int32_t draft_window(const pld_engine_params & params);
// Those of them that a draft of that trained context sees: unless n_ctx_draft says how many, no more than it has learned to look at.
int32_t draft_sight(const pld_engine_params & params, const llama_model & draft);

// Whether launches take the sequences at their ends, too, that complete a stretch: of a small target, for a row costs the others more.
bool fills_ends(const pld_engine_params & params, const llama_model & target);

// Of resolved parameters. mode: how the target's memory rolls back.
llama_context_params target_context(const pld_engine_params & params, pld_rollback mode);
// Feature rows that llama.cpp's own context for a draft takes at once.
int32_t              draft_ubatch(const DraftFacts & facts);
// That context. target: whose embeddings and head it may share.
llama_context_params draft_context(const DraftFacts & facts, llama_context * target, const pld_engine_params & params);

}  // namespace pld
