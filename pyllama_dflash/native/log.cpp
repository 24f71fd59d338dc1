#include "log.h"

#include "error.h"
#include "ggml.h"
#include "llama.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>

namespace pld::log {

namespace {

struct Line {
    Level       level;
    bool        ours;
    std::string text;
};

constexpr size_t MAX_LINES = 4096;
constexpr size_t MAX_BYTES = 1024;  // of one line

// llama.cpp has one log callback and ggml one abort callback for the whole process, so their state is the process's too.
std::mutex           mutex;
std::deque<Line>     ring;
int64_t              n_dropped = 0;
std::atomic<int32_t> min_level{INFO};

// Log lines arrive in pieces, each thread's own; level CONT continues the piece before.
thread_local std::string partial;
thread_local Level       partial_level = INFO;

thread_local int         opening = 0;
thread_local int         quiet   = 0;
thread_local std::string first_error;
thread_local bool        alloc_failed = false;

void keep(Level level, bool ours, const std::string & line) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) {
        return;
    }
    if (opening > 0 && level == ERROR) {
        first_error  = first_error.empty() ? line : first_error;
        alloc_failed = alloc_failed || line.find("alloc") != std::string::npos || line.find("out of memory") != std::string::npos;
    }
    if (level < min_level || quiet > 0) {
        return;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (ring.size() == MAX_LINES) {
        ring.pop_front();
        n_dropped++;
    }
    ring.push_back({level, ours, line.substr(0, MAX_BYTES)});
}

void on_log(ggml_log_level level, const char * text, void *) noexcept {
    try {
        if (level != GGML_LOG_LEVEL_CONT && level != GGML_LOG_LEVEL_NONE) {
            partial_level = static_cast<Level>(level);
        }
        partial += text;
        size_t end;
        while ((end = partial.find('\n')) != std::string::npos) {
            keep(partial_level, /*ours=*/false, partial.substr(0, end));
            partial.erase(0, end + 1);
        }
    } catch (...) {
        // a log line is not worth a failure
    }
}

// ggml prints nothing and gives no backtrace once a callback is set, so say it here before the process ends.
void on_abort(const char * message) {
    if (opening > 0) {
        const char * file = std::strstr(message, "llama.cpp/");
        throw Error(PLD_E_LOAD, std::string("llama.cpp refused it: ") + (file ? file : message));
    }
    std::fprintf(stderr, "%s\n", message);
}

}  // namespace

void install() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
    });
}

void set_level(int32_t level) {
    min_level = level;
}

void write(Level level, const std::string & line) {
    keep(level, /*ours=*/true, line);
}

int32_t next(int32_t * level, int32_t * ours, char * buf, int32_t cap) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (ring.empty()) {
        return -1;
    }
    const auto & line = ring.front();
    const auto   n    = static_cast<int32_t>(line.text.size());
    *level = line.level;
    *ours  = line.ours;
    if (n <= cap) {
        std::memcpy(buf, line.text.data(), n);
        ring.pop_front();
    }
    return n;
}

int64_t dropped() {
    const std::lock_guard<std::mutex> lock(mutex);
    return n_dropped;
}

Quiet::Quiet() {
    quiet++;
}

Quiet::~Quiet() {
    quiet--;
}

Opening::Opening() {
    opening++;
    first_error.clear();
    alloc_failed = false;
}

Opening::~Opening() {
    opening--;
}

bool Opening::out_of_memory() const {
    return alloc_failed;
}

std::string Opening::reason() const {
    return first_error.empty() ? "" : "; llama.cpp: " + first_error;
}

}  // namespace pld::log
