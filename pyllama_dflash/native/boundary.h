// What every function of the C boundary needs: it checks its pointers, runs inside a guard and turns exceptions into a status.
#pragma once

#include "api.h"
#include "engine.h"
#include "error.h"
#include "model.h"

#include <cstring>
#include <new>

struct pld_model {
    std::shared_ptr<pld::Model> model;
};

struct pld_engine {
    pld::Engine engine;
};

namespace pld {

// Keep the message for pld_last_error(); returns the status.
int32_t fail(int32_t status, const char * message) noexcept;

template <typename F> int32_t guard(F && f) noexcept {
    try {
        return f();
    } catch (const Error & e) {
        return fail(e.status, e.what());
    } catch (const std::bad_alloc &) {
        return fail(PLD_E_MEMORY, "out of memory");
    } catch (const std::exception & e) {
        return fail(PLD_E_INTERNAL, e.what());
    } catch (...) {
        return fail(PLD_E_INTERNAL, "an unknown C++ exception");
    }
}

template <typename... P> void require_pointers(const P *... pointers) {
    require((... && (pointers != nullptr)), PLD_E_ARGUMENT, "a required pointer is NULL");
}

// The length that is needed; what fits in cap bytes is written.
int32_t write_text(const std::string & text, char * buf, int32_t cap);

// The number of rows; up to cap of them are written.
template <typename T> int32_t write_rows(const std::vector<T> & rows, T * out, int32_t cap) {
    if (out) {
        std::copy_n(rows.begin(), std::min(rows.size(), static_cast<size_t>(std::max(cap, 0))), out);
    }
    return static_cast<int32_t>(rows.size());
}

// malloc keeps what was freed for the next allocation; who closes a model expects to see its memory again.
void give_back_memory();

}  // namespace pld
