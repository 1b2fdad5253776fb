// Every instruction set of this machine against the scalar one, through the C interface: appends, steps, the 8-bit product
// and the column sums, in each type and coding. For where no Python is, such as an emulator.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "skimkv.h"

using Bytes = std::vector<unsigned char>;
using Floats = std::vector<float>;

static uint32_t state;
static float noise() {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (float)(1 << 24) - 0.5f;
}

// Sixteen-bit floats by hand, so that no instruction set has a part in it.
static uint16_t bits_of(float x, int dtype) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if (dtype == SKIMKV_BF16) return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    const int e = (int)(u >> 23 & 255) - 112;  // float16: normal numbers, or zero
    return (uint16_t)((u >> 16 & 0x8000) | (e < 1 ? 0 : ((uint32_t)e << 10 | (u >> 13 & 0x3ff))));
}
static float float_of(const unsigned char *p, int dtype) {
    uint32_t u;
    float x;
    if (dtype == SKIMKV_F32) return std::memcpy(&x, p, 4), x;
    const uint16_t h = (uint16_t)(p[0] | p[1] << 8);
    if (dtype == SKIMKV_BF16) u = (uint32_t)h << 16;
    else if (!(h & 0x7c00)) return (h & 0x8000 ? -1.f : 1.f) * (float)(h & 0x3ff) * 5.9604645e-8f;
    else u = (uint32_t)(h & 0x8000) << 16 | (((uint32_t)(h & 0x7fff) << 13) + (112u << 23));
    return std::memcpy(&x, &u, 4), x;
}
static int size_of(int dtype) { return dtype == SKIMKV_F32 ? 4 : 2; }
static Bytes pack(const Floats &x, int dtype) {
    Bytes to(x.size() * (size_t)size_of(dtype));
    for (size_t i = 0; i < x.size(); i++) {
        if (dtype == SKIMKV_F32) std::memcpy(&to[4 * i], &x[i], 4);
        else to[2 * i] = (unsigned char)bits_of(x[i], dtype), to[2 * i + 1] = (unsigned char)(bits_of(x[i], dtype) >> 8);
    }
    return to;
}

static void must(const char *error) {
    if (error) std::printf("refused: %s\n", error), std::exit(1);
}
static void must(int failed) { must(failed ? "it could not run" : nullptr); }

struct Case {
    int dtype, channels, bits, D, G, n;
};

// What a set makes of a case: the results of its steps, and the bytes of the cache.
struct Made {
    Floats y;
    Bytes cache;
};

static Made steps(const Case &c) {
    const int H = 2, R = c.D, cap = 1024, r = c.D / 4, top = 24, local = 4, size = size_of(c.dtype);
    state = 7;
    Floats k0, v0, q0;
    for (int h = 0; h < H; h++)
        for (int p = 0; p < c.n; p++)
            for (int d = 0; d < c.D; d++) {
                k0.push_back(noise() + (p % 20 == 7 && p / 20 < top - local && d % 4 == 0 ? 3.f : 0.f));
                v0.push_back(noise());
            }
    for (int i = 0; i < H * c.G * c.D; i++) q0.push_back(i % 4 == 0 ? 1 + 0.1f * noise() : 0.1f * noise());
    const Bytes k = pack(k0, c.dtype), v = pack(v0, c.dtype), q = pack(q0, c.dtype);
    const int64_t row = c.bits ? (c.D + 63) / 64 * 4 + c.D * c.bits / 8 : c.D * size, unit = c.bits ? 1 : size;
    const int64_t code = c.channels == SKIMKV_INT8 ? 2 : c.channels == SKIMKV_INT4 ? 1 : 2 * size;  // half bytes a token
    Bytes held((size_t)(2 * H * cap * row)), index((size_t)(H * R * cap * code / 2)), tail((size_t)(H * R * 256 * size));
    Floats scale((size_t)(H * cap / 256 * 2 * R)), mean((size_t)(H * c.D));
    int64_t length = 0;
    skimkv_chunk chunk{};
    chunk.cap = cap, chunk.k = held.data(), chunk.v = held.data() + H * cap * row;
    chunk.k_h = chunk.v_h = cap * row / unit, chunk.k_n = chunk.v_n = row / unit;
    chunk.k_b = chunk.v_b = H * chunk.k_h;
    if (c.channels != SKIMKV_NONE) {
        chunk.index = index.data(), chunk.x_r = c.channels == SKIMKV_COPY ? cap : cap * code / 2;
        chunk.x_h = R * chunk.x_r, chunk.x_b = H * chunk.x_h;
        chunk.scale = scale.data(), chunk.s_r = 1, chunk.s_z = R, chunk.s_g = 2 * R;
        chunk.s_h = cap / 256 * chunk.s_g, chunk.s_b = H * chunk.s_h;
    }
    skimkv_cache cache{};
    cache.B = 1, cache.H = H, cache.G = c.G, cache.D = c.D, cache.R = R, cache.dtype = c.dtype, cache.channels = c.channels;
    cache.n_chunks = 1, cache.chunks = &chunk, cache.lengths = &length, cache.tail = tail.data(), cache.mean = mean.data();
    cache.t_r = 256, cache.t_h = R * 256, cache.t_b = H * R * 256, cache.m_h = c.D, cache.m_b = H * c.D, cache.bits = c.bits;
    for (int64_t to : {300, 301, c.n - 1}) {
        const int64_t from = length;
        const skimkv_tokens t = {&cache, k.data() + from * c.D * size, v.data() + from * c.D * size, to - from,
                                 0, (int64_t)c.n * c.D, c.D, 0, (int64_t)c.n * c.D, c.D, nullptr, nullptr};
        must(skimkv_check_append(&t)), must(skimkv_append(&t, 1, nullptr));
        length = to;
    }
    Made made;
    Bytes y(q.size());
    skimkv_op op{};
    op.cache = &cache, op.dtype = c.dtype, op.scale = 1 / std::sqrt((float)c.D), op.r = r, op.k = top, op.local = local;
    op.q_g = op.y_g = c.D, op.q_h = op.y_h = c.G * c.D, op.q_b = op.y_b = H * c.G * c.D, op.n_h = (int64_t)c.n * c.D;
    const unsigned char *last_k = k.data() + (c.n - 1) * c.D * size, *last_v = v.data() + (c.n - 1) * c.D * size;
    for (int method : {SKIMKV_DENSE, SKIMKV_SPARQ, SKIMKV_TOPK})
        for (int cap_ : {0, 3}) {
            const bool fresh = method == SKIMKV_DENSE && cap_ == 0;  // the first step brings the last token
            op.method = method, op.softcap = (float)cap_, op.use_mean = method == SKIMKV_SPARQ;
            op.keep = fresh ? SKIMKV_APPEND : SKIMKV_OUTSIDE;
            must(skimkv_step(&op, q.data(), y.data(), fresh ? last_k : nullptr, fresh ? last_v : nullptr, 1, nullptr));
            if (fresh) length++;
            for (size_t i = 0; i < y.size(); i += (size_t)size) made.y.push_back(float_of(&y[i], c.dtype));
        }
    made.cache = held;
    if (!c.bits) made.cache.insert(made.cache.end(), index.begin(), index.end());  // else one rounding may differ
    for (float x : mean) made.y.push_back(x / (float)c.n);
    return made;
}

static Made product(const Case &c) {
    const int in = 32 * c.G, out = c.D + 3, n = 5, size = size_of(c.dtype);
    state = 11;
    Bytes w((size_t)((out + 15) / 16 * (in / 32) * 17 * 16 * 2));
    for (size_t i = 0; i < w.size(); i++) {
        const size_t word = i / 2 % (17 * 16);
        const uint16_t one = bits_of(0.01f, SKIMKV_F16);
        w[i] = word < 16 ? (unsigned char)(i % 2 ? one >> 8 : one) : (unsigned char)(int)(254 * noise());
    }
    Floats x0;
    for (int i = 0; i < n * in; i++) x0.push_back(noise());
    const Bytes x = pack(x0, c.dtype);
    Bytes y((size_t)(n * out * size));
    const skimkv_linear op = {w.data(), out, in, n, x.data(), y.data(), in, out, nullptr, c.dtype};
    must(skimkv_linear_check(&op)), must(skimkv_linear_run(&op, 1, nullptr));
    Made made;
    for (size_t i = 0; i < y.size(); i += (size_t)size) made.y.push_back(float_of(&y[i], c.dtype));
    return made;
}

static Made sums(const Case &c) {
    const int H = 2, n = 70;
    state = 13;
    Floats q0, k0;
    for (int i = 0; i < H * c.G * n * c.D; i++) q0.push_back(noise());
    for (int i = 0; i < H * n * c.D; i++) k0.push_back(noise());
    const Bytes q = pack(q0, c.dtype), k = pack(k0, c.dtype);
    Made made;
    made.y.resize((size_t)(H * n));
    const skimkv_columns op = {H, c.G, c.D, c.dtype, 1, 0.3f, 0, n, n, q.data(), k.data(), (int64_t)c.G * n * c.D,
                               (int64_t)n * c.D, c.D, (int64_t)n * c.D, c.D, made.y.data()};
    must(skimkv_columns_check(&op)), must(skimkv_columns_run(&op, 1, nullptr));
    return made;
}

static double apart(const Made &a, const Made &b) {
    double worst = 0;
    for (size_t i = 0; i < a.y.size(); i++) {
        const double e = std::fabs((double)a.y[i] - b.y[i]);
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

int main() {
    int wrong = 0;
    std::string sets = skimkv_isas();
    for (size_t at = 0, end; at < sets.size(); at = end + 1) {
        end = sets.find(',', at) == std::string::npos ? sets.size() : sets.find(',', at);
        const std::string isa = sets.substr(at, end - at);
        if (isa == "scalar") continue;
        int cases = 0, good = 0;
        for (int dtype : {SKIMKV_F32, SKIMKV_BF16, SKIMKV_F16})
            for (int channels : {SKIMKV_NONE, SKIMKV_COPY, SKIMKV_INT8, SKIMKV_INT4})
                for (int bits : {0, 8, 4})
                    for (int D : {24, 64, 100})
                        for (int G : {1, 2, 5}) {
                            const Case c = {dtype, channels, bits, D, G, 700};
                            const bool once = channels == SKIMKV_NONE && bits == 0;
                            Made of[2][3];
                            for (int i = 0; i < 2; i++) {
                                if (skimkv_force(i ? isa.c_str() : "scalar")) return 1;
                                of[i][0] = steps(c);
                                if (once) of[i][1] = product(c), of[i][2] = sums(c);
                            }
                            // one rounding to the type; codes meet weights of 2^-16
                            const double most = dtype == SKIMKV_BF16 ? 8e-3 : dtype == SKIMKV_F16 ? 1e-3 : 1e-4;
                            const double e = apart(of[0][0], of[1][0]), p = apart(of[0][1], of[1][1]), s = apart(of[0][2], of[1][2]);
                            const bool same = of[0][0].cache == of[1][0].cache;
                            cases++;
                            if (same && e <= most && p <= 2 * most && s <= 1e-4) {
                                good++;
                                continue;
                            }
                            std::printf("%s: type %d, channels %d, bits %d, D %d, G %d: steps %.1e, product %.1e, sums %.1e%s\n",
                                        isa.c_str(), dtype, channels, bits, D, G, e, p, s, same ? "" : ", caches differ");
                        }
        std::printf("%s: %d of %d cases as scalar\n", isa.c_str(), good, cases);
        wrong += cases - good;
    }
    return wrong ? 1 : 0;
}
