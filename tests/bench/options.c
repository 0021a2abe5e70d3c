/* SPDX-License-Identifier: Apache-2.0 */
/* The options of every benchmark program, in the manner of nccl-tests. */
#include "bench.h"

#include <err.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "names.h"

static const char usage[] =
    "All-reduce in place, one row a size; time is rank 0's median of calls made back to back.\n"
    "  -b SIZE -e SIZE   from, to (4, 256M); suffixes K, M, G are binary\n"
    "  -f FACTOR         between sizes (2)\n"
    "  --sizes LIST      these sizes instead, separated by commas\n"
    "  -d TYPE           float32 float64 float16 bfloat16 int8 uint8 int32 int64\n"
    "  -o OP             sum prod max min avg\n"
    "  --iters N         timed calls of a size (by default fewer for larger tensors)\n"
    "  --registered      tensors from gradd_alloc() (the default)\n"
    "  --unregistered    tensors in ordinary memory\n"
    "  --dirty           rewrite every tensor before each call (not timed)\n"
    "  --check           compare with the exact result; exit status 1 when it differs\n"
    "  --json            one JSON object a row\n"
    "  --ranks N         peer_gloo, limit: ranks to start, tensors to sum (2)\n"
    "  --threads N       limit: threads that sum (the cores, at most 8)\n"
    "  --algorithm NAME  peer_gloo: ring or halving-doubling; peer_socket: exchange or server\n"
    "  --rank N          peer_gloo, peer_socket: only this rank, on this host\n"
    "  --store DIR       peer_gloo with --rank: an empty directory that all ranks see\n"
    "  --interface NAME  peer_gloo: of the network (lo)\n"
    "  --address HOST:PORT  peer_socket: where rank 0 listens\n"
    "  --streams N       peer_socket: connections (1)\n"
    "  --tensors N       allreduce: so many tensors of each size in one call (1)\n"
    "  --one-by-one      allreduce: the tensors one after the other instead\n"
    "  --idle SECONDS    allreduce: the ranks only wait for rank 0 so long\n";

enum long_option {
    SIZES = 256,
    ITERS,
    REGISTERED,
    UNREGISTERED,
    DIRTY,
    CHECK,
    JSON,
    RANKS,
    THREADS,
    ALGORITHM,
    RANK,
    STORE,
    INTERFACE,
    ADDRESS,
    STREAMS,
    TENSORS,
    ONE_BY_ONE,
    IDLE,
    HELP,
};

static const struct option long_options[] = {
    {"sizes", required_argument, NULL, SIZES},
    {"iters", required_argument, NULL, ITERS},
    {"registered", no_argument, NULL, REGISTERED},
    {"unregistered", no_argument, NULL, UNREGISTERED},
    {"dirty", no_argument, NULL, DIRTY},
    {"check", no_argument, NULL, CHECK},
    {"json", no_argument, NULL, JSON},
    {"ranks", required_argument, NULL, RANKS},
    {"threads", required_argument, NULL, THREADS},
    {"algorithm", required_argument, NULL, ALGORITHM},
    {"rank", required_argument, NULL, RANK},
    {"store", required_argument, NULL, STORE},
    {"interface", required_argument, NULL, INTERFACE},
    {"address", required_argument, NULL, ADDRESS},
    {"streams", required_argument, NULL, STREAMS},
    {"tensors", required_argument, NULL, TENSORS},
    {"one-by-one", no_argument, NULL, ONE_BY_ONE},
    {"idle", required_argument, NULL, IDLE},
    {"help", no_argument, NULL, HELP},
    {0},
};

struct range {
    size_t begin, end, factor;
};

static void bad_usage(const char *what)
{
    warnx("%s (--help lists the options)", what);
    exit(2);
}

static size_t parse_size(const char *text, char **end)
{
    unsigned long long value = strtoull(text, end, 10);
    static const char suffixes[] = "KMG";
    const char *suffix = **end ? strchr(suffixes, **end) : NULL;
    if (*end == text || *text == '-' || value > 1ull << 40)
        bad_usage("not a size");
    if (!suffix)
        return (size_t)value;
    (*end)++;
    return (size_t)value << (10 * (suffix - suffixes + 1));
}

static size_t size_argument(void)
{
    char *end;
    size_t size = parse_size(optarg, &end);
    if (*end)
        bad_usage("not a size");
    return size;
}

static unsigned count_argument(void)
{
    char *end;
    unsigned long value = strtoul(optarg, &end, 10);
    if (*end || end == optarg || *optarg == '-' || value < 1 || value > 1000000)
        bad_usage("not a number from 1 to 1000000");
    return (unsigned)value;
}

static void add_size(struct bench_options *out, size_t size)
{
    if (out->n_sizes == BENCH_MAX_SIZES)
        bad_usage("too many sizes");
    out->sizes[out->n_sizes++] = size;
}

static void parse_size_list(struct bench_options *out, const char *list)
{
    char *end;
    for (out->n_sizes = 0;; list = end + 1) {
        add_size(out, parse_size(list, &end));
        if (*end == '\0')
            return;
        if (*end != ',')
            bad_usage("not a list of sizes");
    }
}

/* Options of programs that run on several hosts. */
static bool parse_host_option(struct bench_options *out, int option)
{
    char *end;
    switch (option) {
    case RANK:
        out->rank = (int)parse_size(optarg, &end);
        if (*end || out->rank < 0)
            bad_usage("not a rank");
        return true;
    case STORE:
        out->store = optarg;
        return true;
    case INTERFACE:
        out->interface = optarg;
        return true;
    case ADDRESS:
        out->address = optarg;
        return true;
    case STREAMS:
        out->streams = count_argument();
        return true;
    default:
        return false;
    }
}

static void parse_option(struct bench_options *out, struct range *range, int option)
{
    int value;
    if (parse_host_option(out, option))
        return;
    switch (option) {
    case 'b':
        range->begin = size_argument();
        break;
    case 'e':
        range->end = size_argument();
        break;
    case 'f':
        range->factor = count_argument();
        break;
    case 'd':
        if ((value = dtype_from_name(optarg)) < 0)
            bad_usage("unknown type");
        out->dtype = (enum gradd_dtype)value;
        break;
    case 'o':
        if ((value = redop_from_name(optarg)) < 0)
            bad_usage("unknown operator");
        out->redop = (enum gradd_redop)value;
        break;
    case SIZES:
        parse_size_list(out, optarg);
        break;
    case ITERS:
        out->iters = count_argument();
        break;
    case REGISTERED:
    case UNREGISTERED:
        out->unregistered = option == UNREGISTERED;
        break;
    case DIRTY:
        out->dirty = true;
        break;
    case CHECK:
        out->check = true;
        break;
    case JSON:
        out->json = true;
        break;
    case RANKS:
        out->ranks = count_argument();
        break;
    case THREADS:
        out->threads = count_argument();
        break;
    case ALGORITHM:
        out->algorithm = optarg;
        break;
    case TENSORS:
        out->tensors = count_argument();
        break;
    case ONE_BY_ONE:
        out->one_by_one = true;
        break;
    case IDLE:
        out->idle_s = count_argument();
        break;
    case HELP:
        fputs(usage, stdout);
        exit(EXIT_SUCCESS);
    default:
        bad_usage("bad usage");
    }
}

/* Sizes of the range, unless a list was given; all in whole elements. */
static void finish_sizes(struct bench_options *out, const struct range *range)
{
    size_t element = dtype_size(out->dtype);
    if (out->n_sizes == 0) {
        if (range->factor < 2 || range->begin < 1 || range->begin > range->end)
            bad_usage("the sizes must grow: 0 < begin <= end, factor >= 2");
        for (size_t size = range->begin; size <= range->end; size *= range->factor)
            add_size(out, size);
    }
    for (unsigned i = 0; i < out->n_sizes; i++) {
        out->sizes[i] -= out->sizes[i] % element;
        if (out->sizes[i] == 0)
            out->sizes[i] = element;
    }
}

void bench_parse(struct bench_options *out, int argc, char **argv)
{
    struct range range = {.begin = 4, .end = (size_t)256 << 20, .factor = 2};
    *out = (struct bench_options){.dtype = GRADD_F32,
                                  .redop = GRADD_SUM,
                                  .ranks = 2,
                                  .rank = -1,
                                  .tensors = 1,
                                  .streams = 1,
                                  .interface = "lo"};
    for (int option; (option = getopt_long(argc, argv, "b:e:f:d:o:h", long_options, NULL)) != -1;)
        parse_option(out, &range, option == 'h' ? HELP : option);
    if (optind < argc)
        bad_usage("unexpected argument");
    finish_sizes(out, &range);
}

size_t bench_max_size(const struct bench_options *options)
{
    size_t max = 0;
    for (unsigned i = 0; i < options->n_sizes; i++)
        max = options->sizes[i] > max ? options->sizes[i] : max;
    return max;
}
