/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The compiled kernels within this program: written by embed-kernels, or cuda_image_none.c.
 */
#ifndef GRADD_CUDA_IMAGE_H
#define GRADD_CUDA_IMAGE_H

extern const char cuda_image_begin[], cuda_image_end[];
extern const char cuda_image_names[]; /* "": there is no image */

#endif
