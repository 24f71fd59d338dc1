// Static objects of this library are never destroyed: when a process ends, daemon threads may still be in a call, and
// llama.cpp's tables (buffer types, backends) must outlive them. The kernel takes the memory back.
extern "C" int __wrap___cxa_atexit(void (*)(void *), void *, void *) {
    return 0;
}
