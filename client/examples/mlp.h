/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A multilayer perceptron (tanh, softmax, cross-entropy) in plain C. It knows nothing of ranks or
 * of gradd: the caller provides the memory of parameters and gradients, and hears of each layer's
 * gradient as soon as backward has produced it.
 */
#ifndef EXAMPLES_MLP_H
#define EXAMPLES_MLP_H

#include <stddef.h>
#include <stdint.h>

#include "images.h"

enum { N_LAYERS = 3, MAX_WIDTH = 96 };

/* One layer's parameters, or their gradients: weight[out][in], then bias[out]. */
struct layer {
    float *weight, *bias; /* borrowed */
    size_t n_in, n_out;
};

struct mlp {
    struct layer param[N_LAYERS], grad[N_LAYERS];
};

/* Values of one batch between forward and backward; one row an image. */
struct activations {
    size_t capacity;            /* images */
    float *value[N_LAYERS + 1]; /* owned; [0]: pixels, [N_LAYERS]: class probabilities */
    float *delta[2];            /* owned; d loss / d pre-activation, of this layer and the next */
};

/* Called with the layer's number, from the last to the first, when its gradient is complete. */
typedef void mlp_on_gradient(void *context, int layer);

extern const size_t mlp_width[N_LAYERS + 1];

/* Floats that one layer's weights and biases take. */
size_t mlp_n_weights(int layer);
size_t mlp_n_biases(int layer);

/* Uniform in ±sqrt(6 / (in + out)), biases 0; the same for the same seed. */
void mlp_init_params(struct mlp *mlp, uint64_t seed);

void activations_init(struct activations *a, size_t capacity);
void activations_deinit(struct activations *a);

/* Forward over images[order[0..n)]; order NULL: images[0..n). */
void mlp_forward(const struct mlp *mlp, struct activations *a, const struct image *images,
                 const size_t *order, size_t n);

/* Cross-entropy summed over the n images of the last forward. */
double mlp_loss_sum(const struct activations *a, const struct image *images, const size_t *order,
                    size_t n);

/* Images among the n of the last forward whose likeliest class is the digit. */
size_t mlp_n_correct(const struct activations *a, const struct image *images, size_t n);

/* Gradients summed (not averaged) over the n images of the last forward. */
void mlp_backward(struct mlp *mlp, struct activations *a, const struct image *images,
                  const size_t *order, size_t n, mlp_on_gradient *on_gradient, void *context);

/* param -= rate * grad. */
void mlp_step(struct mlp *mlp, int layer, float rate);

/* The next 64 random bits of the generator `state`. */
uint64_t random_next(uint64_t *state);

#endif
