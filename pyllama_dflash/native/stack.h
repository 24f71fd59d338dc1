// Run a function on a stack of a given size, for code of others that recurses as deep as its input is long.
#pragma once

#include "error.h"

#include <cstddef>
#include <exception>
#include <functional>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace pld {

// Returns when the function has. What it throws is thrown here. Small sizes run on the caller's own stack.
inline void with_stack(size_t bytes, const std::function<void()> & function) {
    constexpr size_t OWN = 1 << 22;  // half of what a thread usually has
#if defined(_WIN32)
    function();
#else
    if (bytes <= OWN) {
        function();
        return;
    }
    struct Call {
        const std::function<void()> & function;
        std::exception_ptr            thrown;
    } call{function, nullptr};
    const auto run = [](void * data) -> void * {
        auto & c = *static_cast<Call *>(data);
        try {
            c.function();
        } catch (...) {
            c.thrown = std::current_exception();
        }
        return nullptr;
    };
    pthread_attr_t attributes;
    pthread_t      thread;
    pthread_attr_init(&attributes);
    const bool started = pthread_attr_setstacksize(&attributes, bytes + OWN) == 0 &&
                         pthread_create(&thread, &attributes, run, &call) == 0;
    pthread_attr_destroy(&attributes);
    require(started, PLD_E_MEMORY, format("no memory for a stack of %zu bytes", bytes));
    pthread_join(thread, nullptr);
    if (call.thrown) {
        std::rethrow_exception(call.thrown);
    }
#endif
}

}  // namespace pld
