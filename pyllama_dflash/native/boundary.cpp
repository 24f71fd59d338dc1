#include "boundary.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace pld {

namespace {

thread_local std::string last_error;

}  // namespace

int32_t fail(int32_t status, const char * message) noexcept {
    try {
        last_error = message;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

int32_t write_text(const std::string & text, char * buf, int32_t cap) {
    if (buf && cap > 0) {
        std::memcpy(buf, text.data(), std::min(text.size(), static_cast<size_t>(cap)));
    }
    return static_cast<int32_t>(text.size());
}

void give_back_memory() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

}  // namespace pld

const char * pld_last_error(void) {
    return pld::last_error.c_str();
}
