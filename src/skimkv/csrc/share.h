// How an operation is split into tasks, and what one thread does: tasks are taken from a shared counter, and the
// last thread to finish a part of a unit completes that unit, so nobody ever waits for another.
#pragma once

namespace skimkv::SKIMKV_NS {

struct Header {
    int next, done;
    char pad[56];
};

struct Plan {
    int64_t units, parts, longest;
    int P;
    Header *header;
    int *finished;      // [units]: parts done so far
    float *partial;     // dense: [units][parts] states
    int64_t partial_ld;
    Arena scores;       // sparse: [units] Scores, where parts > 1
    size_t scores_ld;
    char *own;          // [nth] scratch
    size_t own_ld, total;
};

static void take_own(Arena &a, const skimkv_op *op, int64_t n, bool split, Unit *u, Scores *z, Choice *x, Narrow *w, Sums *sums, DenseScratch *d) {
    if (op->method == SKIMKV_DENSE) {
        *d = take_dense(a, op, n);
        return;
    }
    *u = take_unit(a, op, n);
    *x = take_choice(a, op, n);
    *w = take_narrow(a, op, min(n, SPAN * GROUP));
    *sums = take_sums(a, op->cache->G);
    if (!split) *z = take_scores(a, n, op->cache->G);
}

static Plan make_plan(const skimkv_op *op, void *work, int nth) {
    const skimkv_cache *c = op->cache;
    Plan p{};
    p.units = (int64_t)c->B * c->H, p.P = padded(c->D);
    p.longest = longest(c) + (op->k_new ? 1 : 0);
    const int64_t least = op->method == SKIMKV_DENSE ? 512 : 1024;  // positions below which a part is not worth a task
    p.parts = nth == 1 || op->score || p.units >= 4 * nth ? 1 : (4 * nth + p.units - 1) / p.units;
    p.parts = max(1, min(p.parts, p.longest / least));
    Arena a{(char *)work};
    p.header = a.take<Header>(1);
    p.finished = a.take<int>(p.units);
    if (op->method == SKIMKV_DENSE && p.parts > 1) {
        p.partial_ld = roundup(online_floats(c->G, p.P), 16);
        p.partial = a.take<float>(p.units * p.parts * p.partial_ld);
    } else if (p.parts > 1) {
        Arena one{nullptr};
        take_scores(one, p.longest, c->G);
        p.scores_ld = one.used;
        p.scores = Arena{a.take<char>((int64_t)one.used * p.units)};
    }
    Unit u{};
    Scores z;
    Choice x;
    Narrow w;
    Sums sums;
    DenseScratch d;
    Arena own{nullptr};
    take_own(own, op, p.longest, p.parts > 1, &u, &z, &x, &w, &sums, &d);
    p.own_ld = own.used;
    p.own = a.take<char>((int64_t)own.used * nth);
    p.total = a.used;
    return p;
}

static size_t work(const skimkv_op *op, int nth) { return make_plan(op, nullptr, nth).total; }

// Positions of part i: whole tiles, so that no two parts share one.
static inline int64_t part_start(int64_t n, int64_t parts, int64_t i) {
    return min(n, roundup((n * i + parts - 1) / parts, GROUP));
}

static inline bool last_part(const Plan &p, int64_t unit) {
    if (p.parts == 1) return true;
    if (__atomic_add_fetch(p.finished + unit, 1, __ATOMIC_ACQ_REL) < p.parts) return false;
    p.finished[unit] = 0;
    return true;
}

// The part whose positions from .. to-1 end with the new row's puts it there first: nobody else reads it before.
template <class T> static void append_in(const skimkv_op *op, int64_t b, int64_t h, int64_t from, int64_t to) {
    if (!appends(op) || from >= to || to != held(op, b)) return;
    const skimkv_tokens one = tokens(op);
    append_unit<T>(&one, b, h);
}

template <class T, class R, int D_>
static void dense_task(const skimkv_op *op, const Plan &p, const DenseScratch &x, int64_t task) {
    const skimkv_cache *c = op->cache;
    const int64_t unit = task / p.parts, i = task % p.parts, b = unit / c->H, h = unit % c->H;
    const int64_t n = c->lengths[b] + (op->k_new ? 1 : 0);
    if (op->score) return dense_scored<T, R, D_>(op, b, h, x);
    append_in<T>(op, b, h, part_start(n, p.parts, i), part_start(n, p.parts, i + 1));
    float *own = p.parts > 1 ? p.partial + task * p.partial_ld : x.online;
    const Online o = online_at(own, c->G);
    dense_part<T, R, D_>(op, b, h, part_start(n, p.parts, i), part_start(n, p.parts, i + 1), x, o);
    if (!last_part(p, unit)) return;
    const Online sum = p.parts > 1 ? online_at(p.partial + unit * p.parts * p.partial_ld, c->G) : o;
    for (int64_t j = 1; j < p.parts; j++)
        merge(sum, online_at(p.partial + (unit * p.parts + j) * p.partial_ld, c->G), c->G, p.P);
    finish_dense(op, b, h, sum);
    if (op->keep == SKIMKV_SLOT) keep_row<T, R>(op, b, h, x, 0);
}

// The query of a task's unit and what step 1 needs of it.
template <class T> static void prepare(const skimkv_op *op, const Plan &p, Unit &u, int64_t task) {
    const int64_t unit = task / p.parts;
    if (appends(op) && task % p.parts == p.parts - 1) ask_append<T>(op, unit / op->cache->H, unit % op->cache->H);
    load_query(op, u, unit / op->cache->H, unit % op->cache->H);
    if (op->method == SKIMKV_SPARQ) choose_channels(op, u);
    if (op->method == SKIMKV_LOWRANK) project(op, u);
}

// Step 1 of part i.
template <class T, class R, int D_>
static void score(const skimkv_op *op, const Plan &p, const Unit &u, const Scores &z, const Narrow &w, const Sums &sums, int64_t i) {
    const int64_t from = part_start(u.n, p.parts, i), to = part_start(u.n, p.parts, i + 1);
    const int64_t t0 = from / GROUP, t1 = (to + GROUP - 1) / GROUP;
    if (from >= to) return;
    append_in<T>(op, u.b, u.h, from, to);
    const bool exact = op->method == SKIMKV_TOPK || op->method == SKIMKV_ORACLE;
    const bool rows = exact || op->cache->channels == SKIMKV_NONE;
    if (rows) score_rows<R, D_>(op, u, exact ? u.q : u.full, z, sums, t0, t1);
    else score_channels<T>(op, u, z, w, sums, t0, t1);
}

static inline int64_t take_task(const Plan &p) {
    const int64_t task = __atomic_fetch_add(&p.header->next, 1, __ATOMIC_RELAXED);
    return task < p.units * p.parts ? task : -1;
}

// Steps 2 and 3 of a unit. Fetching the rows during another unit's step 1 was no faster: they delay its streams.
template <class R, int D_>
static void complete(const skimkv_op *op, Unit &u, const Scores &z, const Choice &x) {
    const int64_t local = op->method == SKIMKV_SPARQ ? min(op->local, u.n - 1) : 0;
    fetch_rows(op, u, nullptr, u.n - 1 - local, u.n);
    choose(op, u, z, x);
    fetch_rows(op, u, u.chosen, 0, u.n_chosen);
    if (op->use_mean) chosen_mass(op, u, z, x);
    attend<R, D_>(op, u, z, x);
}

// Whole units.
template <class T, class R, int D_>
static void run_units(const skimkv_op *op, const Plan &p, Unit &u, const Scores &z, const Choice &x, const Narrow &w, const Sums &sums) {
    for (int64_t task; (task = take_task(p)) >= 0;) {
        prepare<T>(op, p, u, task);
        score<T, R, D_>(op, p, u, z, w, sums, 0);
        complete<R, D_>(op, u, z, x);
    }
}

// Parts of units: the last to be scored goes on with the unit.
template <class T, class R, int D_>
static void run_parts(const skimkv_op *op, const Plan &p, Unit &u, const Choice &x, const Narrow &w, const Sums &sums) {
    for (int64_t task; (task = take_task(p)) >= 0;) {
        const int64_t unit = task / p.parts;
        Arena a{p.scores.at + unit * p.scores_ld};
        const Scores z = take_scores(a, p.longest, op->cache->G);
        prepare<T>(op, p, u, task);
        score<T, R, D_>(op, p, u, z, w, sums, task % p.parts);
        if (!last_part(p, unit)) continue;
        complete<R, D_>(op, u, z, x);
    }
}

template <class T, class R, int D_> static void run(const skimkv_op *op, const Plan &p, int ith, int nth) {
    Unit u{};
    Scores z{};
    Choice x{};
    Narrow w{};
    Sums sums{};
    DenseScratch d{};
    Arena own{p.own + ith * p.own_ld};
    take_own(own, op, p.longest, p.parts > 1, &u, &z, &x, &w, &sums, &d);
    if (op->method == SKIMKV_DENSE)
        for (int64_t task; (task = take_task(p)) >= 0;) dense_task<T, R, D_>(op, p, d, task);
    else if (p.parts > 1)
        run_parts<T, R, D_>(op, p, u, x, w, sums);
    else
        run_units<T, R, D_>(op, p, u, z, x, w, sums);
    // the last to leave makes the work area ready for the next step
    if (__atomic_add_fetch(&p.header->done, 1, __ATOMIC_ACQ_REL) == nth) p.header->next = p.header->done = 0;
}

template <class T, class R> static void run_d(const skimkv_op *op, const Plan &p, int ith, int nth) {
    const int D = op->cache->D;
    if (D == 64) return run<T, R, 64>(op, p, ith, nth);
    if (D == 128) return run<T, R, 128>(op, p, ith, nth);
    if constexpr (row_bits<R> == 0) {
        if (D == 80) return run<T, R, 80>(op, p, ith, nth);
        if (D == 96) return run<T, R, 96>(op, p, ith, nth);
        if (D == 256) return run<T, R, 256>(op, p, ith, nth);
    }
    run<T, R, 0>(op, p, ith, nth);
}

template <class T> static void run_r(const skimkv_op *op, const Plan &p, int ith, int nth) {
    if (op->cache->bits == 8) run_d<T, Coded<8>>(op, p, ith, nth);
    else if (op->cache->bits == 4) run_d<T, Coded<4>>(op, p, ith, nth);
    else run_d<T, T>(op, p, ith, nth);
}

static void share(const skimkv_op *op, void *work, int ith, int nth) {
    const Plan p = make_plan(op, work, nth);
    if (op->cache->dtype == SKIMKV_F32) run_r<float>(op, p, ith, nth);
    else if (op->cache->dtype == SKIMKV_BF16) run_r<bf16>(op, p, ith, nth);
    else run_r<f16>(op, p, ith, nth);
}

}  // namespace skimkv::SKIMKV_NS
