// Log lines of llama.cpp and ours: kept in a bounded ring until the caller fetches them. No callback leaves the library,
// and nothing is printed.
#pragma once

#include <cstdint>
#include <string>

namespace pld::log {

enum Level : int32_t { DEBUG = 1, INFO = 2, WARN = 3, ERROR = 4 };

// Route ggml's and llama.cpp's logs here, and their aborts through `opening` below. Once per process.
void install();

void set_level(int32_t level);
// A line of our own.
void write(Level level, const std::string & line);

// The oldest line's length and level, and whether it is ours; -1 if there is none. The line leaves the ring only if it fits in cap bytes.
int32_t next(int32_t * level, int32_t * ours, char * buf, int32_t cap);
int64_t dropped();

// While one of these lives, an assertion of llama.cpp that fails on this thread throws instead of ending the process, and
// error lines logged by this thread are gathered to explain a failure. Files come from strangers, and upstream checks many
// of their faults by assertion only. What was half built then leaks: the process's life is worth more.
class Opening {
public:
    Opening();
    ~Opening();
    Opening(const Opening &) = delete;
    Opening & operator=(const Opening &) = delete;

    // "; llama.cpp: <first error line>", or nothing.
    std::string reason() const;
    // True if a line spoke of an allocation that failed: llama.cpp says so in its log only.
    bool out_of_memory() const;
};

// While one of these lives, lines of this thread are not kept: of a trial whose outcome is reported otherwise.
class Quiet {
public:
    Quiet();
    ~Quiet();
    Quiet(const Quiet &) = delete;
    Quiet & operator=(const Quiet &) = delete;
};

}  // namespace pld::log
