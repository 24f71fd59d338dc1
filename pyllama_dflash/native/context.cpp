#include "context.h"

#include "error.h"
#include "ggml-cpu.h"
#include "llama-context.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"
#include "log.h"

#include <algorithm>

namespace pld {

ThreadPool::ThreadPool(int32_t n_threads) {
    auto       params  = ggml_threadpool_params_default(n_threads);
    // Threads wait awake for the next graph for some milliseconds, which spans the gaps of a round. ggml's 50 makes that a tenth
    // of a second and more, in which another engine's threads find the cores taken.
    params.poll        = 1;
    const auto message = format("could not start %d threads: the system allows no more, or memory is short", n_threads);
    try {
        const log::Opening opening;  // ggml asserts that each thread starts
        pool_ = ggml_threadpool_new(&params);
    } catch (const Error &) {
        throw Error(PLD_E_MEMORY, message);
    }
    require(pool_ != nullptr, PLD_E_MEMORY, message);
}

ThreadPool::~ThreadPool() {
    ggml_threadpool_free(pool_);
}

Context::Context(llama_model * model, const llama_context_params & params, const char * what)
    : kv_unified_(params.kv_unified),
      recurrent_(llama_model_is_recurrent(model) || llama_model_is_hybrid(model)),
      in_order_(recurrent_),
      batch_(nullptr) {
    const log::Opening opening;
    ctx_ = llama_init_from_model(model, params);
    require(ctx_ != nullptr, opening.out_of_memory() ? PLD_E_MEMORY : PLD_E_LOAD,
            format("no context of %u tokens could be made for the %s", params.n_ctx, what) + opening.reason() +
                (opening.out_of_memory() ? "; lower n_ctx" : "; convert the file again, or upgrade this package if the model is newer"));
    if (memory() == nullptr) {
        llama_free(ctx_);
        throw Error(PLD_E_LOAD, format("the %s does not generate text: it has no memory of earlier tokens", what));
    }
    if (dynamic_cast<llama_memory_hybrid *>(memory()) || dynamic_cast<llama_memory_hybrid_iswa *>(memory())) {
        in_order_ = false;
    }
    batch_ = llama_batch_ext_init(ctx_);
}

Context::~Context() {
    llama_batch_ext_free(batch_);
    if (ctx_) {
        llama_free(ctx_);
    }
}

void Context::choose_rope_factors(int32_t n_ctx) {
    // Once the memory is made, nothing else reads it.
    const_cast<llama_cparams &>(ctx_->get_cparams()).n_ctx_seq = static_cast<uint32_t>(n_ctx);
}

int32_t Context::rope_factors() const {
    const auto & model = ctx_->get_model();
    for (size_t il = 0; il < model.layers.size(); ++il) {
        const auto & layer = model.layers[il];
        if (!layer.rope_freqs && layer.rope_short != layer.rope_long) {
            return model.get_rope_factors(ctx_->get_cparams(), static_cast<int>(il)) == layer.rope_short ? 1 : 2;
        }
    }
    return 0;
}

bool Context::shows_layer(int32_t id) const {
    const auto * rows = ctx_->get_gf_res_reserve()->get_layer_inp(id);
    // A model with several residual streams may show them all.
    return rows && rows->type == GGML_TYPE_F32 && ggml_is_matrix(rows) && rows->ne[0] == ctx_->get_model().hparams.n_embd;
}

void Context::attach(const ThreadPool & pool, int32_t n_threads) {
    llama_set_n_threads(ctx_, n_threads, n_threads);
    llama_attach_threadpool(ctx_, pool.get(), pool.get());
}

void Context::clear() {
    llama_batch_ext_clear(batch_);
    n_rows_ = 0;
}

// M-RoPE models take four positions an embedding row, three of them equal for text; others read the first.
void Context::set_pos(int32_t row, int32_t pos) {
    const llama_pos all[4] = {pos, pos, pos, 0};
    require(row >= 0 && llama_batch_ext_set_pos(batch_, row, all), PLD_E_INTERNAL, "a batch row was refused");
    n_rows_ = row + 1;
}

void Context::add_token(int32_t seq, int32_t token, int32_t pos, bool output) {
    const auto row = llama_batch_ext_add_token(batch_, seq, token);
    set_pos(row, pos);
    llama_batch_ext_set_output_logits(batch_, row, output);
}

void Context::add_features(int32_t seq, const float * row, size_t width, int32_t pos) {
    set_pos(llama_batch_ext_add_embd(batch_, seq, {row, 1, width}), pos);
}

void Context::run() {
    const auto rc = llama_process(ctx_, LLAMA_PROCESS_TYPE_DECODE, batch_);
    require(rc == 0, PLD_E_DECODE, format("llama.cpp could not run the batch (code %d)", rc));
}

bool Context::wants_one() const {
    switch (ctx_->get_model().arch) {
        case LLM_ARCH_PLAMO2:      // writes the states to the wrong cells, or beyond the last
        case LLM_ARCH_RWKV6QWEN2:  // these two keep the shifted tokens of the first sequence for all
        case LLM_ARCH_ARWKV7:
            return true;
        default:
            return false;
    }
}

bool Context::blocks_of_cells() const {
    return dynamic_cast<llama_kv_cache_msa *>(memory()) || dynamic_cast<llama_memory_hybrid_idx *>(memory());
}

bool Context::truncate(int32_t seq, int32_t pos) {
    return llama_memory_seq_rm(memory(), seq, pos, -1);
}

bool Context::rewind(int32_t seq, int32_t pos) {
    if (recurrent_ && pos > 0) {
        return false;
    }
    const auto n_swa   = llama_model_n_swa(llama_get_model(ctx_));
    const bool dropped = n_swa > 0 && llama_memory_seq_pos_min(memory(), seq) > std::max(0, pos - n_swa);
    return !dropped && truncate(seq, pos);
}

void Context::forget(int32_t seq) {
    llama_memory_seq_rm(memory(), seq, -1, -1);
}

void Context::forget_all() {
    llama_synchronize(ctx_);  // what still runs may write there
    llama_memory_clear(memory(), /*data=*/true);
}

size_t Context::state_size(int32_t seq) const {
    const auto n = llama_state_seq_get_size(ctx_, seq);
    require(n > 0, PLD_E_INTERNAL, format("the state of sequence %d can't be written", seq));
    return n;
}

void Context::state_write(int32_t seq, uint8_t * out, size_t n) const {
    const auto written = llama_state_seq_get_data(ctx_, out, n, seq);
    require(written == n, PLD_E_INTERNAL, format("the state of sequence %d took %zu bytes, not %zu", seq, written, n));
}

void Context::state_read(int32_t seq, const uint8_t * bytes, size_t n) {
    if (llama_state_seq_set_data(ctx_, bytes, n, seq) != n) {
        forget(seq);
        throw Error(PLD_E_INTERNAL, format("a state of %zu bytes does not fit sequence %d", n, seq));
    }
}

}  // namespace pld
