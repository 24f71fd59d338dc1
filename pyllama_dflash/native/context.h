// A llama_context with what it needs around it: batches of tokens or features, and a thread pool shared with the other model.
#pragma once

#include "api.h"
#include "llama.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace pld {

// One pool of threads for both contexts: without one, ggml makes and joins a pool for every graph.
class ThreadPool {
public:
    explicit ThreadPool(int32_t n_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool & operator=(const ThreadPool &) = delete;

    ggml_threadpool * get() const { return pool_; }

private:
    ggml_threadpool * pool_;
};

class Context {
public:
    // Throws Error(PLD_E_LOAD) if llama.cpp can't make one; what names the model in the message.
    Context(llama_model * model, const llama_context_params & params, const char * what);
    ~Context();
    Context(const Context &) = delete;
    Context & operator=(const Context &) = delete;

    llama_context * get() const { return ctx_; }
    llama_memory_t  memory() const { return llama_get_memory(ctx_); }

    // Of two sets of RoPE factors llama.cpp takes the one for its context's size, which grows with the sequences and with room for
    // their drafts. Before anything runs: take the one for n_ctx.
    void    choose_rope_factors(int32_t n_ctx);
    // 0 of a model that has no two, 1 those for a short context, 2 for a long one.
    int32_t rope_factors() const;

    // Whether a draft can read the input of that layer, by the graph that was built for this context.
    bool shows_layer(int32_t id) const;

    void attach(const ThreadPool & pool, int32_t n_threads);
    // Give up the handle without freeing it: its state is unknown after an assertion failed half way through a decode.
    void leak() noexcept { ctx_ = nullptr; }

    // Fill the batch, then run it. Rows of a sequence come together, at consecutive positions. run() throws Error(PLD_E_DECODE).
    void clear();
    void add_token(int32_t seq, int32_t token, int32_t pos, bool output);
    void add_features(int32_t seq, const float * row, size_t width, int32_t pos);
    void run();

    int32_t n_rows() const { return n_rows_; }

    // How llama.cpp takes a batch of several sequences at once, and not in parts: where that is so, only if all have as many rows,
    // and only if each is the neighbour of the one before.
    bool wants_equal_rows() const { return recurrent_ || !kv_unified_; }
    bool wants_neighbours() const { return in_order_ || !kv_unified_; }
    // Whether the model's graph is wrong for several sequences.
    bool wants_one() const;

    // Whether attention chooses among blocks of neighbouring cells, which only one sequence may fill.
    bool blocks_of_cells() const;

    // Keep positions [0, pos). False if this memory can't drop a part of a sequence; nothing is changed then.
    bool truncate(int32_t seq, int32_t pos);
    // The same for any earlier position: false, too, where a sliding window has dropped what attention there would reach, and of
    // a recurrent state, which does not go back.
    bool rewind(int32_t seq, int32_t pos);
    void forget(int32_t seq);
    // And zero all cells: where attention is a product with a mask, one that nobody sees must hold a number.
    void forget_all();

    // What the memory holds of a sequence, as bytes on the host. Throw Error(PLD_E_INTERNAL) for a state of another memory; the
    // sequence is empty then.
    size_t state_size(int32_t seq) const;
    void   state_write(int32_t seq, uint8_t * out, size_t n) const;
    void   state_read(int32_t seq, const uint8_t * bytes, size_t n);

private:
    void set_pos(int32_t row, int32_t pos);

    llama_context *   ctx_;
    bool              kv_unified_;
    bool              recurrent_;  // some layers keep a state of all tokens
    bool              in_order_;   // sequences are split in their order, even with one buffer for all
    llama_batch_ext * batch_;
    int32_t           n_rows_ = 0;
};

}  // namespace pld
