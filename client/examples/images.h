/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The handwritten digits of data/digits.csv, scaled to 0..1, split into training and test images.
 * Every fifth image is a test image, so that the split needs no seed and every rank has the same.
 */
#ifndef EXAMPLES_IMAGES_H
#define EXAMPLES_IMAGES_H

#include <stddef.h>

enum { N_PIXELS = 64, N_CLASSES = 10 };

struct image {
    float pixel[N_PIXELS]; /* 0..1 */
    int digit;             /* 0..9 */
};

struct images {
    struct image *train, *test; /* owned */
    size_t n_train, n_test;
};

/* Read `path`. Exits with file and line when it is not what data/README.md describes. */
void images_load(struct images *images, const char *path);

void images_free(struct images *images);

#endif
