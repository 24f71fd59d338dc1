// Kernel launches, counted where the runtime is called: what a round costs on a card whose driver cannot replay graphs.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace pld::cuda {

// Launches of kernels and of captured graphs by this process; 0 in a build without CUDA.
int64_t n_launches();

// Note kernels by name from now on; forgets what was noted. Kernels of a captured graph are noted when it is captured.
void trace(bool on);
// Mangled name and number of launches; "cudaGraphLaunch" for captured graphs.
std::map<std::string, int64_t> traced();

}  // namespace pld::cuda
