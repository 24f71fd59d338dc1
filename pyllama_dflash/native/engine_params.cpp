#include "engine_params.h"

#include "error.h"

#include <algorithm>

namespace pld {

namespace {

constexpr int32_t MAX_CTX = 1 << 28, MAX_SEQ = 64;

// The types that llama.cpp takes for a cache.
constexpr ggml_type KV_TYPES[] = {
    GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,   GGML_TYPE_Q4_0,
    GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL,
};

bool is_kv_type(int32_t type) {
    return std::find(std::begin(KV_TYPES), std::end(KV_TYPES), type) != std::end(KV_TYPES);
}

void check_type(int32_t type) {
    require(is_kv_type(type), PLD_E_ARGUMENT, format("%d is no K/V cache type", type));
}

void check_range(const char * option, int32_t value, int32_t most) {
    require(value >= 1 && value <= most, PLD_E_ARGUMENT,
            format("%s=%d is out of range, 1 to %d; %s %s", option, value, most, value < 1 ? "raise" : "lower", option));
}

void check_sizes(const pld_engine_params & p) {
    check_range("n_ctx", p.n_ctx, MAX_CTX);
    check_range("n_seq_max", p.n_seq_max, MAX_SEQ);
    require(p.n_ctx <= MAX_CTX / p.n_seq_max, PLD_E_ARGUMENT,
            format("n_ctx=%d for each of n_seq_max=%d sequences is more than %d tokens in all; lower one of them", p.n_ctx,
                   p.n_seq_max, MAX_CTX));
    require(p.n_ctx_draft >= 0, PLD_E_ARGUMENT,
            format("n_ctx_draft=%d is negative; 0 lets the draft see as many as it was trained on", p.n_ctx_draft));
}

// A quantised cache holds the values of a head in whole blocks.
void check_heads(const Header & h, const char * width, int32_t type, const char * option) {
    const auto n_head = h.integer(h.key("attention.head_count")).value_or(0);
    const auto n_embd = h.integer(h.key("embedding_length")).value_or(0);
    const auto n      = h.integer(h.key(width)).value_or(n_head > 0 ? n_embd / n_head : 0);
    const auto block  = ggml_blck_size(static_cast<ggml_type>(type));
    require(n % block == 0, PLD_E_ARGUMENT,
            format("%s=%s stores %lld values at a time and a head of %s has %lld; use f16", option,
                   ggml_type_name(static_cast<ggml_type>(type)), (long long) block, h.name().c_str(), (long long) n));
}

llama_context_params context_params(int32_t n_ctx, int32_t n_batch, int32_t n_outputs, const pld_engine_params & params) {
    // Graphs are reserved with as many rows for each sequence: of some models' none can be built otherwise.
    n_batch             = (n_batch + params.n_seq_max - 1) / params.n_seq_max * params.n_seq_max;
    auto out            = llama_context_default_params();
    out.n_ctx           = static_cast<uint32_t>(n_ctx);
    out.n_batch         = static_cast<uint32_t>(n_batch);
    out.n_ubatch        = static_cast<uint32_t>(n_batch);
    out.n_seq_max       = static_cast<uint32_t>(params.n_seq_max);
    out.n_outputs_max   = static_cast<uint32_t>(n_outputs);
    out.n_threads       = 1;  // until a pool is attached
    out.n_threads_batch = 1;
    out.flash_attn_type = static_cast<llama_flash_attn_type>(params.flash_attn);
    out.kv_unified      = params.kv_unified != 0;
    return out;
}

}  // namespace

int32_t kv_type(const std::string & name) {
    const auto it = std::find_if(std::begin(KV_TYPES), std::end(KV_TYPES), [&](auto type) { return name == ggml_type_name(type); });
    return it == std::end(KV_TYPES) ? -1 : *it;
}

int32_t draft_window(const pld_engine_params & p) {
    return p.n_ctx_draft == 0 ? p.n_ctx : std::min(p.n_ctx_draft, p.n_ctx);
}

int32_t draft_sight(const pld_engine_params & p, const llama_model & draft) {
    const auto trained = llama_model_n_ctx_train(&draft);
    return p.n_ctx_draft == 0 && trained > 0 ? std::min(p.n_ctx, trained) : draft_window(p);
}

void check_draft_cache(const Header & draft, const pld_engine_params & p) {
    check_sizes(p);
    check_type(p.type_k_draft);
    check_type(p.type_v_draft);
    check_heads(draft, "attention.key_length", p.type_k_draft, "type_k_draft");
    check_heads(draft, "attention.value_length", p.type_v_draft, "type_v_draft");
}

pld_engine_params resolve(const Header & target, const Header * draft, pld_engine_params p) {
    if (draft) {
        check_pair(target, *draft);
    } else {
        check_target(target);
    }
    const auto trained = static_cast<int32_t>(target.integer(target.key("context_length")).value_or(0));
    const auto widest  = draft ? draft_facts(*draft).block_size - 1 : p.n_max;
    require(p.n_max >= -1, PLD_E_ARGUMENT, format("n_max=%d is out of range, -1 or more; raise n_max", p.n_max));
    p.n_ctx = p.n_ctx == 0 ? trained : p.n_ctx;
    p.n_ctx_rope = p.n_ctx_rope == 0 ? p.n_ctx : p.n_ctx_rope;
    p.n_max = p.n_max < 0 ? std::max(widest, 0) : p.n_max;

    constexpr int32_t MAX_STEP = 1 << 16, MAX_THREADS = 512, MAX_WIDTH = 255;
    check_sizes(p);
    check_range("n_ctx_rope", p.n_ctx_rope, MAX_CTX);
    check_range("n_ubatch", p.n_ubatch, MAX_STEP);
    check_range("n_threads", p.n_threads, MAX_THREADS);
    require(p.flash_attn >= -1 && p.flash_attn <= 1, PLD_E_ARGUMENT, format("flash_attn=%d is none of -1, 0, 1", p.flash_attn));
    require(p.cuda_graphs >= -1 && p.cuda_graphs <= 1, PLD_E_ARGUMENT, format("cuda_graphs=%d is none of -1, 0, 1", p.cuda_graphs));
    require(p.few_shapes >= -1 && p.few_shapes <= 1, PLD_E_ARGUMENT, format("few_shapes=%d is none of -1, 0, 1", p.few_shapes));
    require(!draft || p.n_max <= widest, PLD_E_ARGUMENT,
            format("n_max=%d exceeds block_size-1=%d of %s; lower n_max", p.n_max, widest,
                   draft ? draft->name().c_str() : ""));
    require(p.n_max <= MAX_WIDTH, PLD_E_ARGUMENT, format("n_max=%d is out of range, 0 to %d; lower n_max", p.n_max, MAX_WIDTH));
    for (const auto type : {p.type_k, p.type_v, p.type_k_draft, p.type_v_draft}) {
        check_type(type);
    }
    for (const auto type : {p.type_v, p.type_v_draft}) {
        require(p.flash_attn != 0 || !ggml_is_quantized(static_cast<ggml_type>(type)), PLD_E_ARGUMENT,
                format("a V cache of type %s needs flash attention; turn it on or use f16",
                       ggml_type_name(static_cast<ggml_type>(type))));
    }
    check_heads(target, "attention.key_length", p.type_k, "type_k");
    check_heads(target, "attention.value_length", p.type_v, "type_v");
    if (draft) {
        check_draft_cache(*draft, p);
    }
    return p;
}

bool fills_ends(const pld_engine_params & params, const llama_model & target) {
    constexpr uint64_t SMALL = 1000000000;  // weights, whose products with some rows more a GPU has before it could launch another graph
    return params.few_shapes != 0 && llama_model_n_params(&target) <= SMALL;
}

llama_context_params target_context(const pld_engine_params & params, pld_rollback mode) {
    // Side by side, sequences get rows that nothing reads until all have as many: there must be room for those.
    const auto rows  = params.n_seq_max * (params.n_max + 1);
    const auto n_ctx = params.n_seq_max == 1 ? params.n_ctx : (params.n_ctx + params.n_max) * params.n_seq_max;
    // With snapshots, llama.cpp asserts that a batch may be larger than the rows that are taken back. Its limit is n_ctx, too,
    // before it rounds that up.
    auto out   = context_params(std::max(n_ctx, rows + 1), std::max(params.n_ubatch, rows + 1), rows, params);
    out.type_k = static_cast<ggml_type>(params.type_k);
    out.type_v = static_cast<ggml_type>(params.type_v);
    if (mode == PLD_ROLLBACK_SNAPSHOTS) {
        out.n_rs_seq = static_cast<uint32_t>(params.n_max);
    } else if (mode == PLD_ROLLBACK_CHECKPOINT && params.n_max > 0) {
        // A second sequence for each: its recurrent state is the checkpoint. In a K/V buffer of all it takes no room.
        out.n_seq_max *= 2;
        out.kv_unified = true;
    }
    return out;
}

int32_t draft_ubatch(const DraftFacts & facts) {
    // The draft's graph computes logits for every row of a batch, so its compute buffer grows with n_ubatch x n_vocab.
    return std::max(64, facts.block_size);
}

llama_context_params draft_context(const DraftFacts & facts, llama_context * target, const pld_engine_params & params) {
    // What a block sees, the block, and a batch of features before what no longer is seen makes room for it. A block never reaches
    // beyond what could be verified, unless it is as wide as another's.
    const auto all   = params.n_ctx + (params.n_seq_max > 1 ? facts.block_size - 1 : 0);
    const auto n_ctx = std::min(all, draft_window(params) + facts.block_size + draft_ubatch(facts));
    auto       out   = context_params(n_ctx * params.n_seq_max, draft_ubatch(facts), facts.block_size, params);
    out.type_k       = static_cast<ggml_type>(params.type_k_draft);
    out.type_v       = static_cast<ggml_type>(params.type_v_draft);
    out.ctx_other    = target;
    return out;
}

}  // namespace pld
