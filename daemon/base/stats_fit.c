/* SPDX-License-Identifier: Apache-2.0 */
#include "base/stats_fit.h"

#include <stdlib.h>
#include <string.h>

enum {
    SHARES = 16,
    ROW_OVERHEAD = 4, /* tag and length of a row that may stay */
};

static int compare_numbers(double a, double b)
{
    /* What is not a number comes first, so that there is an order. */
    a = a > 0 ? a : 0;
    b = b > 0 ? b : 0;
    return (a > b) - (a < b);
}

static int latest_first(const void *a, const void *b)
{
    const Pb__RankStats *const *left = a, *const *right = b;
    return compare_numbers((*right)->late_mean_us, (*left)->late_mean_us);
}

static int by_rank(const void *a, const void *b)
{
    const Pb__RankStats *const *left = a, *const *right = b;
    return ((*left)->rank > (*right)->rank) - ((*left)->rank < (*right)->rank);
}

static int longest_first(const void *a, const void *b)
{
    const Pb__Stall *const *left = a, *const *right = b;
    return ((*right)->waited_ms > (*left)->waited_ms) - ((*right)->waited_ms < (*left)->waited_ms);
}

static int busiest_first(const void *a, const void *b)
{
    const Pb__LinkStats *const *left = a, *const *right = b;
    return ((*right)->sent_bytes > (*left)->sent_bytes) -
           ((*right)->sent_bytes < (*left)->sent_bytes);
}

/* The lists of JobStats; those that come first get first what others leave. */
static const struct list {
    size_t n_at, rows_at, left_out_at; /* in Pb__JobStats */
    unsigned shares;
    int (*by_worth)(const void *a, const void *b);
    int (*by_order)(const void *a, const void *b);
} lists[] = {
#define LIST(name)                                                                                 \
    offsetof(Pb__JobStats, n_##name), offsetof(Pb__JobStats, name),                                \
        offsetof(Pb__JobStats, name##_left_out)
    {LIST(ranks), 8, latest_first, by_rank},
    {LIST(stalls), 4, longest_first, NULL},
    {LIST(links), 2, busiest_first, NULL},
    {LIST(gpus), 1, NULL, NULL},
    {LIST(comms), 1, NULL, NULL},
#undef LIST
};
enum { N_LISTS = sizeof lists / sizeof lists[0] };

static size_t *n_of(Pb__JobStats *stats, const struct list *list)
{
    return (size_t *)((char *)stats + list->n_at);
}

static void set_rows(Pb__JobStats *stats, const struct list *list, void **rows)
{
    memcpy((char *)stats + list->rows_at, &rows, sizeof rows);
}

static void add_left_out(Pb__JobStats *stats, const struct list *list, size_t n)
{
    uint32_t *left_out = (uint32_t *)((char *)stats + list->left_out_at);
    *left_out = n < UINT32_MAX - *left_out ? *left_out + (uint32_t)n : UINT32_MAX;
}

static size_t row_bytes(const void *row)
{
    return ROW_OVERHEAD + protobuf_c_message_get_packed_size(row);
}

/* A list's rows, copied to `rows` with the most worthy first. Returns what all of them take. */
static size_t take_rows(const Pb__JobStats *from, const struct list *list, void **rows, size_t n)
{
    const void *first;
    size_t bytes = 0;
    memcpy(&first, (const char *)from + list->rows_at, sizeof first);
    if (n == 0)
        return 0;
    memcpy(rows, first, n * sizeof *rows);
    if (list->by_worth)
        qsort(rows, n, sizeof *rows, list->by_worth);
    for (size_t i = 0; i < n; i++)
        bytes += row_bytes(rows[i]);
    return bytes;
}

/* How much each list may keep of the room. */
static void share_room(size_t room, const size_t *wanted, size_t *out_granted)
{
    size_t left = room;
    for (size_t i = 0; i < N_LISTS; i++) {
        size_t share = room / SHARES * lists[i].shares;
        out_granted[i] = wanted[i] < share ? wanted[i] : share;
        left -= out_granted[i];
    }
    for (size_t i = 0; i < N_LISTS; i++) {
        size_t lacking = wanted[i] - out_granted[i];
        size_t more = lacking < left ? lacking : left;
        out_granted[i] += more;
        left -= more;
    }
}

static size_t count_fitting(void *const *rows, size_t n, size_t room)
{
    size_t kept = 0;
    for (size_t bytes = 0; kept < n; kept++) {
        bytes += row_bytes(rows[kept]);
        if (bytes > room)
            break;
    }
    return kept;
}

/* What is left of the figures without their lists. */
static size_t strip(Pb__JobStats *stats)
{
    stats->base.n_unknown_fields = 0;
    stats->base.unknown_fields = NULL;
    if (stats->n_silent_nodes > STATS_FIT_SILENT_MAX)
        stats->n_silent_nodes = STATS_FIT_SILENT_MAX;
    for (size_t i = 0; i < N_LISTS; i++) {
        add_left_out(stats, &lists[i], *n_of(stats, &lists[i]));
        *n_of(stats, &lists[i]) = 0;
    }
    return pb__job_stats__get_packed_size(stats);
}

static void keep(Pb__JobStats *stats, const struct list *list, void **rows, size_t n,
                 uint32_t n_cut)
{
    *(uint32_t *)((char *)stats + list->left_out_at) = n_cut;
    *n_of(stats, list) = n;
    set_rows(stats, list, rows);
}

void stats_fit_init(struct stats_fit *fit, const Pb__JobStats *from)
{
    *fit = (struct stats_fit){.stats = *from};
    if (pb__job_stats__get_packed_size(from) <= STATS_FIT_BYTES_MAX)
        return;
    size_t n[N_LISTS], wanted[N_LISTS], granted[N_LISTS], n_all = 0;
    for (size_t i = 0; i < N_LISTS; i++)
        n_all += n[i] = *n_of(&fit->stats, &lists[i]);
    size_t bare = strip(&fit->stats);
    fit->lists = calloc(n_all + 1, sizeof *fit->lists);
    if (!fit->lists)
        return; /* all rows are left out, and counted */
    void **rows = fit->lists;
    for (size_t i = 0; i < N_LISTS; rows += n[i++])
        wanted[i] = take_rows(from, &lists[i], rows, n[i]);
    share_room(STATS_FIT_BYTES_MAX - bare, wanted, granted);
    rows = fit->lists;
    for (size_t i = 0; i < N_LISTS; rows += n[i++]) {
        size_t kept = count_fitting(rows, n[i], granted[i]);
        uint32_t left_out = *(uint32_t *)((char *)&fit->stats + lists[i].left_out_at);
        if (lists[i].by_order && kept > 1)
            qsort(rows, kept, sizeof *rows, lists[i].by_order);
        keep(&fit->stats, &lists[i], rows, kept,
             left_out == UINT32_MAX ? left_out : left_out - (uint32_t)kept);
    }
}

void stats_fit_deinit(struct stats_fit *fit)
{
    free(fit->lists);
    *fit = (struct stats_fit){.stats = PB__JOB_STATS__INIT};
}
