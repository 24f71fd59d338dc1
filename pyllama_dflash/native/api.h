// pld.h for C++: C linkage and exported symbols. Everything else in the library is hidden.
#pragma once

#include <cstdint>

#if defined(_WIN32)
extern "C" {
#include "pld.h"
}
#else
#pragma GCC visibility push(default)
extern "C" {
#include "pld.h"
}
#pragma GCC visibility pop
#endif
