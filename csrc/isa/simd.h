// The vector operations of the instruction set that is being compiled. A file isa/<set>.cpp includes the simd_*.h of
// its set before any kernel. Where no set was chosen (an editor opens a header, or a test compiles it alone), it is the
// scalar one.
#pragma once

#ifndef SKIMKV_NS
#include "isa/simd_scalar.h"
#endif
