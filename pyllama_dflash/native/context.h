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

    // Keep positions [0, pos). False if this memory can't drop a part of a sequence; nothing is changed then.
    bool truncate(int32_t seq, int32_t pos);
    // The same for any earlier position: false, too, where a sliding window has dropped what attention there would reach.
    bool rewind(int32_t seq, int32_t pos);
    void forget(int32_t seq);
    void forget_all();

private:
    void set_pos(int32_t row, int32_t pos);

    llama_context *   ctx_;
    llama_batch_ext * batch_;
};

}  // namespace pld
