// Compares every instruction set of this machine with the scalar one through the C interface: appends, decode steps,
// the linear layers, the key scores, prompts and normalisations, with every element type and every quantisation. It
// needs no Python, so that it also runs in an emulator.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "skimkv.h"

using Bytes = std::vector<unsigned char>;
using Floats = std::vector<float>;

static uint32_t state;

// A random number from -0.5 to 0.5.
static float noise() {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (float)(1 << 24) - 0.5f;
}

// Conversions of 16-bit floats that use no instruction set's own instructions.
static uint16_t bits_of(float x, int dtype) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if (dtype == SKIMKV_BF16) return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    const int e = (int)(u >> 23 & 255) - 112;  // float16: only normal numbers and zero
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
        else {
            const uint16_t bits = bits_of(x[i], dtype);
            to[2 * i] = (unsigned char)bits, to[2 * i + 1] = (unsigned char)(bits >> 8);
        }
    }
    return to;
}

// Ends the program if an operation was refused or failed.
static void must(const char *error) {
    if (error) std::printf("refused: %s\n", error), std::exit(1);
}
static void must(int failed) { must(failed ? "it could not run" : nullptr); }

struct Case {
    int dtype, channels, bits, D, G, n;
};

// What an instruction set computes in a case: the results of its steps, and the bytes of the cache.
struct Result {
    Floats y;
    Bytes cache;
};

// Appends tokens three times, and then runs dense attention, SparQ, top-k and with codes of 4 bits Skim, each without
// and with a soft cap.
static Result steps(const Case &c) {
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
    const int64_t row = c.bits ? (c.D + 63) / 64 * 4 + c.D * c.bits / 8 : c.D * size, element = c.bits ? 1 : size;
    const int64_t nibbles = c.channels == SKIMKV_INT4 ? 1 : c.channels == SKIMKV_INT8 ? 2 : 2 * size;  // of a token
    Bytes rows((size_t)(2 * H * cap * row)), index((size_t)(H * R * cap * nibbles / 2));
    Bytes tail((size_t)(H * R * 256 * size));
    Floats scale((size_t)(H * cap / 256 * 2 * R)), mean((size_t)(H * c.D));
    Bytes means((size_t)(H * cap / 256 * R * size));
    int64_t rows_read[2] = {};
    int64_t length = 0;
    skimkv_chunk chunk{};
    chunk.cap = cap, chunk.k = rows.data(), chunk.v = rows.data() + H * cap * row;
    chunk.k_h = chunk.v_h = cap * row / element, chunk.k_n = chunk.v_n = row / element;
    chunk.k_b = chunk.v_b = H * chunk.k_h;
    if (c.channels != SKIMKV_NONE) {
        chunk.index = index.data(), chunk.x_r = c.channels == SKIMKV_COPY ? cap : cap * nibbles / 2;
        chunk.x_h = R * chunk.x_r, chunk.x_b = H * chunk.x_h;
        chunk.scale = scale.data(), chunk.s_r = 1, chunk.s_z = R, chunk.s_g = 2 * R;
        chunk.s_h = cap / 256 * chunk.s_g, chunk.s_b = H * chunk.s_h;
    }
    if (c.channels == SKIMKV_INT4) {
        chunk.means = means.data(), chunk.e_g = R, chunk.e_h = cap / 256 * R, chunk.e_b = H * chunk.e_h;
    }
    skimkv_cache cache{};
    cache.B = 1, cache.H = H, cache.G = c.G, cache.D = c.D, cache.R = R;
    cache.dtype = c.dtype, cache.channels = c.channels, cache.bits = c.bits;
    cache.n_chunks = 1, cache.chunks = &chunk, cache.lengths = &length;
    cache.tail = tail.data(), cache.t_r = 256, cache.t_h = R * 256, cache.t_b = H * R * 256;
    cache.mean = mean.data(), cache.m_h = c.D, cache.m_b = H * c.D;
    for (int64_t to : {300, 301, c.n - 1}) {
        const int64_t from = length;
        skimkv_tokens t{};
        t.cache = &cache, t.n = to - from;
        t.k = k.data() + from * c.D * size, t.k_h = (int64_t)c.n * c.D, t.k_n = c.D;
        t.v = v.data() + from * c.D * size, t.v_h = (int64_t)c.n * c.D, t.v_n = c.D;
        must(skimkv_check_append(&t)), must(skimkv_append(&t, 1, nullptr));
        length = to;
    }
    Result result;
    Bytes y(q.size());
    skimkv_op op{};
    op.cache = &cache, op.dtype = c.dtype, op.scale = 1 / std::sqrt((float)c.D), op.r = r, op.k = top, op.local = local;
    op.q_g = op.y_g = c.D, op.q_h = op.y_h = c.G * c.D, op.q_b = op.y_b = H * c.G * c.D, op.n_h = (int64_t)c.n * c.D;
    const unsigned char *last_k = k.data() + (c.n - 1) * c.D * size, *last_v = v.data() + (c.n - 1) * c.D * size;
    op.rows_read = rows_read;
    for (int method : {SKIMKV_DENSE, SKIMKV_SPARQ, SKIMKV_TOPK, SKIMKV_SKIM})
        for (float softcap : {0.f, 3.f}) {
            if (method == SKIMKV_SKIM && c.channels != SKIMKV_INT4) continue;
            const bool fresh = method == SKIMKV_DENSE && softcap == 0;  // the first step appends the last token
            op.method = method, op.softcap = softcap, op.use_mean = method == SKIMKV_SPARQ;
            op.keep = fresh ? SKIMKV_APPEND : SKIMKV_OUTSIDE;
            must(skimkv_step(&op, q.data(), y.data(), fresh ? last_k : nullptr, fresh ? last_v : nullptr, 1, nullptr));
            if (fresh) length++;
            for (size_t i = 0; i < y.size(); i += (size_t)size) result.y.push_back(float_of(&y[i], c.dtype));
        }
    result.cache = rows;
    // With quantised rows, a key may be rounded differently before it enters the index.
    if (!c.bits) result.cache.insert(result.cache.end(), index.begin(), index.end());
    for (int64_t n : rows_read) result.y.push_back((float)n);
    for (float x : mean) result.y.push_back(x / (float)c.n);
    return result;
}

// The kind of a matrix of floats.
static int kind_of(int dtype) {
    return dtype == SKIMKV_F32 ? SKIMKV_KIND_F32 : dtype == SKIMKV_BF16 ? SKIMKV_KIND_BF16 : SKIMKV_KIND_F16;
}

// Linear layers with random weights: of 8 bits, and of every type of floats.
static Result linear(const Case &c) {
    const int in = 32 * c.G, out = c.D + 3, n = 5, size = size_of(c.dtype);
    state = 11;
    Bytes w((size_t)((out + 15) / 16 * (in / 32) * 17 * 16 * 2));
    for (size_t i = 0; i < w.size(); i++) {
        const size_t word = i / 2 % (17 * 16);
        const uint16_t scale = bits_of(0.01f, SKIMKV_F16);
        w[i] = word < 16 ? (unsigned char)(i % 2 ? scale >> 8 : scale) : (unsigned char)(int)(254 * noise());
    }
    Floats x0;
    for (int i = 0; i < n * in; i++) x0.push_back(noise());
    const Bytes x = pack(x0, c.dtype);
    Bytes y((size_t)(n * out * size));
    const skimkv_matrix panels{w.data(), out, in, nullptr, nullptr, SKIMKV_KIND_PANELS, c.dtype};
    must(skimkv_product_run(&panels, x.data(), y.data(), n, 1, nullptr));
    Result result;
    const auto note = [&] {
        for (size_t i = 0; i < y.size(); i += (size_t)size) result.y.push_back(float_of(&y[i], c.dtype));
    };
    note();
    Floats w0;
    for (int i = 0; i < out * in; i++) w0.push_back(noise());
    for (int type : {SKIMKV_F32, SKIMKV_BF16, SKIMKV_F16}) {
        const Bytes floats = pack(w0, type);
        const skimkv_matrix matrix{floats.data(), out, in, nullptr, nullptr, kind_of(type), c.dtype};
        must(skimkv_product_run(&matrix, x.data(), y.data(), n, 1, nullptr));
        note();
    }
    return result;
}

// The key scores of a random prompt.
static Result key_scores(const Case &c) {
    const int H = 2, n = 70;
    state = 13;
    Floats q0, k0;
    for (int i = 0; i < H * c.G * n * c.D; i++) q0.push_back(noise());
    for (int i = 0; i < H * n * c.D; i++) k0.push_back(noise());
    const Bytes q = pack(q0, c.dtype), k = pack(k0, c.dtype);
    Result result;
    result.y.resize((size_t)(H * n));
    skimkv_columns op{};
    op.H = H, op.G = c.G, op.D = c.D, op.dtype = c.dtype, op.parts = 1, op.scale = 0.3f, op.n = op.m = n;
    op.q = q.data(), op.q_h = (int64_t)c.G * n * c.D, op.q_g = (int64_t)n * c.D, op.q_n = c.D;
    op.k = k.data(), op.k_h = (int64_t)n * c.D, op.k_n = c.D, op.sum = result.y.data();
    must(skimkv_columns_check(&op)), must(skimkv_columns_run(&op, 1, nullptr));
    return result;
}

// The causal attention of random tokens that follow others.
static Result prompt(const Case &c) {
    const int H = 2, n = 70, m = 150, size = size_of(c.dtype);
    state = 17;
    Floats q0, kv0;
    for (int i = 0; i < H * c.G * n * c.D; i++) q0.push_back(noise());
    for (int i = 0; i < 2 * H * m * c.D; i++) kv0.push_back(noise());
    const Bytes q = pack(q0, c.dtype), kv = pack(kv0, c.dtype);
    Bytes y(q.size());
    skimkv_prompt op{};
    op.B = 1, op.H = H, op.G = c.G, op.D = c.D, op.dtype = c.dtype, op.scale = 1, op.softcap = 3, op.n = n, op.m = m;
    op.q = q.data(), op.k = kv.data(), op.v = kv.data() + kv.size() / 2, op.y = y.data();
    op.q_n = op.y_n = op.k_n = op.v_n = c.D, op.k_h = op.v_h = (int64_t)m * c.D;
    op.q_g = op.y_g = (int64_t)n * c.D, op.q_h = op.y_h = c.G * op.q_g;
    must(skimkv_prompt_attention_run(&op, 1, nullptr));
    Result result;
    for (size_t i = 0; i < y.size(); i += (size_t)size) result.y.push_back(float_of(&y[i], c.dtype));
    return result;
}

// Random tokens of one head, normalised.
static Result norm(const Case &c) {
    const int n = 5, size = size_of(c.dtype);
    state = 19;
    Floats w0, x0;
    for (int i = 0; i < c.D; i++) w0.push_back(noise());
    for (int i = 0; i < n * c.D; i++) x0.push_back(noise());
    const Bytes w = pack(w0, c.dtype), x = pack(x0, c.dtype);
    Bytes y(x.size());
    const skimkv_rms_norm op{w.data(), c.D, 1e-5f, c.dtype, 0};
    must(skimkv_rms_norm_run(&op, x.data(), y.data(), n, 1, nullptr));
    Result result;
    for (size_t i = 0; i < y.size(); i += (size_t)size) result.y.push_back(float_of(&y[i], c.dtype));
    return result;
}

// What a layer asked attention.
struct Asked {
    Bytes queries, keys, values;
};

// Stands in for attention: notes what it was asked, and answers with the queries.
static int answer(void *context, int64_t, const void *queries, const void *keys, const void *values, void *y) {
    Asked &asked = *(Asked *)context;
    std::memcpy(asked.queries.data(), queries, asked.queries.size());
    std::memcpy(asked.keys.data(), keys, asked.keys.size());
    std::memcpy(asked.values.data(), values, asked.values.size());
    std::memcpy(y, queries, asked.queries.size());
    return 0;
}

// Two layers with random weights, one as Llama has it and one as Gemma 3, and the normalisation after them.
static Result layers(const Case &c) {
    const int n = 3, in = 64, inner = 96, D = c.D, q_rows = 16 * D, k_rows = 8 * D;
    state = 23;
    const auto random = [&](int count) {
        Floats values;
        for (int i = 0; i < count; i++) values.push_back(noise());
        return pack(values, c.dtype);
    };
    const auto matrix = [&](const Bytes &w, int rows, int columns) {
        return skimkv_matrix{w.data(), rows, columns, nullptr, nullptr, kind_of(c.dtype), c.dtype};
    };
    const Bytes q = random(q_rows * in), k = random(k_rows * in), o = random(in * q_rows), up = random(inner * in);
    const Bytes down = random(in * inner), x = random(n * in), cos = random(2 * n * D), sin = random(2 * n * D);
    const Bytes of_head = random(D), of_token = random(in);
    const skimkv_norm tokens{of_token.data(), 1e-5f, 0}, heads{of_head.data(), 1e-5f, 0};
    skimkv_layer of_llama{matrix(q, q_rows, in),
                          matrix(k, k_rows, in),
                          matrix(k, k_rows, in),
                          matrix(o, in, q_rows),
                          matrix(up, inner, in),
                          matrix(up, inner, in),
                          matrix(down, in, inner),
                          tokens,
                          tokens,
                          {},
                          {},
                          heads,
                          heads,
                          D,
                          SKIMKV_SILU,
                          0};
    skimkv_layer of_gemma = of_llama;
    for (skimkv_norm *norm : {&of_gemma.before, &of_gemma.of_q}) norm->adds_one = 1;
    of_gemma.of_o = of_gemma.of_down = tokens, of_gemma.activation = SKIMKV_GELU_TANH, of_gemma.angles = 1;
    const skimkv_layer every[] = {of_llama, of_gemma};
    const skimkv_layers op{every, 2, 2, tokens};
    skimkv_op *const steps[] = {nullptr, nullptr};
    const size_t size = (size_t)size_of(c.dtype), of_keys = (size_t)(n * k_rows) * size;
    Asked asked{Bytes(2 * of_keys), Bytes(of_keys), Bytes(of_keys)};
    Bytes y(x.size());
    must(skimkv_layers_run(&op, steps, answer, &asked, x.data(), cos.data(), sin.data(), y.data(), n, 1, nullptr));
    Result result;
    for (const Bytes *of : {&y, &asked.queries, &asked.keys, &asked.values})
        for (size_t i = 0; i < of->size(); i += size) result.y.push_back(float_of(&(*of)[i], c.dtype));
    return result;
}

// The largest difference between two results.
static double difference(const Result &a, const Result &b) {
    double worst = 0;
    for (size_t i = 0; i < a.y.size(); i++) {
        const double e = std::fabs((double)a.y[i] - b.y[i]);
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

// Everything that is computed in a case: the steps, and where nothing is quantised what else there is.
using Results = std::array<Result, 6>;

static Results compute(const std::string &isa, const Case &c) {
    must(skimkv_force(isa.c_str()));
    Results of{steps(c)};
    if (c.channels == SKIMKV_NONE && c.bits == 0)
        of[1] = linear(c), of[2] = key_scores(c), of[3] = prompt(c), of[4] = norm(c), of[5] = layers(c);
    return of;
}

// Whether an instruction set computes in a case what the scalar one computes. Results may differ by one rounding to the
// element type, and where codes are multiplied with integer weights by 2^-16; the bytes of the cache must be the same.
static bool agrees(const std::string &isa, const Case &c, const Results &of_scalar) {
    const Results of_isa = compute(isa, c);
    const double most = c.dtype == SKIMKV_BF16 ? 8e-3 : c.dtype == SKIMKV_F16 ? 1e-3 : 1e-4;
    double error[6];
    for (int i = 0; i < 6; i++) error[i] = difference(of_scalar[i], of_isa[i]);
    const bool same_cache = of_scalar[0].cache == of_isa[0].cache;
    const bool same_rest =
        error[1] <= 2 * most && error[2] <= 1e-4 && error[3] <= most && error[4] <= 2 * most && error[5] <= 16 * most;
    if (same_cache && error[0] <= most && same_rest) return true;
    std::printf(
        "%s: type %d, channels %d, bits %d, D %d, G %d: errors of steps %.1e, linear %.1e, key scores %.1e, prompts "
        "%.1e, norms %.1e, layers %.1e%s\n",
        isa.c_str(), c.dtype, c.channels, c.bits, c.D, c.G, error[0], error[1], error[2], error[3], error[4], error[5],
        same_cache ? "" : "; the caches differ");
    return false;
}

// The instruction sets of this machine but the scalar one.
static std::vector<std::string> fast_sets() {
    std::vector<std::string> found;
    std::stringstream names(skimkv_isas());
    for (std::string name; std::getline(names, name, ',');)
        if (name != "scalar") found.push_back(name);
    return found;
}

int main() {
    const std::vector<std::string> sets = fast_sets();
    std::vector<int> good(sets.size());
    int cases = 0, wrong = 0;
    for (int dtype : {SKIMKV_F32, SKIMKV_BF16, SKIMKV_F16})
        for (int channels : {SKIMKV_NONE, SKIMKV_COPY, SKIMKV_INT8, SKIMKV_INT4})
            for (int bits : {0, 8, 4})
                for (int D : {24, 64, 100})
                    for (int G : {1, 2, 5}) {
                        const Case c{dtype, channels, bits, D, G, 700};
                        const Results of_scalar = compute("scalar", c);
                        for (size_t i = 0; i < sets.size(); i++) good[i] += agrees(sets[i], c, of_scalar);
                        cases++;
                    }
    for (size_t i = 0; i < sets.size(); i++) {
        std::printf("%s: %d of %d cases as scalar\n", sets[i].c_str(), good[i], cases);
        wrong += cases - good[i];
    }
    return wrong ? 1 : 0;
}
