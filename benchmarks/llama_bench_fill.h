// Fills the cache of llama.cpp's llama-bench instead of reading a long prompt, which takes long.
// A prompt of 32 tokens is read; then its keys and values are repeated up to the depth, through the functions of
// llama.h that save and restore a sequence. Only the contents of the cache differ: what is timed afterwards is
// llama.cpp's own. A cache that is saved in another way, as those of models with sliding layers, is filled by a prompt.
// docs/reproduce.md says how to build llama-bench with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "llama.h"

// Reads a saved sequence of `few` tokens, and writes one of `depth` tokens.
class fill_copier {
   public:
    fill_copier(const std::vector<uint8_t> &from, uint32_t few, uint32_t depth, size_t room)
        : from(from), few(few), depth(depth) {
        to.reserve(room);
    }

    template <class T> T number() {
        const T value = peek<T>();
        copy(sizeof(T));
        return value;
    }

    template <class T> T peek() {
        T value{};
        if (at + sizeof(T) <= from.size()) {
            std::memcpy(&value, from.data() + at, sizeof(T));
        } else {
            failed = true;
        }
        return value;
    }

    void copy(size_t n) {
        if (failed || n > from.size() - at) {
            failed = true;
            return;
        }
        to.insert(to.end(), from.begin() + at, from.begin() + at + n);
        at += n;
    }

    // `few` pieces of one size become `depth` pieces.
    void repeat(size_t piece) {
        const size_t size = piece * few, start = at;
        if (failed || size > from.size() - at) {
            failed = true;
            return;
        }
        for (uint32_t i = 0; i < depth; i += few) {
            const size_t n = piece * std::min(few, depth - i);
            to.insert(to.end(), from.begin() + start, from.begin() + start + n);
        }
        at += size;
    }

    // The position, the number of sequences (one) and the sequence of every token.
    void positions() {
        uint32_t one = 1;
        int32_t sequence = 0;
        for (uint32_t i = 0; i < depth; i++) {
            for (const void *value : {(const void *)&i, (const void *)&one, (const void *)&sequence}) {
                const uint8_t *bytes = (const uint8_t *)value;
                to.insert(to.end(), bytes, bytes + 4);
            }
        }
        at += size_t(few) * 12;
    }

    bool done() const { return !failed && at == from.size(); }

    std::vector<uint8_t> to;

   private:
    const std::vector<uint8_t> &from;
    uint32_t few, depth;
    size_t at = 0;
    bool failed = false;
};

// Fills sequence 0 with `depth` tokens. read_prompt(n) reads a prompt of n tokens into the empty cache.
template <class F> static bool fill_cache(llama_context *ctx, uint32_t depth, F read_prompt) {
    const uint32_t few = std::min<uint32_t>(depth, 32);
    if (!read_prompt(few)) {
        return false;
    }
    std::vector<uint8_t> saved(llama_state_seq_get_size(ctx, 0));
    saved.resize(llama_state_seq_get_data(ctx, saved.data(), saved.size(), 0));
    fill_copier copier(saved, few, depth, saved.size() / few * depth + (1 << 20));
    copier.copy(8);  // a magic number and the sequence
    const bool one_stream = copier.number<uint32_t>() == 1 && copier.peek<uint32_t>() == few;
    std::vector<uint8_t> &to = copier.to;
    copier.copy(4);
    std::memcpy(to.data() + to.size() - 4, &depth, 4);
    copier.positions();
    const bool transposed = copier.number<uint32_t>() != 0;
    const uint32_t layers = copier.number<uint32_t>();
    for (uint32_t i = 0; i < (transposed ? layers : 2 * layers) && one_stream; i++) {
        copier.copy(4);  // the type
        copier.repeat(copier.number<uint64_t>());
    }
    for (uint32_t i = 0; i < (transposed ? layers : 0) && one_stream; i++) {
        copier.copy(4);
        const uint32_t bytes = copier.number<uint32_t>(), channels = copier.number<uint32_t>();
        for (uint32_t j = 0; j < channels; j++) {
            copier.repeat(bytes);
        }
    }
    llama_memory_clear(llama_get_memory(ctx), true);
    if (!copier.done() || llama_state_seq_set_data(ctx, to.data(), to.size(), 0) == 0) {
        fprintf(stderr, "llama-bench: this cache cannot be repeated: a prompt of %u tokens is read\n", depth);
        llama_memory_clear(llama_get_memory(ctx), true);
        return read_prompt(depth);
    }
    return true;
}
