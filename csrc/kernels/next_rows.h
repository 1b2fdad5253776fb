// Rows that are prefetched while others are worked on.
#pragma once
#include <stdint.h>

#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// The rows that come next. They are prefetched while others are worked on, a share with each of these: so the memory is
// at work while arithmetic is done, and it reads on where the hardware's prefetchers do not, as over the end of a page
// or where a row ends within a cache line. Where one row follows the other in memory, no line is prefetched twice.
class NextRows {
    const char *const *rows;
    const char *first = nullptr;                  // the first row, if the others follow it in memory
    int64_t bytes, count = 0, share = 0, at = 0;  // count, share and at are lines, or rows if these are apart

   public:
    // `next` are n rows of `bytes` each, or nullptr; prefetch_share is called `calls` times, or more often.
    template <class R>
    NextRows(const R *const *next, int n, int64_t bytes, int calls) : rows((const char *const *)next), bytes(bytes) {
        if (!next) return;
        const bool together = (intptr_t)rows[n - 1] - (intptr_t)rows[0] == (n - 1) * bytes;
        if (together) first = rows[0];
        count = together ? (n * bytes + 63) / 64 : n;
        share = (count + calls - 1) / calls;
    }
    inline void prefetch_share() {
        const int64_t end = min(at + share, count);
        if (first)
            for (int64_t i = at; i < end; i++) prefetch(first + 64 * i);
        else
            for (int64_t j = at; j < end; j++)
                for (int64_t i = 0; i < bytes; i += 64) prefetch(rows[j] + i);
        at = end;
    }
};

}  // namespace skimkv::SKIMKV_NS
