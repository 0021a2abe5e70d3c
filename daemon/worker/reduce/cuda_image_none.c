/* SPDX-License-Identifier: Apache-2.0 */
/* The image of a build without nvcc: none. */
#include "cuda_image.h"

const char cuda_image_begin[1] = "", cuda_image_end[1] = "", cuda_image_names[1] = "";
