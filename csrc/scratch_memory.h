// Memory that a thread of the caller keeps between operations, so that an operation allocates nothing once it has run.
#pragma once
#include <cstddef>
#include <cstdlib>

namespace skimkv {

struct ScratchMemory {
    void *memory = nullptr;
    size_t capacity = 0;
    ~ScratchMemory() { std::free(memory); }
    // At least `bytes` bytes at a multiple of 4096, or nullptr if there is no memory. What was in it is lost.
    void *get(size_t bytes) {
        if (bytes > capacity) {
            std::free(memory);
            capacity = (bytes + bytes / 4 + 4095) / 4096 * 4096;
            memory = std::aligned_alloc(4096, capacity);
            if (memory == nullptr) capacity = 0;
        }
        return memory;
    }
};

}  // namespace skimkv
