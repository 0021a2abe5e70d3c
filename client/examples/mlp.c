/* SPDX-License-Identifier: Apache-2.0 */
/* The model's arithmetic. tanh rather than a rectifier: its gradient has no kink, so rounding
 * differences between world sizes stay rounding differences. */
#include "mlp.h"

#include <err.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const size_t mlp_width[N_LAYERS + 1] = {N_PIXELS, MAX_WIDTH, 48, N_CLASSES};

/* SplitMix64 (Steele, Lea, Flood 2014): tiny, seedable, the same on every machine. */
uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

size_t mlp_n_weights(int layer)
{
    return mlp_width[layer] * mlp_width[layer + 1];
}

size_t mlp_n_biases(int layer)
{
    return mlp_width[layer + 1];
}

void mlp_init_params(struct mlp *mlp, uint64_t seed)
{
    for (int l = 0; l < N_LAYERS; l++) {
        struct layer *p = &mlp->param[l];
        double limit = sqrt(6.0 / (double)(p->n_in + p->n_out));
        for (size_t i = 0; i < p->n_in * p->n_out; i++) {
            double unit = (double)(random_next(&seed) >> 11) * 0x1p-53; /* 0..1 */
            p->weight[i] = (float)((2 * unit - 1) * limit);
        }
        memset(p->bias, 0, p->n_out * sizeof *p->bias);
    }
}

static float *rows(size_t n, size_t width)
{
    float *memory = calloc(n ? n : 1, width * sizeof *memory);
    if (!memory)
        err(EXIT_FAILURE, "activations");
    return memory;
}

void activations_init(struct activations *a, size_t capacity)
{
    a->capacity = capacity;
    for (int l = 0; l <= N_LAYERS; l++)
        a->value[l] = rows(capacity, mlp_width[l]);
    for (int i = 0; i < 2; i++)
        a->delta[i] = rows(capacity, MAX_WIDTH);
}

void activations_deinit(struct activations *a)
{
    for (int l = 0; l <= N_LAYERS; l++)
        free(a->value[l]);
    for (int i = 0; i < 2; i++)
        free(a->delta[i]);
    *a = (struct activations){0};
}

static const struct image *pick(const struct image *images, const size_t *order, size_t i)
{
    return &images[order ? order[i] : i];
}

static void softmax(float *row)
{
    float top = row[0], sum = 0;
    for (int c = 1; c < N_CLASSES; c++)
        top = fmaxf(top, row[c]);
    for (int c = 0; c < N_CLASSES; c++)
        sum += row[c] = expf(row[c] - top);
    for (int c = 0; c < N_CLASSES; c++)
        row[c] /= sum;
}

static void layer_forward(const struct layer *p, const float *in, float *out)
{
    for (size_t o = 0; o < p->n_out; o++) {
        float sum = p->bias[o];
        for (size_t i = 0; i < p->n_in; i++)
            sum += p->weight[o * p->n_in + i] * in[i];
        out[o] = sum;
    }
}

void mlp_forward(const struct mlp *mlp, struct activations *a, const struct image *images,
                 const size_t *order, size_t n)
{
    for (size_t row = 0; row < n; row++) {
        memcpy(&a->value[0][row * N_PIXELS], pick(images, order, row)->pixel, sizeof images->pixel);
        for (int l = 0; l < N_LAYERS; l++) {
            const struct layer *p = &mlp->param[l];
            float *out = &a->value[l + 1][row * p->n_out];
            layer_forward(p, &a->value[l][row * p->n_in], out);
            for (size_t o = 0; l < N_LAYERS - 1 && o < p->n_out; o++)
                out[o] = tanhf(out[o]);
        }
        softmax(&a->value[N_LAYERS][row * N_CLASSES]);
    }
}

double mlp_loss_sum(const struct activations *a, const struct image *images, const size_t *order,
                    size_t n)
{
    double sum = 0;
    for (size_t row = 0; row < n; row++) {
        float p = a->value[N_LAYERS][row * N_CLASSES + (size_t)pick(images, order, row)->digit];
        sum -= log(fmax((double)p, 1e-30));
    }
    return sum;
}

size_t mlp_n_correct(const struct activations *a, const struct image *images, size_t n)
{
    size_t n_correct = 0;
    for (size_t row = 0; row < n; row++) {
        const float *p = &a->value[N_LAYERS][row * N_CLASSES];
        int best = 0;
        for (int c = 1; c < N_CLASSES; c++)
            best = p[c] > p[best] ? c : best;
        n_correct += best == images[row].digit;
    }
    return n_correct;
}

/* grad of this layer from delta (d loss / d pre-activation) and the layer's input. */
static void layer_gradient(struct layer *grad, const float *in, const float *delta, size_t n)
{
    memset(grad->weight, 0, grad->n_in * grad->n_out * sizeof *grad->weight);
    memset(grad->bias, 0, grad->n_out * sizeof *grad->bias);
    for (size_t row = 0; row < n; row++) {
        const float *x = &in[row * grad->n_in], *d = &delta[row * grad->n_out];
        for (size_t o = 0; o < grad->n_out; o++) {
            grad->bias[o] += d[o];
            for (size_t i = 0; i < grad->n_in; i++)
                grad->weight[o * grad->n_in + i] += d[o] * x[i];
        }
    }
}

/* delta of the layer below: back through the weights, times tanh' = 1 - value². */
static void layer_delta_below(const struct layer *p, const float *delta, const float *in,
                              float *below, size_t n)
{
    memset(below, 0, n * p->n_in * sizeof *below);
    for (size_t row = 0; row < n; row++) {
        float *b = &below[row * p->n_in];
        const float *x = &in[row * p->n_in];
        for (size_t o = 0; o < p->n_out; o++)
            for (size_t i = 0; i < p->n_in; i++)
                b[i] += p->weight[o * p->n_in + i] * delta[row * p->n_out + o];
        for (size_t i = 0; i < p->n_in; i++)
            b[i] *= 1 - x[i] * x[i];
    }
}

void mlp_backward(struct mlp *mlp, struct activations *a, const struct image *images,
                  const size_t *order, size_t n, mlp_on_gradient *on_gradient, void *context)
{
    float *delta = a->delta[0], *below = a->delta[1];
    memcpy(delta, a->value[N_LAYERS], n * N_CLASSES * sizeof *delta);
    for (size_t row = 0; row < n; row++)
        delta[row * N_CLASSES + (size_t)pick(images, order, row)->digit] -= 1;

    for (int l = N_LAYERS - 1; l >= 0; l--) {
        layer_gradient(&mlp->grad[l], a->value[l], delta, n);
        on_gradient(context, l);
        if (l > 0)
            layer_delta_below(&mlp->param[l], delta, a->value[l], below, n);
        float *swap = delta;
        delta = below;
        below = swap;
    }
}

void mlp_step(struct mlp *mlp, int layer, float rate)
{
    struct layer *p = &mlp->param[layer], *g = &mlp->grad[layer];
    for (size_t i = 0; i < p->n_in * p->n_out; i++)
        p->weight[i] -= rate * g->weight[i];
    for (size_t i = 0; i < p->n_out; i++)
        p->bias[i] -= rate * g->bias[i];
}
