// Failures inside the library are exceptions; the C boundary turns them into a status and a message.
#pragma once

#include "api.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace pld {

struct Error : std::runtime_error {
    int32_t status;
    Error(int32_t status, const std::string & message) : std::runtime_error(message), status(status) {}
};

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
inline std::string format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    va_list again;
    va_copy(again, args);
    std::string out(std::max(0, std::vsnprintf(nullptr, 0, fmt, args)), '\0');
    std::vsnprintf(out.data(), out.size() + 1, fmt, again);
    va_end(again);
    va_end(args);
    return out;
}

inline void require(bool ok, int32_t status, const std::string & message) {
    if (!ok) {
        throw Error(status, message);
    }
}

}  // namespace pld
