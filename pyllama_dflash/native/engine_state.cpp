// A sequence of an engine as bytes: its tokens, the target's memory of them and the draft's.
#include "draft_state.h"
#include "engine.h"
#include "error.h"
#include "llama-model.h"
#include "log.h"
#include "positions.h"

#include <cstddef>
#include <cstring>

namespace pld {

namespace {

constexpr uint32_t MAGIC = 0x45444c50, VERSION = 1;  // "PLDE"

// In front of the tokens [n_past], n_target bytes and n_draft bytes. A part of the file's format: a change here must raise its
// version.
struct SequenceState {
    uint32_t magic;
    uint32_t version;
    uint64_t checksum;  // of all that follows it
    int32_t  arch;
    int32_t  n_embd;
    int32_t  n_layer;
    int32_t  n_vocab;
    int32_t  type_k;
    int32_t  type_v;
    int32_t  kind;  // of the draft; PLD_KIND_TARGET without one
    int32_t  n_past;
    int32_t  anchor;  // -1: the prompt was not evaluated to its end
    int32_t  rope_factors;  // Context::rope_factors()
    uint64_t n_target;
    uint64_t n_draft;
};

constexpr size_t CHECKED = offsetof(SequenceState, arch);

// FNV-1a, over words where it can: quick enough not to be felt beside the copy.
uint64_t checksum(const uint8_t * data, size_t size) {
    constexpr uint64_t PRIME = 0x100000001b3;
    uint64_t           out   = 0xcbf29ce484222325;
    for (; size >= sizeof(uint64_t); data += sizeof(uint64_t), size -= sizeof(uint64_t)) {
        uint64_t word;
        std::memcpy(&word, data, sizeof(word));
        out = (out ^ word) * PRIME;
        out ^= out >> 32;
    }
    for (; size > 0; ++data, --size) {
        out = (out ^ *data) * PRIME;
    }
    return out;
}

size_t n_token_bytes(const SequenceState & s) {
    return sizeof(int32_t) * static_cast<size_t>(s.n_past);
}

SequenceState like(const Model & target, const Model * draft, const Context & ctx, const pld_engine_params & params) {
    const auto *  model = target.llama();
    SequenceState out   = {};
    out.magic           = MAGIC;
    out.version         = VERSION;
    out.arch            = static_cast<int32_t>(model->arch);
    out.n_embd          = llama_model_n_embd(model);
    out.n_layer         = llama_model_n_layer(model);
    out.n_vocab         = target.n_vocab();
    out.type_k          = params.type_k;
    out.type_v          = params.type_v;
    out.kind            = draft ? draft->facts().kind : PLD_KIND_TARGET;
    out.rope_factors    = ctx.rope_factors();
    return out;
}

// The header of what an engine like that wrote.
SequenceState checked(const uint8_t * data, size_t size, const SequenceState & ours, int32_t n_ctx) {
    SequenceState s = {};
    require(size >= sizeof(s), PLD_E_LOAD, format("%zu bytes are no state of a sequence; it has %zu and more", size, sizeof(s)));
    std::memcpy(&s, data, sizeof(s));
    require(s.magic == MAGIC, PLD_E_LOAD, "this is no state of a sequence");
    require(s.version == VERSION, PLD_E_LOAD,
            format("the state has version %u and this library reads version %u; evaluate the text again", s.version, VERSION));
    const auto rest = size - sizeof(s);
    const bool fits = s.n_past > 0 && n_token_bytes(s) <= rest && s.n_target <= rest - n_token_bytes(s) &&
                      s.n_draft == rest - n_token_bytes(s) - s.n_target;
    require(fits && s.checksum == checksum(data + CHECKED, size - CHECKED), PLD_E_LOAD,
            "the state is damaged: its length or checksum is wrong");
    require(s.arch == ours.arch && s.n_embd == ours.n_embd && s.n_layer == ours.n_layer && s.n_vocab == ours.n_vocab, PLD_E_ARGUMENT,
            "the state is another target's: their layers differ");
    require(s.type_k == ours.type_k && s.type_v == ours.type_v, PLD_E_ARGUMENT,
            "the state was written with other types of cache; open with the same type_k and type_v");
    require(s.kind == ours.kind && (s.kind != PLD_KIND_TARGET || s.n_draft == 0), PLD_E_ARGUMENT,
            s.kind == PLD_KIND_TARGET ? "the state was written without a draft; open without one"
                                      : "the state was written with a draft of another kind; open with that");
    require(s.n_past <= n_ctx, PLD_E_CONTEXT_FULL,
            format("the state has %d tokens but n_ctx is %d; open with a larger n_ctx", s.n_past, n_ctx));
    return s;
}

}  // namespace

const std::vector<int32_t> & Engine::tokens(int32_t seq) const {
    return at(seq).cached;
}

size_t Engine::state_size(int32_t seq) {
    const auto & s = at(seq);
    require(s.n_past() > 0, PLD_E_ORDER, format("sequence %d has no tokens in the cache: prefill a prompt first", seq));
    const log::Opening opening;
    try {
        catch_up({seq});  // the memory may hold what was rejected, or lack what stays
        n_rows_ = 0;
        return sizeof(SequenceState) + sizeof(int32_t) * s.cached.size() + ctx_->state_size(seq) +
               (drafter_ ? drafter_->state_size(seq) : 0);
    } catch (...) {
        reset();
        throw;
    }
}

void Engine::state_write(int32_t seq, uint8_t * out, size_t size) {
    const auto needed = state_size(seq);
    require(size == needed, PLD_E_ARGUMENT, format("the state of sequence %d takes %zu bytes, not %zu", seq, needed, size));
    const auto &       s = at(seq);
    const log::Opening opening;
    auto               header = like(*target_, draft_.get(), *ctx_, params_);
    header.n_past             = s.n_past();
    header.anchor             = s.pending.empty() ? s.anchor : -1;
    header.n_draft            = drafter_ ? drafter_->state_size(seq) : 0;
    auto * at                 = out + sizeof(header);
    header.n_target           = size - sizeof(header) - n_token_bytes(header) - header.n_draft;
    std::memcpy(at, s.cached.data(), n_token_bytes(header));
    at += n_token_bytes(header);
    ctx_->state_write(seq, at, header.n_target);
    if (drafter_) {
        drafter_->state_write(seq, at + header.n_target);
    }
    std::memcpy(out, &header, sizeof(header));
    header.checksum = checksum(out + CHECKED, size - CHECKED);
    std::memcpy(out, &header, sizeof(header));
}

void Engine::state_read(int32_t seq, const uint8_t * data, size_t size) {
    reset(seq);
    const auto           ours   = like(*target_, draft_.get(), *ctx_, params_);
    const auto           header = checked(data, size, ours, params_.n_ctx);
    require(header.rope_factors == ours.rope_factors, PLD_E_ARGUMENT,
            format("the state was written with n_ctx %s %u, where the target turns positions by other factors; open with such an n_ctx",
                   ours.rope_factors == 1 ? "beyond" : "up to", target_->llama()->hparams.n_ctx_orig_yarn));
    const auto *         from   = data + sizeof(header);
    std::vector<int32_t> tokens(static_cast<size_t>(header.n_past));
    std::memcpy(tokens.data(), from, n_token_bytes(header));
    for (const auto token : tokens) {
        target_->check_token(token);
    }
    if (header.anchor != -1) {
        target_->check_token(header.anchor);
    }
    from += n_token_bytes(header);
    read_memories(seq, from, header.n_target, header.n_draft, header.n_past);
    at(seq).cached = std::move(tokens);
    at(seq).anchor = header.anchor;
}

// Of both models. llama.cpp checks what it reads by assertion, too, and may leave a cache half filled: after a failure, nothing of
// it is kept.
void Engine::read_memories(int32_t seq, const uint8_t * data, size_t n_target, size_t n_draft, int32_t n_past) {
    const log::Opening opening;
    try {
        ctx_->state_read(seq, data, n_target);
        const auto last = llama_memory_seq_pos_max(ctx_->memory(), seq);
        require(last == n_past - 1, PLD_E_ARGUMENT, format("the target's cache ends at position %d, not at %d", last, n_past - 1));
        require_positions(ctx_->memory(), seq, n_past);
        rollback_->ran(seq, n_past);
        if (drafter_) {
            drafter_->state_read(seq, data + n_target, n_draft);
            require(drafter_->n_past(seq) == n_past, PLD_E_ARGUMENT,
                    format("the draft's cache ends at position %d, not at %d", drafter_->n_past(seq), n_past));
        }
    } catch (const Error & e) {
        reset();
        throw Error(PLD_E_ARGUMENT, format("the state does not fit: %s; open with the options that it was written with%s", e.what(),
                                           opening.reason().c_str()));
    } catch (...) {
        reset();
        throw;
    }
}

}  // namespace pld
