/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole trainer in C: a small perceptron learns the handwritten digits by data-parallel SGD.
 *
 *     gradrun -np 2 digits
 *
 * Every rank computes the gradient of its share of each global batch; gradd sums the shares, layer
 * by layer, while backward goes on with the layer below. All ranks then take the same step, so the
 * parameters stay equal without being sent again. The global batch does not depend on the number
 * of ranks: neither does the result, except for the rounding of sums.
 */
#include <err.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <gradd/gradd.h>

#include "images.h"
#include "mlp.h"

#define MIN_ACCURACY 0.95

struct settings {
    unsigned epochs, batch;
    float rate;
    uint64_t seed;
    const char *data, *save; /* borrowed from argv or the environment; save may be NULL */
};

/* The tensors of one layer, as the ranks call them. */
struct layer_names {
    char weight[16], bias[16];
};

struct trainer {
    struct settings set;
    struct gradd *g;
    struct images images;
    struct mlp mlp;
    float *params, *grads; /* gradd_alloc: every layer's weight, then bias, one after another */
    size_t n_params;
    struct layer_names names[N_LAYERS];
    gradd_handle pending[N_LAYERS];
    size_t global_batch; /* images of the batch that is being computed, on all ranks */
    double waiting_s;    /* spent in calls of gradd: what training lost to aggregation */
    struct activations activations;
    size_t *order; /* training images in this epoch's order; equal on all ranks */
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void check(int64_t status)
{
    if (status < 0)
        errx(EXIT_FAILURE, "%s", gradd_error());
}

/* First index of rank's share of n items; rank `size` gives the end. Uneven shares are fine. */
static size_t share_begin(const struct trainer *t, size_t n, int rank)
{
    return n * (size_t)rank / (size_t)gradd_size(t->g);
}

/* ------------------------------------------------------------------ aggregation */

static struct gradd_op tensor_op(int kind, const char *name, float *data, size_t count)
{
    return (struct gradd_op){
        .struct_size = sizeof(struct gradd_op),
        .kind = kind,
        .dtype = GRADD_F32,
        .redop = GRADD_SUM,
        .name = name,
        .in = data,
        .out = data,
        .count = count,
    };
}

/* Both tensors of a layer as one submission. */
static gradd_handle submit_layer(struct trainer *t, int kind, const struct layer *layer, int l,
                                 double postscale)
{
    struct gradd_op ops[] = {
        tensor_op(kind, t->names[l].weight, layer->weight, layer->n_in * layer->n_out),
        tensor_op(kind, t->names[l].bias, layer->bias, layer->n_out),
    };
    for (size_t i = 0; i < 2; i++)
        ops[i].postscale = postscale;
    gradd_handle handle = gradd_submit(t->g, ops, 2);
    check(handle);
    return handle;
}

/* mlp_on_gradient: the layer's sum starts now and runs while backward computes the next. */
static void on_gradient(void *context, int l)
{
    struct trainer *t = context;
    double begin = now_s();
    t->pending[l] =
        submit_layer(t, GRADD_ALLREDUCE, &t->mlp.grad[l], l, 1.0 / (double)t->global_batch);
    t->waiting_s += now_s() - begin;
}

static void wait_layer(struct trainer *t, int l)
{
    double begin = now_s();
    check(gradd_wait(t->g, t->pending[l], -1));
    t->waiting_s += now_s() - begin;
}

static void broadcast_params(struct trainer *t)
{
    for (int l = 0; l < N_LAYERS; l++)
        t->pending[l] = submit_layer(t, GRADD_BROADCAST, &t->mlp.param[l], l, 1);
    for (int l = 0; l < N_LAYERS; l++)
        wait_layer(t, l);
}

static double sum_over_ranks(struct trainer *t, const char *name, double value)
{
    double begin = now_s();
    check(gradd_allreduce(t->g, name, &value, &value, 1, GRADD_F64, GRADD_SUM));
    t->waiting_s += now_s() - begin;
    return value;
}

/* ------------------------------------------------------------------ training */

static void shuffle(size_t *order, size_t n, uint64_t *state)
{
    for (size_t i = n; i > 1; i--) {
        size_t j = random_next(state) % i;
        size_t swap = order[i - 1];
        order[i - 1] = order[j];
        order[j] = swap;
    }
}

/* One step on the global batch order[0..n). @return the loss summed over this rank's share. */
static double train_batch(struct trainer *t, const size_t *order, size_t n)
{
    size_t begin = share_begin(t, n, gradd_rank(t->g));
    size_t n_mine = share_begin(t, n, gradd_rank(t->g) + 1) - begin;
    t->global_batch = n;
    mlp_forward(&t->mlp, &t->activations, t->images.train, order + begin, n_mine);
    double loss = mlp_loss_sum(&t->activations, t->images.train, order + begin, n_mine);
    mlp_backward(&t->mlp, &t->activations, t->images.train, order + begin, n_mine, on_gradient, t);
    for (int l = N_LAYERS - 1; l >= 0; l--) {
        wait_layer(t, l);
        mlp_step(&t->mlp, l, t->set.rate);
    }
    return loss;
}

static void train(struct trainer *t)
{
    size_t n = t->images.n_train;
    uint64_t state = t->set.seed + 1;
    for (unsigned epoch = 1; epoch <= t->set.epochs; epoch++) {
        double loss = 0;
        shuffle(t->order, n, &state);
        for (size_t at = 0; at < n; at += t->set.batch)
            loss += train_batch(t, t->order + at, n - at < t->set.batch ? n - at : t->set.batch);
        loss = sum_over_ranks(t, "loss", loss) / (double)n;
        if (gradd_rank(t->g) == 0)
            printf("epoch %u loss %.6f\n", epoch, loss);
    }
}

/* Share of the test images that are read correctly; each rank reads its part. */
static double test_accuracy(struct trainer *t)
{
    size_t n = t->images.n_test;
    size_t end = share_begin(t, n, gradd_rank(t->g) + 1), n_correct = 0;
    for (size_t at = share_begin(t, n, gradd_rank(t->g)); at < end;) {
        size_t some = end - at < t->activations.capacity ? end - at : t->activations.capacity;
        mlp_forward(&t->mlp, &t->activations, t->images.test + at, NULL, some);
        n_correct += mlp_n_correct(&t->activations, t->images.test + at, some);
        at += some;
    }
    return sum_over_ranks(t, "correct", (double)n_correct) / (double)n;
}

/* ------------------------------------------------------------------ set-up and report */

/* Lay the layers out in one piece of memory. */
static void assign_layers(struct layer *layers, float *memory)
{
    for (int l = 0; l < N_LAYERS; l++) {
        layers[l] = (struct layer){
            .weight = memory,
            .bias = memory + mlp_n_weights(l),
            .n_in = mlp_width[l],
            .n_out = mlp_width[l + 1],
        };
        memory += mlp_n_weights(l) + mlp_n_biases(l);
    }
}

static void trainer_init(struct trainer *t)
{
    check(gradd_init(NULL, &t->g));
    images_load(&t->images, t->set.data);
    for (int l = 0; l < N_LAYERS; l++) {
        t->n_params += mlp_n_weights(l) + mlp_n_biases(l);
        snprintf(t->names[l].weight, sizeof t->names[l].weight, "fc%d.weight", l + 1);
        snprintf(t->names[l].bias, sizeof t->names[l].bias, "fc%d.bias", l + 1);
    }
    t->params = gradd_alloc(t->g, t->n_params * sizeof *t->params);
    t->grads = gradd_alloc(t->g, t->n_params * sizeof *t->grads);
    if (!t->params || !t->grads)
        errx(EXIT_FAILURE, "%s", gradd_error());
    assign_layers(t->mlp.param, t->params);
    assign_layers(t->mlp.grad, t->grads);

    size_t most = t->set.batch / (size_t)gradd_size(t->g) + 1;
    activations_init(&t->activations, most);
    t->order = calloc(t->images.n_train, sizeof *t->order);
    if (!t->order)
        err(EXIT_FAILURE, "order");
    for (size_t i = 0; i < t->images.n_train; i++)
        t->order[i] = i;
}

static void trainer_deinit(struct trainer *t)
{
    free(t->order);
    activations_deinit(&t->activations);
    images_free(&t->images);
    gradd_free(t->g, t->grads);
    gradd_free(t->g, t->params);
    gradd_shutdown(t->g);
}

/* The parameters as native float32, in the order fc1.weight, fc1.bias, fc2.weight, … */
static void save_params(const struct trainer *t)
{
    FILE *file = fopen(t->set.save, "we");
    if (!file || fwrite(t->params, sizeof *t->params, t->n_params, file) != t->n_params ||
        fclose(file) != 0)
        err(EXIT_FAILURE, "%s", t->set.save);
}

static void report(const struct trainer *t, double accuracy, double train_s, double waiting_s)
{
    printf("test accuracy %.4f (%zu images)\n", accuracy, t->images.n_test);
    printf("images per second %.0f (%d ranks, batch %u)\n",
           (double)t->images.n_train * t->set.epochs / train_s, gradd_size(t->g), t->set.batch);
    printf("time in aggregation %.3f s of %.3f s (%.1f %%)\n", waiting_s, train_s,
           100 * waiting_s / train_s);
}

/* --data, else GRADD_EXAMPLE_DATA, else the source tree's copy, else the installed one. */
static const char *find_data(void)
{
    static const char in_tree[] = "client/examples/data/digits.csv";
    const char *named = getenv("GRADD_EXAMPLE_DATA");
    if (named)
        return named;
    return access(in_tree, R_OK) == 0 ? in_tree : GRADD_INSTALLED_DATA;
}

static const char usage[] =
    "usage: digits [--epochs N] [--batch N] [--lr RATE] [--seed N] [--data FILE] [--save FILE]\n"
    "Trains on the UCI handwritten digits; run it under gradrun for more than one rank.\n"
    "  --epochs N   passes over the training images (30)\n"
    "  --batch N    images of a step, on all ranks together (64)\n"
    "  --lr RATE    learning rate (0.2)\n"
    "  --seed N     of the first parameters and of the order of images (1)\n"
    "  --data FILE  the images, as CSV (GRADD_EXAMPLE_DATA, or digits.csv of the sources)\n"
    "  --save FILE  rank 0 writes the final parameters as float32\n"
    "Exit status 1 when the final test accuracy is below 0.95.\n";

static void bad_usage(const char *option)
{
    if (option)
        warnx("--%s: not a positive number: %s", option, optarg);
    fputs(usage, stderr);
    exit(2);
}

static unsigned long positive(const char *option)
{
    char *end;
    unsigned long value = strtoul(optarg, &end, 10);
    if (*end || value < 1 || value > 1000000 || *optarg == '-')
        bad_usage(option);
    return value;
}

static void parse_options(struct settings *set, int argc, char **argv)
{
    static const struct option options[] = {
        {"epochs", required_argument, NULL, 'e'}, {"batch", required_argument, NULL, 'b'},
        {"lr", required_argument, NULL, 'l'},     {"seed", required_argument, NULL, 's'},
        {"data", required_argument, NULL, 'd'},   {"save", required_argument, NULL, 'o'},
        {"help", no_argument, NULL, 'h'},         {0},
    };
    char *end;
    for (int c; (c = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        switch (c) {
        case 'e':
            set->epochs = (unsigned)positive("epochs");
            break;
        case 'b':
            set->batch = (unsigned)positive("batch");
            break;
        case 'l':
            set->rate = strtof(optarg, &end);
            if (*end || !(set->rate > 0))
                bad_usage("lr");
            break;
        case 's':
            set->seed = positive("seed");
            break;
        case 'd':
            set->data = optarg;
            break;
        case 'o':
            set->save = optarg;
            break;
        case 'h':
            fputs(usage, stdout);
            exit(EXIT_SUCCESS);
        default:
            bad_usage(NULL);
        }
    }
    if (optind < argc)
        bad_usage(NULL);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* losses appear as they happen, through a pipe too */
    struct trainer t = {
        .set = {.epochs = 30, .batch = 64, .rate = 0.2f, .seed = 1, .data = find_data()},
    };
    parse_options(&t.set, argc, argv);
    trainer_init(&t);
    bool is_first = gradd_rank(t.g) == 0;
    if (is_first)
        mlp_init_params(&t.mlp, t.set.seed);
    broadcast_params(&t);

    t.waiting_s = 0;
    double begin = now_s();
    train(&t);
    double train_s = now_s() - begin, waiting_s = t.waiting_s;
    double accuracy = test_accuracy(&t);
    if (is_first) {
        report(&t, accuracy, train_s, waiting_s);
        if (t.set.save)
            save_params(&t);
    }
    trainer_deinit(&t);
    if (accuracy >= MIN_ACCURACY)
        return EXIT_SUCCESS;
    if (is_first)
        warnx("test accuracy %.4f is below %.2f", accuracy, MIN_ACCURACY);
    return EXIT_FAILURE;
}
